"""tokens/v1 -> fgrams/v1: count all n-grams of a corpus, rank them, keep the most frequent."""

import time
from functools import partial

import polars as pl

from ray_jobs.count.config import CountConfig
from ray_jobs.count.report import log_count
from ray_jobs.runtime.cluster import connect
from ray_jobs.runtime.stage import run_stage
from ray_jobs.runtime.tracking import RunLog
from ray_jobs.runtime.units import run_units
from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.folders import SharedFields, shared_fields
from scone_core.artifacts.manifests import FGramsManifest, Shard, TokensManifest, load_manifest
from scone_core.artifacts.units import remove_receipt, write_receipt
from scone_core.counting.count import count_fgrams, write_index
from scone_core.counting.kept_chunks import claim_chunks
from scone_core.counting.plan import CountPlan
from scone_core.counting.ranking import NothingFrequentError, Ranking
from scone_core.counting.rounds import fit_to_disk

STARTED = "started"
SCRATCH = "_scratch"


class StartedReceipt(Frozen):
    """Keeps `out` for its configuration while all other receipts are written to scratch."""

    scratch: str


def run(config: CountConfig) -> FGramsManifest:
    """Count all n-grams of a tokenized corpus and keep the most frequent as f-grams."""
    tokens = load_manifest(TokensManifest, config.tokens)
    inputs = config.input_fingerprints(tokens)
    fingerprint = shared_fields(FGramsManifest, config, inputs)["fingerprint"]
    scratch = config.scratch or storage.join(config.out, SCRATCH)
    plan = config.plan(tokens, scratch=storage.join(scratch, fingerprint[:16]))
    build = partial(_build, config, plan)
    manifest = run_stage(FGramsManifest, config, inputs, build, stage="count")
    storage.remove_folder(plan.scratch)
    if config.scratch is None:
        storage.remove_folder(scratch)
    return manifest


def _build(
    config: CountConfig, plan: CountPlan, shared: SharedFields, log: RunLog
) -> FGramsManifest:
    plan = _fit(config, plan)
    connect(config.cluster)
    started = time.monotonic()
    ranking, shards = _count(config, plan)
    index = write_index(shards, run_units, out=config.out, vocab_size=plan.manifest.vocab_size)
    tokenizer = storage.read_bytes(storage.join(config.tokens, "tokenizer.json"))
    storage.write_bytes(storage.join(config.out, "tokenizer.json"), tokenizer)
    manifest = _manifest(ranking, shards, index, shared)
    log_count(config, manifest, ranking.runs, log, seconds=time.monotonic() - started)
    return manifest


def _fit(config: CountConfig, plan: CountPlan) -> CountPlan:
    """The plan that takes kept chunks where there are some, in as many rounds as the disk needs."""
    if plan.keeps_chunks:
        plan = claim_chunks(plan)
    if plan.is_mapped:
        print(f"count: chunks of {config.tokens} are taken from {plan.chunk_folder}")
    limit = None if config.scratch_mb is None else config.scratch_mb << 20
    plan, lines = fit_to_disk(plan, scratch_bytes=limit)
    print("\n".join(f"count: {line}" for line in lines))
    return plan


def _count(config: CountConfig, plan: CountPlan) -> tuple[Ranking, list[Shard]]:
    """Count on Ray. If no n-gram reaches `min_count`, release `out` so that another configuration
    may use it.
    """
    write_receipt(config.out, STARTED, StartedReceipt(scratch=plan.scratch))
    try:
        return count_fgrams(
            plan,
            run_units,
            num_fgrams=config.num_fgrams,
            out=config.out,
            rows_per_shard=config.rows_per_shard,
        )
    except NothingFrequentError:
        remove_receipt(config.out, STARTED)
        raise


def _manifest(
    ranking: Ranking, shards: list[Shard], index: Shard, shared: SharedFields
) -> FGramsManifest:
    plan = ranking.plan
    per_n = dict(ranking.runs.group_by("n").agg(pl.col("num").sum()).iter_rows())
    return FGramsManifest(
        **shared,
        shards=tuple(shards),
        index=index,
        tokenizer_sha256=plan.manifest.tokenizer_sha256,
        vocab_size=plan.manifest.vocab_size,
        separator_id=plan.manifest.separator_id,
        max_n=plan.options.max_n,
        min_count=plan.options.min_count,
        num_fgrams=ranking.num_fgrams,
        num_fgrams_per_n={n: per_n.get(n, 0) for n in range(2, plan.options.max_n + 1)},
        num_included=ranking.num_included,
        num_tokens=plan.num_tokens,
    )
