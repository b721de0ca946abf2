"""The options of precompute, and of converting, checking and exporting its tables."""

from typing import Literal

from pydantic import Field

from ray_jobs.runtime.config import JobConfig
from scone_core.artifacts.config import (
    InputPath,
    OptionalInputPath,
    OutputPath,
    Resource,
    StageConfig,
)
from scone_core.artifacts.manifests import RowFormat


class PrecomputeConfig(JobConfig):
    """Options of the precompute stage."""

    checkpoint: InputPath
    """Folder or URI of a checkpoint/v1 artifact that was trained with f-grams."""
    fgrams: InputPath
    """Folder or URI of the fgrams/v1 artifact it was trained with, or of a later generation."""
    grow: OptionalInputPath = None
    """Folder or URI of this checkpoint's table for an earlier generation of the f-grams: its shards
    are taken over as they are, and only the rows of newer f-grams are computed."""
    row_format: RowFormat = "bf16"
    """Format of the stored rows; int8 and fp8 take half the bytes of bf16, with one scale per row.
    """
    rows_per_shard: int = Field(default=1 << 18, ge=1)
    """Rows of one published shard, which a task assembles in memory."""
    fgrams_per_block: int = Field(default=1 << 16, ge=1)
    """F-grams of one resumable unit."""
    fgrams_per_forest: int = Field(default=1 << 14, ge=1)
    """F-grams of one forward pass; decides its memory and, by its shapes, the last bits of rows."""
    num_actors: Resource[int | None] = Field(default=None, ge=1)
    """Copies of the model; by default as many as the cluster's CPUs (or GPUs) hold."""
    cpus_per_actor: Resource[int] = Field(default=1, ge=1)
    gpus_per_actor: Resource[float] = Field(default=0, ge=0)


class ConvertConfig(JobConfig):
    """Write a table in another row format, without the model."""

    table: InputPath
    """Folder or URI of the embeddings/v1 artifact to convert."""
    row_format: RowFormat = "int8"
    """Format of the rows to write."""


class VerifyConfig(StageConfig):
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


class ExportConfig(StageConfig):
    """Write a table for other programs: LMDB (the paper's store), safetensors or .npy."""

    table: InputPath
    """Folder or URI of an embeddings/v1 artifact."""
    to: Literal["lmdb", "safetensors", "npy"]
    out: OutputPath
    """An empty folder, for lmdb a local one. `export.json` is written last."""
    fgrams: OptionalInputPath = None
    """Folder or URI of the table's fgrams/v1 artifact, whose n-grams are the keys of lmdb."""
