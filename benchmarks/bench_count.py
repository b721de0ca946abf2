"""Counting: the kernels and their peers, the whole count without Ray and on it, its memory.

`make bench-count` prints a table for people, and one JSON line last. Rates are per CPU second of
one thread.
"""

import json
import multiprocessing.pool
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
import polars as pl
import tiktoken

from benchmarks import count_corpora, count_peers
from benchmarks.rounds import Metrics, interleaved_medians
from ray_jobs.count.config import CountConfig
from ray_jobs.runtime.cluster import connect
from ray_jobs.runtime.config import Cluster
from ray_jobs.runtime.units import run_units
from ray_jobs.tokenize.config import TokenizeConfig
from ray_jobs.tokenize.worker import ShardWriter, to_table
from scone_core.artifacts.manifests import TokensManifest, load_manifest
from scone_core.artifacts.units import DoUnits, R
from scone_core.corpus.documents import DocumentFormat, read_packs
from scone_core.corpus.input_files import find_files
from scone_core.corpus.tokenizer import FastBpe
from scone_core.counting.chunks import Chunk
from scone_core.counting.count import count_fgrams
from scone_core.counting.one_scan import count_groups, sort_groups
from scone_core.counting.plan import CountPlan
from scone_core.counting.ranges import gather_range
from scone_core.counting.units import plan_ranges

ROUNDS = 5
KERNEL_TOKENS = 12_000_000
BUDGET_MB = 1024
ROWS_PER_SHARD = 1 << 20


def main() -> None:
    if not count_corpora.SHARED.exists():
        sys.exit(f"bench-count: skipped, there is no {count_corpora.SHARED}")
    if pl.thread_pool_size() != 1:
        sys.exit("bench-count: set POLARS_MAX_THREADS=1 and RAYON_NUM_THREADS=1 (make does)")
    folder = Path(os.environ.get("BENCH_FOLDER", f"{tempfile.gettempdir()}/scone-bench-count"))
    corpora = count_corpora.prepare(folder)
    scratch = folder / "scratch"
    metrics = (
        measure_kernels(corpora["real"])
        | measure_tokenizing(scratch)
        | measure_end_to_end(corpora["real"], scratch)
        | measure_ray(corpora["200m"], scratch)
        | measure_memory(corpora, scratch)
    )
    shutil.rmtree(scratch, ignore_errors=True)
    print(pd.Series(metrics).to_string(float_format="{:,.3f}".format))
    print(json.dumps({name: round(value, 3) for name, value in metrics.items()}))


def measure_kernels(folder: str) -> Metrics:
    """All orders in memory; every peer on the same tokens."""
    piece = count_corpora.load_piece(folder, KERNEL_TOKENS)
    warm = piece._replace(last=100_000)
    peers = count_peers.find_peers()
    found = {peers[name](warm) for name in ("one_scan", "a_priori", "polars")}
    assert len(found) == 1, f"engines and polars differ: {found}"
    runs = {name: partial(count_peers.mtok_s, peer, piece) for name, peer in peers.items()}
    rates = interleaved_medians(runs, ROUNDS)
    metrics = {"kernel_mtok_s": rates["one_scan"], "apriori_mtok_s": rates["a_priori"]}
    names = {"kenlm": "vs_kenlm", "a_priori": "kernel_vs_apriori"}
    for name in rates.keys() - {"one_scan"}:
        metrics[names.get(name, f"kernel_vs_{name}")] = rates["one_scan"] / rates[name]
    return metrics


def measure_tokenizing(scratch: Path) -> Metrics:
    """A worker of the tokenize stage, shards and receipts included, against tiktoken's encode."""
    gpt2 = str(count_corpora.SHARED / "tokenizers" / "gpt2.json")
    files = find_files((str(count_corpora.SHARED / "text" / "sotu.jsonl.gz"),))
    pack = next(read_packs(files, DocumentFormat(), 4 << 20))
    config = TokenizeConfig(inputs=(), tokenizer=gpt2, out=str(scratch / "tokenize"))
    writer, table = ShardWriter(config, "tiktoken"), to_table(0, pack)
    bpe = FastBpe.from_json(json.loads(Path(gpt2).read_text()))
    assert bpe is not None
    plain: tiktoken.Encoding = bpe.encoding

    def encode() -> None:
        for text in pack.texts:
            plain.encode_ordinary(text)

    runs = {"tokenize MB/s": partial(writer, table), "tiktoken MB/s": encode}
    rates = interleaved_medians(
        {name: partial(_rate, run, pack.num_bytes / 1e6) for name, run in runs.items()}, ROUNDS
    )
    return {
        "tokenize_mb_s": rates["tokenize MB/s"],
        "tokenize_vs_tiktoken": rates["tokenize MB/s"] / rates["tiktoken MB/s"],
    }


def _rate(run: Callable[[], object], amount: float) -> float:
    started = time.process_time()
    run()
    return amount / (time.process_time() - started)


def plan_for(folder: str, scratch: Path) -> CountPlan:
    config = CountConfig(
        tokens=folder, out=str(scratch / "out"), num_fgrams=1 << 30, memory_mb=BUDGET_MB
    )
    return config.plan(load_manifest(TokensManifest, folder), scratch=str(scratch / "records"))


