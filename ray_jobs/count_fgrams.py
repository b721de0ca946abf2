"""tokens/v1 -> fgrams/v1: count all n-grams of a corpus in one scan, rank them, keep the most
frequent.
"""

import time
from functools import partial
from typing import Annotated, Any

import mlflow
import polars as pl
from pydantic import Field

from ray_jobs import fgram_plots
from ray_jobs.runtime import JobConfig, connect, run_units
from ray_jobs.tracking import log_manifest, stage_run
from scone_core import artifacts, storage
from scone_core.artifacts import FgramsManifest, Shard, TokensManifest
from scone_core.config import InputPath, Resource, Role
from scone_core.counting import (
    ROW_BYTES,
    WORKER_BYTES,
    CountPlan,
    assemble_shard,
    map_chunk,
    plan_count,
    plan_cuts,
    rank_ranges,
    reduce_range,
)
from scone_core.coverage import coverage_curve, curve_sizes
from scone_core.fgram_index import INDEX
from scone_core.fgrams import build_index
from scone_core.ngrams import MAX_N
from scone_core.trie import MAX_FGRAMS, num_buckets


class CountConfig(JobConfig):
    """Options of the count stage."""

    tokens: InputPath
    """Folder or URI of the tokens/v1 artifact to count."""
    num_fgrams: int = Field(ge=1, le=MAX_FGRAMS)
    """Size of V_fgram: the most frequent n-grams of all lengths together; fewer where fewer reach
    `min_count`."""
    max_n: int = Field(default=MAX_N, ge=2, le=MAX_N)
    """Longest n-grams, tokens."""
    min_count: int = Field(default=5, ge=1)
    """Rarer n-grams are never f-grams."""
    rows_per_shard: int = Field(default=1 << 22, ge=1)
    """F-grams per Parquet file."""
    scratch: Annotated[str | None, Role("output")] = None
    """Folder or URI for about 11 bytes per token (at min_count 5) that every worker sees; by
    default inside `out`. Removed at the end."""
    memory_mb: Resource[int] = Field(default=1024, ge=1)
    """Memory of one task, MiB; decides the number of chunks and ranges."""
    num_chunks: Resource[int | None] = Field(default=None, ge=1)
    """Parts of the corpus that are mapped one by one; by default from `memory_mb`, at least 8."""
    num_ranges: Resource[int | None] = Field(default=None, ge=1)
    """Ranges of first tokens that are reduced one by one; by default from `memory_mb`, at least
    4."""


def run(config: CountConfig) -> FgramsManifest:
    """Count all n-grams of a tokenized corpus and keep the most frequent as f-grams."""
    tokens = artifacts.load_manifest(TokensManifest, config.tokens)
    inputs = {"tokens": tokens.fingerprint}
    common = artifacts.plan_fields(FgramsManifest, config, inputs)
    scratch = storage.join(
        config.scratch or storage.join(config.out, "_scratch"), common["fingerprint"][:16]
    )
    plan = plan_count(
        config.tokens,
        tokens,
        scratch=scratch,
        max_n=config.max_n,
        min_count=config.min_count,
        memory_bytes=config.memory_mb << 20,
        num_chunks=config.num_chunks,
        num_ranges=config.num_ranges,
    )
    if done := artifacts.claim(FgramsManifest, config.out, config, inputs):
        print(f"count: {config.out} is up to date")
        _remove_scratch(config, scratch)
        return done
    _print_plan(plan)
    connect(config.cluster)
    with stage_run(config, stage="count", fingerprint=common["fingerprint"]):
        manifest = _count(config, plan, common)
        log_manifest(manifest)
    artifacts.publish(config.out, manifest)
    _remove_scratch(config, scratch)
    return manifest


def _print_plan(plan: CountPlan) -> None:
    """Say what the run will need, and stop when the disk cannot hold it."""
    free = storage.free_bytes(plan.scratch)
    room = "" if free is None else f" ({free >> 20:,} MiB free)"
    print(
        f"count: {plan.manifest.num_tokens:,} tokens in {len(plan.manifest.shards)} shards, "
        f"n = 2..{plan.max_n}, min_count {plan.min_count}\n"
        f"count: plan: {plan.num_chunks} chunks, {plan.num_ranges} ranges, at most "
        f"{plan.peak_bytes >> 20:,} MiB per task, about {plan.scratch_bytes >> 20:,} MiB of "
        f"scratch in {plan.scratch}{room}"
    )
    if free is not None and free < plan.scratch_bytes:
        raise ValueError(
            f"scratch={plan.scratch!r}: {free >> 20:,} MiB free, about "
            f"{plan.scratch_bytes >> 20:,} MiB needed; name a larger disk"
        )


