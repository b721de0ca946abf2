"""Laws of the ranks: a total order that no cut into ranges or shards changes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scone_core.counting.one_scan import count_ngrams
from scone_core.counting.ranking import class_sizes, gather_ids, rank_range, rank_runs
from scone_core.counting.records import Layout
from scone_core.fgrams.ngrams import NGrams
from tests.builders.corpora import Documents, brute_force, rank, whole

VOCAB_SIZE = 6
documents_of_few_ids = st.lists(
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20), min_size=1, max_size=6
)


def rank_all(documents: Documents, max_n: int, min_count: int) -> NGrams:
    piece = whole(documents)
    return rank_range(count_ngrams([piece], Layout(max_n, VOCAB_SIZE), min_count=min_count))


@given(documents=documents_of_few_ids, max_n=st.integers(2, 5), min_count=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_rank_order_is_count_then_n_then_tokens(
    documents: Documents, max_n: int, min_count: int
) -> None:
    ranked = rank_all(documents, max_n, min_count)
    assert ranked.tuples() == rank(brute_force(documents, max_n=max_n, min_count=min_count))


@given(
    documents=documents_of_few_ids,
    cuts=st.lists(st.integers(0, VOCAB_SIZE), max_size=4),
    num_fgrams=st.integers(1, 60),
    rows_per_shard=st.integers(1, 30),
)
@settings(max_examples=60, deadline=None)
def test_ranks_do_not_depend_on_ranges_and_shards(
    documents: Documents, cuts: list[int], num_fgrams: int, rows_per_shard: int
) -> None:
    whole_rank = rank_all(documents, 4, 1)
    edges = [0, *sorted(cuts), VOCAB_SIZE]
    ranges = []
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        inside = (first <= whole_rank.tokens_MK[:, 0]) & (whole_rank.tokens_MK[:, 0] < last)
        ranges.append(whole_rank.where(inside))
    runs = rank_runs([class_sizes(part) for part in ranges], num_fgrams=num_fgrams)
    num_kept = int(runs["num"].sum())
    assert num_kept == min(num_fgrams, whole_rank.num)
    for first_id in range(0, num_kept, rows_per_shard):
        last_id = min(first_id + rows_per_shard, num_kept)
        shard = gather_ids(
            runs,
            lambda part, first, last: ranges[part].part(first, last),
            max_n=4,
            first_id=first_id,
            last_id=last_id,
        )
        for column, expected in zip(shard, whole_rank, strict=True):
            np.testing.assert_array_equal(column, expected[first_id:last_id])
