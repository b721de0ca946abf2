"""tokens/v1 -> fgrams/v1, cut into units of work that run anywhere and in any order.

map_chunk:      a part of the token shards -> a chunk file of grouped suffix records
plan_ranges:    chunk files -> cuts: where ranges begin and end
reduce_range:   what lies between two cuts -> its frequent n-grams in rank order, class sizes
rank_ranges:    class sizes of all ranges -> runs: where each f-gram id is found
assemble_fgrams: runs -> one Parquet shard of f-grams

What is published does not depend on chunks, ranges and rounds. A finished unit is known by the
receipt that the caller writes. Chunk and range files lie in a scratch folder that all workers see.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from scone_core.artifacts import storage
from scone_core.artifacts.manifests import ArtifactError, Shard
from scone_core.artifacts.shards import map_shard, write_shard
from scone_core.counting.chunks import BLOCK, Chunk, write_chunk
from scone_core.counting.one_scan import count_groups, group_records, sort_groups
from scone_core.counting.plan import CountPlan, chunk_pieces, damage_named
from scone_core.counting.ranges import Cut, count_exactly, gather_range, plan_cuts
from scone_core.counting.ranking import class_sizes, gather_ids, rank_range, rank_runs
from scone_core.fgrams.fgram_shards import write_fgrams
from scone_core.fgrams.ngrams import (
    NGram,
    NGrams,
    exclude,
    ngram_batch,
    ngrams_from,
    ngrams_of,
    without,
)

Receipt = dict[str, Any]


def map_chunk(plan: CountPlan, number: int, chunk: int) -> Receipt:
    """Write the grouped suffix records of one chunk that belong to round `number` to scratch.

    Raises:
        ArtifactError: a token shard is missing or damaged.
        ValueError: a token outside the vocabulary.
    """
    first, last = plan.round_tokens[number : number + 2]
    with damage_named(plan, chunk):
        pieces = list(chunk_pieces(plan, chunk))
        groups = group_records(pieces, plan.layout, first_token=first, last_token=last)
    compressed = plan.scratch_form == "compressed"
    num_ranges = max(1, plan.num_tokens // plan.range_records)
    sorted_from = 1 if compressed else max(1, len(groups.records.low_R) // num_ranges)
    groups = sort_groups(groups, plan.layout, min_size=sorted_from)
    path = plan.chunk_paths(number)[chunk]
    block = BLOCK if compressed else 0
    num_bytes = write_chunk(path, groups, sorted_from=max(sorted_from, 2), block=block)
    shard = Shard(
        name=path.rsplit("/", 1)[1],
        num_rows=len(groups.records.low_R),
        num_bytes=num_bytes,
        sha256="" if plan.chunk_folder == plan.scratch else storage.sha256_of(path),
    )
    return {"shard": shard.model_dump()}


def plan_ranges(plan: CountPlan, number: int) -> list[Cut]:
    """Where the ranges of round `number` begin, and the end of the last.

    Raises:
        ArtifactError: the corpus holds the separator.
    """
    first, last = plan.round_tokens[number : number + 2]
    chunks = [Chunk(path) for path in plan.chunk_paths(number)]
    sizes_G = np.zeros(last - first, np.int64)
    for chunk in chunks:
        sizes_G += np.diff(chunk.starts(first, last))
    separator = plan.manifest.separator_id
    if first <= separator < last and sizes_G[separator - first]:
        raise ArtifactError(f"{plan.tokens}: {separator=} inside a document; tokenize again")
    return plan_cuts(chunks, plan.layout, sizes_G, first_token=first, budget=plan.range_records)


def reduce_range(plan: CountPlan, number: int, lower: Cut, upper: Cut, name: str) -> Receipt:
    """Count the n-grams between two cuts and write those at `min_count` or above to scratch as
    `name`, with the sizes of their classes. To the receipt go the counts of n-grams that lie across
    a cut and of those to include.
    """
    layout, chunks = plan.layout, [Chunk(path) for path in plan.chunk_paths(number)]
    groups, num_equal = gather_range(chunks, layout, lower, upper)
    groups = sort_groups(groups, layout, min_size=plan.min_count)
    found = count_groups(groups, layout, min_count=plan.min_count)
    across = lower.open_ngrams(layout) | upper.open_ngrams(layout)
    counts = count_exactly(groups, layout, across | set(plan.include), lower, num_equal)
    return {
        **write_range(plan, name, without(found, across)),
        "across": [[ngram, counts[ngram]] for ngram in sorted(across)],
        "included": [[ngram, counts[ngram]] for ngram in plan.include if ngram in counts],
    }


def write_range(plan: CountPlan, name: str, found: NGrams) -> Receipt:
    """Write the n-grams of one range in rank order, and the sizes of their classes."""
    ranked = rank_range(exclude(found, plan.exclude_tokens))
    sizes = class_sizes(ranked)
    classes = pa.RecordBatch.from_arrays([c.to_arrow() for c in sizes], sizes.columns)
    return {
        "rows": write_shard(plan.scratch, f"{name}.arrow", ngram_batch(ranked)).model_dump(),
        "classes": write_shard(plan.scratch, f"{name}.classes.arrow", classes).model_dump(),
    }


class Ranking(NamedTuple):
    """Where each f-gram id is found."""

    runs: pl.DataFrame
    """As from `ranking.rank_runs`: range 2 r is that of receipt r, all others are in `apart`."""
    apart: dict[int, NGrams]
    """Range 2 r + 1: the n-grams across the cut behind range r; the last range: those included on
    top."""

    @property
    def num_fgrams(self) -> int:
        return int(self.runs["num"].sum())

    @property
    def num_included(self) -> int:
        return len(self.apart[max(self.apart)].n_M)


def rank_ranges(plan: CountPlan, receipts: Sequence[Receipt], *, num_fgrams: int) -> Ranking:
    """Rank the `num_fgrams` most frequent n-grams, and those to include behind them.

    Raises:
        ValueError: no n-gram reaches `min_count`.
    """
    apart = {2 * r + 1: rows for r, rows in enumerate(_across(plan, receipts))}
    classes = []
    for r, receipt in enumerate(receipts):
        shard = Shard.model_validate(receipt["classes"])
        table = pa.Table.from_batches([map_shard(plan.scratch, shard)])
        classes += [pl.DataFrame(table), class_sizes(apart[2 * r + 1])]
    runs = rank_runs(classes, num_fgrams=num_fgrams)
    if runs.is_empty():
        raise ValueError(
            f"min_count={plan.min_count}: no n-gram occurs that often in "
            f"{plan.num_tokens} tokens; lower it or count more text"
        )
    ranking = Ranking(runs, {**apart, 2 * len(receipts): ngrams_from({}, plan.max_n)})
    return _include(plan, receipts, ranking)


def _include(plan: CountPlan, receipts: Sequence[Receipt], ranking: Ranking) -> Ranking:
    """Append the n-grams to include that rank behind the last one. Their prefixes and suffixes are
    among them or before it, so the set stays closed and in order.
    """
    if not plan.include:
        return ranking
    counts = dict.fromkeys(plan.include, 0)
    for receipt in receipts:
        for tokens, count in receipt["included"]:
            counts[tuple(tokens)] += count
    num = ranking.num_fgrams
    ((last_tokens, last_n, last_count),) = zip(
        *_read_ids(plan, receipts, ranking, num - 1, num), strict=True
    )
    last = (-int(last_count), int(last_n), tuple(last_tokens[:last_n].tolist()))
    keys = sorted((-counts[ngram], len(ngram), ngram) for ngram in plan.include)
    rows = ngrams_from({ngram: -c for c, n, ngram in keys if (c, n, ngram) > last}, plan.max_n)
    num_rows = len(rows.n_M)
    columns = {
        "range": np.full(num_rows, max(ranking.apart)),
        "count": rows.counts_M,
        "n": rows.n_M,
        "num": np.ones(num_rows, np.int64),
        "first_row": np.arange(num_rows),
        "first_id": np.arange(num, num + num_rows),
    }
    added = pl.DataFrame(columns).cast(ranking.runs.schema)
    runs = pl.concat([ranking.runs, added.select(ranking.runs.columns)])
    return Ranking(runs, {**ranking.apart, max(ranking.apart): rows})


def assemble_fgrams(
    plan: CountPlan,
    receipts: Sequence[Receipt],
    ranking: Ranking,
    *,
    out: str,
    rows_per_shard: int,
    number: int,
) -> Shard:
    """Publish the f-grams `number * rows_per_shard` and following as a Parquet shard."""
    first_id = number * rows_per_shard
    last_id = min(first_id + rows_per_shard, ranking.num_fgrams)
    fgrams = _read_ids(plan, receipts, ranking, first_id, last_id)
    return write_fgrams(out, f"fgrams-{number:05d}.parquet", fgrams, first_id=first_id)


def remove_chunks(plan: CountPlan, number: int) -> None:
    """Free the scratch space of a round that is reduced; chunks of earlier counts stay."""
    for path in plan.chunk_paths(number)[: plan.num_chunks]:
        storage.remove(path)


def _read_ids(
    plan: CountPlan, receipts: Sequence[Receipt], ranking: Ranking, first_id: int, last_id: int
) -> NGrams:
    """The f-grams with the ids from `first_id` to `last_id`."""

    def read_rows(part: int, first_row: int, last_row: int) -> NGrams:
        if part in ranking.apart:
            return NGrams(*(column[first_row:last_row] for column in ranking.apart[part]))
        rows = map_shard(plan.scratch, Shard.model_validate(receipts[part // 2]["rows"]))
        return ngrams_of(rows.slice(first_row, last_row - first_row))

    return gather_ids(ranking.runs, read_rows, max_n=plan.max_n, first_id=first_id, last_id=last_id)


def _across(plan: CountPlan, receipts: Sequence[Receipt]) -> list[NGrams]:
    """For every range the frequent n-grams that lie across the cut behind it. They rank behind its
    own of equal count and length, and before those of the next.
    """
    counts: dict[NGram, int] = {}
    place: dict[NGram, int] = {}
    for number, receipt in enumerate(receipts):
        for tokens, count in receipt["across"]:
            ngram = tuple(tokens)
            counts[ngram] = counts.get(ngram, 0) + count
            place.setdefault(ngram, number)
    found: list[dict[NGram, int]] = [{} for _ in receipts]
    for ngram in sorted(counts, key=lambda ngram: (-counts[ngram], len(ngram))):
        if counts[ngram] >= plan.min_count:
            found[place[ngram]][ngram] = counts[ngram]
    return [exclude(ngrams_from(part, plan.max_n), plan.exclude_tokens) for part in found]
