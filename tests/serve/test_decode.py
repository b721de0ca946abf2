"""The law of the measurement: it serves once, and what it found is an artifact."""

from pathlib import Path

from ray_jobs.measure_decode import DecodeManifest
from scone_core import artifacts
from tests.corpora import write_tokens, zipf_documents
from tests.served_models import VOCAB, publish_served
from tests.stages import run_script


def test_both_models_are_served_once_and_never_again(base: Path, tmp_path: Path) -> None:
    publish_served(tmp_path / "plain", None)
    documents = zipf_documents(num_documents=4, mean_length=40, vocab_size=VOCAB, seed=0)
    write_tokens(str(tmp_path / "tokens"), documents, vocab_size=VOCAB)
    arguments = [
        *("--model", str(base / "served"), "--baseline", str(tmp_path / "plain")),
        *("--tokens", str(tmp_path / "tokens"), "--out", str(tmp_path / "decode")),
        *("--num-rounds", "1", "--num-tokens", "8"),
    ]
    code, output = run_script("measure_decode.py", *arguments)
    assert code == 0, output[-6000:]
    measured = artifacts.load_manifest(DecodeManifest, str(tmp_path / "decode"))
    assert measured.decode_tokens_per_s > 0
    assert measured.decode_tokens_per_s_baseline > 0
    assert measured.answer
    code, output = run_script("measure_decode.py", *arguments)
    assert code == 0
    assert "up to date" in output
    assert "engines are starting" not in output
