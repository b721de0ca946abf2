"""Laws of the tiers: where a row lives is invisible in it."""

import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scone_core.artifacts.manifests import ArtifactError, RowFormat
from scone_core.machine.uring import Ring
from scone_core.table.cold_rows import DirectReader
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.row_formats import STORAGE
from scone_core.table.tiers import MAX_EXTENTS, Tiers, hot_extents
from tests.builders.tables import publish_vectors, random_vectors

NUM_ROWS, WIDTH = 700, 40


def has_io_uring() -> bool:
    try:
        Ring(1)
    except OSError:
        return False
    return True


needs_io_uring = pytest.mark.skipif(not has_io_uring(), reason="io_uring is not allowed here")
IO = ["mmap", pytest.param("direct", marks=needs_io_uring)]


def publish(folder: Path, *, row_format: RowFormat = "bf16", width: int = WIDTH) -> str:
    vectors_SD = random_vectors(NUM_ROWS, width)
    return publish_vectors(folder, vectors_SD, row_format=row_format, rows_per_shard=256)


def tiers(io: str, **changes: int) -> Tiers:
    return Tiers.model_validate({"hot_rows": 100, "cold_from": 300, "io": io, **changes})


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("row_format", STORAGE)
@pytest.mark.parametrize("num_ids", [1, 40, 5000])
def test_rows_are_equal_whatever_their_tier(
    tmp_path: Path, io: str, row_format: RowFormat, num_ids: int
) -> None:
    folder = publish(tmp_path, row_format=row_format)
    ids_M = np.random.default_rng(num_ids).integers(0, NUM_ROWS, num_ids)
    mapped, tiered = EmbeddingTable.open(folder), EmbeddingTable.open(folder, tiers=tiers(io))
    expected_MD = mapped.empty(num_ids)
    mapped.gather(ids_M, expected_MD)
    for _ in range(2):
        out_MD = tiered.empty(num_ids)
        tiered.gather(ids_M, out_MD)
        assert np.array_equal(out_MD, expected_MD)


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("changes", [{"hot_rows": 0, "cold_from": 0}, {"cold_from": 699}])
def test_the_cold_tier_may_be_all_rows_or_one(
    tmp_path: Path, io: str, changes: dict[str, int]
) -> None:
    folder = publish(tmp_path)
    ids_M = np.arange(NUM_ROWS)
    rows = EmbeddingTable.open(folder, tiers=tiers(io, **changes)).vectors(ids_M)
    assert rows.equal(EmbeddingTable.open(folder).vectors(ids_M))


@needs_io_uring
@pytest.mark.parametrize("queue_depth", [1, 3, 64])
@pytest.mark.parametrize("width", [2048, 2050, 5000])
def test_direct_reads_do_not_depend_on_queue_depth_or_page_boundaries(
    tmp_path: Path, queue_depth: int, width: int
) -> None:
    folder = publish(tmp_path, width=width)
    direct = tiers("direct", queue_depth=queue_depth)
    ids_M = np.random.default_rng(0).integers(0, NUM_ROWS, 300)
    rows = EmbeddingTable.open(folder, tiers=direct).vectors(ids_M)
    assert rows.equal(EmbeddingTable.open(folder).vectors(ids_M))


@pytest.mark.parametrize("io", IO)
def test_a_row_that_a_batch_wants_twice_is_read_once(tmp_path: Path, io: str) -> None:
    table = EmbeddingTable.open(publish(tmp_path), tiers=tiers(io))
    table.vectors(np.array([650, 5, 650, 299, 300, 650, 150]))
    report = table.statistics.report()
    assert (report.num_rows, report.num_hot, report.num_cold, report.num_reads) == (7, 1, 4, 2)
    assert report.num_bytes == 7 * WIDTH * 2
    assert sum(report.latency_ns) == report.num_lookups == 1


