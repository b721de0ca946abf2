"""fgrams/v1: ranked f-grams in Parquet shards, row number = rank = id; write and read.

Shapes: S f-grams, K max_n.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from scone_core.artifacts import storage
from scone_core.artifacts.manifests import ArtifactError, FGramsManifest, Shard, load_manifest
from scone_core.fgrams.index import INDEX, write_index
from scone_core.fgrams.ngrams import NGrams
from scone_core.fgrams.trie import MAX_FGRAMS

ROW_GROUP = 1 << 18
_ENCODINGS = {
    "fgram_id": "DELTA_BINARY_PACKED",
    "count": "DELTA_BINARY_PACKED",
    "tokens.list.element": "BYTE_STREAM_SPLIT",
}
"""Half the time and two thirds of the bytes of dictionaries: ids and counts go by small steps."""


def fgram_schema(max_n: int) -> pa.Schema:
    """The columns of fgrams/v1. Arrow's fixed size lists have no offsets that could overflow."""
    tokens = pa.list_(pa.uint32(), max_n)
    return pa.schema(
        {"fgram_id": pa.uint64(), "n": pa.uint8(), "tokens": tokens, "count": pa.uint64()}
    )


def write_fgrams(folder: str, name: str, fgrams: NGrams, *, first_id: int) -> Shard:
    """Publish f-grams with the ids `first_id`, `first_id + 1`, ... as one Parquet shard."""
    ids = pa.array(np.arange(first_id, first_id + fgrams.num, dtype=np.uint64))
    table = pa.Table.from_batches([fgrams.to_batch()]).add_column(0, "fgram_id", ids)
    num_bytes, sha256 = storage.write_atomic(
        storage.join(folder, name),
        lambda file: pq.write_table(
            table,
            file,
            row_group_size=ROW_GROUP,
            compression="zstd",
            use_dictionary=False,
            column_encoding=_ENCODINGS,
        ),
    )
    return Shard(
        name=name, num_rows=fgrams.num, num_bytes=num_bytes, sha256=sha256, first_id=first_id
    )


def read_fgrams(folder: str, *, first_id: int = 0, num: int | None = None) -> NGrams:
    """The f-grams `first_id` to `first_id + num` of an artifact, by default all from `first_id` on.

    Raises:
        ValueError: ids outside the artifact.
        ArtifactError: no such artifact, or a shard is missing or damaged.
    """
    manifest = load_manifest(FGramsManifest, folder)
    last_id = manifest.num_fgrams if num is None else first_id + num
    if not 0 <= first_id <= last_id <= manifest.num_fgrams:
        raise ValueError(
            f"f-grams {first_id} to {last_id}: {folder} has ids below {manifest.num_fgrams}"
        )
    empty = pa.RecordBatch.from_pylist([], fgram_schema(manifest.max_n))
    blocks = [empty, *iter_rows(folder, manifest.shards, first_id=first_id, last_id=last_id)]
    return NGrams.concat(map(NGrams.from_batch, blocks))


def take_fgrams(folder: str, ids_S: np.ndarray) -> NGrams:
    """The f-grams with the ids `ids_S`, in that order. Reads the row groups around them.

    Raises:
        ValueError, ArtifactError: as `read_fgrams`.
    """
    unique, places = np.unique(ids_S, return_inverse=True)
    blocks = [read_fgrams(folder, num=0)]
    for near in np.split(unique, np.flatnonzero(np.diff(unique) > ROW_GROUP) + 1):
        if len(near):
            first_id, num = int(near[0]), int(near[-1] - near[0]) + 1
            rows = read_fgrams(folder, first_id=first_id, num=num)
            blocks.append(rows.take(near - first_id))
    return NGrams.concat(blocks).take(places)


def depth_first_order(tokens_SK: np.ndarray, n_S: np.ndarray) -> np.ndarray:
    """The order of f-grams in which every prefix stands before what it begins; int64 [S]."""
    is_token_SK = np.arange(tokens_SK.shape[1]) < n_S[:, None]
    keys_SK = np.where(is_token_SK, tokens_SK.astype(np.int64) + 1, 0)
    return np.lexsort(keys_SK.T[::-1])


def iter_rows(
    folder: str, shards: Iterable[Shard], *, first_id: int = 0, last_id: int = MAX_FGRAMS
) -> Iterator[pa.RecordBatch]:
    """The rows of an artifact's shards in rank order, in blocks of at most ROW_GROUP.

    Raises:
        ArtifactError: a shard is missing or damaged.
    """
    for shard in shards:
        if shard.first_id < last_id and first_id < shard.first_id + shard.num_rows:
            yield from _read_shard(folder, shard, first_id, last_id)


def build_index(folder: str, shards: Sequence[Shard], *, out: str, vocab_size: int) -> Shard:
    """Build the trie of the f-grams in `shards` of `folder`, and publish it in the folder `out`.

    Raises:
        ValueError: the f-grams are not closed under prefixes and suffixes, or one repeats.
    """
    blocks = (NGrams.from_batch(rows)[:2] for rows in iter_rows(folder, shards))
    num_fgrams = sum(shard.num_rows for shard in shards)
    num_bytes, sha256 = write_index(
        storage.join(out, INDEX), blocks, num_fgrams=num_fgrams, vocab_size=vocab_size
    )
    return Shard(name=INDEX, num_rows=num_fgrams, num_bytes=num_bytes, sha256=sha256)


def _read_shard(folder: str, shard: Shard, first_id: int, last_id: int) -> Iterator[pa.RecordBatch]:
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
                    rows = file.read_row_group(number).combine_chunks().to_batches()[0]
                    yield rows.slice(low, high - low)
                start += num_rows
    except (OSError, pa.ArrowException) as error:
        raise ArtifactError(f"{path}: damaged Parquet file ({error}); rebuild {folder}") from error
