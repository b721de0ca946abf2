"""Lookup: match and gather from memory, cold rows from disk, and the peers of both.

`make bench-lookup`. A table for people, one JSON line last. Rates are per CPU second of one thread,
latencies by the wall clock, both medians of interleaved rounds. A decode step is what vLLM's worker
calls: `RowLookup.put_rows` with the scheduler's table of int32 tokens, which matches the new token
of each of B sequences and writes the rows of the hits into the input embeddings (bfloat16).

Shapes: B sequences, L positions of a token table, T steps, M hits, D width, N rows of one shard.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple, Self

import numpy as np
import pandas as pd
import torch

from benchmarks import lookup_cold, lookup_data, lookup_peers
from benchmarks.lookup_data import MAX_N, NUM_KEYS, NUM_ROWS, WIDTH, Data
from benchmarks.lookup_peers import TOKEN_BYTES
from benchmarks.rounds import Metrics, interleave, medians, wall_us
from scone_core.artifacts.manifests import EmbeddingsManifest, RowFormat, load_manifest
from scone_core.table.embedding_table import EmbeddingTable, aligned_empty
from scone_core.table.row_formats import as_array, as_tensor, from_storage, to_storage
from scone_core.table.row_lookup import Hits, RowLookup
from tests.builders.tables import publish_rows

BATCHES = (1, 16, 256, 4096)
MAX_LENGTH = 4096
"""Positions of a token table: as vLLM has one row for each request, of the longest there may be."""
NUM_STEPS, ROUNDS, PASSES = 240, 21, 10
"""Decode steps of a comparison, its rounds, and how often ours takes all steps in one: it is about
as many times as fast as its peers.
"""


def main() -> None:
    torch.set_num_threads(1)
    folder = lookup_data.bench_folder()
    data = lookup_data.prepare(folder)
    table = warm_table(data)
    metrics = (
        measure_bytes(data)
        | measure_private_memory(data, folder)
        | measure_match(data, table)
        | measure_steps(data, table)
        | measure_dict(data, table)
        | measure_lmdb(data, table)
        | measure_gather(table)
        | measure_quantised()
        | {"index_build_ns_per_fgram": lookup_data.index_build_ns(data, folder)}
    )
    del table  # mapped pages do not leave the page cache
    metrics |= lookup_cold.measure_cold(data)
    print(pd.Series(metrics).to_string(float_format="{:,.4f}".format))
    print(json.dumps({name: float(f"{value:.4g}") for name, value in metrics.items()}))


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
        "lmdb_bytes_vs_raw": lookup_peers.lmdb_bytes_per_row(data.lmdb) / (WIDTH * 2),
    }


OPEN_IN_ANOTHER_PROCESS = """
import sys
import numpy as np
from scone_core.table.embedding_table import EmbeddingTable

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


def measure_match(data: Data, table: EmbeddingTable) -> Metrics:
    """All of the held-out text at once, and one sequence token by token."""
    text_1T = data.text_L[None]

    def mtok_s() -> float:
        started = process_time()
        data.index.match(text_1T)
        return text_1T.size / (process_time() - started) / 1e6

    rates = interleave({"match Mtok/s": mtok_s}, 7)
    print("match Mtok/s: " + " ".join(f"{value:.1f}" for value in rates["match Mtok/s"]))
    expected_L = data.index.match(text_1T).fgram_ids_BT[0]
    lookup, sequence = RowLookup(data.index, table), Sequences.of(data, np.zeros(1, int), 20_000)
    found, latency = [], []
    for num_computed_B in sequence.steps:
        started = perf_counter()
        hits = lookup.match(sequence.tokens_BL, num_computed_B, sequence.starts_B1)
        latency.append(perf_counter() - started)
        found.append(int(hits.fgram_ids_M[0]) if len(hits.places_M) else -1)
    assert found == expected_L[: len(found)].tolist()
    return {
        "match_mtok_s_per_core": statistics.median(rates["match Mtok/s"]),
        "hit_rate": float((expected_L >= 0).mean()),
        "decode_match_us_b1": float(np.median(latency)) * 1e6,
        "decode_match_us_b1_p99": float(np.percentile(latency, 99)) * 1e6,
    }


