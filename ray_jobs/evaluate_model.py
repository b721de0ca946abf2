"""checkpoint/v1 + tokens/v1 (+ fgrams/v1, embeddings/v1) -> evaluation/v1: score held-out text."""

from functools import partial
from typing import Annotated, Any, Literal

import mlflow
import ray
import torch
from pydantic import PositiveInt
from ray.util import ActorPool

from ray_jobs.runtime import JobConfig, Progress, connect
from ray_jobs.tracking import log_manifest, stage_run
from scone_core import artifacts
from scone_core.artifacts import (
    ArtifactError,
    CheckpointManifest,
    EmbeddingsManifest,
    EvaluationManifest,
    FgramsManifest,
    Manifest,
    TokensManifest,
)
from scone_core.batches import TokenStream
from scone_core.config import InputPath, Resource, Role
from scone_core.evaluation import (
    Embed,
    Score,
    embed_from_table,
    embed_on_the_fly,
    evaluate,
    num_windows,
)
from scone_core.fgram_index import FGramIndex
from scone_core.model import SconeLM
from scone_core.table import EmbeddingTable

WINDOWS_PER_UNIT = 64
"""Fixed, because it decides the order in which losses are added."""


class EvaluateConfig(JobConfig):
    """Options of the evaluate stage."""

    checkpoint: InputPath
    """Folder or URI of a checkpoint/v1 artifact."""
    tokens: InputPath
    """Folder or URI of the held-out tokens/v1 artifact."""
    fgrams: Annotated[str | None, Role("input")] = None
    """The fgrams/v1 artifact of the training; none for a plain baseline."""
    table: Annotated[str | None, Role("input")] = None
    """The embeddings/v1 artifact to read vectors from; without it they are computed on the fly."""
    sequence_length: PositiveInt | None = None
    """Tokens of one window; by default as in training."""
    num_actors: Resource[PositiveInt | None] = None
    """Copies of the model, one CPU each; by default one per CPU of the cluster."""


def run(config: EvaluateConfig) -> EvaluationManifest:
    """Perplexity, bits per byte, hit rate and mean match length on held-out text."""
    inputs = {name: manifest.fingerprint for name, manifest in _load_inputs(config).items()}
    if done := artifacts.claim(EvaluationManifest, config.out, config, inputs):
        print(f"evaluate: {config.out} is up to date: {_summary(done)}")
        return done
    common = artifacts.plan_fields(EvaluationManifest, config, inputs)
    connect(config.cluster)
    with stage_run(config, stage="evaluate", fingerprint=common["fingerprint"]):
        manifest = _manifest(config, _score_all(config), common)
        mlflow.log_metrics({name: getattr(manifest, name) for name in METRICS})
        log_manifest(manifest)
        print(f"evaluate: {_summary(manifest)}")
        return artifacts.publish(config.out, manifest)


METRICS = ("perplexity", "bits_per_byte", "hit_rate", "mean_match_length")


def _load_inputs(config: EvaluateConfig) -> dict[str, Manifest]:
    """The manifests of the inputs, which must belong together.

    Raises:
        ArtifactError: a damaged checkpoint, or inputs of different tokenizers, f-grams or models.
    """
    checkpoint = artifacts.load_manifest(CheckpointManifest, config.checkpoint)
    artifacts.verify_shards(config.checkpoint, checkpoint.shards)
    tokens = artifacts.load_manifest(TokensManifest, config.tokens)
    artifacts.require_equal(
        f"tokens={config.tokens!r}: tokenizer_sha256",
        tokens.tokenizer_sha256,
        checkpoint.tokenizer_sha256,
        "tokenize the text with the tokenizer of the training",
    )
    found: dict[str, Manifest] = {"checkpoint": checkpoint, "tokens": tokens}
    if checkpoint.fgrams_fingerprint is not None and config.fgrams is None:
        raise ArtifactError("fgrams: needed, because this checkpoint was trained with f-grams")
    if config.fgrams is not None:
        fgrams = found["fgrams"] = artifacts.load_manifest(FgramsManifest, config.fgrams)
        artifacts.require_equal(
            f"fgrams={config.fgrams!r}: fingerprint",
            fgrams.fingerprint,
            checkpoint.fgrams_fingerprint,
            "give the f-grams of the training, and none for a plain baseline",
        )
    if config.table is not None:
        table = found["table"] = artifacts.load_manifest(EmbeddingsManifest, config.table)
        artifacts.require_equal(
            f"table={config.table!r}: checkpoint_fingerprint",
            table.checkpoint_fingerprint,
            checkpoint.fingerprint,
            "precompute the table of this checkpoint",
        )
    return found


