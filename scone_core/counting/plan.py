"""tokens/v1 + the memory of a worker -> CountPlan: how a count is cut into units of work.

A chunk is a part of the corpus, a range is a part of the order of n-grams; both only bound memory.
A round bounds scratch space: it maps all chunks but keeps only the records of its own first tokens
(`rounds`).
"""

import math
from collections.abc import Sequence

from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.manifests import TokensManifest
from scone_core.counting.options import CountOptions
from scone_core.counting.records import Layout
from scone_core.fgrams.trie import MAX_VOCAB

CHUNK_TOKENS, RANGE_RECORDS = 8 << 20, 8 << 20
"""Small enough to share work among many workers, large enough for long reads. Both grow when there
would be more than MAX_UNITS units."""
MAX_UNITS = 4096
MIN_CHUNKS, MIN_RANGES = 8, 4
"""Small corpora take the same path as large ones."""
WORKER_BYTES = 350 << 20
"""Resident memory of a worker before its first unit: interpreter, Ray, Arrow, compiled kernels."""
ROW_BYTES = 75
"""Peak bytes per n-gram of a range: 29 as counted, 29 in rank order, the order itself."""


class KeptChunk(Frozen):
    """A chunk file of an earlier count."""

    path: str
    num_tokens: int


class CountPlan(Frozen):
    """How a count is cut into units."""

    tokens: str
    manifest: TokensManifest
    options: CountOptions
    scratch: str
    chunk_folder: str
    num_chunks: int
    range_records: int
    """Approximate number of records of a range."""
    round_tokens: tuple[int, ...]
    """The first tokens at which rounds begin, and the end of the last round."""
    kept: tuple[KeptChunk, ...] = ()
    is_mapped: bool = False
    """The chunks of `tokens` are among those kept."""

    @property
    def layout(self) -> Layout:
        return Layout(self.options.max_n, self.manifest.vocab_size)

    def with_rounds(self, round_tokens: Sequence[int]) -> "CountPlan":
        """The plan with rounds that begin at these first tokens, the end of the last included."""
        return CountPlan.model_validate({**dict(self), "round_tokens": tuple(round_tokens)})

    def with_mapped(self, chunks: Sequence[KeptChunk]) -> "CountPlan":
        """The plan with chunks that an earlier count has made of the same tokens."""
        changes = {"kept": (*self.kept, *chunks), "num_chunks": 0, "is_mapped": True}
        return CountPlan.model_validate({**dict(self), **changes})

    @property
    def keeps_chunks(self) -> bool:
        """The chunk files are an artifact of their own, which stays."""
        return self.chunk_folder != self.scratch

    @property
    def num_rounds(self) -> int:
        return len(self.round_tokens) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole corpus, those in chunks of earlier counts included."""
        return self.num_new_tokens + sum(chunk.num_tokens for chunk in self.kept)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that are still to be mapped."""
        return 0 if self.is_mapped else self.manifest.num_tokens

    def chunk_names(self, round_index: int) -> list[str]:
        """Names of the chunks of a round."""
        suffix = f"of-{self.num_chunks:05d}-round-{round_index}-of-{self.num_rounds}"
        return [f"chunk-{i:05d}-{suffix}" for i in range(self.num_chunks)]

    def range_names(self, round_index: int, num_ranges: int) -> list[str]:
        """Names of the ranges of a round."""
        suffix = f"of-{num_ranges:05d}-of-{self.cuts_name(round_index)}"
        return [f"range-{i:05d}-{suffix}" for i in range(num_ranges)]

    def cuts_name(self, round_index: int) -> str:
        """Name of the cuts of a round; it names all that they depend on."""
        chunks = f"{self.num_chunks}-chunks-{self.range_records}-records"
        return f"cuts-{chunks}-round-{round_index}-of-{self.num_rounds}"

    def chunk_paths(self, round_index: int) -> list[str]:
        """The chunk files that a round reads: its own, then those kept by earlier counts."""
        names = self.chunk_names(round_index)
        own = [storage.join(self.chunk_folder, f"{name}.records") for name in names]
        return own + [chunk.path for chunk in self.kept]

    @property
    def peak_bytes(self) -> int:
        """Resident memory that no unit is expected to exceed."""
        per_chunk = self.num_new_tokens / max(self.num_chunks, 1) * _map_bytes(self.layout)
        per_range = self.range_records * _reduce_bytes(self.layout, self.options.min_count)
        return WORKER_BYTES + math.ceil(max(per_chunk, per_range))

    @property
    def record_bytes(self) -> int:
        """Approximate scratch bytes of the records of one round."""
        per_record = self.layout.record_bytes
        if self.options.scratch_form == "compressed":
            per_record = math.ceil(per_record / 2)
        index = self.num_chunks * (self.manifest.vocab_size + 7) * 8
        return self.num_new_tokens * per_record // self.num_rounds + index