def count(folder: str, scratch: Path, do_units: DoUnits) -> None:
    """The whole count without its index, in an empty folder `scratch`; units run in `do_units`."""
    count_fgrams(
        plan_for(folder, scratch),
        do_units,
        num_fgrams=1 << 30,
        out=str(scratch / "out"),
        rows_per_shard=ROWS_PER_SHARD,
    )


def do_plain(
    title: str,
    names: Sequence[str],
    unit: Callable[[int], R],
    *,
    kind: type[R],
    folder: str,
    memory_bytes: int = 0,
) -> list[R]:
    """A `DoUnits` in this process that writes no receipts."""
    return [unit(number) for number in range(len(names))]


def do_in(pool: multiprocessing.pool.Pool) -> DoUnits:
    """A `DoUnits` in the plain processes of `pool` that writes no receipts."""

    def do_units(
        title: str,
        names: Sequence[str],
        unit: Callable[[int], R],
        *,
        kind: type[R],
        folder: str,
        memory_bytes: int = 0,
    ) -> list[R]:
        return pool.map(unit, range(len(names)), chunksize=1)

    return do_units


def measure_end_to_end(folder: str, scratch: Path) -> Metrics:
    """Arrow tokens in, spill, reduce, rank, Parquet out."""
    num_tokens = load_manifest(TokensManifest, folder).num_tokens
    run = partial(_rate_plain, folder, scratch, num_tokens / 1e6)
    return {
        "end_to_end_mtok_s_per_core": interleaved_medians({"end to end Mtok/s": run}, ROUNDS)[
            "end to end Mtok/s"
        ]
    }


def _rate_plain(folder: str, scratch: Path, amount: float) -> float:
    shutil.rmtree(scratch, ignore_errors=True)
    return _rate(partial(count, folder, scratch, do_plain), amount)


def measure_ray(folder: str, scratch: Path, num_rounds: int = 3) -> Metrics:
    """Wall rates on two cores. Processes and cluster are started before; Ray's units also write
    receipts and show progress, as those of users do.
    """
    connect(Cluster(num_cpus=2, object_store_mb=256))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        ways = {
            "two processes s": partial(count, folder, scratch, do_in(pool)),
            "Ray s": partial(count, folder, scratch, run_units),
        }
        seconds = interleaved_medians(
            {n: partial(_wall, way, scratch) for n, way in ways.items()}, num_rounds
        )
    num_tokens = load_manifest(TokensManifest, folder).num_tokens
    return {
        "ray_efficiency": seconds["two processes s"] / seconds["Ray s"],
        "ray_mtok_s": num_tokens / seconds["Ray s"] / 1e6,
    }


def _wall(run: Callable[[], None], scratch: Path) -> float:
    shutil.rmtree(scratch, ignore_errors=True)
    os.sync()
    started = time.monotonic()
    run()
    return time.monotonic() - started


def measure_memory(corpora: dict[str, str], scratch: Path) -> Metrics:
    """Peak RSS of a process that does all units, by corpus, and what a hot bigram costs."""
    seconds, rss_mb, distinct = {}, {}, {}
    for name in ("50m", "200m", "hot"):
        shutil.rmtree(scratch, ignore_errors=True)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds[name], rss_mb[name] = pool.apply(_count_apart, (corpora[name], scratch))
        if name != "hot":
            distinct[name] = num_distinct(corpora[name], scratch)
        print(f"{name}: {seconds[name]:.1f} CPU s, {rss_mb[name]:,.0f} MiB", flush=True)
    return {
        "distinct_growth_50m_200m": distinct["200m"] / distinct["50m"],
        "peak_rss_mb": max(rss_mb.values()),
        "peak_rss_vs_budget": max(rss_mb.values()) / BUDGET_MB,
        "peak_rss_growth_50m_200m": rss_mb["200m"] / rss_mb["50m"],
        "hot_bigram_time": seconds["hot"] / seconds["50m"],
        "hot_bigram_rss": rss_mb["hot"] / rss_mb["50m"],
    }


def _count_apart(folder: str, scratch: Path) -> tuple[float, float]:
    started = time.process_time()
    count(folder, scratch, do_plain)
    seconds = time.process_time() - started
    return seconds, peak_rss_mb()


def peak_rss_mb() -> float:
    """The peak RSS of this process; `getrusage` would count its parent at the time of the fork."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").open())
    return int(status["VmHWM"].split()[0]) / 1024


def num_distinct(folder: str, scratch: Path) -> int:
    """Distinct n-grams of the chunks in `scratch`; those that cuts divide count more than once."""
    plan = plan_for(folder, scratch)
    chunks = [Chunk(path) for path in plan.chunk_paths(0)]
    cuts = plan_ranges(plan, 0).cuts
    num = 0
    for lower, upper in zip(cuts[:-1], cuts[1:], strict=True):
        groups, _ = gather_range(chunks, plan.layout, lower, upper)
        groups = sort_groups(groups, plan.layout, min_size=2)
        num += count_groups(groups, plan.layout, min_count=1).num
    return num


if __name__ == "__main__":
    main()
