"""tokens/v1 + memory and disk at hand -> CountPlan: how a count is cut into units of work.

Chunks are parts of the corpus, ranges parts of the order of n-grams; both only bound memory. Rounds
bound scratch space: each maps all chunks but keeps the records of its own first tokens alone.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np

from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.manifests import ArtifactError, Shard, TokensManifest
from scone_core.artifacts.shards import verify_shards
from scone_core.corpus.token_shards import map_documents
from scone_core.counting.one_scan import Piece, count_ngrams, count_tokens
from scone_core.counting.records import Layout

CHUNK_TOKENS, RANGE_RECORDS = 8 << 20, 8 << 20
"""Small enough to share work among many workers, large enough for long reads; more only when their
number would pass MAX_UNITS."""
MAX_UNITS = 4096
MIN_CHUNKS, MIN_RANGES = 8, 4
"""Small corpora take the same path as large ones."""
WORKER_BYTES = 350 << 20
"""Resident memory of a worker before its first unit: interpreter, Ray, Arrow, compiled kernels."""
ROW_BYTES = 75
"""Peak bytes per n-gram of a range: 29 as counted, 29 in rank order, the order itself."""
SAMPLE_TOKENS = 1 << 20

Engine = Literal["one_scan", "a_priori"]
ScratchForm = Literal["raw", "compressed"]


class KeptChunk(Frozen):
    """A chunk file of an earlier count."""

    path: str
    num_tokens: int


class CountPlan(Frozen):
    """How a count is cut into units."""

    tokens: str
    manifest: TokensManifest
    scratch: str
    chunk_folder: str
    max_n: int
    min_count: int
    num_chunks: int
    range_records: int
    """Records of a range, about."""
    round_tokens: tuple[int, ...]
    """First tokens at which the rounds begin, and the end of the last."""
    engine: Engine = "one_scan"
    scratch_form: ScratchForm = "raw"
    kept: tuple[KeptChunk, ...] = ()
    is_mapped: bool = False
    """The chunks of `tokens` are among those kept."""
    include: tuple[tuple[int, ...], ...] = ()
    """N-grams that become f-grams however rare, closed under prefixes and suffixes."""
    exclude_tokens: tuple[int, ...] = ()

    @property
    def layout(self) -> Layout:
        return Layout(self.max_n, self.manifest.vocab_size)

    def with_rounds(self, round_tokens: Sequence[int]) -> "CountPlan":
        """The plan in rounds that begin at these first tokens, the end of the last included."""
        return CountPlan.model_validate({**dict(self), "round_tokens": tuple(round_tokens)})

    def with_mapped(self, chunks: Sequence[KeptChunk]) -> "CountPlan":
        """The plan with chunks that an earlier count has made of the same tokens."""
        changes = {"kept": (*self.kept, *chunks), "num_chunks": 0, "is_mapped": True}
        return CountPlan.model_validate({**dict(self), **changes})

    @property
    def num_rounds(self) -> int:
        return len(self.round_tokens) - 1

    @property
    def num_tokens(self) -> int:
        """Of the whole corpus, chunks of earlier counts included."""
        return self.num_new_tokens + sum(chunk.num_tokens for chunk in self.kept)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that are still to be mapped."""
        return 0 if self.is_mapped else self.manifest.num_tokens

    def chunk_names(self, number: int) -> list[str]:
        """Names of the chunks of a round."""
        suffix = f"of-{self.num_chunks:05d}-round-{number}-of-{self.num_rounds}"
        return [f"chunk-{i:05d}-{suffix}" for i in range(self.num_chunks)]

    def range_names(self, number: int, num_ranges: int) -> list[str]:
        """Names of the ranges of a round."""
        suffix = f"of-{num_ranges:05d}-of-{self.cuts_name(number)}"
        return [f"range-{i:05d}-{suffix}" for i in range(num_ranges)]

    def cuts_name(self, number: int) -> str:
        """Name of the cuts of a round; they depend on all that is in it."""
        chunks = f"{self.num_chunks}-chunks-{self.range_records}-records"
        return f"cuts-{chunks}-round-{number}-of-{self.num_rounds}"

    def chunk_paths(self, number: int) -> list[str]:
        own = [storage.join(self.chunk_folder, f"{n}.records") for n in self.chunk_names(number)]
        return own + [chunk.path for chunk in self.kept]

    @property
    def peak_bytes(self) -> int:
        """Resident memory that no unit is expected to exceed."""
        per_chunk = (
            self.num_new_tokens / max(self.num_chunks, 1) * _map_bytes(self.layout, self.engine)
        )
        per_range = self.range_records * _reduce_bytes(self.layout, self.min_count)
        return WORKER_BYTES + math.ceil(max(per_chunk, per_range))

    @property
    def record_bytes(self) -> int:
        """Scratch bytes of the records of one round, about."""
        per_record = self.layout.record_bytes
        if self.engine == "a_priori":
            per_record = 7
        elif self.scratch_form == "compressed":
            per_record = math.ceil(per_record / 2)
        index = self.num_chunks * (self.manifest.vocab_size + 7) * 8
        return self.num_new_tokens * per_record // self.num_rounds + index


