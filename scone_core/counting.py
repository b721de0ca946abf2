"""tokens/v1 -> fgrams/v1, cut into units of work that run anywhere and in any order.

map_chunk:      a part of the token shards -> a chunk file of grouped suffix records
reduce_range:   some groups of all chunk files -> their frequent n-grams in rank order, class sizes
rank_ranges:    class sizes of all ranges -> runs: where each f-gram id is found
assemble_shard: runs -> one Parquet shard of f-grams

Chunks and ranges only bound memory: what is published does not depend on them. A finished unit is
known by the receipt that the caller writes. Chunk and range files lie in a scratch folder that all
workers see; their names hold the plan's numbers, so those of another plan are never mixed in.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from scone_core import storage
from scone_core.artifacts import (
    ArtifactError,
    Shard,
    TokensManifest,
    map_documents,
    map_shard,
    verify_shards,
    write_shard,
)
from scone_core.config import Frozen
from scone_core.fgrams import ngram_batch, ngrams_of, write_fgrams
from scone_core.ngrams import (
    RECORD_BYTES,
    NGrams,
    Piece,
    check_limits,
    count_groups,
    gather_groups,
    group_records,
    plan_ranges,
    read_starts,
    write_chunk,
)
from scone_core.ranking import class_sizes, gather_ids, rank_range, rank_runs

MIN_CHUNKS, MIN_RANGES = 8, 4
"""Small corpora take the same path as large ones."""
WORKER_BYTES = 350 << 20
"""Resident memory of a worker before its first unit: interpreter, Ray, Arrow, compiled kernels."""
ROW_BYTES = 75
"""Peak bytes per n-gram of a range: 29 as counted, 29 in rank order, the order itself."""


class CountPlan(Frozen):
    """How a count is cut into units."""

    tokens: str
    manifest: TokensManifest
    scratch: str
    max_n: int
    min_count: int
    num_chunks: int
    num_ranges: int

    @property
    def chunks(self) -> list[str]:
        """Names of the chunks."""
        return [f"chunk-{i:05d}-of-{self.num_chunks:05d}" for i in range(self.num_chunks)]

    @property
    def ranges(self) -> list[str]:
        """Names of the ranges."""
        return [f"range-{i:05d}-of-{self.num_ranges:05d}" for i in range(self.num_ranges)]

    @property
    def chunk_paths(self) -> list[str]:
        return [storage.join(self.scratch, f"{name}.records") for name in self.chunks]

    @property
    def scratch_bytes(self) -> int:
        """About how much scratch space is needed. Records are exact; n-grams that reach `min_count`
        are guessed from English text, where about 0.6 / min_count^2 per token and order do.
        """
        num_tokens, num_orders = self.manifest.num_tokens, self.max_n - 1
        records = num_tokens * RECORD_BYTES + self.num_chunks * self.manifest.vocab_size * 8
        return records + int(num_tokens * num_orders * 0.6 / self.min_count**2) * 29

    @property
    def peak_bytes(self) -> int:
        """Resident memory that no unit is expected to exceed."""
        per_chunk = _map_bytes(self.manifest) / self.num_chunks
        per_range = _reduce_bytes(self.manifest, self.max_n, self.min_count) / self.num_ranges
        return WORKER_BYTES + math.ceil(max(per_chunk, per_range))


def plan_count(
    tokens: str,
    manifest: TokensManifest,
    *,
    scratch: str,
    max_n: int,
    min_count: int,
    memory_bytes: int,
    num_chunks: int | None = None,
    num_ranges: int | None = None,
) -> CountPlan:
    """As many chunks and ranges as keep every unit below `memory_bytes`, where not given.

    Raises:
        ValueError: the n-grams do not fit the records, or the memory is too small for any unit.
    """
    check_limits(max_n=max_n, vocab_size=manifest.vocab_size)
    available = memory_bytes - WORKER_BYTES
    if available < 64 << 20:
        raise ValueError(
            f"memory_mb={memory_bytes >> 20}: at least {(WORKER_BYTES >> 20) + 64} are needed"
        )
    for_map = math.ceil(_map_bytes(manifest) / available)
    for_reduce = math.ceil(_reduce_bytes(manifest, max_n, min_count) / available)
    return CountPlan(
        tokens=tokens,
        manifest=manifest,
        scratch=scratch,
        max_n=max_n,
        min_count=min_count,
        num_chunks=num_chunks or max(MIN_CHUNKS, for_map),
        num_ranges=num_ranges or max(MIN_RANGES, for_reduce),
    )


def map_chunk(plan: CountPlan, chunk: int) -> dict[str, Any]:
    """Write the grouped suffix records of one chunk to scratch.

    Raises:
        ArtifactError: a token shard is missing or damaged.
    """
    groups = group_records(
        list(_pieces(plan, chunk)), max_n=plan.max_n, vocab_size=plan.manifest.vocab_size
    )
    return {"num_bytes": write_chunk(plan.chunk_paths[chunk], groups)}


def plan_cuts(plan: CountPlan) -> list[int]:
    """First tokens at which ranges begin, and the end: [num_ranges + 1].

    Raises:
        ArtifactError: the corpus holds the separator, or nothing.
    """
    vocab_size, separator = plan.manifest.vocab_size, plan.manifest.separator_id
    sizes_G = np.zeros(vocab_size, np.int64)
    for path in plan.chunk_paths:
        sizes_G += np.diff(read_starts(path, 0, vocab_size))
    if separator < vocab_size and sizes_G[separator]:
        raise ArtifactError(f"{plan.tokens}: {separator=} inside a document; tokenize again")
    return plan_ranges(sizes_G, plan.num_ranges).tolist()


def reduce_range(plan: CountPlan, cuts: Sequence[int], number: int) -> dict[str, Any]:
    """Count the n-grams of one range and write those at `min_count` or above to scratch, with the
    sizes of their classes.
    """
    first, last = cuts[number], cuts[number + 1]
    groups = gather_groups(plan.chunk_paths, first, last, num_groups=plan.manifest.vocab_size)
    found = count_groups(groups, first_token=first, max_n=plan.max_n, min_count=plan.min_count)
    ranked = rank_range(found)
    sizes = class_sizes(ranked)
    classes = pa.RecordBatch.from_arrays([c.to_arrow() for c in sizes], sizes.columns)
    name = plan.ranges[number]
    return {
        "rows": write_shard(plan.scratch, f"{name}.arrow", ngram_batch(ranked)).model_dump(),
        "classes": write_shard(plan.scratch, f"{name}.classes.arrow", classes).model_dump(),
    }


def rank_ranges(
    plan: CountPlan, receipts: Sequence[dict[str, Any]], *, num_fgrams: int
) -> pl.DataFrame:
    """The runs (see `ranking.rank_runs`) of the `num_fgrams` most frequent n-grams.

    Raises:
        ValueError: no n-gram reaches `min_count`.
    """
    shards = [Shard.model_validate(receipt["classes"]) for receipt in receipts]
    tables = [pa.Table.from_batches([map_shard(plan.scratch, shard)]) for shard in shards]
    runs = rank_runs([pl.DataFrame(table) for table in tables], num_fgrams=num_fgrams)
    if runs.is_empty():
        raise ValueError(
            f"min_count={plan.min_count}: no n-gram occurs that often in "
            f"{plan.manifest.num_tokens} tokens; lower it or count more text"
        )
    return runs


def assemble_shard(
    plan: CountPlan,
    receipts: Sequence[dict[str, Any]],
    runs: pl.DataFrame,
    *,
    out: str,
    rows_per_shard: int,
    number: int,
) -> Shard:
    """Publish the f-grams `number * rows_per_shard` and following as a Parquet shard."""
    first_id = number * rows_per_shard
    last_id = min(first_id + rows_per_shard, int(runs["num"].sum()))

    def read_rows(part: int, first_row: int, last_row: int) -> NGrams:
        rows = map_shard(plan.scratch, Shard.model_validate(receipts[part]["rows"]))
        return ngrams_of(rows.slice(first_row, last_row - first_row))

    fgrams = gather_ids(runs, read_rows, max_n=plan.max_n, first_id=first_id, last_id=last_id)
    return write_fgrams(out, f"fgrams-{number:05d}.parquet", fgrams, first_id=first_id)


def _map_bytes(manifest: TokensManifest) -> int:
    """Bytes that all chunks together need: a record and the token itself per position."""
    return manifest.num_tokens * (RECORD_BYTES + 4)


def _reduce_bytes(manifest: TokensManifest, max_n: int, min_count: int) -> int:
    """Bytes that all ranges together need at most: two copies of the records while one chunk is
    read, and as many n-grams as can reach `min_count`.
    """
    return manifest.num_tokens * (2 * RECORD_BYTES + ROW_BYTES * (max_n - 1) // min_count)


def _pieces(plan: CountPlan, chunk: int) -> Iterator[Piece]:
    """The chunk's part of every shard. Chunks cut the bytes of all shards evenly, so no shard has
    to be opened to plan. The chunk that holds the begin of a shard verifies it.
    """
    total = sum(shard.num_bytes for shard in plan.manifest.shards)
    begin, end = (total * i // plan.num_chunks for i in (chunk, chunk + 1))
    start = 0
    for shard in plan.manifest.shards:
        low, high = max(begin - start, 0), min(end - start, shard.num_bytes)
        if low < high:
            if low == 0:
                verify_shards(plan.tokens, [shard])
            tokens_L, offsets_D1 = map_documents(plan.tokens, plan.manifest, shard)
            _check_offsets(f"{plan.tokens}/{shard.name}", tokens_L, offsets_D1)
            first, last = (len(tokens_L) * byte // shard.num_bytes for byte in (low, high))
            yield Piece(tokens_L, offsets_D1, first, last)
        start += shard.num_bytes


def _check_offsets(path: str, tokens_L: np.ndarray, offsets_D1: np.ndarray) -> None:
    inside = offsets_D1[0] == 0 and offsets_D1[-1] == len(tokens_L)
    if not inside or (offsets_D1[1:] < offsets_D1[:-1]).any():
        raise ArtifactError(f"{path}: damaged document boundaries; restore it or tokenize again")
