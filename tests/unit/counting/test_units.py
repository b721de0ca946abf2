"""Laws of the units of counting: run in any order, cut in any way, they give the same rows."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peers import apriori
from scone_core.artifacts.manifests import ArtifactError, Shard, TokensManifest
from scone_core.artifacts.units import R, do_here, read_receipt
from scone_core.counting.count import count_fgrams
from scone_core.counting.options import CountOptions
from scone_core.counting.plan import WORKER_BYTES, CountPlan, plan_count
from scone_core.counting.ranking import rank_range
from scone_core.counting.receipts import CutsReceipt
from scone_core.counting.rounds import Estimate, estimate_ngrams, sample_cuts
from scone_core.counting.units import map_chunk
from scone_core.fgrams.fgram_shards import iter_rows
from scone_core.fgrams.ngrams import NGrams
from tests.builders.corpora import (
    Documents,
    brute_force,
    rank,
    whole,
    write_tokens,
    zipf_documents,
)

VOCAB_SIZE = 12


def do_last_first(
    title: str,
    names: Sequence[str],
    unit: Callable[[int], R],
    *,
    kind: type[R],
    folder: str,
    memory_bytes: int = 0,
) -> list[R]:
    """A `DoUnits` that runs the last unit first: no unit needs its predecessor."""
    return [unit(number) for number in reversed(range(len(names)))][::-1]


def read(out: str, shards: list[Shard]) -> NGrams:
    return NGrams.concat(map(NGrams.from_batch, iter_rows(out, shards)))


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
        options=CountOptions(max_n=4, min_count=min_count, scratch_form=scratch_form),
        scratch=str(folder / "scratch"),
        chunk_folder=str(folder / "scratch"),
        num_chunks=num_chunks,
        range_records=range_records,
        round_tokens=(0, VOCAB_SIZE),
    )
    plan = plan.with_rounds(sample_cuts(plan, num_rounds))
    ranking, shards = count_fgrams(
        plan,
        do_last_first,
        num_fgrams=num_fgrams,
        out=str(folder / "out"),
        rows_per_shard=rows_per_shard,
    )
    found = read(str(folder / "out"), shards)
    counts = brute_force(documents, max_n=4, min_count=min_count)
    assert found.tuples() == rank(counts)[:num_fgrams]
    assert found.counts_M.tolist() == [counts[ngram] for ngram in rank(counts)[:num_fgrams]]
    assert ranking.num_fgrams == found.num


def plan_small(
    folder: Path, documents: Documents, *, vocab_size: int, range_records: int
) -> CountPlan:
    manifest = write_tokens(str(folder / "tokens"), documents, vocab_size=vocab_size, num_shards=3)
    return CountPlan(
        tokens=str(folder / "tokens"),
        manifest=manifest,
        options=CountOptions(max_n=5, min_count=2),
        scratch=str(folder / "scratch"),
        chunk_folder=str(folder / "scratch"),
        num_chunks=4,
        range_records=range_records,
        round_tokens=(0, vocab_size),
    )


@pytest.mark.parametrize("vocab_size", [60, 131_073])
def test_a_count_gives_the_rows_of_the_a_priori_method(tmp_path: Path, vocab_size: int) -> None:
    """The paper's method, which prunes, and the count, which does not, with the same order."""
    documents = zipf_documents(num_documents=20, mean_length=200, vocab_size=60, seed=2)
    plan = plan_small(tmp_path, documents, vocab_size=vocab_size, range_records=500)
    _, shards = count_fgrams(
        plan, do_here, num_fgrams=1000, out=str(tmp_path / "out"), rows_per_shard=300
    )
    found = read(str(tmp_path / "out"), shards)
    expected = rank_range(apriori.count_ngrams([whole(documents)], plan.layout, min_count=2))
    for column, expected_column in zip(found, expected.part(0, 1000), strict=True):
        np.testing.assert_array_equal(column, expected_column)


def test_receipts_keep_cuts_inside_records_of_two_words(tmp_path: Path) -> None:
    """Cuts hold records of up to 128 bits; a resumed count reads them from JSON."""
    documents = [[131_072] * 400, *([[131_072, 5, 131_071, 7, 9]] * 200)]
    plan = plan_small(tmp_path, documents, vocab_size=131_073, range_records=50)
    out = str(tmp_path / "out")
    _, shards = count_fgrams(plan, do_here, num_fgrams=30, out=out, rows_per_shard=10)
    planned = read_receipt(plan.scratch, plan.cuts_name(0), CutsReceipt)
    assert planned is not None
    assert max(cut.value for cut in planned.cuts) >= 1 << 64
    counts = brute_force(documents, max_n=5, min_count=2)
    found = read(out, shards)
    assert found.tuples() == rank(counts)[:30]
    assert found.counts_M.tolist() == [counts[ngram] for ngram in rank(counts)[:30]]


def test_a_finished_unit_is_not_done_again(tmp_path: Path) -> None:
    """Once all ranges have receipts, no chunk and no token shard is opened."""
    documents = zipf_documents(num_documents=20, mean_length=200, vocab_size=60, seed=2)
    plan = plan_small(tmp_path, documents, vocab_size=60, range_records=500)
    first, _ = count_fgrams(
        plan, do_here, num_fgrams=1000, out=str(tmp_path / "first"), rows_per_shard=300
    )
    for path in [*tmp_path.glob("scratch/*.records"), *tmp_path.glob("tokens/*.arrow")]:
        path.unlink()
    again, _ = count_fgrams(
        plan, do_here, num_fgrams=1000, out=str(tmp_path / "again"), rows_per_shard=300
    )
    assert again.receipts == first.receipts
    for shard in (tmp_path / "first").glob("*.parquet"):
        assert (tmp_path / "again" / shard.name).read_bytes() == shard.read_bytes()


@pytest.mark.parametrize("damage", ["footer", "token"])
def test_every_chunk_that_meets_a_damaged_shard_says_so(tmp_path: Path, damage: str) -> None:
    """Chunks share shards, and one of them verifies: the others may come first."""
    documents = zipf_documents(num_documents=8, mean_length=50, vocab_size=VOCAB_SIZE, seed=1)
    manifest = write_tokens(str(tmp_path), documents)
    plan = plan_count(
        str(tmp_path), manifest, CountOptions(max_n=3, min_count=1),
        scratch=str(tmp_path / "scratch"), memory_bytes=1 << 30, num_chunks=4,
    )  # fmt: skip
    shard = tmp_path / manifest.shards[0].name
    content = bytearray(shard.read_bytes())
    last_document = np.array(documents[-1], np.uint16).tobytes()
    content[-100 if damage == "footer" else content.index(last_document) + 1] ^= 0x80
    shard.write_bytes(content)
    for chunk_index in (0, plan.num_chunks - 1):
        with pytest.raises(ArtifactError, match="sha256 differs"):
            map_chunk(plan, 0, chunk_index)


def plan_for(num_tokens: int, memory_bytes: int) -> CountPlan:
    manifest = TokensManifest.model_construct(num_tokens=num_tokens, vocab_size=50_257, shards=())
    options = CountOptions(max_n=5, min_count=5)
    return plan_count("tokens", manifest, options, scratch="scratch", memory_bytes=memory_bytes)


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
    options = CountOptions(max_n=5, min_count=2)
    plan = plan_count(folder, manifest, options, scratch="scratch", memory_bytes=1 << 30)
    expected = Estimate(
        num_distinct=len(brute_force(documents, max_n=5)),
        num_frequent=len(brute_force(documents, max_n=5, min_count=2)),
    )
    assert estimate_ngrams(plan) == expected
