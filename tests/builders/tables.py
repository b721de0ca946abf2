"""embeddings/v1 artifacts for tests."""

from pathlib import Path

import numpy as np
import torch

from scone_core.artifacts.folders import publish
from scone_core.artifacts.manifests import EmbeddingsManifest, RowFormat, Shard
from scone_core.artifacts.shards import write_shard
from scone_core.fgrams.ranks import write_ranks
from scone_core.table.row_formats import STORAGE, embedding_batch, to_storage, width_of


def publish_rows(
    folder: Path,
    rows_SC: np.ndarray,
    *,
    row_format: RowFormat,
    rows_per_shard: int,
    ids_by_rank_S: np.ndarray | None = None,
) -> str:
    """A table of stored rows, by default with ids that are ranks; its folder."""
    shards: list[Shard] = []
    for first in range(0, len(rows_SC), rows_per_shard):
        batch = embedding_batch(rows_SC[first : first + rows_per_shard], row_format)
        name = f"rows-{first:05d}.arrow"
        shards.append(write_shard(str(folder), name, batch, first_id=first))
    width = width_of(rows_SC, row_format)
    manifest = EmbeddingsManifest(
        fingerprint="table",
        config={},
        inputs={},
        shards=tuple(shards),
        fgrams_fingerprint="these f-grams",
        checkpoint_fingerprint="this checkpoint",
        tokenizer_sha256="this tokenizer",
        max_n=5,
        num_rows=len(rows_SC),
        width=width,
        row_format=row_format,
        bytes_per_row=STORAGE[row_format].num_bytes(width),
        ranks=None
        if ids_by_rank_S is None
        else write_ranks(str(folder), ids_by_rank_S, len(rows_SC)),
    )
    publish(str(folder), manifest)
    return str(folder)


def publish_vectors(
    folder: Path,
    vectors_SD: torch.Tensor,
    *,
    row_format: RowFormat,
    rows_per_shard: int = 1 << 20,
    ids_by_rank_S: np.ndarray | None = None,
) -> str:
    """A table of float32 vectors, rounded to `row_format`; its folder."""
    return publish_rows(
        folder,
        to_storage(vectors_SD, row_format),
        row_format=row_format,
        rows_per_shard=rows_per_shard,
        ids_by_rank_S=ids_by_rank_S,
    )


def random_vectors(num: int, width: int, *, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, one of them zero."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 3, num)[torch.randperm(num, generator=generator)]
    vectors_SD = torch.randn(num, width, generator=generator) * sizes[:, None]
    vectors_SD[num // 2] = 0
    return vectors_SD
