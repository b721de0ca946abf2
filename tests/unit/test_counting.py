"""Laws of the units of counting: run in any order, cut in any way, they give the same rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scone_core.artifacts import TokensManifest
from scone_core.counting import (
    WORKER_BYTES,
    CountPlan,
    assemble_shard,
    map_chunk,
    plan_count,
    plan_cuts,
    rank_ranges,
    reduce_range,
)
from scone_core.fgrams import NGrams, iter_rows, ngrams_of
from tests.corpora import brute_force, rank, write_tokens

VOCAB_SIZE = 12


def count(plan: CountPlan, out: str, *, num_fgrams: int, rows_per_shard: int) -> NGrams:
    """All units one after another, the last first: no unit needs its predecessor."""
    for chunk in reversed(range(plan.num_chunks)):
        map_chunk(plan, chunk)
    cuts = plan_cuts(plan)
    numbers = reversed(range(plan.num_ranges))
    receipts = [reduce_range(plan, cuts, number) for number in numbers][::-1]
    runs = rank_ranges(plan, receipts, num_fgrams=num_fgrams)
    num_shards = -(-int(runs["num"].sum()) // rows_per_shard)
    shards = [
        assemble_shard(plan, receipts, runs, out=out, rows_per_shard=rows_per_shard, number=number)
        for number in range(num_shards)
    ]
    blocks = [ngrams_of(rows) for rows in iter_rows(out, shards)]
    return NGrams(*map(np.concatenate, zip(*blocks, strict=True)))


@given(
    documents=st.lists(
        st.lists(st.integers(1, VOCAB_SIZE - 1), max_size=30), min_size=1, max_size=8
    ),
    num_shards=st.integers(1, 4),
    num_chunks=st.integers(1, 9),
    num_ranges=st.integers(1, 20),
    num_fgrams=st.integers(1, 200),
    rows_per_shard=st.integers(20, 100),
)
@settings(max_examples=20)
def test_rows_do_not_depend_on_how_the_work_is_cut(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    num_shards: int,
    num_chunks: int,
    num_ranges: int,
    num_fgrams: int,
    rows_per_shard: int,
) -> None:
    folder = tmp_path_factory.mktemp("count")
    documents = [*documents, [1, 2]]
    manifest = write_tokens(
        str(folder / "tokens"), documents, vocab_size=VOCAB_SIZE, num_shards=num_shards
    )
    plan = CountPlan(
        tokens=str(folder / "tokens"),
        manifest=manifest,
        scratch=str(folder / "scratch"),
        max_n=4,
        min_count=1,
        num_chunks=num_chunks,
        num_ranges=num_ranges,
    )
    found = count(plan, str(folder / "out"), num_fgrams=num_fgrams, rows_per_shard=rows_per_shard)
    rows = zip(found.tokens_MK.tolist(), found.n_M.tolist(), strict=True)
    expected = rank(brute_force(documents, max_n=4))[:num_fgrams]
    assert [tuple(tokens[:n]) for tokens, n in rows] == expected


def plan_for(num_tokens: int, memory_bytes: int) -> CountPlan:
    manifest = TokensManifest.model_construct(num_tokens=num_tokens, vocab_size=50_257, shards=())
    return plan_count(
        "tokens", manifest, scratch="scratch", max_n=5, min_count=5, memory_bytes=memory_bytes
    )


@pytest.mark.parametrize("num_tokens", [10**3, 10**8, 10**12])
@pytest.mark.parametrize("memory_mb", [512, 1024, 16_384])
def test_plans_stay_within_memory_and_take_the_real_path(num_tokens: int, memory_mb: int) -> None:
    plan = plan_for(num_tokens, memory_mb << 20)
    assert WORKER_BYTES < plan.peak_bytes <= memory_mb << 20
    assert plan.num_chunks >= 8
    assert plan.num_ranges >= 4
    assert plan.scratch_bytes >= 8 * num_tokens


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_mb=300: at least 414 are needed"):
        plan_for(1000, 300 << 20)
