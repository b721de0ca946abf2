"""tokens/v1 -> fgrams/v1: count all n-grams of a corpus, rank them, keep the most frequent."""

import time
from functools import partial
from typing import Any

import polars as pl

from ray_jobs.count.config import ChunksConfig, CountConfig
from ray_jobs.count.plan import fit_to_disk, load_chunks, make_plan
from ray_jobs.count.report import log_count
from ray_jobs.runtime.cluster import connect
from ray_jobs.runtime.tracking import log_manifest, stage_run
from ray_jobs.runtime.units import run_units
from scone_core.artifacts import storage
from scone_core.artifacts.folders import (
    claim,
    publish,
    read_receipt,
    remove_receipt,
    shared_fields,
    write_receipt,
)
from scone_core.artifacts.manifests import (
    ChunksManifest,
    FGramsManifest,
    Shard,
    TokensManifest,
    load_manifest,
)
from scone_core.counting import apriori
from scone_core.counting.plan import ROW_BYTES, WORKER_BYTES, CountPlan
from scone_core.counting.ranges import Cut
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
from scone_core.fgrams.fgram_shards import build_index
from scone_core.fgrams.index import INDEX
from scone_core.fgrams.trie import num_buckets

STARTED = "started"
"""Receipt that keeps `out` for its configuration while all other receipts lie in scratch."""


def run(config: CountConfig) -> FGramsManifest:
    """Count all n-grams of a tokenized corpus and keep the most frequent as f-grams."""
    tokens = load_manifest(TokensManifest, config.tokens)
    inputs = config.input_fingerprints(tokens)
    shared = shared_fields(FGramsManifest, config, inputs)
    scratch = storage.join(
        config.scratch or storage.join(config.out, "_scratch"), shared["fingerprint"][:16]
    )
    plan = make_plan(config, tokens, scratch)
    if done := claim(FGramsManifest, config.out, config, inputs):
        print(f"count: {config.out} is up to date")
        _remove_scratch(config, scratch)
        return done
    if config.keep_chunks:
        plan = _claim_chunks(config, config.keep_chunks, plan)
    plan = fit_to_disk(config, plan)
    connect(config.cluster)
    with stage_run(config, stage="count", fingerprint=shared["fingerprint"]):
        manifest = _count(config, plan, shared)
        log_manifest(manifest)
    publish(config.out, manifest)
    _remove_scratch(config, scratch)
    return manifest


def _claim_chunks(config: CountConfig, folder: str, plan: CountPlan) -> CountPlan:
    """Write the chunks to `folder`, or take those that it holds from an earlier count."""
    inputs = {"tokens": plan.manifest.fingerprint}
    if claim(ChunksManifest, folder, ChunksConfig(max_n=config.max_n), inputs) is None:
        return plan
    print(f"count: chunks of {config.tokens} are taken from {folder}")
    return plan.with_mapped(load_chunks((folder,), plan.manifest, config.max_n))


def _publish_chunks(config: CountConfig, folder: str, plan: CountPlan) -> None:
    receipts = [read_receipt(folder, name) or {} for name in plan.chunk_names(0)]
    tokens = plan.manifest
    fields = {"tokens": tokens.fingerprint}
    shared = shared_fields(ChunksManifest, ChunksConfig(max_n=config.max_n), fields)
    manifest = ChunksManifest(
        **shared,
        shards=tuple(Shard.model_validate(receipt["shard"]) for receipt in receipts),
        tokenizer_sha256=tokens.tokenizer_sha256,
        vocab_size=tokens.vocab_size,
        separator_id=tokens.separator_id,
        max_n=config.max_n,
    )
    publish(folder, manifest)


def _count(config: CountConfig, plan: CountPlan, shared: dict[str, Any]) -> FGramsManifest:
    started = time.monotonic()
    write_receipt(config.out, STARTED, {"scratch": plan.scratch})
    receipts = count_ranges(config, plan)
    ranking = _rank(config, plan, receipts)
    shards = write_shards(config, plan, receipts, ranking)
    index = _write_index(config, plan, shards)
    tokenizer = storage.read_bytes(storage.join(config.tokens, "tokenizer.json"))
    storage.write_bytes(storage.join(config.out, "tokenizer.json"), tokenizer)
    per_n = dict(ranking.runs.group_by("n").agg(pl.col("num").sum()).iter_rows())
    manifest = FGramsManifest(
        **shared,
        shards=tuple(shards),
        index=index,
        tokenizer_sha256=plan.manifest.tokenizer_sha256,
        vocab_size=plan.manifest.vocab_size,
        separator_id=plan.manifest.separator_id,
        max_n=config.max_n,
        min_count=config.min_count,
        num_fgrams=ranking.num_fgrams,
        num_fgrams_per_n={n: per_n.get(n, 0) for n in range(2, config.max_n + 1)},
        num_included=ranking.num_included,
        num_tokens=plan.num_tokens,
    )
    log_count(config, manifest, ranking.runs, seconds=time.monotonic() - started)
    return manifest