def plan_count(
    tokens: str,
    manifest: TokensManifest,
    options: CountOptions,
    *,
    scratch: str,
    memory_bytes: int,
    chunk_folder: str | None = None,
    num_chunks: int | None = None,
    num_ranges: int | None = None,
    kept: Sequence[KeptChunk] = (),
) -> CountPlan:
    """The plan for one round. Where the numbers of chunks and ranges are not given, they keep every
    unit below `memory_bytes`.

    Raises:
        ValueError: the vocabulary is too large for the index, the n-grams do not fit the records,
            or the memory is too small for any unit.
    """
    if manifest.vocab_size > MAX_VOCAB:
        raise ValueError(
            f"vocab_size={manifest.vocab_size} of {tokens}: the index holds {MAX_VOCAB} ids; "
            "use a tokenizer with a smaller vocabulary"
        )
    layout = Layout(options.max_n, manifest.vocab_size)
    available = memory_bytes - WORKER_BYTES
    if available < 64 << 20:
        raise ValueError(
            f"memory_mb={memory_bytes >> 20}: at least {(WORKER_BYTES >> 20) + 64} are needed"
        )
    num_records = manifest.num_tokens + sum(chunk.num_tokens for chunk in kept)
    most = int(available / _reduce_bytes(layout, options.min_count))
    return CountPlan(
        tokens=tokens,
        manifest=manifest,
        options=options,
        scratch=scratch,
        chunk_folder=chunk_folder or scratch,
        num_chunks=num_chunks or _usual_chunks(manifest.num_tokens, layout, available),
        range_records=_range_records(num_records, num_ranges or MIN_RANGES, most),
        round_tokens=(0, manifest.vocab_size),
        kept=tuple(kept),
    )


def _usual_chunks(num_tokens: int, layout: Layout, available: int) -> int:
    """The number of chunks when none is asked for."""
    chunk_tokens = max(CHUNK_TOKENS, num_tokens // MAX_UNITS)
    for_memory = math.ceil(num_tokens * _map_bytes(layout) / available)
    return max(MIN_CHUNKS, math.ceil(num_tokens / chunk_tokens), for_memory)


def _range_records(num_records: int, num_ranges: int, most: int) -> int:
    """The records of a range, at most `most`, for at least `num_ranges` ranges."""
    usual = max(RANGE_RECORDS, num_records // MAX_UNITS)
    return max(1, min(usual, num_records // num_ranges, most))


def _map_bytes(layout: Layout) -> int:
    """Bytes per token of a chunk: the token itself, its record, and what sorting needs."""
    return 4 + layout.record_bytes + _sort_bytes(layout)


def _reduce_bytes(layout: Layout, min_count: int) -> float:
    """Bytes per record of a range at most: two copies while it is read, what sorting needs, and the
    n-grams, as many as can reach `min_count`.
    """
    rows = ROW_BYTES * (layout.max_n - 1) / min_count
    return 2 * layout.record_bytes + _sort_bytes(layout) + rows


def _sort_bytes(layout: Layout) -> int:
    """Bytes that sorting needs per record. Records of one word are sorted in place, others by a
    word each into a copy.
    """
    return 0 if layout.high_dtype is None else layout.record_bytes + 8
