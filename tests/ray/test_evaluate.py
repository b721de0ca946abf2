"""The laws of the evaluate stage: table = on the fly; damaged or foreign inputs are refused."""

from pathlib import Path

import pytest

from ray_jobs import evaluate_model, precompute_embeddings
from ray_jobs.evaluate_model import EvaluateConfig
from ray_jobs.precompute_embeddings import PrecomputeConfig
from ray_jobs.runtime import Tracking
from scone_core.artifacts import ArtifactError, FgramsManifest, load_manifest
from tests.corpora import write_fgrams, write_tokens, zipf_documents
from tests.served_models import VOCAB, publish_checkpoint, trained_model
from tests.stages import snapshot

DOCUMENTS = zipf_documents(num_documents=30, mean_length=80, vocab_size=VOCAB, seed=7)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokens, fgrams, other_fgrams, checkpoint and table, in folders of these names."""
    folder = tmp_path_factory.mktemp("artifacts")
    write_tokens(str(folder / "tokens"), DOCUMENTS, vocab_size=VOCAB)
    for name, num_fgrams in (("fgrams", 200), ("other_fgrams", 100)):
        write_fgrams(str(folder / name), DOCUMENTS, num_fgrams=num_fgrams, vocab_size=VOCAB)
    fgrams = load_manifest(FgramsManifest, str(folder / "fgrams"))
    publish_checkpoint(str(folder / "checkpoint"), trained_model(), fgrams)
    precompute_embeddings.run(
        PrecomputeConfig(
            out=str(folder / "table"),
            checkpoint=str(folder / "checkpoint"),
            fgrams=str(folder / "fgrams"),
            rows="fp32",
            tracking=Tracking(uri=f"sqlite:///{folder}/mlflow.db"),
        )
    )
    return folder


@pytest.fixture
def config(artifacts: Path, tmp_path: Path) -> EvaluateConfig:
    return EvaluateConfig(
        out=str(tmp_path / "evaluation"),
        checkpoint=str(artifacts / "checkpoint"),
        tokens=str(artifacts / "tokens"),
        fgrams=str(artifacts / "fgrams"),
        sequence_length=16,
        tracking=Tracking(uri=f"sqlite:///{artifacts}/mlflow.db"),
    )


def test_table_gives_the_perplexity_of_the_fgram_model(
    config: EvaluateConfig, artifacts: Path, tmp_path: Path
) -> None:
    fly = evaluate_model.run(config)
    table = evaluate_model.run(
        config.replace(out=str(tmp_path / "from_table"), table=str(artifacts / "table"))
    )
    assert table.perplexity == pytest.approx(fly.perplexity, rel=1e-6)
    assert (table.hit_rate, table.mean_match_length) == (fly.hit_rate, fly.mean_match_length)
    assert fly.num_tokens == sum(map(len, DOCUMENTS))
    assert (fly.vectors, table.vectors) == ("on the fly", "table")


def test_bytes_do_not_depend_on_the_number_of_actors(
    config: EvaluateConfig, tmp_path: Path
) -> None:
    evaluate_model.run(config)
    evaluate_model.run(config.replace(out=str(tmp_path / "other"), num_actors=1))
    assert snapshot(tmp_path / "other") == snapshot(Path(config.out))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fgrams": None}, "fgrams: needed"),
        ({"fgrams": "other_fgrams"}, "fingerprint: found"),
        ({"checkpoint": "tokens"}, "'checkpoint/v1' is needed"),
        ({"table": "fgrams"}, "'embeddings/v1' is needed"),
    ],
    ids=str,
)
def test_inputs_that_do_not_belong_together_are_refused(
    config: EvaluateConfig, artifacts: Path, changes: dict[str, str | None], message: str
) -> None:
    paths = {name: value and str(artifacts / value) for name, value in changes.items()}
    with pytest.raises(ArtifactError, match=message):
        evaluate_model.run(config.replace(**paths))
    assert not Path(config.out).exists()


def test_a_damaged_checkpoint_is_refused(config: EvaluateConfig, tmp_path: Path) -> None:
    fgrams = load_manifest(FgramsManifest, str(config.fgrams))
    folder = tmp_path / "checkpoint"
    publish_checkpoint(str(folder), trained_model(), fgrams)
    weights = folder / "main_model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"oops")
    with pytest.raises(ArtifactError, match=r"model\.safetensors: sha256 differs"):
        evaluate_model.run(config.replace(checkpoint=str(folder)))
