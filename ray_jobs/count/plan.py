"""CountConfig -> CountPlan that fits memory and disk."""

import math
from itertools import combinations

from ray_jobs.count.config import CountConfig
from scone_core.artifacts import storage
from scone_core.artifacts.folders import read_receipt, write_receipt
from scone_core.artifacts.manifests import (
    ChunksManifest,
    TokensManifest,
    load_manifest,
    require_equal,
)
from scone_core.counting.plan import (
    CountPlan,
    Estimate,
    KeptChunk,
    estimate_ngrams,
    plan_count,
    sample_cuts,
)
from scone_core.fgrams.trie import MAX_VOCAB

MAX_ROUNDS = 64


ROUNDS = "rounds"


def load_chunks(folders: tuple[str, ...], tokens: TokensManifest, max_n: int) -> list[KeptChunk]:
    """The chunk files of earlier counts.

    Raises:
        ArtifactError: they are of another tokenizer or another `max_n`.
    """
    found = []
    for folder in folders:
        manifest = load_manifest(ChunksManifest, folder)
        for name in ("tokenizer_sha256", "vocab_size", "separator_id"):
            expected = getattr(tokens, name)
            remedy = "count it together with tokens of the same tokenizer"
            require_equal(f"{name} of {folder}", getattr(manifest, name), expected, remedy)
        require_equal(f"max_n of {folder}", manifest.max_n, max_n, "use the same max_n")
        for shard in manifest.shards:
            path = storage.join(folder, shard.name)
            require_equal(
                f"bytes of {path}", storage.file_size(path), shard.num_bytes, "restore it"
            )
            found.append(KeptChunk(path=path, num_tokens=shard.num_rows))
    return found


def make_plan(config: CountConfig, tokens: TokensManifest, scratch: str) -> CountPlan:
    """The plan for one round.

    Raises:
        ValueError: memory, records or the index are too small.
    """
    if tokens.vocab_size > MAX_VOCAB:
        raise ValueError(
            f"vocab_size={tokens.vocab_size} of {config.tokens}: the index holds {MAX_VOCAB} ids; "
            "use a tokenizer with a smaller vocabulary"
        )
    return plan_count(
        config.tokens,
        tokens,
        scratch=scratch,
        chunk_folder=config.keep_chunks,
        max_n=config.max_n,
        min_count=config.min_count,
        memory_bytes=config.memory_mb << 20,
        num_chunks=config.num_chunks,
        num_ranges=config.num_ranges,
        engine=config.engine,
        scratch_form=config.scratch_form,
        kept=tuple(load_chunks(config.chunks, tokens, config.max_n)),
        include=read_ngrams(config, tokens) if config.include else (),
        exclude_tokens=config.exclude_tokens,
    )


def read_ngrams(config: CountConfig, tokens: TokensManifest) -> tuple[tuple[int, ...], ...]:
    """The n-grams of the file `include` and all n-grams inside them, sorted.

    Raises:
        ValueError: names the line that is no n-gram, or holds an excluded token.
    """
    found: set[tuple[int, ...]] = set()
    refused = {*config.exclude_tokens, tokens.separator_id}
    lines = storage.read_bytes(config.include or "").decode().splitlines()
    for number, line in enumerate(lines, 1):
        if not all(word.isdecimal() for word in line.split()):
            raise ValueError(f"{config.include}, line {number}: token ids are expected: {line!r}")
        ngram = tuple(int(word) for word in line.split())
        inside = all(token < tokens.vocab_size for token in ngram) and not refused & {*ngram}
        if ngram and not (2 <= len(ngram) <= config.max_n and inside):
            raise ValueError(
                f"{config.include}, line {number}: {line!r} is not 2 to max_n={config.max_n} ids "
                f"below vocab_size={tokens.vocab_size} without separator and excluded tokens"
            )
        pairs = combinations(range(len(ngram) + 1), 2)
        found |= {ngram[first:last] for first, last in pairs if last - first >= 2}
    return tuple(sorted(found))


def fit_to_disk(config: CountConfig, plan: CountPlan) -> CountPlan:
    """Say what the run will need, and use as many rounds as the disk asks for; a run that goes on
    keeps its rounds and opens no input for that.

    Raises:
        ValueError: it does not fit in any number of rounds.
    """
    if begun := read_receipt(plan.scratch, ROUNDS):
        print(f"count: going on with {plan.scratch}")
        return plan.with_rounds(begun["round_tokens"])
    free = storage.free_bytes(plan.scratch)
    limits = [size for size in (free, _limit(config)) if size is not None]
    expected = estimate_ngrams(plan)
    plan = _add_rounds(config, plan, expected, min(limits) if limits else None)
    room = "" if free is None else f" ({free >> 20:,} MiB free)"
    print(
        f"count: {plan.num_tokens:,} tokens in {len(plan.manifest.shards)} shards and "
        f"{len(plan.kept)} kept chunks, n = 2..{plan.max_n}, min_count {plan.min_count}, "
        f"{plan.engine}\n"
        f"count: expected (a guess from a sample): {expected.num_distinct:,} distinct n-grams, "
        f"{expected.num_frequent:,} frequent\n"
        f"count: plan: {plan.num_rounds} rounds of {plan.num_chunks} chunks, about "
        f"{-(-plan.num_tokens // plan.range_records)} ranges, at most "
        f"{plan.peak_bytes >> 20:,} MiB per task, about "
        f"{plan.record_bytes + expected.row_bytes >> 20:,} MiB of scratch in {plan.scratch}{room}"
    )
    write_receipt(plan.scratch, ROUNDS, {"round_tokens": plan.round_tokens})
    return plan


def _limit(config: CountConfig) -> int | None:
    return None if config.scratch_mb is None else config.scratch_mb << 20


def _add_rounds(
    config: CountConfig, plan: CountPlan, expected: Estimate, available: int | None
) -> CountPlan:
    if available is None or plan.record_bytes + expected.row_bytes <= available:
        return plan
    for_records = available - expected.row_bytes
    num_rounds = math.ceil(plan.record_bytes / for_records) if for_records > 0 else math.inf
    if num_rounds > MAX_ROUNDS or config.keep_chunks or config.engine == "a_priori":
        raise ValueError(
            f"scratch={plan.scratch!r}: {available >> 20:,} MiB available, about "
            f"{plan.record_bytes + expected.row_bytes >> 20:,} MiB needed; name a larger disk"
        )
    return plan.with_rounds(sample_cuts(plan, int(num_rounds)))
