"""The options of the count stage, and the plan that follows from them."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from ray_jobs.runtime.config import JobConfig
from scone_core.artifacts import storage
from scone_core.artifacts.config import (
    InputPath,
    OptionalInputPath,
    OptionalOutputPath,
    Resource,
    Role,
)
from scone_core.artifacts.manifests import ChunksManifest, TokensManifest, load_manifest
from scone_core.counting.kept_chunks import load_chunks
from scone_core.counting.options import CountOptions, ScratchForm, read_ngrams
from scone_core.counting.plan import CountPlan, plan_count
from scone_core.counting.records import MAX_N
from scone_core.fgrams.trie import MAX_FGRAMS


class CountConfig(JobConfig):
    """Options of the count stage."""

    tokens: InputPath
    """Folder or URI of the tokens/v1 artifact to count."""
    chunks: Annotated[tuple[str, ...], Role("input")] = ()
    """Folders or URIs of chunks/v1 artifacts that earlier counts kept: their documents are counted
    too, without being mapped again."""
    num_fgrams: int = Field(ge=1)
    """F-grams to keep: the most frequent n-grams of all lengths together, or fewer if fewer reach
    `min_count`."""
    max_n: int = Field(default=5, ge=2, le=MAX_N)
    """Tokens of the longest n-grams."""
    min_count: int = Field(default=5, ge=1)
    """Rarer n-grams are never f-grams."""
    exclude_tokens: tuple[int, ...] = ()
    """No f-gram holds one of these token ids."""
    include: OptionalInputPath = None
    """Text file with one n-gram a line, as token ids with spaces between. These n-grams and all
    n-grams inside them become f-grams however rare, in addition to the `num_fgrams` most frequent.
    """
    rows_per_shard: int = Field(default=1 << 22, ge=1)
    """F-grams per Parquet file."""
    scratch: OptionalOutputPath = None
    """Folder or URI that every worker sees, for records of 8 to 16 bytes per token; by default
    inside `out`. It is removed at the end."""
    scratch_mb: Resource[int | None] = Field(default=None, ge=1)
    """Scratch space to use, MiB; by default all that is free. If the records do not fit, the corpus
    is mapped in several rounds, each of which keeps the records of its own first tokens."""
    scratch_form: Resource[ScratchForm] = "raw"
    """`compressed` needs half the scratch space and twice the time; it is faster on slow disks."""
    keep_chunks: OptionalOutputPath = None
    """Folder or URI where the grouped records stay as a chunks/v1 artifact, for later counts."""
    held_out: Resource[str | None] = None
    """Folder or URI of a tokens/v1 artifact whose documents were not counted; a second coverage
    curve is computed on it."""
    memory_mb: Resource[int] = Field(default=1024, ge=1)
    """Memory of one task, MiB. It decides the number of chunks and ranges."""
    num_chunks: Resource[int | None] = Field(default=None, ge=1)
    """Parts of the corpus that are mapped one by one; by default from `memory_mb`, at least 8."""
    num_ranges: Resource[int | None] = Field(default=None, ge=1)
    """Approximate number of ranges of n-grams, which are reduced one by one; by default from
    `memory_mb`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_fgrams > MAX_FGRAMS:
            raise ValueError(
                f"num_fgrams={self.num_fgrams}: f-gram ids have 32 bits, so {MAX_FGRAMS} at most"
            )
        return self

    def input_fingerprints(self, tokens: TokensManifest) -> dict[str, str]:
        """The fingerprints of everything that is counted; the order of `chunks` changes nothing."""
        kept = [load_manifest(ChunksManifest, folder).fingerprint for folder in self.chunks]
        inputs = {"tokens": tokens.fingerprint}
        inputs |= {f"chunks-{i}": found for i, found in enumerate(sorted(kept))}
        return inputs | ({"include": storage.sha256_of(self.include)} if self.include else {})

    def options(self, tokens: TokensManifest) -> CountOptions:
        """What to look for in a corpus.

        Raises:
            ValueError: names the line of the file `include` that is no n-gram.
        """
        include = ()
        if self.include:
            include = read_ngrams(
                self.include, tokens, max_n=self.max_n, exclude_tokens=self.exclude_tokens
            )
        return CountOptions(
            max_n=self.max_n,
            min_count=self.min_count,
            scratch_form=self.scratch_form,
            include=include,
            exclude_tokens=self.exclude_tokens,
        )

    def plan(self, tokens: TokensManifest, *, scratch: str) -> CountPlan:
        """How the count is cut into units, in one round.

        Raises:
            ValueError: memory, records or the index are too small.
            ArtifactError: `chunks` are of another tokenizer or another `max_n`.
        """
        return plan_count(
            self.tokens,
            tokens,
            self.options(tokens),
            scratch=scratch,
            memory_bytes=self.memory_mb << 20,
            chunk_folder=self.keep_chunks,
            num_chunks=self.num_chunks,
            num_ranges=self.num_ranges,
            kept=load_chunks(self.chunks, tokens, max_n=self.max_n),
        )
