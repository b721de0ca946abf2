"""embeddings/v1 -> another row format, a verdict, or another store."""

import json
from functools import partial
from typing import Any, Literal

import numpy as np
import tyro
from pydantic import Field

from ray_jobs.runtime.tracking import log_manifest, stage_run
from ray_jobs.runtime.units import (
    JobConfig,
    connect,
    one_line_errors,
    refuse_relative_paths,
    run_units,
)
from scone_core.artifacts import manifests, storage
from scone_core.artifacts.config import InputPath, OutputPath, StageConfig
from scone_core.artifacts.manifests import ArtifactError, EmbeddingsManifest, RowFormat, Shard
from scone_core.table.check import RowCheck, check_table
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.export import export_lmdb, export_npy, export_safetensors
from scone_core.table.row_formats import (
    STORAGE,
    embedding_batch,
    from_storage,
    table_rows,
    to_storage,
    width_of,
)

ROWS_PER_BLOCK = 1 << 12
"""Rows that are float32 at a time; a shard is never."""


class Convert(JobConfig):
    """Write a table in another row format, without the model."""

    table: InputPath
    """Folder or URI of the embeddings/v1 artifact to convert."""
    rows: RowFormat = "int8"
    """Format of the rows to write."""


class Verify(StageConfig):
    """Compare a table's files with their sha256 and some of its rows with the f-gram model."""

    table: InputPath
    """Folder or URI of an embeddings/v1 artifact."""
    checkpoint: InputPath
    """Folder or URI of the checkpoint/v1 artifact it was precomputed from."""
    fgrams: InputPath
    """Folder or URI of its fgrams/v1 artifact."""
    num_rows: int = Field(default=1000, ge=1)
    """Rows to compute again."""
    seed: int = 0
    """Of the choice of rows."""


class Export(StageConfig):
    """Write a table for other programs: LMDB (the paper's store), safetensors or .npy."""

    table: InputPath
    """Folder or URI of an embeddings/v1 artifact."""
    to: Literal["lmdb", "safetensors", "npy"]
    out: OutputPath
    """An empty folder, for lmdb a local one. `export.json` is written last."""
    fgrams: InputPath | None = None
    """Folder or URI of the table's fgrams/v1 artifact, whose n-grams are the keys of lmdb."""


def convert(config: Convert) -> EmbeddingsManifest:
    """Write `config.table` in the format `config.rows`, shard by shard."""
    source = manifests.load_manifest(EmbeddingsManifest, config.table)
    inputs = {"table": source.fingerprint}
    if done := manifests.claim(EmbeddingsManifest, config.out, config, inputs):
        print(f"convert: {config.out} is up to date")
        return done
    common = manifests.plan_fields(EmbeddingsManifest, config, inputs)
    connect(config.cluster)
    with stage_run(config, stage="convert", fingerprint=common["fingerprint"]):
        receipts = run_units(
            "convert",
            [shard.name for shard in source.shards],
            partial(_convert_shard, config=config, source=source),
            folder=config.out,
        )
        if source.ranks is not None:
            names = (
                storage.join(folder, source.ranks.name) for folder in (config.table, config.out)
            )
            storage.copy_file(*names)
        changed = common | {
            "shards": tuple(Shard.model_validate(receipt) for receipt in receipts),
            "row_format": config.rows,
            "bytes_per_row": STORAGE[config.rows].num_bytes(source.width),
            "converted_from": (*source.converted_from, source.row_format),
        }
        manifest = EmbeddingsManifest.model_validate(source.model_dump() | changed)
        manifests.publish(config.out, manifest)
        log_manifest(manifest)
    return manifest


def _convert_shard(number: int, *, config: Convert, source: EmbeddingsManifest) -> dict[str, Any]:
    shard = source.shards[number]
    rows_NC = table_rows(manifests.map_shard(config.table, shard))
    batch = embedding_batch(convert_rows(rows_NC, source.row_format, config.rows), config.rows)
    written = manifests.write_shard(config.out, shard.name, batch, first_id=shard.first_id)
    return written.model_dump()


def convert_rows(rows_NC: np.ndarray, source: RowFormat, target: RowFormat) -> np.ndarray:
    """Stored rows of the format `source` as stored rows of the format `target`."""
    columns = STORAGE[target].columns(width_of(rows_NC, source))
    out_NC = np.empty((len(rows_NC), columns), STORAGE[target].stored)
    for first in range(0, len(rows_NC), ROWS_PER_BLOCK):
        part = slice(first, first + ROWS_PER_BLOCK)
        vectors_ND = from_storage(rows_NC[part].copy(), source).float()
        out_NC[part] = to_storage(vectors_ND, target)
    return out_NC


def verify(config: Verify) -> RowCheck:
    """What `config.num_rows` random rows show; a difference is an error."""
    return check_table(
        config.table,
        checkpoint=config.checkpoint,
        fgrams=config.fgrams,
        num_rows=config.num_rows,
        seed=config.seed,
    )


def export(config: Export) -> list[str]:
    """Write `config.table` as `config.to`; the names of the files.

    Raises:
        ArtifactError: `out` is not empty, or an input is missing, damaged or not the table's.
        ValueError: lmdb without `fgrams`, or without the package.
    """
    if not storage.is_empty_folder(config.out):
        raise ArtifactError(f"out={config.out!r} is not empty; choose another folder")
    table = EmbeddingTable.open(config.table)
    match config.to:
        case "safetensors":
            names = export_safetensors(table, config.out)
        case "npy":
            names = export_npy(table, config.out)
        case "lmdb":
            if config.fgrams is None:
                raise ValueError("fgrams: the keys of lmdb are n-grams; name the fgrams/v1 folder")
            names = export_lmdb(table, config.fgrams, config.out)
    fields = {"fingerprint", "row_format", "num_rows", "width"}
    content = table.manifest.model_dump(include=fields) | {"files": names}
    storage.write_bytes(storage.join(config.out, "export.json"), json.dumps(content).encode())
    return names


def main() -> None:
    """One of the three from the command line."""
    command = tyro.cli(Convert | Verify | Export, description=__doc__)
    with one_line_errors():
        refuse_relative_paths(command)
        print(_run(command))


def _run(command: Convert | Verify | Export) -> str:
    match command:
        case Convert():
            manifest = convert(command)
            return f"{manifest.row_format} table at {command.out} ({manifest.fingerprint[:12]})"
        case Verify():
            check = verify(command)
            return (
                f"{command.table}: files agree with the manifest, {check.num_rows:,} rows with the "
                f"model (largest error {check.largest_error:.2f} of what rounding allows, mean "
                f"cosine error {check.mean_cosine_error:.1e})"
            )
        case Export():
            return f"{command.out}: {', '.join(export(command))}"
