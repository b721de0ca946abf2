"""Laws of the units of counting: run in any order, cut in any way, they give the same rows."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scone_core.artifacts.manifests import ArtifactError, TokensManifest
from scone_core.counting import apriori
from scone_core.counting.plan import (
    WORKER_BYTES,
    CountPlan,
    Estimate,
    estimate_ngrams,
    plan_count,
    sample_cuts,
)
from scone_core.counting.units import (
    Ranking,
    Receipt,
    assemble_fgrams,
    map_chunk,
    plan_ranges,
    rank_ranges,
    reduce_range,
    remove_chunks,
)
from scone_core.fgrams.fgram_shards import iter_rows
from scone_core.fgrams.ngrams import NGrams, ngrams_of
from tests.builders.corpora import brute_force, rank, write_tokens, zipf_documents

VOCAB_SIZE = 12


def one_scan(plan: CountPlan) -> list[Receipt]:
    """All units one after another, the last first: no unit needs its predecessor."""
    receipts = []
    for number in range(plan.num_rounds):
        for chunk in reversed(range(plan.num_chunks)):
            map_chunk(plan, number, chunk)
        cuts = plan_ranges(plan, number)
        names = plan.range_names(number, len(cuts) - 1)
        ranges = [
            reduce_range(plan, number, cuts[i], cuts[i + 1], names[i])
            for i in reversed(range(len(names)))
        ]
        receipts += ranges[::-1]
        remove_chunks(plan, number)
    return receipts


def a_priori(plan: CountPlan) -> list[Receipt]:
    cuts = apriori.plan_tokens(plan)
    scans: list[list[Receipt]] = []
    merged: list[list[Receipt]] = []
    for n in range(2, plan.max_n + 1):
        scans.append(
            [apriori.scan_chunk(plan, n, scans, merged, c) for c in range(plan.num_chunks)]
        )
        merged.append(
            [apriori.merge_range(plan, n, cuts, scans, merged, r) for r in range(len(cuts) - 1)]
        )
    names = plan.range_names(0, len(cuts) - 1)
    return [apriori.rank_merged(plan, merged, names, r) for r in range(len(names))]


ENGINES = {"one_scan": one_scan, "a_priori": a_priori}


def read(plan: CountPlan, receipts: list[Receipt], ranking: Ranking, out: str, rows: int) -> NGrams:
    shards = [
        assemble_fgrams(plan, receipts, ranking, out=out, rows_per_shard=rows, number=number)
        for number in range(-(-ranking.num_fgrams // rows))
    ]
    blocks = [ngrams_of(block) for block in iter_rows(out, shards)]
    return NGrams(*map(np.concatenate, zip(*blocks, strict=True)))


def to_ngrams(found: NGrams) -> list[tuple[int, ...]]:
    rows = zip(found.tokens_MK.tolist(), found.n_M.tolist(), strict=True)
    return [tuple(tokens[:n]) for tokens, n in rows]


@pytest.mark.parametrize("engine", ENGINES)
@given(
    documents=st.lists(
        st.lists(st.integers(1, VOCAB_SIZE - 1), max_size=30), min_size=1, max_size=8
    ),
    num_shards=st.integers(1, 4),
    num_chunks=st.integers(1, 9),
    range_records=st.integers(3, 100),
    num_rounds=st.integers(1, 3),
    scratch_form=st.sampled_from(["raw", "compressed"]),
    num_fgrams=st.integers(1, 200),
    min_count=st.integers(1, 3),
    rows_per_shard=st.integers(20, 100),
)
@settings(max_examples=25)
def test_rows_do_not_depend_on_how_the_work_is_cut(
    tmp_path_factory: pytest.TempPathFactory,
    engine: str,
    documents: list[list[int]],
    num_shards: int,
    num_chunks: int,
    range_records: int,
    num_rounds: int,
    scratch_form: str,
    num_fgrams: int,
    min_count: int,
    rows_per_shard: int,
) -> None:
    folder = tmp_path_factory.mktemp("count")
    documents = [*documents, [1, 2], [1, 2], [1, 2]]
    manifest = write_tokens(
        str(folder / "tokens"), documents, vocab_size=VOCAB_SIZE, num_shards=num_shards
    )
    plan = CountPlan(
        tokens=str(folder / "tokens"),
        manifest=manifest,
        scratch=str(folder / "scratch"),
        chunk_folder=str(folder / "scratch"),
        max_n=4,
        min_count=min_count,
        num_chunks=num_chunks,
        range_records=range_records,
        round_tokens=(0, VOCAB_SIZE),
        scratch_form=scratch_form,
    )
    if engine == "one_scan":
        plan = plan.with_rounds(sample_cuts(plan, num_rounds))
    receipts = ENGINES[engine](plan)
    ranking = rank_ranges(plan, receipts, num_fgrams=num_fgrams)
    found = read(plan, receipts, ranking, str(folder / "out"), rows_per_shard)
    counts = brute_force(documents, max_n=4, min_count=min_count)
    assert to_ngrams(found) == rank(counts)[:num_fgrams]
    assert found.counts_M.tolist() == [counts[ngram] for ngram in rank(counts)[:num_fgrams]]


@pytest.mark.parametrize("damage", ["footer", "token"])
def test_every_chunk_that_meets_a_damaged_shard_says_so(tmp_path: Path, damage: str) -> None:
    """Chunks share shards, and one of them verifies: the others may come first."""
    documents = zipf_documents(num_documents=8, mean_length=50, vocab_size=VOCAB_SIZE, seed=1)
    manifest = write_tokens(str(tmp_path), documents)
    plan = plan_count(
        str(tmp_path), manifest, scratch=str(tmp_path / "scratch"), max_n=3, min_count=1,
        memory_bytes=1 << 30, num_chunks=4,
    )  # fmt: skip
    shard = tmp_path / manifest.shards[0].name
    content = bytearray(shard.read_bytes())
    last_document = np.array(documents[-1], np.uint16).tobytes()
    content[-100 if damage == "footer" else content.index(last_document) + 1] ^= 0x80
    shard.write_bytes(content)
    last_chunk = plan.num_chunks - 1
    for unit in (partial(map_chunk, plan, 0), partial(apriori.scan_chunk, plan, 2, [], [])):
        for chunk in (0, last_chunk):
            with pytest.raises(ArtifactError, match="sha256 differs"):
                unit(chunk)


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
    assert num_tokens // plan.range_records >= 4
    assert plan.record_bytes >= 8 * num_tokens


def test_the_memory_of_a_unit_does_not_grow_with_the_corpus() -> None:
    plans = [plan_for(num_tokens, 1 << 30) for num_tokens in (5 * 10**7, 2 * 10**8, 10**9)]
    assert max(plan.peak_bytes for plan in plans) <= 1.15 * min(plan.peak_bytes for plan in plans)


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_mb=300: at least 414 are needed"):
        plan_for(1000, 300 << 20)


def test_an_estimate_from_a_sample_is_near_what_is_found(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    documents = zipf_documents(num_documents=40, mean_length=500, vocab_size=VOCAB_SIZE, seed=1)
    folder = str(tmp_path_factory.mktemp("tokens"))
    manifest = write_tokens(folder, documents, vocab_size=VOCAB_SIZE)
    plan = plan_count(
        folder, manifest, scratch="scratch", max_n=5, min_count=2, memory_bytes=1 << 30
    )
    expected = Estimate(
        num_distinct=len(brute_force(documents, max_n=5)),
        num_frequent=len(brute_force(documents, max_n=5, min_count=2)),
    )
    assert estimate_ngrams(plan) == expected
