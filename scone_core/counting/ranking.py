"""counted ranges -> ranks: a total order without a global sort.

The order is (count descending, n ascending, tokens ascending). Ranges hold ascending n-grams, so
inside a class of equal (count, n) the n-grams of one range all rank before those of the next, and
the sizes of all classes of all ranges give every id. A run is the part of a class that one range
holds: consecutive rows there, consecutive ids here. Memory is bounded by one range, or one shard of
ids, and the table of runs.

Shapes: M n-grams, S f-grams of a shard, R runs, K max_n.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import pyarrow as pa

from scone_core.artifacts.shards import map_shard
from scone_core.counting.plan import CountPlan
from scone_core.counting.receipts import RangeReceipt
from scone_core.fgrams.ngrams import NGram, NGrams


def rank_range(found: NGrams) -> NGrams:
    """The n-grams of one range in rank order; `found` has tokens ascending among those of equal n,
    as `one_scan.count_groups` gives them.
    """
    return found.take(_rank_order(found.counts_M, found.n_M))


def _rank_order(counts_M: np.ndarray, n_M: np.ndarray) -> np.ndarray:
    """The order of rows by (count descending, n, row), int64 [M]: one sort of packed keys where 64
    bits hold all three.
    """
    num_rows, most = len(n_M), int(counts_M.max(initial=0))
    row_bits, n_bits = np.uint64(num_rows.bit_length()), np.uint64(4)
    if most.bit_length() + int(row_bits + n_bits) > 64:
        return np.lexsort([n_M, np.invert(counts_M)])
    keys_M = (np.uint64(most) - counts_M) << n_bits | n_M
    keys_M = keys_M << row_bits | np.arange(num_rows, dtype=np.uint64)
    keys_M.sort()
    return (keys_M & ((np.uint64(1) << row_bits) - np.uint64(1))).astype(np.int64)


def class_sizes(ranked: NGrams) -> pl.DataFrame:
    """How many n-grams each class of equal `count` and `n` has (`num`), in rank order."""
    columns = pl.DataFrame({"count": ranked.counts_M, "n": ranked.n_M})
    return columns.group_by("count", "n", maintain_order=True).agg(num=pl.len())


def rank_runs(classes: Sequence[pl.DataFrame], *, num_fgrams: int) -> pl.DataFrame:
    """The runs that make the top `num_fgrams`, in rank order.

    Args:
        classes: `class_sizes` of every range, ranges in the order of n-grams.

    Returns:
        range, count, n, num (n-grams in the run), first_row (in its range) and first_id.
    """
    first_row = (pl.col("num").cum_sum() - pl.col("num")).alias("first_row")
    parts = [
        sizes.with_columns(pl.exclude("n").cast(pl.Int64)).select(
            pl.lit(i).alias("range"), "*", first_row
        )
        for i, sizes in enumerate(classes)
    ]
    runs = pl.concat(parts).sort("count", "n", "range", descending=[True, False, False])
    runs = runs.with_columns(first_id=pl.col("num").cum_sum() - pl.col("num"))
    runs = runs.filter(pl.col("first_id") < num_fgrams)
    return runs.with_columns(num=pl.min_horizontal("num", num_fgrams - pl.col("first_id")))


def gather_ids(
    runs: pl.DataFrame,
    read_rows: Callable[[int, int, int], NGrams],
    *,
    max_n: int,
    first_id: int,
    last_id: int,
) -> NGrams:
    """The f-grams with the ids `first_id` to `last_id - 1`, from their places in the ranges.

    Args:
        read_rows: (range, first row, last row) -> those rows of the range in rank order.
    """
    num = last_id - first_id
    fgrams = NGrams(
        np.empty((num, max_n), np.uint32), np.empty(num, np.uint8), np.empty(num, np.uint64)
    )
    for (range_index,), part in _cut_runs(runs, first_id, last_id).group_by("range"):
        rows_S = _expand(part["first_row"], part["num"])
        ids_S = _expand(part["first_id"], part["num"])
        rows = read_rows(int(range_index), int(rows_S[0]), int(rows_S[-1]) + 1)
        for column, values in zip(fgrams, rows, strict=True):
            column[ids_S - first_id] = values
    return fgrams


def _cut_runs(runs: pl.DataFrame, first_id: int, last_id: int) -> pl.DataFrame:
    """The parts of runs that have ids from `first_id` to `last_id - 1`."""
    begin = pl.max_horizontal("first_id", pl.lit(first_id))
    end = pl.min_horizontal(pl.col("first_id") + pl.col("num"), pl.lit(last_id))
    cut = runs.filter(
        (pl.col("first_id") < last_id) & (pl.col("first_id") + pl.col("num") > first_id)
    )
    return cut.with_columns(
        first_id=begin, first_row=pl.col("first_row") + begin - pl.col("first_id"), num=end - begin
    )


def _expand(firsts: pl.Series, nums: pl.Series) -> np.ndarray:
    """The numbers first, first + 1, ... of every run, one run behind the other, int64."""
    num_R = nums.to_numpy()
    starts_R = np.cumsum(num_R) - num_R
    return np.repeat(firsts.to_numpy() - starts_R, num_R) + np.arange(num_R.sum())


class NothingFrequentError(ValueError):
    """No n-gram of a corpus reaches `min_count`."""


@dataclass(frozen=True)
class Ranking:
    """Where the n-gram of each f-gram id is found."""

    plan: CountPlan
    receipts: Sequence[RangeReceipt]
    runs: pl.DataFrame
    """As from `rank_runs`. Even range 2 r: the rows of receipt r. Odd range 2 r + 1: the n-grams
    that the cut after r divides, kept in `apart`."""
    apart: dict[int, NGrams]
    """The n-grams of every odd range; and, as the last range, those that rank behind all others but
    are included on request."""

    @property
    def num_fgrams(self) -> int:
        return int(self.runs["num"].sum())

    @property
    def num_included(self) -> int:
        return self.apart[max(self.apart)].num

    def fgrams(self, first_id: int, last_id: int) -> NGrams:
        """The f-grams with the ids `first_id` to `last_id - 1`.

        Raises:
            ArtifactError: a file of a range is missing or damaged.
        """
        max_n = self.plan.options.max_n
        return gather_ids(
            self.runs, self._read_rows, max_n=max_n, first_id=first_id, last_id=last_id
        )

    def _read_rows(self, range_index: int, first_row: int, last_row: int) -> NGrams:
        if range_index in self.apart:
            return self.apart[range_index].part(first_row, last_row)
        rows = map_shard(self.plan.scratch, self.receipts[range_index // 2].rows)
        return NGrams.from_batch(rows).part(first_row, last_row)


def rank_ranges(plan: CountPlan, receipts: Sequence[RangeReceipt], *, num_fgrams: int) -> Ranking:
    """Rank the `num_fgrams` most frequent n-grams, and behind them those to include.

    Raises:
        NothingFrequentError: no n-gram reaches `min_count`.
        ArtifactError: a file of a range is missing or damaged.
    """
    apart = {2 * r + 1: rows for r, rows in enumerate(_across(plan, receipts))}
    classes = []
    for r, receipt in enumerate(receipts):
        table = pa.Table.from_batches([map_shard(plan.scratch, receipt.classes)])
        classes += [pl.DataFrame(table), class_sizes(apart[2 * r + 1])]
    runs = rank_runs(classes, num_fgrams=num_fgrams)
    if runs.is_empty():
        raise NothingFrequentError(
            f"min_count={plan.options.min_count}: no n-gram occurs that often in "
            f"{plan.num_tokens} tokens; lower it or count more text"
        )
    apart[2 * len(receipts)] = NGrams.from_counts({}, max_n=plan.options.max_n)
    return _include(Ranking(plan, receipts, runs, apart))


def _include(ranking: Ranking) -> Ranking:
    """Append the n-grams to include that rank behind the last one. Their prefixes and suffixes are
    among them or before them, so the set stays closed and in order.
    """
    options, num = ranking.plan.options, ranking.num_fgrams
    if not options.include:
        return ranking
    counts = dict.fromkeys(options.include, 0)
    for receipt in ranking.receipts:
        for ngram, count in receipt.included:
            counts[ngram] += count
    last = ranking.fgrams(num - 1, num)
    (ngram,), count = last.tuples(), int(last.counts_M[0])
    last_key = (-count, len(ngram), ngram)
    keys = sorted((-counts[ngram], len(ngram), ngram) for ngram in options.include)
    behind = {ngram: -count for count, n, ngram in keys if (count, n, ngram) > last_key}
    rows, place = NGrams.from_counts(behind, max_n=options.max_n), max(ranking.apart)
    columns = {
        "range": np.full(rows.num, place),
        "count": rows.counts_M,
        "n": rows.n_M,
        "num": np.ones(rows.num, np.int64),
        "first_row": np.arange(rows.num),
        "first_id": np.arange(num, num + rows.num),
    }
    added = pl.DataFrame(columns).cast(ranking.runs.schema).select(ranking.runs.columns)
    runs = pl.concat([ranking.runs, added])
    return replace(ranking, runs=runs, apart={**ranking.apart, place: rows})


def _across(plan: CountPlan, receipts: Sequence[RangeReceipt]) -> list[NGrams]:
    """For every range the frequent n-grams that the cut after it divides. They rank behind its own
    of equal count and length, and before those of the next range.
    """
    options = plan.options
    counts: dict[NGram, int] = {}
    place: dict[NGram, int] = {}
    for range_index, receipt in enumerate(receipts):
        for ngram, count in receipt.across:
            counts[ngram] = counts.get(ngram, 0) + count
            place.setdefault(ngram, range_index)
    found: list[dict[NGram, int]] = [{} for _ in receipts]
    for ngram in sorted(counts, key=lambda ngram: (-counts[ngram], len(ngram))):
        if counts[ngram] >= options.min_count:
            found[place[ngram]][ngram] = counts[ngram]
    parts = [NGrams.from_counts(part, max_n=options.max_n) for part in found]
    return [part.without_tokens(options.exclude_tokens) for part in parts]