@pytest.mark.parametrize("io", IO)
def test_threads_share_a_table_with_cold_rows(tmp_path: Path, io: str) -> None:
    folder = publish(tmp_path)
    mapped, tiered = EmbeddingTable.open(folder), EmbeddingTable.open(folder, tiers=tiers(io))
    wrong = []

    def look_up(seed: int) -> None:
        for ids_M in np.random.default_rng(seed).integers(0, NUM_ROWS, (20, 64)):
            if not tiered.vectors(ids_M).equal(mapped.vectors(ids_M)):
                wrong.append(ids_M)

    threads = [threading.Thread(target=look_up, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_io_uring
def test_a_shard_that_shrinks_under_an_open_table_is_an_error_and_not_a_row(tmp_path: Path) -> None:
    table = EmbeddingTable.open(publish(tmp_path), tiers=tiers("direct"))
    before = table.vectors(np.array([400]))
    last = tmp_path / "rows-00512.arrow"
    os.truncate(last, 4096)
    with pytest.raises(ArtifactError, match="rows-00512.arrow.*could not be read"):
        table.vectors(np.array([600]))
    assert table.vectors(np.array([400])).equal(before)


@needs_io_uring
def test_rows_are_right_after_a_batch_that_was_given_up(tmp_path: Path) -> None:
    """As by Ctrl-C: its reads are still on their way when the next batch begins."""
    folder = publish(tmp_path, width=2048)
    table = EmbeddingTable.open(folder, tiers=tiers("direct", queue_depth=64))
    reader = table._reader
    assert isinstance(reader, DirectReader)
    for first in (300, 400):
        reader.fetch(np.arange(first, first + 200))
        ids_M = np.arange(350, 650)
        assert table.vectors(ids_M).equal(EmbeddingTable.open(folder).vectors(ids_M))


def test_more_than_may_be_locked_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = publish(tmp_path, width=4096)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.geteuid() == 0:
        pytest.skip("the superuser may lock any memory")
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, hard))
    try:
        with pytest.raises(ValueError, match="hot_rows: cannot lock .* ulimit -l"):
            EmbeddingTable.open(folder, tiers=Tiers(hot_rows=NUM_ROWS))
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_hot_rows_are_locked_in_memory(tmp_path: Path) -> None:
    folder = publish(tmp_path, width=4096)
    before = locked_kb()
    table = EmbeddingTable.open(folder, tiers=Tiers(hot_rows=NUM_ROWS))
    assert locked_kb() - before >= table.num_rows * table.manifest.bytes_per_row // 1024


def locked_kb() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").open())
    return int(status["VmLck"].split()[0])


@pytest.mark.parametrize("io", IO)
def test_tiers_of_a_grown_table_follow_its_ranks(tmp_path: Path, io: str) -> None:
    ids_by_rank = np.random.default_rng(1).permutation(NUM_ROWS)
    vectors_SD = random_vectors(NUM_ROWS, WIDTH)
    folder = publish_vectors(
        tmp_path, vectors_SD, row_format="bf16", rows_per_shard=256, ids_by_rank_S=ids_by_rank
    )
    table = EmbeddingTable.open(folder, tiers=tiers(io))
    ranks_M = np.array([0, 99, 100, 299, 300, 301, 699, 301])
    rows = table.vectors(ids_by_rank[ranks_M])
    assert rows.equal(EmbeddingTable.open(folder).vectors(ids_by_rank[ranks_M]))
    assert rows.equal(vectors_SD[ids_by_rank[ranks_M]].bfloat16())
    report = table.statistics.report()
    assert (report.num_rows, report.num_hot, report.num_cold, report.num_reads) == (8, 2, 4, 3)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=300).map(np.cumsum), st.integers(0, 1 << 31)
)
def test_few_extents_hold_all_hot_rows(gaps: np.ndarray, seed: int) -> None:
    """At most MAX_EXTENTS, and no larger than that needs."""
    ranks_S = np.full(int(gaps[-1]) + 20, 1 << 31, np.uint32)
    ranks_S[gaps] = np.random.default_rng(seed).permutation(len(gaps))
    extents = hot_extents(ranks_S, len(gaps))
    covered = np.concatenate([np.arange(*extent) for extent in extents])
    assert (np.diff(covered) > 0).all()
    assert np.array_equal(covered, gaps) or len(gaps) > MAX_EXTENTS
    limited = hot_extents(ranks_S, len(gaps), max_extents=3)
    assert len(limited) <= 3
    covered = np.concatenate([np.arange(*extent) for extent in limited])
    assert np.isin(gaps, covered).all()
    between = np.sort(np.diff(gaps) - 1)
    assert len(covered) - len(gaps) == between[: max(len(gaps) - 3, 0)].sum()


def test_a_row_cannot_be_hot_and_cold() -> None:
    with pytest.raises(ValueError, match="hot_rows=11 > cold_from=10"):
        Tiers(hot_rows=11, cold_from=10)
