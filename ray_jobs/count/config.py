"""The options of the count stage, and the plan that follows from them and from the disk."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from ray_jobs.runtime.config import JobConfig
from scone_core.artifacts import storage
from scone_core.artifacts.config import InputPath, Resource, Role, StageConfig
from scone_core.artifacts.manifests import ChunksManifest, TokensManifest, load_manifest
from scone_core.counting.plan import (
    Engine,
    ScratchForm,
)
from scone_core.counting.records import MAX_N
from scone_core.fgrams.trie import MAX_FGRAMS

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
