"""manifest.json <-> what a finished artifact is: one class per contract. See docs/data-format.md.

The manifest of evaluation/v1 is in `scone_core.evaluation.scores`, because it consists of scores.
"""

import json
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import ValidationError

from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen

MANIFEST = "manifest.json"
PLAN = "plan.json"
"""The file that says what an unfinished folder will be."""

RowFormat = Literal["bf16", "fp16", "fp32", "int8", "fp8"]
"""Formats of the rows of embeddings/v1; int8 and fp8 (e4m3) carry one float32 scale per row."""


class Shard(Frozen):
    """One published file of an artifact."""

    name: str
    num_rows: int
    num_bytes: int
    sha256: str
    first_id: int = 0
    """Id of the shard's first row where rows carry consecutive ids."""


class Manifest(Frozen):
    """What a finished artifact is. Written last; readers trust it and never a directory listing."""

    contract: str
    fingerprint: str
    config: dict[str, Any]
    """The semantic fields of the stage's configuration."""
    inputs: dict[str, str]
    """Fingerprint of every input, by the name of the config field that points to it."""
    shards: tuple[Shard, ...]
    CONTRACT: ClassVar[str]


class TokensManifest(Manifest):
    """tokens/v1: Arrow shards `doc_id uint64, tokens large_list<uint16 | uint32>`, no separator
    inside a document.
    """

    CONTRACT: ClassVar[str] = "tokens/v1"
    contract: Literal["tokens/v1"] = "tokens/v1"
    tokenizer_sha256: str
    """sha256 of the `tokenizer.json` beside the manifest."""
    vocab_size: int
    separator_id: int
    """The id that stands between documents in a packed stream; in no document and no f-gram."""
    num_documents: int
    num_tokens: int
    num_bytes_text: int
    """UTF-8 bytes of the text behind the tokens, for bits per byte; for chat, of what assistants
    say."""
    num_targets: int | None = None
    """Tokens that models learn to write, marked in the column `is_target`; None but for chat."""
    num_skipped_records: dict[str, int]
    """Records left out, by reason."""


class ChunksManifest(Manifest):
    """chunks/v1: the grouped suffix records of a corpus, for later counts of a grown one."""

    CONTRACT: ClassVar[str] = "chunks/v1"
    contract: Literal["chunks/v1"] = "chunks/v1"
    tokenizer_sha256: str
    vocab_size: int
    separator_id: int
    max_n: int


class Generation(Frozen):
    """What an f-gram set was before it grew."""

    fingerprint: str
    num_fgrams: int
    """Its f-grams have the ids below."""
    num_included: int


class FGramsManifest(Manifest):
    """fgrams/v1: ranked Parquet shards and the trie index `index/trie.npy`."""

    CONTRACT: ClassVar[str] = "fgrams/v1"
    contract: Literal["fgrams/v1"] = "fgrams/v1"
    tokenizer_sha256: str
    vocab_size: int
    separator_id: int
    max_n: int
    min_count: int
    num_fgrams: int
    num_fgrams_per_n: dict[int, int]
    num_included: int = 0
    """F-grams that are there on request: the last ones, whose counts may be below `min_count`."""
    num_tokens: int
    """Tokens of the corpus that was counted last."""
    index: Shard
    earlier: tuple[Generation, ...] = ()
    """The generations before this one, oldest first: an f-gram keeps the id it first got, and each
    generation's own f-grams follow in their rank order."""
    ranks: Shard | None = None
    """`ranks.npy`, uint32, the rank of every id in the last count; None where ids are ranks, which
    is so until a set grows."""

    @property
    def generations(self) -> tuple[Generation, ...]:
        """All generations, oldest first, this one last."""
        this = Generation(
            fingerprint=self.fingerprint,
            num_fgrams=self.num_fgrams,
            num_included=self.num_included,
        )
        return (*self.earlier, this)


