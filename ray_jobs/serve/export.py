"""checkpoint/v1 + embeddings/v1 -> served/v1: the Hugging Face folder that engines load."""

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import field_validator

from ray_jobs.runtime.config import JobConfig
from ray_jobs.runtime.stage import run_stage
from ray_jobs.runtime.tracking import RunLog
from scone_core.artifacts import storage
from scone_core.artifacts.config import InputPath
from scone_core.artifacts.folders import SharedFields
from scone_core.artifacts.manifests import (
    ArtifactError,
    CheckpointManifest,
    Shard,
    TokensManifest,
    load_manifest,
    require_equal,
)
from scone_core.corpus.tokenizer import Tokenizer
from scone_core.model.scone_lm import MAIN
from scone_core.serving.served_folder import SconeSection, ServedManifest, served_config

PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
"""For models that were never taught a chat format: the messages, one per line."""


class ExportConfig(JobConfig):
    """Options of the export stage."""

    checkpoint: InputPath
    """Folder or URI of the checkpoint/v1 artifact to serve."""
    tokens: InputPath
    """Folder or URI of a tokens/v1 artifact made with the model's tokenizer."""
    fgrams: str | None = None
    """Folder or URI of the f-grams, from where engines will read them; None for a baseline."""
    table: str | None = None
    """Folder or URI of the table, from where engines will read it; None for a baseline."""
    chat_template: str = PLAIN_CHAT
    """Jinja template that turns chat messages into a prompt."""

    @field_validator("fgrams", "table")
    @classmethod
    def _make_absolute(cls, path: str | None) -> str | None:
        return os.path.abspath(path) if path and storage.is_local(path) else path


def run(config: ExportConfig) -> ServedManifest:
    """Put together what an engine needs: main model, tokenizer, and where f-grams and table are."""
    checkpoint = load_manifest(CheckpointManifest, config.checkpoint)
    section = _section(config, checkpoint)
    inputs = {"checkpoint": checkpoint.fingerprint, "tokenizer": checkpoint.tokenizer_sha256}
    if section is not None:
        inputs |= {"fgrams": section.fgrams_fingerprint, "table": section.table_fingerprint}
    build = partial(_export, config, checkpoint, section)
    return run_stage(ServedManifest, config, inputs, build, stage="export")


def _export(
    config: ExportConfig,
    checkpoint: CheckpointManifest,
    section: SconeSection | None,
    shared: SharedFields,
    log: RunLog,
) -> ServedManifest:
    return ServedManifest(
        **shared,
        shards=(*_copy_model(config, checkpoint, section), *_copy_tokenizer(config)),
        checkpoint_fingerprint=checkpoint.fingerprint,
        table_fingerprint=section.table_fingerprint if section else None,
    )


def _section(config: ExportConfig, checkpoint: CheckpointManifest) -> SconeSection | None:
    require_equal(
        f"tokens={config.tokens!r}: tokenizer_sha256",
        load_manifest(TokensManifest, config.tokens).tokenizer_sha256,
        checkpoint.tokenizer_sha256,
        "give tokens that were made with the checkpoint's tokenizer",
    )
    if checkpoint.fgrams_fingerprint is None:
        return None
    if config.fgrams is None or config.table is None:
        raise ArtifactError(
            f"fgrams, table: checkpoint={config.checkpoint!r} was trained with f-grams; name both"
        )
    return SconeSection.of(
        config.fgrams, config.table, checkpoint_fingerprint=checkpoint.fingerprint
    )


def _copy_model(
    config: ExportConfig, checkpoint: CheckpointManifest, section: SconeSection | None
) -> list[Shard]:
    files = []
    for shard in checkpoint.shards:
        folder, _, name = shard.name.partition("/")
        source = storage.join(config.checkpoint, shard.name)
        if folder == MAIN and name == "config.json":
            content = served_config(json.loads(storage.read_bytes(source)), section)
            files.append(_write_json(config.out, name, content))
        elif folder == MAIN:
            files.append(_copy(source, config.out, name))
    return files


def _copy_tokenizer(config: ExportConfig) -> list[Shard]:
    """The tokenizer as transformers wants it. Prompts of users hold no control tokens: what looks
    like one is split into ordinary tokens, as it was in training.
    """
    tokens = load_manifest(TokensManifest, config.tokens)
    tokenizer = Tokenizer(storage.local_copy(storage.join(config.tokens, "tokenizer.json")))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.decode([tokens.separator_id]),
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "chat_template": config.chat_template,
    }
    return [
        _copy(storage.join(config.tokens, "tokenizer.json"), config.out, "tokenizer.json"),
        _write_json(config.out, "tokenizer_config.json", content),
    ]


def _copy(source: str, folder: str, name: str) -> Shard:
    local = storage.local_copy(source)

    def write(file: Path) -> None:
        shutil.copyfile(local, file)

    num_bytes, sha256 = storage.write_atomic(storage.join(folder, name), write)
    return Shard(name=name, num_rows=0, num_bytes=num_bytes, sha256=sha256)


def _write_json(folder: str, name: str, content: dict[str, Any]) -> Shard:
    data = (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
    num_bytes, sha256 = storage.write_bytes(storage.join(folder, name), data)
    return Shard(name=name, num_rows=0, num_bytes=num_bytes, sha256=sha256)
