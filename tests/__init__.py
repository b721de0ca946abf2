"""Tests, each named by the law it guards."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
BUNDLED = ROOT / "pipelines" / "corpus"
"""Real text and a tokenizer trained on it (see its README)."""
