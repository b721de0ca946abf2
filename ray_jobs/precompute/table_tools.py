"""embeddings/v1 -> another row format, a verdict, or another store."""

import json
from typing import Literal

import tyro
from pydantic import Field

from ray_jobs.precompute.convert_table import Convert, convert
from ray_jobs.runtime.command_line import one_line_errors, refuse_relative_paths
from scone_core.artifacts import storage
from scone_core.artifacts.config import InputPath, OutputPath, StageConfig
from scone_core.artifacts.manifests import (
    ArtifactError,
)
from scone_core.table.check import RowCheck, check_table
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.export import export_lmdb, export_npy, export_safetensors


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
