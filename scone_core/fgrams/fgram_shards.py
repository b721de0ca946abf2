"""fgrams/v1: ranked f-grams in Parquet shards, row number = rank = id; write and read.

Shapes: S f-grams, K max_n.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from scone_core.artifacts import storage
from scone_core.artifacts.manifests import (
    ArtifactError,
    FgramsManifest,
    Generation,
    Shard,
    load_manifest,
    require_equal,
    verify_shards,
)
from scone_core.counting.one_scan import NGrams
from scone_core.fgrams.index import FGramIndex, Matches, write_index
from scone_core.fgrams.ranks import map_ranks
from scone_core.fgrams.trie import MAX_FGRAMS, find_rows

__all__ = ["FGramIndex", "Matches", "NGrams", "read_fgrams", "validate_fgrams", "write_fgrams"]

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
    num_rows = len(fgrams.n_M)
    ids = pa.array(np.arange(first_id, first_id + num_rows, dtype=np.uint64))
    table = pa.Table.from_batches([ngram_batch(fgrams)]).add_column(0, "fgram_id", ids)
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
        name=name, num_rows=num_rows, num_bytes=num_bytes, sha256=sha256, first_id=first_id
    )


def ngram_batch(ngrams: NGrams) -> pa.RecordBatch:
    """n-grams as Arrow columns n, tokens, count."""
    tokens_MK = np.ascontiguousarray(ngrams.tokens_MK)
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(tokens_MK.reshape(-1)), tokens_MK.shape[1])
    columns = {"n": pa.array(ngrams.n_M), "tokens": tokens, "count": pa.array(ngrams.counts_M)}
    return pa.RecordBatch.from_pydict(columns)


def ngrams_of(batch: pa.RecordBatch) -> NGrams:
    """The inverse of `ngram_batch`, without a copy; other columns are left out."""
    tokens = batch.column("tokens")
    max_n = tokens.type.list_size
    values = tokens.values.to_numpy()[tokens.offset * max_n : (tokens.offset + len(tokens)) * max_n]
    return NGrams(
        values.reshape(-1, max_n),
        batch.column("n").to_numpy(),
        batch.column("count").to_numpy(),
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
    empty = pa.RecordBatch.from_pylist([], fgram_schema(manifest.max_n))
    blocks = [empty, *iter_rows(folder, manifest.shards, first_id=first_id, last_id=last_id)]
    return NGrams(*map(np.concatenate, zip(*map(ngrams_of, blocks), strict=True)))


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
            blocks.append(NGrams(*(column[near - first_id] for column in rows)))
    return NGrams(*(np.concatenate(columns)[places] for columns in zip(*blocks, strict=True)))


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


def build_index(
    folder: str, path: str, shards: Sequence[Shard], *, vocab_size: int
) -> tuple[int, str]:
    """Build the trie of an artifact's shards and publish it as `path`: its bytes and sha256.

    Raises:
        ValueError: the f-grams are not closed under prefixes and suffixes, or one repeats.
    """
    blocks = (ngrams_of(rows)[:2] for rows in iter_rows(folder, shards))
    num_fgrams = sum(shard.num_rows for shard in shards)
    return write_index(path, blocks, num_fgrams=num_fgrams, vocab_size=vocab_size)


def compare_fgrams(first: str, second: str) -> pl.DataFrame:
    """How many f-grams of each length two artifacts have, and have in common.

    Returns:
        n, first, second, common (numbers of f-grams), overlap (common / all of both).

    Raises:
        ArtifactError: their tokenizers differ.
    """
    kept, index = load_manifest(FgramsManifest, first), FGramIndex.open(second)
    other = load_manifest(FgramsManifest, second)
    require_equal(
        f"tokenizer of {second}",
        other.tokenizer_sha256,
        kept.tokenizer_sha256,
        f"only f-grams of the tokenizer of {first} can be compared with it",
    )
    common_K1 = np.zeros(kept.max_n + 1, np.int64)
    for rows in iter_rows(first, kept.shards):
        tokens_SK, n_S, _ = ngrams_of(rows)
        is_common_S = find_rows(index.buckets_N8, tokens_SK, n_S) >= 0
        common_K1 += np.bincount(n_S[is_common_S], minlength=kept.max_n + 1)
    numbers = [
        (
            n,
            kept.num_fgrams_per_n.get(n, 0),
            other.num_fgrams_per_n.get(n, 0),
            int(common_K1[n]) if n <= kept.max_n else 0,
        )
        for n in range(2, max(kept.max_n, other.max_n) + 1)
    ]
    table = pl.DataFrame(numbers, ["n", "first", "second", "common"], orient="row")
    union = pl.col("first") + pl.col("second") - pl.col("common")
    return table.with_columns(overlap=pl.col("common") / union)


def validate_fgrams(folder: str) -> FgramsManifest:
    """Check every invariant of fgrams/v1 by reading all of it.

    Raises:
        ArtifactError: names the file and the invariant that does not hold.
    """
    manifest = load_manifest(FgramsManifest, folder)
    verify_shards(folder, [*manifest.shards, manifest.index, *filter(None, [manifest.ranks])])
    num_per_n = np.zeros(manifest.max_n + 1, np.int64)
    for generation in manifest.generations:
        num_per_n += _check_generation(folder, manifest, generation, int(num_per_n.sum()))
    found = {n: int(num_per_n[n]) for n in range(2, manifest.max_n + 1)}
    require_equal(f"{folder}: f-grams per n", found, manifest.num_fgrams_per_n, "rebuild it")
    _check_index(folder, manifest)
    if manifest.ranks is not None:
        ranks_S = np.sort(map_ranks(folder, manifest.ranks))
        if not np.array_equal(ranks_S, np.arange(manifest.num_fgrams)):
            raise ArtifactError(f"{folder}/{manifest.ranks.name}: not one rank per f-gram")
    return manifest


def _check_generation(
    folder: str, manifest: FgramsManifest, generation: Generation, first_id: int
) -> np.ndarray:
    """Check the rows from `first_id` on; how many f-grams of each length they are."""
    num_per_n = np.zeros(manifest.max_n + 1, np.int64)
    last_ranked = generation.num_fgrams - generation.num_included
    last_row: NGrams | None = None
    last_id = generation.num_fgrams
    for rows in iter_rows(folder, manifest.shards, first_id=first_id, last_id=last_id):
        fgrams, where = ngrams_of(rows), f"{folder}: f-grams from {first_id} on"
        if not np.array_equal(rows.column("fgram_id"), first_id + np.arange(rows.num_rows)):
            raise ArtifactError(f"{folder}: fgram_id is not the row number behind row {first_id}")
        _check_rows(fgrams, manifest, max(last_ranked - first_id, 0), where)
        _check_order(fgrams, last_row, where)
        num_per_n += np.bincount(fgrams.n_M, minlength=manifest.max_n + 1)
        last_row = NGrams(*(column[-1:] for column in fgrams))
        first_id += rows.num_rows
    return num_per_n


def _check_rows(fgrams: NGrams, manifest: FgramsManifest, num_ranked: int, where: str) -> None:
    """`num_ranked`: of the rows, the first ones, that are not there on request alone."""
    tokens_MK, n_M, counts_M = fgrams
    counts_M = counts_M[:num_ranked]
    if tokens_MK.shape[1] != manifest.max_n or n_M.min() < 2 or n_M.max() > manifest.max_n:
        raise ArtifactError(f"{where}: n outside 2 to max_n={manifest.max_n}")
    if counts_M.size and counts_M.min() < manifest.min_count:
        raise ArtifactError(f"{where}: count {counts_M.min()} < min_count={manifest.min_count}")
    inside_MK = np.arange(manifest.max_n) < n_M[:, None]
    if tokens_MK[~inside_MK].any():
        raise ArtifactError(f"{where}: not zero behind the n-th token")
    tokens = tokens_MK[inside_MK]
    if tokens.max() >= manifest.vocab_size or (tokens == manifest.separator_id).any():
        raise ArtifactError(
            f"{where}: a token outside vocab_size={manifest.vocab_size}, or the separator"
        )


def _check_order(fgrams: NGrams, last_row: NGrams | None, where: str) -> None:
    """Each row must come after the one before it: count descending, n, then tokens ascending."""
    tokens_MK, n_M, counts_M = map(
        np.concatenate, zip(*filter(None, [last_row, fgrams]), strict=True)
    )
    keys_MX = np.column_stack([np.invert(counts_M), n_M, tokens_MK])
    deciding = (keys_MX[1:] != keys_MX[:-1]).argmax(axis=1)
    rows = np.arange(len(deciding))
    if not (keys_MX[1:][rows, deciding] > keys_MX[:-1][rows, deciding]).all():
        raise ArtifactError(f"{where}: not in rank order")


def _check_index(folder: str, manifest: FgramsManifest) -> None:
    """The index is a function of the rows: building it again must give the same bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            _, sha256 = build_index(
                folder, f"{scratch}/trie.npy", manifest.shards, vocab_size=manifest.vocab_size
            )
        except ValueError as error:
            raise ArtifactError(f"{folder}: {error}") from error
    if sha256 != manifest.index.sha256:
        raise ArtifactError(f"{folder}/{manifest.index.name}: not the index of its f-grams")


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
