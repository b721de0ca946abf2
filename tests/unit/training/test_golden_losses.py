"""A training computes what it computed before."""

from pathlib import Path

import pytest

from tests.programs.golden_losses import golden_losses, read_golden

TOLERANCE = 1e-5
"""Relative. The last digits depend on the CPU: kernels for AVX-512, for AVX2 and without either
(ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, MKL_ENABLE_INSTRUCTIONS) differed by 2e-7 after 20 steps.
The two models, whose first steps are nearly equal, differ by 4e-5 at the second.
"""


def test_losses_of_a_tiny_training_are_those_in_the_golden_file(tmp_path: Path) -> None:
    """`python -m tests.programs.golden_losses` writes the file anew."""
    golden = read_golden()
    losses = golden_losses(tmp_path)
    assert losses.keys() == golden.keys()
    for name, expected in golden.items():
        assert losses[name] == pytest.approx(expected, rel=TOLERANCE), name
