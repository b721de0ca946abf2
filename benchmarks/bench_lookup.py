"""Lookup: match and gather from memory, cold rows from disk, and the peers of both.

`make bench-lookup`. A table for people, one JSON line last. Rates are per CPU second of one thread,
latencies by the wall clock, both medians of interleaved rounds.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import pandas as pd
import torch

from benchmarks import lookup_data, lookup_peers
from benchmarks.lookup_data import LMDB_ROWS, MAX_N, NUM_KEYS, NUM_ROWS, WIDTH, Data
from scone_core.artifacts import EmbeddingsManifest, RowFormat, load_manifest
from scone_core.lookup_engine import LookupEngine
from scone_core.row_formats import from_storage, to_storage
from scone_core.table import EmbeddingTable, aligned_empty
from scone_core.table_export import ngram_keys
from scone_core.tiers import ALL_MAPPED, Tiers, expect_random_reads

BATCHES = (1, 16, 256, 4096)
COLD_ROUNDS = 7
Metrics = dict[str, float]
Rounds = dict[str, list[float]]
"""Measurements by name, in order."""


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(os.environ.get("BENCH_FOLDER", f"{tempfile.gettempdir()}/scone-bench-lookup"))
    data = lookup_data.prepare(folder)
    table = warm_table(data)
    metrics = (
        measure_bytes(data)
        | measure_private_memory(data, folder)
        | measure_match(data)
        | measure_steps(data, table)
        | measure_dict(data)
        | measure_lmdb(data, table)
        | measure_gather(table)
        | measure_quantised()
        | {"index_build_ns_per_fgram": lookup_data.index_build_ns(data, folder)}
    )
    del table  # mapped pages do not leave the page cache
    metrics |= measure_cold(data)
    print(pd.Series(metrics).to_string(float_format="{:,.4f}".format))
    print(json.dumps({name: float(f"{value:.4g}") for name, value in metrics.items()}))


def wall_us(run: Callable[..., object], *arguments: object) -> float:
    started = perf_counter()
    run(*arguments)
    return (perf_counter() - started) * 1e6


def interleave(runs: dict[str, Callable[[], float]], num_rounds: int) -> Rounds:
    """What every run returns over rounds in which each has its turn; the first is a rehearsal."""
    found: Rounds = {name: [] for name in runs}
    for number in range(num_rounds + 1):
        for name, run in runs.items():
            value = run()
            if number:
                found[name].append(value)
    return found


def medians(found: Rounds) -> Metrics:
    return {name: statistics.median(values) for name, values in found.items()}


def warm_table(data: Data) -> EmbeddingTable:
    """The table and the index with every page in memory and mapped."""
    table = EmbeddingTable.open(data.table)
    for shard in range(len(table.manifest.shards)):
        table.stored_shard(shard)[:, 0].sum()
    data.index.buckets_N8[:, 0].sum()
    return table


def measure_bytes(data: Data) -> Metrics:
    shards = load_manifest(EmbeddingsManifest, data.table).shards
    return {
        "rows": NUM_ROWS,
        "width": WIDTH,
        "bytes_vs_raw": sum(shard.num_bytes for shard in shards) / (NUM_ROWS * WIDTH * 2),
        "index_keys": NUM_KEYS,
        "index_bytes_per_fgram": data.index.buckets_N8.nbytes / NUM_KEYS,
        "lmdb_rows": LMDB_ROWS,
        "lmdb_bytes_vs_raw": lookup_peers.lmdb_bytes_per_row(data.lmdb) / (WIDTH * 2),
    }


OPEN_IN_ANOTHER_PROCESS = """
import sys
import numpy as np
from scone_core.table import EmbeddingTable

def private_mb():
    lines = [line.split() for line in open("/proc/self/smaps_rollup")]
    return sum(int(words[1]) for words in lines if words[0].startswith("Private_")) / 1024

