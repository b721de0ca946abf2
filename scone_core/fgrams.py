"""fgrams/v1: ranked f-grams in Parquet shards, row number = rank = id; write and read.

Shapes: S f-grams, K max_n.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from scone_core import storage
from scone_core.artifacts import ArtifactError, FgramsManifest, Shard, load_manifest
from scone_core.fgram_index import FGramIndex, Matches
from scone_core.ngrams import NGrams

__all__ = ["FGramIndex", "Matches", "NGrams", "iter_fgrams", "read_fgrams", "write_fgrams"]

ROW_GROUP = 1 << 18


def fgram_schema(max_n: int) -> pa.Schema:
    """The columns of fgrams/v1. Arrow's fixed size lists have no offsets that could overflow."""
    tokens = pa.list_(pa.field("token", pa.uint32(), nullable=False), max_n)
    columns = {"fgram_id": pa.uint64(), "n": pa.uint8(), "tokens": tokens, "count": pa.uint64()}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


def write_fgrams(folder: str, name: str, fgrams: NGrams, *, first_id: int) -> Shard:
    """Publish f-grams with the ids `first_id`, `first_id + 1`, ... as one Parquet shard."""
    schema = fgram_schema(fgrams.tokens_MK.shape[1])
    num_rows = len(fgrams.n_M)
    ids = pa.array(np.arange(first_id, first_id + num_rows, dtype=np.uint64))
    tokens = pa.FixedSizeListArray.from_arrays(
        pa.array(fgrams.tokens_MK.reshape(-1)), type=schema.field("tokens").type
    )
    columns = [ids, pa.array(fgrams.n_M), tokens, pa.array(fgrams.counts_M)]
    table = pa.Table.from_arrays(columns, schema=schema)
    num_bytes, sha256 = storage.write_atomic(
        storage.join(folder, name),
        lambda file: pq.write_table(table, file, row_group_size=ROW_GROUP, compression="zstd"),
    )
    return Shard(
        name=name, num_rows=num_rows, num_bytes=num_bytes, sha256=sha256, first_id=first_id
    )


def read_fgrams(folder: str, *, first_id: int = 0, num: int | None = None) -> NGrams:
    """The f-grams `first_id` to `first_id + num` of an artifact, by default all from `first_id` on.

    Raises:
        ValueError: ids outside the artifact.
        ArtifactError: no such artifact, or a shard is missing or damaged.
    """
    manifest = load_manifest(FgramsManifest, folder)
    last_id = manifest.num_fgrams if num is None else first_id + num
    if not 0 <= first_id <= last_id <= manifest.num_fgrams:
        raise ValueError(
            f"f-grams {first_id} to {last_id}: {folder} has ids below {manifest.num_fgrams}"
        )
    blocks = list(_read_blocks(folder, manifest, first_id, last_id))
    empty = to_ngrams(fgram_schema(manifest.max_n).empty_table())
    return NGrams(*(np.concatenate(columns) for columns in zip(empty, *blocks, strict=True)))


def iter_fgrams(folder: str, manifest: FgramsManifest) -> Iterator[NGrams]:
    """All f-grams of an artifact in rank order, in blocks of bounded size."""
    return _read_blocks(folder, manifest, 0, manifest.num_fgrams)


def to_ngrams(table: pa.Table) -> NGrams:
    """The columns of f-gram rows as arrays."""
    tokens = table.column("tokens").combine_chunks()
    return NGrams(
        tokens.flatten().to_numpy().reshape(-1, tokens.type.list_size),
        table.column("n").to_numpy(),
        table.column("count").to_numpy(),
    )


def _read_blocks(
    folder: str, manifest: FgramsManifest, first_id: int, last_id: int
) -> Iterator[NGrams]:
    for shard in manifest.shards:
        if shard.first_id < last_id and first_id < shard.first_id + shard.num_rows:
            yield from _read_shard(folder, shard, first_id, last_id)


def _read_shard(folder: str, shard: Shard, first_id: int, last_id: int) -> Iterator[NGrams]:
    path = storage.join(folder, shard.name)
    if storage.file_size(path) != shard.num_bytes:
        raise ArtifactError(f"{path}: missing or truncated; restore it or rebuild {folder}")
    filesystem, inner = storage.resolve(path)
    try:
        with pq.ParquetFile(inner, filesystem=filesystem) as file:
            start = shard.first_id
            for number in range(file.num_row_groups):
                num_rows = file.metadata.row_group(number).num_rows
                low, high = max(first_id - start, 0), min(last_id - start, num_rows)
                if low < high:
                    yield to_ngrams(file.read_row_group(number).slice(low, high - low))
                start += num_rows
    except (OSError, pa.ArrowException) as error:
        raise ArtifactError(f"{path}: damaged Parquet file ({error}); rebuild {folder}") from error