def _score_all(config: EvaluateConfig) -> Score:
    """The score of all windows, unit by unit; units with a receipt are not scored again."""
    num_units = -(-_num_windows(config) // WINDOWS_PER_UNIT)
    todo = [unit for unit in range(num_units) if _read_score(config, unit) is None]
    progress = Progress("evaluate", unit="units", total=num_units, done=num_units - len(todo))
    num_actors = config.num_actors or int(ray.cluster_resources().get("CPU", 1))
    actor = ray.remote(num_cpus=1)(Evaluator)
    pool = ActorPool(
        [actor.remote(config.model_dump(mode="json")) for _ in range(min(num_actors, len(todo)))]
    )
    for unit, score in pool.map_unordered(lambda actor, unit: actor.score.remote(unit), todo):
        artifacts.write_receipt(config.out, f"unit-{unit:05d}", score)
        progress.advance()
    scores = [_read_score(config, unit) for unit in range(num_units)]
    return sum((score for score in scores if score is not None), start=Score())


def _num_windows(config: EvaluateConfig) -> int:
    return num_windows(TokenStream.open(config.tokens), _sequence_length(config))


def _sequence_length(config: EvaluateConfig) -> int:
    if config.sequence_length is not None:
        return config.sequence_length
    return artifacts.load_manifest(CheckpointManifest, config.checkpoint).config["sequence_length"]


def _read_score(config: EvaluateConfig, unit: int) -> Score | None:
    receipt = artifacts.read_receipt(config.out, f"unit-{unit:05d}")
    return None if receipt is None else Score.model_validate(receipt)


class Evaluator:
    """A Ray actor that holds the model. It has one thread, so that no sum depends on threads."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """`settings`: an EvaluateConfig as JSON."""
        torch.set_num_threads(1)
        config = EvaluateConfig.model_validate(settings)
        self._stream = TokenStream.open(config.tokens)
        self._sequence_length = _sequence_length(config)
        self._model = SconeLM.load(config.checkpoint)
        self._embed = _embed(config, self._model)

    def score(self, unit: int) -> tuple[int, dict[str, float]]:
        """The unit and the score of its windows."""
        last = num_windows(self._stream, self._sequence_length)
        first = unit * WINDOWS_PER_UNIT
        score = evaluate(
            self._model.main_model,
            self._embed,
            self._stream,
            windows=range(first, min(first + WINDOWS_PER_UNIT, last)),
            sequence_length=self._sequence_length,
        )
        return unit, score.model_dump()


def _embed(config: EvaluateConfig, model: SconeLM) -> Embed:
    index = None if config.fgrams is None else FGramIndex.open(config.fgrams)
    if index is None or config.table is None:
        return partial(embed_on_the_fly, model=model, matcher=index)
    table = EmbeddingTable.open(config.table)
    return partial(embed_from_table, model=model, index=index, table=table)


def _vectors(config: EvaluateConfig) -> Literal["none", "on the fly", "table"]:
    if config.fgrams is None:
        return "none"
    return "on the fly" if config.table is None else "table"


def _manifest(config: EvaluateConfig, score: Score, common: dict[str, Any]) -> EvaluationManifest:
    tokens = artifacts.load_manifest(TokensManifest, config.tokens)
    assert score.num_tokens == tokens.num_tokens, "every token is scored once"
    fields: dict[str, Any] = common | score.metrics(num_bytes_text=tokens.num_bytes_text)
    return EvaluationManifest(
        **fields,
        shards=(),
        vectors=_vectors(config),
        num_tokens=score.num_tokens,
    )


def _summary(manifest: EvaluationManifest) -> str:
    metrics = ", ".join(f"{name} {getattr(manifest, name):.4f}" for name in METRICS)
    return f"{metrics} (f-gram vectors: {manifest.vectors})"