before = private_mb()
table = EmbeddingTable.open(sys.argv[1])
buckets = np.load(sys.argv[2], mmap_mode="r")
opened = private_mb()
out = table.empty(4096)
table.gather(np.random.default_rng(0).integers(0, table.num_rows, 4096), out)
print(opened - before, private_mb() - before - out.nbytes / 2**20)
"""


def measure_private_memory(data: Data, folder: Path) -> Metrics:
    """USS that opening table and index adds to a second process while the first has all of both
    mapped, and what it is after a first lookup, which loads the compiled code.
    """
    command = [sys.executable, "-c", OPEN_IN_ANOTHER_PROCESS, data.table, str(folder / "trie.npy")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    opened, used = map(float, result.stdout.split())
    return {"uss_growth_mb": opened, "uss_growth_with_compiled_code_mb": used}


def drop_from_cache(folder: str) -> None:
    """Pages that no process has mapped; what is not on disk yet is written first."""
    for path in Path(folder).iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


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
    keys = ngram_keys(data.tokens_SK[:LMDB_ROWS], data.n_S[:LMDB_ROWS], 1 << 16)
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
    return found | measure_fio(data, found["cold_direct_us_per_row_b256"])


def cold_table(data: Data, rng: np.random.Generator, batch: int, tiers: Tiers | None) -> float:
    drop_from_cache(data.table)
    if tiers is None:
        table = open_with_faults(data.table)
    else:
        table = EmbeddingTable.open(data.table, tiers=tiers)
    table.vectors(np.arange(batch))  # the reader's memory; other rows than those of the round
    ids_M = rng.choice(np.arange(batch, NUM_ROWS), batch, replace=False)
    out_MD = table.empty(batch)
    out_MD[:] = 0
    microseconds = wall_us(table.gather, ids_M, out_MD)
    assert np.array_equal(out_MD.view(np.int64)[:, 0], ids_M)
    return microseconds / batch


def cold_lmdb(data: Data, rng: np.random.Generator, batch: int, keys: list[bytes]) -> float:
    drop_from_cache(data.lmdb)
    store = lookup_peers.Lmdb(data.lmdb)
    ids_M = rng.choice(LMDB_ROWS, batch, replace=False)
    wanted, out_MD = [keys[i] for i in ids_M], np.zeros((batch, WIDTH), np.uint16)
    microseconds = wall_us(store.rows, wanted, out_MD)
    store.close()
    assert np.array_equal(out_MD.view(np.int64)[:, 0], ids_M)
    return microseconds / batch


def measure_fio(data: Data, direct_us_per_row: float) -> Metrics:
    """What the disk gives: many reads at a time, and one, which is what a page fault waits for."""
    shards = load_manifest(EmbeddingsManifest, data.table).shards
    files = [f"{data.table}/{shard.name}" for shard in shards]
    many = lookup_peers.fio_rows_per_s(files, queue_depth=256)
    one = lookup_peers.fio_rows_per_s(files, queue_depth=1)
    if many is None or one is None:
        return {}
    return {
        "fio_rows_per_s_qd256": many,
        "fio_rows_per_s_qd1": one,
        "fio_qd256_vs_qd1": many / one,
        "cold_vs_fio": 1e6 / direct_us_per_row / many,
    }


def measure_match(data: Data) -> Metrics:
    """All of the held-out text at once, and one sequence token by token."""
    text_1T = data.text_L[None]

    def mtok_s() -> float:
        started = process_time()
        data.index.match(text_1T)
        return text_1T.size / (process_time() - started) / 1e6

    rates = interleave({"match Mtok/s": mtok_s}, 7)
    print("match Mtok/s: " + " ".join(f"{value:.1f}" for value in rates["match Mtok/s"]))
    stream, tokens = data.index.stream(1), [data.text_L[i : i + 1] for i in range(20_000)]
    expected_L = data.index.match(text_1T).fgram_ids_BT[0]
    found, latency = [], []
    for token in tokens:
        started = perf_counter()
        ids_B = stream.advance(token)
        latency.append(perf_counter() - started)
        found.append(int(ids_B[0]))
    assert found == expected_L[: len(found)].tolist()
    return {
        "match_mtok_s_per_core": statistics.median(rates["match Mtok/s"]),
        "hit_rate": float((expected_L >= 0).mean()),
        "decode_match_us_b1": float(np.median(latency)) * 1e6,
        "decode_match_us_b1_p99": float(np.percentile(latency, 99)) * 1e6,
    }


def streams_of(data: Data, batch: int, num_steps: int, seed: int) -> np.ndarray:
    """Tokens [steps, B] of B sequences from random places of the text."""
    starts_B = np.random.default_rng(seed).integers(0, len(data.text_L) - num_steps, batch)
    return np.stack([data.text_L[starts_B + step] for step in range(num_steps)])


def measure_steps(data: Data, table: EmbeddingTable) -> Metrics:
    """Decode steps of B sequences: match the new tokens, gather the rows of the hits."""
    engine = LookupEngine(data.index, table)
    metrics: Metrics = {}
    for batch in BATCHES:
        steps = max(60, min(3000, 300_000 // batch))
        tokens_TB, out_BD = streams_of(data, batch, steps, batch), engine.table.empty(batch)
        stream, latency = engine.stream(batch), []
        for tokens_B in tokens_TB:
            latency.append(wall_us(engine.step, stream, tokens_B, out_BD))
        warm = latency[steps // 5 :]
        metrics[f"us_per_token_b{batch}"] = float(np.median(warm)) / batch
        metrics[f"step_us_b{batch}_p50"] = float(np.median(warm))
        metrics[f"step_us_b{batch}_p99"] = float(np.percentile(warm, 99))
    print(f"lookups so far: {engine.report()}")
    return metrics


def measure_dict(data: Data) -> Metrics:
    """Decode steps of 256 sequences, match only: ours and a Python dictionary in turn."""
    batch, steps = 256, 150
    ids = lookup_peers.python_dict(data)
    stream, found = data.index.stream(batch), Rounds(ours=[], theirs=[])
    for tokens_B, text, ends_B in steps_of(data, batch, steps, seed=5):
        found["ours"].append(wall_us(stream.advance, tokens_B))
        found["theirs"].append(wall_us(lookup_peers.match_in_dict, ids, text, ends_B))
        expected = lookup_peers.match_in_dict(ids, text, ends_B)
        assert len(found["ours"]) < MAX_N or stream.fgram_ids_B.tolist() == expected
    middle = medians({name: values[steps // 5 :] for name, values in found.items()})
    return {
        "match_us_b256": middle["ours"],
        "dict_us_b256": middle["theirs"],
        "vs_python_dict_b256": middle["theirs"] / middle["ours"],
    }


def measure_lmdb(data: Data, table: EmbeddingTable) -> Metrics:
    """Decode steps of 256 sequences, match and rows: ours and LMDB in turn, all in memory. LMDB
    holds fewer f-grams, so ours copies more rows.
    """
    batch, steps = 256, 150
    engine, store = LookupEngine(data.index, table), lookup_peers.Lmdb(data.lmdb)
    store.touch()
    stream, found = engine.stream(batch), Rounds(ours=[], theirs=[])
    out_BD, row_BD = engine.table.empty(batch), engine.table.empty(batch)
    for tokens_B, text, ends_B in steps_of(data, batch, steps, seed=6):
        found["ours"].append(wall_us(engine.step, stream, tokens_B, out_BD))
        found["theirs"].append(wall_us(store.match_rows, text, ends_B, row_BD))
        is_in_both_B = (stream.fgram_ids_B >= 0) & (stream.fgram_ids_B < LMDB_ROWS)
        rows_B = row_BD.view(np.int64)[is_in_both_B, 0]
        assert len(found["ours"]) < MAX_N or np.array_equal(
            rows_B, stream.fgram_ids_B[is_in_both_B]
        )
    store.close()
    middle = medians({name: values[steps // 5 :] for name, values in found.items()})
    return {
        "match_and_rows_us_b256": middle["ours"],
        "lmdb_warm_us_b256": middle["theirs"],
        "vs_lmdb_warm_b256": middle["theirs"] / middle["ours"],
    }


def steps_of(
    data: Data, batch: int, num_steps: int, seed: int
) -> Iterator[tuple[np.ndarray, bytes, list[int]]]:
    """Per step the next token of B sequences; the text in bytes and where they stand in it."""
    text = data.text_L.astype(">u2").tobytes()
    starts_B = np.random.default_rng(seed).integers(MAX_N, len(data.text_L) - num_steps, batch)
    for step in range(num_steps):
        yield data.text_L[starts_B + step], text, ((starts_B + step + 1) * 2).tolist()


def measure_gather(table: EmbeddingTable) -> Metrics:
    """Random rows against a sequential copy of as many, both from memory."""
    rng = np.random.default_rng(2)
    metrics: Metrics = {}
    for batch in BATCHES:
        out_MD = table.empty(batch)
        runs: dict[str, Callable[[], float]] = {
            "gather": partial(gather_us, table, rng, batch, out_MD),
            "memcpy": partial(copy_us, table, rng, batch, out_MD),
        }
        middle = medians(interleave(runs, 60 if batch == 4096 else 400))
        metrics[f"gather_us_per_row_b{batch}"] = middle["gather"] / batch
        metrics[f"gather_vs_memcpy_b{batch}"] = middle["memcpy"] / middle["gather"]
    return metrics


def gather_us(
    table: EmbeddingTable, rng: np.random.Generator, batch: int, out_MD: np.ndarray
) -> float:
    ids_M = rng.integers(0, table.num_rows, batch)
    return wall_us(table.gather, ids_M, out_MD)


def copy_us(
    table: EmbeddingTable, rng: np.random.Generator, batch: int, out_MD: np.ndarray
) -> float:
    rows_ND = table.stored_shard(int(rng.integers(len(table.manifest.shards))))
    first = int(rng.integers(0, len(rows_ND) - batch))
    return wall_us(np.copyto, out_MD, rows_ND[first : first + batch])


def measure_quantised() -> Metrics:
    """Errors of quantised rows as they are read, against float32, and what reading them costs."""
    generator = torch.Generator().manual_seed(0)
    vectors_ND = torch.randn(1 << 14, WIDTH, generator=generator)
    vectors_ND *= torch.rand(WIDTH, generator=generator) + 0.5  # channels of different sizes
    metrics: Metrics = {}
    for row_format in ("int8", "fp8"):
        rows_NC = to_storage(vectors_ND, row_format)
        read_ND = from_storage(rows_NC, row_format).bfloat16().double()
        error_N = 1 - torch.cosine_similarity(read_ND, vectors_ND.double())
        metrics[f"{row_format}_cosine_error_mean"] = float(error_N.mean())
        metrics[f"{row_format}_cosine_error_max"] = float(error_N.max())
        metrics[f"{row_format}_gather_us_per_row_b4096"] = quantised_us(rows_NC, row_format)
    return metrics


def quantised_us(rows_NC: np.ndarray, row_format: RowFormat) -> float:
    from tests.tables import publish_rows

    with tempfile.TemporaryDirectory() as folder:
        publish_rows(Path(folder), rows_NC, row_format=row_format, rows_per_shard=1 << 20)
        table, rng = EmbeddingTable.open(folder), np.random.default_rng(3)
        out_MD = aligned_empty(4096, WIDTH, table.vector_dtype)
        rounds = interleave({"gather": partial(gather_us, table, rng, 4096, out_MD)}, 30)
        return medians(rounds)["gather"] / 4096


if __name__ == "__main__":
    main()