def plan_count(
    tokens: str,
    manifest: TokensManifest,
    *,
    scratch: str,
    chunk_folder: str | None = None,
    max_n: int,
    min_count: int,
    memory_bytes: int,
    num_chunks: int | None = None,
    num_ranges: int | None = None,
    engine: Engine = "one_scan",
    scratch_form: ScratchForm = "raw",
    kept: tuple[KeptChunk, ...] = (),
    include: tuple[tuple[int, ...], ...] = (),
    exclude_tokens: tuple[int, ...] = (),
) -> CountPlan:
    """Chunks and ranges that keep every unit below `memory_bytes`, where their number is not given.

    Raises:
        ValueError: the n-grams do not fit the records, or the memory is too small for any unit.
    """
    layout = Layout(max_n, manifest.vocab_size)
    available = memory_bytes - WORKER_BYTES
    if available < 64 << 20:
        raise ValueError(
            f"memory_mb={memory_bytes >> 20}: at least {(WORKER_BYTES >> 20) + 64} are needed"
        )
    num_records = manifest.num_tokens + sum(chunk.num_tokens for chunk in kept)
    for_map = math.ceil(manifest.num_tokens * _map_bytes(layout, engine) / available)
    chunk_tokens = max(CHUNK_TOKENS, manifest.num_tokens // MAX_UNITS)
    usual = max(MIN_CHUNKS, math.ceil(manifest.num_tokens / chunk_tokens), for_map)
    range_records = max(RANGE_RECORDS, num_records // MAX_UNITS)
    range_records = min(range_records, num_records // (num_ranges or MIN_RANGES))
    range_records = min(range_records, int(available / _reduce_bytes(layout, min_count)))
    return CountPlan(
        tokens=tokens,
        manifest=manifest,
        scratch=scratch,
        chunk_folder=chunk_folder or scratch,
        max_n=max_n,
        min_count=min_count,
        num_chunks=num_chunks or usual,
        range_records=max(1, range_records),
        round_tokens=(0, manifest.vocab_size),
        engine=engine,
        scratch_form=scratch_form,
        kept=kept,
        include=include,
        exclude_tokens=exclude_tokens,
    )


class Estimate(Frozen):
    """What a count is expected to find; extrapolated from a sample, so a guess."""

    num_distinct: int
    num_frequent: int
    """N-grams at `min_count` or above."""

    @property
    def row_bytes(self) -> int:
        """Scratch bytes of the counted n-grams."""
        return self.num_frequent * 29


def estimate_ngrams(plan: CountPlan) -> Estimate:
    """Distinct n-grams grow as a power of the corpus (Heaps' law): its exponent is taken from the
    first SAMPLE_TOKENS and their first half.
    """
    whole = sample_piece(plan.tokens, plan.manifest, SAMPLE_TOKENS)
    if whole.last < 2:
        return Estimate(num_distinct=0, num_frequent=0)
    num_ngrams = [
        [
            len(count_ngrams([part], plan.layout, min_count=least).n_M)
            for least in (1, plan.min_count)
        ]
        for part in (whole._replace(last=whole.last // 2), whole)
    ]
    growth = plan.num_tokens / whole.last
    powers = [
        max(0.5, math.log2(max(whole, 1) / max(half, 1)))
        for half, whole in zip(*num_ngrams, strict=True)
    ]
    distinct, frequent = (
        round(num * growth**power) for num, power in zip(num_ngrams[1], powers, strict=True)
    )
    most = plan.num_tokens * (plan.max_n - 1)
    return Estimate(
        num_distinct=min(distinct, most), num_frequent=min(frequent, most // plan.min_count)
    )


def sample_piece(tokens: str, manifest: TokensManifest, num_tokens: int) -> Piece:
    """About the first `num_tokens` tokens of the corpus: those of its first shard that has any."""
    for shard in manifest.shards:
        tokens_L, offsets_D1 = map_documents(tokens, shard)
        if len(tokens_L):
            return Piece(tokens_L, offsets_D1, 0, min(num_tokens, len(tokens_L)))
    return Piece(np.empty(0, np.uint16), np.zeros(1, np.int64), 0, 0)


def sample_cuts(plan: CountPlan, num_parts: int) -> list[int]:
    """First tokens at which parts of about equal numbers of positions begin, and the end of the
    last: about [num_parts + 1]. From a sample of the corpus.
    """
    vocab_size = plan.manifest.vocab_size
    sample = sample_piece(plan.tokens, plan.manifest, SAMPLE_TOKENS)
    ends_V = np.cumsum(count_tokens([sample], vocab_size) + 1)
    targets = np.arange(1, num_parts + 1) * (ends_V[-1] / num_parts)
    return [0, *sorted({min(int(i) + 1, vocab_size) for i in np.searchsorted(ends_V, targets)})]


def chunk_pieces(plan: CountPlan, chunk: int) -> Iterator[Piece]:
    """The chunk's part of every shard. The chunk that holds the begin of a shard verifies it."""
    for shard, low, high in _parts(plan, chunk):
        yield _piece(plan, shard, low, high)


@contextmanager
def damage_named(plan: CountPlan, chunk: int) -> Iterator[None]:
    """Of a damaged shard that another chunk has not verified yet, this one may find other things
    wrong: the damage is what is reported.
    """
    try:
        yield
    except ValueError:
        verify_shards(plan.tokens, [shard for shard, _, _ in _parts(plan, chunk)])
        raise


def _parts(plan: CountPlan, chunk: int) -> Iterator[tuple[Shard, int, int]]:
    """The chunk's shards, and which of their bytes. Chunks cut the bytes of all shards evenly, so
    no shard has to be opened to plan.
    """
    total = sum(shard.num_bytes for shard in plan.manifest.shards)
    begin, end = (total * i // plan.num_chunks for i in (chunk, chunk + 1))
    start = 0
    for shard in plan.manifest.shards:
        low, high = max(begin - start, 0), min(end - start, shard.num_bytes)
        if low < high:
            yield shard, low, high
        start += shard.num_bytes


def _piece(plan: CountPlan, shard: Shard, low: int, high: int) -> Piece:
    """What lies between two of a shard's bytes, which stand for its positions in proportion."""
    if low == 0:
        verify_shards(plan.tokens, [shard])
    tokens_L, offsets_D1 = map_documents(plan.tokens, shard)
    inside = offsets_D1[0] == 0 and offsets_D1[-1] == len(tokens_L)
    if not inside or (offsets_D1[1:] < offsets_D1[:-1]).any():
        path = storage.join(plan.tokens, shard.name)
        raise ArtifactError(f"{path}: damaged document boundaries; restore it or tokenize again")
    first, last = (len(tokens_L) * byte // shard.num_bytes for byte in (low, high))
    return Piece(tokens_L, offsets_D1, first, last)


def _map_bytes(layout: Layout, engine: Engine) -> int:
    """Bytes per token of a chunk: the token itself and its record, or what a-priori needs at most:
    key, position, slot, number and a hash table of only distinct keys at half its load.
    """
    if engine == "a_priori":
        return 4 + 8 + 3 * 4 + 2 * 20
    return 4 + layout.record_bytes + _sort_bytes(layout)


def _reduce_bytes(layout: Layout, min_count: int) -> float:
    """Bytes per record of a range at most: two copies while it is read, what sorting takes, and the
    n-grams, as many as can reach `min_count`.
    """
    rows = ROW_BYTES * (layout.max_n - 1) / min_count
    return 2 * layout.record_bytes + _sort_bytes(layout) + rows


def _sort_bytes(layout: Layout) -> int:
    """One-word records are sorted in place, others by a word each into a copy."""
    return 0 if layout.high_dtype is None else layout.record_bytes + 8
