"""Rows that are not in memory: ours, page faults and LMDB after the page cache was dropped, fio."""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import lookup_peers
from benchmarks.lookup_data import NUM_ROWS, WIDTH, Data, drop_from_cache
from benchmarks.rounds import Metrics, Rounds, interleave, medians, wall_us
from scone_core.artifacts.manifests import EmbeddingsManifest, load_manifest
from scone_core.machine.mapped_memory import expect_random_reads
from scone_core.table.embedding_table import EmbeddingTable
from scone_core.table.export import ngram_keys
from scone_core.table.tiers import ALL_MAPPED, Tiers

COLD_ROUNDS, COLD_BATCHES = 7, 5


def drop_all(folder: str) -> None:
    for path in Path(folder).iterdir():
        drop_from_cache(path)


def open_with_faults(folder: str) -> EmbeddingTable:
    """A mapped table whose cold pages come one fault at a time, as plain mapping gives them."""
    table = EmbeddingTable.open(folder)
    for shard in range(len(table.manifest.shards)):
        expect_random_reads(table.stored_shard(shard))
    return table


def measure_cold(data: Data) -> Metrics:
    """Random distinct rows after the page cache was dropped, us per row. A fault of `mmap` reads
    one page; `read-around` is a map without advice, where it reads up to 8 MiB.
    """
    rng, found = np.random.default_rng(1), {}
    keys = ngram_keys(data.tokens_SK, data.n_S, 1 << 16)
    for batch in (16, 256, 4096):
        runs: dict[str, Callable[[], float]] = {
            "direct": partial(cold_table, data, rng, batch, Tiers(cold_from=0, io="direct")),
            "willneed": partial(cold_table, data, rng, batch, Tiers(cold_from=0, io="mmap")),
            "mmap": partial(cold_table, data, rng, batch, None),
            "lmdb": partial(cold_lmdb, data, rng, batch, keys),
        }
        if batch == 16:
            runs["read-around"] = partial(cold_table, data, rng, batch, ALL_MAPPED)
        if batch == 4096:  # nearly a second a round by faults
            del runs["mmap"], runs["lmdb"]
        rounds = interleave(runs, COLD_ROUNDS if batch < 4096 else 3)
        for name, values in rounds.items():
            print(f"cold {name} batch {batch}, us/row: " + " ".join(f"{v:.1f}" for v in values))
            found[f"cold_{name.replace('-', '_')}_us_per_row_b{batch}"] = statistics.median(values)
    found["cold_vs_mmap"] = (
        found["cold_mmap_us_per_row_b256"] / found["cold_direct_us_per_row_b256"]
    )
    found["cold_vs_lmdb"] = (
        found["cold_lmdb_us_per_row_b256"] / found["cold_direct_us_per_row_b256"]
    )
    return found | measure_disk(data, rng)


def cold_table(data: Data, rng: np.random.Generator, batch: int, tiers: Tiers | None) -> float:
    drop_all(data.table)
    if tiers is None:
        table = open_with_faults(data.table)
    else:
        table = EmbeddingTable.open(data.table, tiers=tiers)
    out_MD = table.empty(batch)

    def read(ids_M: np.ndarray) -> float:
        out_MD[:] = 0
        microseconds = wall_us(table.gather, ids_M, out_MD)
        assert np.array_equal(out_MD.view(np.int64)[:, 0], ids_M)
        return microseconds

    return us_per_row(read, rng, batch)


def cold_lmdb(data: Data, rng: np.random.Generator, batch: int, keys: list[bytes]) -> float:
    drop_all(data.lmdb)
    store, out_MD = lookup_peers.Lmdb(data.lmdb), np.zeros((batch, WIDTH), np.uint16)

    def read(ids_M: np.ndarray) -> float:
        wanted = [keys[i] for i in ids_M]
        microseconds = wall_us(store.rows, wanted, out_MD)
        assert np.array_equal(out_MD.view(np.int64)[:, 0], ids_M)
        return microseconds

    found = us_per_row(read, rng, batch)
    store.close()
    return found


def us_per_row(read: Callable[[np.ndarray], float], rng: np.random.Generator, batch: int) -> float:
    """Median of some batches, no row twice; the first, which brings the reader's own memory, does
    not count.
    """
    batches = rng.choice(NUM_ROWS, (1 + COLD_BATCHES, batch), replace=False)
    return statistics.median([read(ids_M) for ids_M in batches][1:]) / batch


def measure_disk(data: Data, rng: np.random.Generator) -> Metrics:
    """What the disk gives to fio (many reads at a time; one, which is what a page fault waits for)
    and to us, in turn: it changes from minute to minute.
    """
    shards = load_manifest(EmbeddingsManifest, data.table).shards
    files, tiers = [f"{data.table}/{s.name}" for s in shards], Tiers(cold_from=0, io="direct")
    found = Rounds(fio=[], fio_one=[], ours=[])
    for _ in range(3):
        many = lookup_peers.fio_rows_per_s(files, queue_depth=256)
        one = lookup_peers.fio_rows_per_s(files, queue_depth=1)
        if many is None or one is None:
            return {}
        ours = [cold_table(data, rng, 256, tiers) for _ in range(COLD_ROUNDS)]
        for name, value in (("fio", many), ("fio_one", one), ("ours", 1e6 / np.median(ours))):
            found[name].append(float(value))
    print(f"rows/s at 256: {found}")
    middle = medians(found)
    return {
        "fio_rows_per_s_qd256": middle["fio"],
        "fio_rows_per_s_qd1": middle["fio_one"],
        "fio_qd256_vs_qd1": middle["fio"] / middle["fio_one"],
        "cold_rows_per_s_b256": middle["ours"],
        "cold_vs_fio": middle["ours"] / middle["fio"],
    }
