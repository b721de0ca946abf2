"""counted ranges -> ranks: a total order without a global sort.

The order is (count descending, n ascending, tokens ascending). Ranges hold ascending first tokens,
so inside a class of equal (count, n) the n-grams of one range
all rank before those of the next, and the sizes of all classes of all ranges give every id. A run
is the part of a class that lies in one range: consecutive rows there, consecutive ids here. Memory
is bounded by one range, or one shard of ids, and the table of runs.

Shapes: M n-grams, S f-grams of a shard, K max_n.
"""

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl

from scone_core.fgrams.ngrams import NGrams


def rank_range(found: NGrams) -> NGrams:
    """The n-grams of one range in rank order; `found` has tokens ascending among those of equal n,
    as `ngrams.count_groups` gives them.
    """
    order_M = _rank_order(found.counts_M, found.n_M)
    return NGrams(*(np.take(column, order_M, axis=0) for column in found))


def _rank_order(counts_M: np.ndarray, n_M: np.ndarray) -> np.ndarray:
    """Rows by (count descending, n, row): one sort of packed keys where 64 bits hold all three."""
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
        classes: `class_sizes` of every range, ranges ascending by first token.

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
    """The f-grams with the ids from `first_id` to `last_id`, from their places in the ranges.

    Args:
        read_rows: (range, first row, last row) -> those rows of the range in rank order.
    """
    num = last_id - first_id
    fgrams = NGrams(
        np.empty((num, max_n), np.uint32), np.empty(num, np.uint8), np.empty(num, np.uint64)
    )
    for number, part in _cut_runs(runs, first_id, last_id).group_by("range"):
        rows_S = _expand(part["first_row"], part["num"])
        ids_S = _expand(part["first_id"], part["num"])
        rows = read_rows(int(number[0]), int(rows_S[0]), int(rows_S[-1]) + 1)
        for column, values in zip(fgrams, rows, strict=True):
            column[ids_S - first_id] = values
    return fgrams


def _cut_runs(runs: pl.DataFrame, first_id: int, last_id: int) -> pl.DataFrame:
    """The parts of runs whose ids lie between `first_id` and `last_id`."""
    begin = pl.max_horizontal("first_id", pl.lit(first_id))
    end = pl.min_horizontal(pl.col("first_id") + pl.col("num"), pl.lit(last_id))
    cut = runs.filter(
        (pl.col("first_id") < last_id) & (pl.col("first_id") + pl.col("num") > first_id)
    )
    return cut.with_columns(
        first_id=begin, first_row=pl.col("first_row") + begin - pl.col("first_id"), num=end - begin
    )


def _expand(firsts: pl.Series, nums: pl.Series) -> np.ndarray:
    """first, first + 1, ... of every run, one run after another, int64."""
    num_R = nums.to_numpy()
    starts_R = np.cumsum(num_R) - num_R
    return np.repeat(firsts.to_numpy() - starts_R, num_R) + np.arange(num_R.sum())
