"""The law of the measurement: it serves once, and what it found is an artifact."""

from pathlib import Path

import pytest

from ray_jobs.serve.measure_decode import DecodeConfig, run
from scone_core.artifacts.manifests import DecodeManifest, load_manifest
from tests.builders.corpora import write_tokens, zipf_documents
from tests.builders.served_models import VOCAB, publish_served
from tests.programs.stages import run_script


def test_both_models_are_served_once_and_never_again(
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiled engines: test_engine.py
    publish_served(tmp_path / "plain", None)
    documents = zipf_documents(num_documents=4, mean_length=40, vocab_size=VOCAB, seed=0)
    write_tokens(str(tmp_path / "tokens"), documents, vocab_size=VOCAB)
    config = DecodeConfig(
        model=str(base / "served"),
        baseline=str(tmp_path / "plain"),
        tokens=str(tmp_path / "tokens"),
        out=str(tmp_path / "decode"),
        num_rounds=1,
        num_tokens=8,
    )
    names = ("model", "baseline", "tokens", "out", "num_rounds", "num_tokens")
    options = [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in names]
    code, output = run_script("measure_decode.py", *options)
    assert code == 0, output[-6000:]
    measured = load_manifest(DecodeManifest, config.out)
    assert measured.decode_tokens_per_second > 0
    assert measured.decode_tokens_per_second_baseline > 0
    assert measured.answer
    assert run(config) == measured
    assert "up to date" in capsys.readouterr().out
