"""The options of the count stage, and the plan that follows from them and from the disk."""

import math
from itertools import combinations
from typing import Annotated, Self

from pydantic import Field, model_validator

from ray_jobs.runtime.units import JobConfig
from scone_core.artifacts import storage
from scone_core.artifacts.config import InputPath, Resource, Role, StageConfig
from scone_core.artifacts.manifests import (
    ChunksManifest,
    TokensManifest,
    load_manifest,
    read_receipt,
    require_equal,
    write_receipt,
)
from scone_core.counting.plan import (
    CountPlan,
    Engine,
    Estimate,
    KeptChunk,
    ScratchForm,
    estimate_ngrams,
    plan_count,
    sample_cuts,
)
from scone_core.counting.records import MAX_N
from scone_core.fgrams.trie import MAX_FGRAMS, MAX_VOCAB

MAX_ROUNDS = 64
ROUNDS = "rounds"
OptionalInput = Annotated[str | None, Role("input")]


class CountConfig(JobConfig):
    """Options of the count stage."""

    tokens: InputPath
    """Folder or URI of the tokens/v1 artifact to count."""
    chunks: Annotated[tuple[str, ...], Role("input")] = ()
    """Folders or URIs of chunks/v1 artifacts that earlier counts kept: their documents are counted
    too, without being mapped again."""
    num_fgrams: int = Field(ge=1)
    """Size of V_fgram: the most frequent n-grams of all lengths together; fewer where fewer reach
    `min_count`."""
    max_n: int = Field(default=5, ge=2, le=MAX_N)
    """Longest n-grams, tokens."""
    min_count: int = Field(default=5, ge=1)
    """Rarer n-grams are never f-grams."""
    exclude_tokens: tuple[int, ...] = ()
    """No f-gram holds one of these token ids."""
    include: OptionalInput = None
    """Text file with one n-gram a line, as token ids with spaces between. They are f-grams however
    rare, with all n-grams inside them; those beyond `num_fgrams` come on top of it."""
    rows_per_shard: int = Field(default=1 << 22, ge=1)
    """F-grams per Parquet file."""
    engine: Resource[Engine] = "one_scan"
    """One scan over suffix records of 8 bytes per token (16 at most), or the paper's max_n - 1
    a-priori scans with about 7, however long the n-grams. Both give the same bytes."""
    scratch: Annotated[str | None, Role("output")] = None
    """Folder or URI that every worker sees; by default inside `out`. Removed at the end."""
    scratch_mb: Resource[int | None] = Field(default=None, ge=1)
    """Scratch space to use, MiB; by default what is free. Where records do not fit, the corpus is
    mapped in several rounds over first tokens."""
    scratch_form: Resource[ScratchForm] = "raw"
    """compressed: half the bytes for twice the time, worth it on slow disks."""
    keep_chunks: Annotated[str | None, Role("output")] = None
    """Folder or URI where the grouped records stay as a chunks/v1 artifact, for later counts."""
    held_out: Annotated[str | None, Role("resource")] = None
    """Folder or URI of a tokens/v1 artifact whose documents were not counted: the coverage curve is
    computed on it as well."""
    memory_mb: Resource[int] = Field(default=1024, ge=1)
    """Memory of one task, MiB; decides the number of chunks and ranges."""
    num_chunks: Resource[int | None] = Field(default=None, ge=1)
    """Parts of the corpus that are mapped one by one; by default from `memory_mb`, at least 8."""
    num_ranges: Resource[int | None] = Field(default=None, ge=1)
    """Ranges of n-grams that are reduced one by one, about; by default from `memory_mb`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_fgrams > MAX_FGRAMS:
            raise ValueError(
                f"num_fgrams={self.num_fgrams}: f-gram ids have 32 bits, so {MAX_FGRAMS} at most"
            )
        needs_records = self.keep_chunks or self.chunks or self.include
        if self.engine == "a_priori" and needs_records:
            raise ValueError("keep_chunks, chunks, include: they need engine='one_scan'")
        return self

    def input_fingerprints(self, tokens: TokensManifest) -> dict[str, str]:
        """Of everything that is counted, whatever the order in which it is named."""
        kept = [load_manifest(ChunksManifest, folder).fingerprint for folder in self.chunks]
        inputs = {"tokens": tokens.fingerprint}
        inputs |= {f"chunks-{i}": found for i, found in enumerate(sorted(kept))}
        return inputs | ({"include": storage.sha256_of(self.include)} if self.include else {})


class ChunksConfig(StageConfig):
    """What decides the content of a chunks/v1 artifact."""

    max_n: int


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