class CheckpointManifest(Manifest):
    """checkpoint/v1: Hugging Face folder `main_model/` and, where the method has weights of its
    own, `fgram_model/` or `over_encoding/`.
    """

    CONTRACT: ClassVar[str] = "checkpoint/v1"
    contract: Literal["checkpoint/v1"] = "checkpoint/v1"
    step: int
    tokens_seen: int
    tokenizer_sha256: str
    method: Literal["plain", "scone", "fgram_mean", "over_encoding"]
    """How input embeddings are made (scone_core/model/input_embeddings.py)."""
    fgrams_fingerprint: str | None
    """None for a method without f-grams."""
    max_n: int | None
    fgram_output: Literal["residual", "replace"] | None

    def require_fgrams(self, fgrams: FGramsManifest, field: str) -> None:
        """Refuse f-grams that are neither those of the training nor grew from them.

        Raises:
            ArtifactError: names `field`, both fingerprints and the remedy.
        """
        known = {generation.fingerprint for generation in fgrams.generations}
        if self.fgrams_fingerprint not in known:
            raise ArtifactError(
                f"{field}: fingerprint {fgrams.fingerprint!r}, the training's was "
                f"{self.fgrams_fingerprint!r}; give the f-grams that the checkpoint was trained "
                "with, or later generations of them (none for a plain baseline)"
            )


class EmbeddingsManifest(Manifest):
    """embeddings/v1: Arrow shards of one row per f-gram, row id = f-gram id."""

    CONTRACT: ClassVar[str] = "embeddings/v1"
    contract: Literal["embeddings/v1"] = "embeddings/v1"
    fgrams_fingerprint: str
    checkpoint_fingerprint: str
    tokenizer_sha256: str
    max_n: int
    num_rows: int
    width: int
    row_format: RowFormat
    bytes_per_row: int
    converted_from: tuple[RowFormat, ...] = ()
    """Formats that the rows had before, where the table was converted."""
    ranks: Shard | None = None
    """The ranks of the f-grams, where they are not their ids (see FGramsManifest)."""


class DecodeManifest(Manifest):
    """decode/v1: how fast a served model and its baseline decode, measured once; no shards."""

    CONTRACT: ClassVar[str] = "decode/v1"
    contract: Literal["decode/v1"] = "decode/v1"
    decode_tokens_per_second: float
    decode_tokens_per_second_baseline: float
    answer: str
    """What the model says after the first prompt."""


AnyManifest = TypeVar("AnyManifest", bound=Manifest)


class ArtifactError(ValueError):
    """An artifact is missing, unfinished, damaged or of another kind than its reader needs."""


def load_manifest(kind: type[AnyManifest], folder: str) -> AnyManifest:
    """Read and check `folder/manifest.json`.

    Raises:
        ArtifactError: absent, unreadable, or of another contract than `kind`.
    """
    path = storage.join(folder, MANIFEST)
    if not storage.exists(path):
        state = (
            "an unfinished artifact"
            if storage.exists(storage.join(folder, PLAN))
            else "no artifact"
        )
        raise ArtifactError(
            f"{folder}: {state} ({MANIFEST} is missing); run the stage that writes {kind.CONTRACT}"
        )
    content = read_json(path)
    if content.get("contract") != kind.CONTRACT:
        raise ArtifactError(
            f"{folder}: holds {content.get('contract')!r}, but {kind.CONTRACT!r} is needed here"
        )
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ArtifactError(f"{path}: not a valid {kind.CONTRACT} manifest: {error}") from error


def require_equal(field: str, found: object, expected: object, remedy: str) -> None:
    """Refuse artifacts that do not belong together.

    Raises:
        ArtifactError: names the field, both values and the remedy.
    """
    if found != expected:
        raise ArtifactError(f"{field}: found {found!r}, expected {expected!r}; {remedy}")


def read_json(path: str) -> dict[str, Any]:
    """The JSON object in the file at `path`.

    Raises:
        ArtifactError: the file is damaged.
    """
    try:
        return json.loads(storage.read_bytes(path))
    except ValueError as error:
        raise ArtifactError(
            f"{path}: not readable as JSON ({error}); delete the folder and run its stage again"
        ) from error