def _rank(config: CountConfig, plan: CountPlan, receipts: list[Receipt]) -> Ranking:
    """When nothing is frequent enough, `out` is free again for another configuration."""
    try:
        return rank_ranges(plan, receipts, num_fgrams=config.num_fgrams)
    except ValueError:
        remove_receipt(config.out, STARTED)
        raise


def count_ranges(config: CountConfig, plan: CountPlan) -> list[Receipt]:
    """The receipts of all ranges of all rounds."""
    if plan.engine == "a_priori":
        return _scan_apriori(plan)
    receipts = []
    for number in range(plan.num_rounds):
        receipts += _do_round(plan, number)
        if config.keep_chunks and not plan.is_mapped:
            _publish_chunks(config, config.keep_chunks, plan)
        elif plan.num_rounds > 1:
            remove_chunks(plan, number)
    return receipts


def _do_round(plan: CountPlan, number: int) -> list[Receipt]:
    """Map all chunks, reduce all ranges. No chunk is opened once every range is finished."""
    do_units = partial(run_units, memory_bytes=plan.peak_bytes)
    cuts_name = plan.cuts_name(number)
    if read_receipt(plan.scratch, cuts_name) is None:
        names = plan.chunk_names(number)
        map_one = partial(map_chunk, plan, number)
        do_units("count: map chunks", names, map_one, folder=plan.chunk_folder)
        planned = [cut.model_dump() for cut in plan_ranges(plan, number)]
        write_receipt(plan.scratch, cuts_name, {"cuts": planned})
    found = read_receipt(plan.scratch, cuts_name) or {}
    cuts = [Cut.model_validate(cut) for cut in found["cuts"]]
    names = plan.range_names(number, len(cuts) - 1)

    def reduce_one(i: int) -> Receipt:
        return reduce_range(plan, number, cuts[i], cuts[i + 1], names[i])

    return do_units("count: reduce ranges", names, reduce_one, folder=plan.scratch)


def _scan_apriori(plan: CountPlan) -> list[Receipt]:
    """max_n - 1 scans: count the candidates of length n in every chunk, then merge every range."""
    do_units = partial(run_units, folder=plan.scratch, memory_bytes=plan.peak_bytes)
    scans: list[list[Receipt]] = []
    merged: list[list[Receipt]] = []
    cuts = apriori.plan_tokens(plan)
    ranges = plan.range_names(0, len(cuts) - 1)
    for n in range(2, plan.max_n + 1):
        names = [f"scan-{n}-{name}" for name in plan.chunk_names(0)]
        scan = partial(apriori.scan_chunk, plan, n, scans, merged)
        scans = [*scans, do_units(f"count: scan n = {n}", names, scan)]
        names = [f"merge-{n}-{name}" for name in ranges]
        merge = partial(apriori.merge_range, plan, n, cuts, scans, merged)
        merged = [*merged, do_units(f"count: merge n = {n}", names, merge)]
    rank = partial(apriori.rank_merged, plan, merged, ranges)
    return do_units("count: rank ranges", ranges, rank)


def write_shards(
    config: CountConfig, plan: CountPlan, receipts: list[Receipt], ranking: Ranking
) -> list[Shard]:
    num_shards = -(-ranking.num_fgrams // config.rows_per_shard)
    names = [f"shard-{number:05d}" for number in range(num_shards)]

    def assemble(number: int) -> dict[str, Any]:
        return assemble_fgrams(
            plan,
            receipts,
            ranking,
            out=config.out,
            rows_per_shard=config.rows_per_shard,
            number=number,
        ).model_dump()

    memory_bytes = WORKER_BYTES + min(config.rows_per_shard, ranking.num_fgrams) * ROW_BYTES
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


def _remove_scratch(config: CountConfig, scratch: str) -> None:
    storage.remove_folder(scratch)
    if config.scratch is None:
        storage.remove_folder(storage.join(config.out, "_scratch"))