def _count(config: CountConfig, plan: CountPlan, common: dict[str, Any]) -> FgramsManifest:
    started = time.monotonic()
    receipts = _count_ranges(plan)
    runs = rank_ranges(plan, receipts, num_fgrams=config.num_fgrams)
    num_fgrams = int(runs["num"].sum())
    shards = _write_shards(config, plan, receipts, runs, num_fgrams)
    index = _write_index(config, plan, shards)
    tokenizer = storage.read_bytes(storage.join(config.tokens, "tokenizer.json"))
    storage.write_bytes(storage.join(config.out, "tokenizer.json"), tokenizer)
    per_n = dict(runs.group_by("n").agg(pl.col("num").sum()).iter_rows())
    manifest = FgramsManifest(
        **common,
        shards=tuple(shards),
        index=index,
        tokenizer_sha256=plan.manifest.tokenizer_sha256,
        vocab_size=plan.manifest.vocab_size,
        separator_id=plan.manifest.separator_id,
        max_n=config.max_n,
        min_count=config.min_count,
        num_fgrams=num_fgrams,
        num_fgrams_per_n={n: per_n.get(n, 0) for n in range(2, config.max_n + 1)},
        num_tokens=plan.manifest.num_tokens,
    )
    _log(manifest, runs, seconds=time.monotonic() - started)
    return manifest


def _count_ranges(plan: CountPlan) -> list[dict[str, Any]]:
    """Map all chunks, reduce all ranges; the receipts of the ranges. Chunks are not opened once
    every range is finished.
    """
    do_units = partial(run_units, folder=plan.scratch, memory_bytes=plan.peak_bytes)
    cuts: list[int] = []
    if any(artifacts.read_receipt(plan.scratch, name) is None for name in plan.ranges):
        do_units("count: map chunks", plan.chunks, partial(map_chunk, plan))
        cuts = plan_cuts(plan)
    return do_units("count: reduce ranges", plan.ranges, partial(reduce_range, plan, cuts))


def _write_shards(
    config: CountConfig,
    plan: CountPlan,
    receipts: list[dict[str, Any]],
    runs: pl.DataFrame,
    num_fgrams: int,
) -> list[Shard]:
    num_shards = -(-num_fgrams // config.rows_per_shard)
    names = [f"shard-{number:05d}" for number in range(num_shards)]

    def assemble(number: int) -> dict[str, Any]:
        return assemble_shard(
            plan,
            receipts,
            runs,
            out=config.out,
            rows_per_shard=config.rows_per_shard,
            number=number,
        ).model_dump()

    memory_bytes = WORKER_BYTES + min(config.rows_per_shard, num_fgrams) * ROW_BYTES
    done = run_units(
        "count: write shards", names, assemble, folder=config.out, memory_bytes=memory_bytes
    )
    return [Shard.model_validate(receipt) for receipt in done]


def _write_index(config: CountConfig, plan: CountPlan, shards: list[Shard]) -> Shard:
    num_rows = sum(shard.num_rows for shard in shards)

    def build(number: int) -> dict[str, Any]:
        path = storage.join(config.out, INDEX)
        num_bytes, sha256 = build_index(
            config.out, path, shards, vocab_size=plan.manifest.vocab_size
        )
        return Shard(name=INDEX, num_rows=num_rows, num_bytes=num_bytes, sha256=sha256).model_dump()

    memory_bytes = WORKER_BYTES + num_buckets(num_rows) * 64
    (receipt,) = run_units(
        "count: build index", ["index"], build, folder=config.out, memory_bytes=memory_bytes
    )
    return Shard.model_validate(receipt)


def _log(manifest: FgramsManifest, runs: pl.DataFrame, *, seconds: float) -> None:
    """Metrics and plots to MLflow, one line to the terminal."""
    sizes = curve_sizes(manifest.num_fgrams)
    coverage = coverage_curve(runs, num_tokens=manifest.num_tokens, sizes=sizes)
    _, hit_rate, mean_match_len = coverage.row(-1)
    print(
        f"count: {manifest.num_fgrams:,} f-grams; on the counted corpus hit rate "
        f"{hit_rate:.3f}, mean match length {mean_match_len:.2f}"
    )
    per_n = {f"num_fgrams_{n}": num for n, num in manifest.num_fgrams_per_n.items()}
    mlflow.log_metrics(
        {
            "num_fgrams": manifest.num_fgrams,
            "hit_rate": hit_rate,
            "mean_match_len": mean_match_len,
            "seconds": seconds,
            "tokens_per_second": manifest.num_tokens / seconds,
            **per_n,
        }
    )
    mlflow.log_text(coverage.write_csv(), "coverage.csv")
    mlflow.log_figure(fgram_plots.rank_frequency(runs), "rank_frequency.png")
    mlflow.log_figure(fgram_plots.coverage(coverage), "coverage.png")
    mlflow.log_figure(fgram_plots.fgrams_per_n(manifest.num_fgrams_per_n), "fgrams_per_n.png")


def _remove_scratch(config: CountConfig, scratch: str) -> None:
    storage.remove_folder(scratch)
    if config.scratch is None:
        storage.remove_folder(storage.join(config.out, "_scratch"))