class Sequences(NamedTuple):
    """B sequences that are decoded step by step, as vLLM's worker sees them."""

    tokens_BL: np.ndarray
    """int32, the token table."""
    starts_B1: np.ndarray
    """int32, one token of each in every step."""
    steps: list[np.ndarray]
    """int32 [B] each: tokens of each sequence before the step."""

    @classmethod
    def of(cls, data: Data, places_B: np.ndarray, num_steps: int) -> Self:
        """Sequences that begin at these places of the text."""
        tokens_BL = np.zeros((len(places_B), max(MAX_LENGTH, num_steps)), np.int32)
        for row, place in zip(tokens_BL, places_B, strict=True):
            row[:num_steps] = data.text_L[place : place + num_steps]
        steps = [np.full(len(places_B), step, np.int32) for step in range(num_steps)]
        return cls(tokens_BL, np.arange(len(places_B) + 1, dtype=np.int32), steps)


def measure_steps(data: Data, table: EmbeddingTable) -> Metrics:
    """Decode steps of B sequences from random places of the text."""
    lookup, metrics = RowLookup(data.index, table), Metrics()
    for batch in BATCHES:
        num_steps = max(60, min(3000, 300_000 // batch))
        rng, inputs_BD = np.random.default_rng(batch), as_tensor(table.empty(batch))
        places_B = rng.integers(0, len(data.text_L) - num_steps, batch)
        tokens_BL, starts_B1, steps = Sequences.of(data, places_B, num_steps)
        latency = [wall_us(lookup.put_rows, tokens_BL, n_B, starts_B1, inputs_BD) for n_B in steps]
        warm = latency[num_steps // 5 :]
        metrics[f"us_per_token_b{batch}"] = float(np.median(warm)) / batch
        metrics[f"step_us_b{batch}_p50"] = float(np.median(warm))
        metrics[f"step_us_b{batch}_p99"] = float(np.percentile(warm, 99))
    print(f"rows so far: {table.statistics.report()}")
    return metrics


class Step(NamedTuple):
    """One decode step: the token table for ours, and where it stands in the text for peers."""

    tokens_BL: np.ndarray
    num_computed_B: np.ndarray
    starts_B1: np.ndarray
    text: bytes
    """All tokens as big-endian uint16."""
    ends_B: list[int]


def steps_of(data: Data, batch: int, seed: int) -> list[Step]:
    """Steps behind the first K tokens of each sequence, which ours and peers see alike."""
    text = data.text_L.astype(">u2").tobytes()
    places_B = np.random.default_rng(seed).integers(0, len(data.text_L) - NUM_STEPS - MAX_N, batch)
    tokens_BL, starts_B1, steps = Sequences.of(data, places_B, NUM_STEPS + MAX_N)
    return [
        Step(tokens_BL, n_B, starts_B1, text, ((places_B + n_B + 1) * TOKEN_BYTES).tolist())
        for n_B in steps[MAX_N:]
    ]


def in_turn(
    ours: Callable[[Step], object],
    theirs: Callable[[Step], object],
    steps: list[Step],
) -> Iterator[tuple[float, float]]:
    """Median microseconds of a step of both, round by round. Each has the machine for about as
    long (ours takes all steps again and again), and the second half of that counts: memory that
    was not touched for a second is slow to reach on virtual machines whose host moves it about.
    """
    for _ in range(ROUNDS):
        passes = []
        for _ in range(PASSES):
            passes.append([wall_us(ours, step) for step in steps])
        ours_us = [microseconds for one in passes[PASSES // 2 :] for microseconds in one]
        theirs_us = [wall_us(theirs, step) for step in steps]
        yield statistics.median(ours_us), statistics.median(theirs_us[len(steps) // 2 :])


def measure_dict(data: Data, table: EmbeddingTable) -> Metrics:
    """Decode steps of 256 sequences, match only: ours and a Python dictionary."""
    ids, steps = lookup_peers.python_dict(data), steps_of(data, 256, seed=5)
    lookup, found = RowLookup(data.index, table), []

    def ours(step: Step) -> np.ndarray:
        hits = lookup.match(step.tokens_BL, step.num_computed_B, step.starts_B1)
        return hits.fgram_ids_M

    def theirs(step: Step) -> list[int]:
        return lookup_peers.match_in_dict(ids, step.text, step.ends_B)

    for microseconds in in_turn(ours, theirs, steps):
        found.append(microseconds)
        expected = theirs(steps[-1])
        assert ours(steps[-1]).tolist() == [fgram_id for fgram_id in expected if fgram_id >= 0]
    print("match b256, ours and dict, us: " + " ".join(f"{o:.0f}/{t:.0f}" for o, t in found))
    ours_us, theirs_us = map(statistics.median, zip(*found, strict=True))
    return {
        "match_us_b256": ours_us,
        "match_us_b256_cold_caches": cold_caches_us(ours, steps),
        "dict_us_b256": theirs_us,
        "vs_python_dict_b256": theirs_us / ours_us,
    }


def cold_caches_us(match: Callable[[Step], object], steps: list[Step]) -> float:
    """A step behind work that has filled the caches, as a model's weights do."""
    weights, found = np.zeros(6 << 20, np.int64), []
    for step in steps:
        weights.sum()
        found.append(wall_us(match, step))
    return statistics.median(found[len(steps) // 2 :])


def measure_lmdb(data: Data, table: EmbeddingTable) -> Metrics:
    """Decode steps of 256 sequences, match and rows: ours and LMDB, the same f-grams, all in
    memory.
    """
    lookup, store = RowLookup(data.index, table), lookup_peers.Lmdb(data.lmdb)
    inputs_BD, row_BD = as_tensor(table.empty(256)), table.empty(256)
    steps, found = steps_of(data, 256, seed=6), []

    def ours(step: Step) -> Hits:
        return lookup.put_rows(step.tokens_BL, step.num_computed_B, step.starts_B1, inputs_BD)

    def theirs(step: Step) -> list[bool]:
        return store.match_rows(step.text, step.ends_B, row_BD)

    for microseconds in in_turn(ours, theirs, steps):
        found.append(microseconds)
        hits, is_hit_B = ours(steps[-1]), theirs(steps[-1])
        assert np.array_equal(hits.places_M, np.flatnonzero(is_hit_B))
        for rows_BD in (row_BD, as_array(inputs_BD)):
            assert np.array_equal(rows_BD.view(np.int64)[hits.places_M, 0], hits.fgram_ids_M)
    store.close()
    print("rows b256, ours and LMDB, us: " + " ".join(f"{o:.0f}/{t:.0f}" for o, t in found))
    ours_us, theirs_us = map(statistics.median, zip(*found, strict=True))
    return {
        "match_and_rows_us_b256": ours_us,
        "lmdb_warm_us_b256": theirs_us,
        "vs_lmdb_warm_b256": theirs_us / ours_us,
    }


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
        middle = medians(interleave(runs, 400))
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
    with tempfile.TemporaryDirectory() as folder:
        publish_rows(Path(folder), rows_NC, row_format=row_format, rows_per_shard=1 << 20)
        table, rng = EmbeddingTable.open(folder), np.random.default_rng(3)
        out_MD = aligned_empty(4096, WIDTH, table.vector_dtype)
        rounds = interleave({"gather": partial(gather_us, table, rng, 4096, out_MD)}, 30)
        return medians(rounds)["gather"] / 4096


if __name__ == "__main__":
    main()
