"""The on-disk contracts between stages: manifests, claims on output folders, Arrow shards. See
docs/data-format.md.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import pyarrow as pa
from pydantic import ValidationError

from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen, StageConfig, fingerprint

MANIFEST = "manifest.json"
PLAN = "plan.json"
RECEIPTS = "_receipts"
PAGE_BYTES = 4096

RowFormat = Literal["bf16", "fp16", "fp32", "int8", "fp8"]
"""Of the rows of embeddings/v1; int8 and fp8 (e4m3) carry one float32 scale per row."""


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
    """Of the `tokenizer.json` that lies beside the manifest."""
    vocab_size: int
    separator_id: int
    """The id that stands between documents in a packed stream; in no document and no f-gram."""
    num_documents: int
    num_tokens: int
    num_bytes_text: int
    """UTF-8 bytes of the text behind the tokens (of chat: what assistants say), for bits per byte.
    """
    num_targets: int | None = None
    """Of chat: tokens that models learn to write, marked in the column `is_target`."""
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
    """Its f-grams: the ids below."""
    num_included: int


class FgramsManifest(Manifest):
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
    """Of a set that grew: `ranks.npy`, uint32, the rank of every id in the last count."""

    @property
    def generations(self) -> tuple[Generation, ...]:
        """All of them, oldest first, this one last."""
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
    """How input embeddings are made (scone_core/input_embeddings.py)."""
    fgrams_fingerprint: str | None
    """None for a method without f-grams."""
    max_n: int | None
    fgram_output: Literal["residual", "replace"] | None

    def require_fgrams(self, fgrams: FgramsManifest, field: str) -> None:
        """Refuse other f-grams than those of the training and those that grew from them.

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
    """The ranks of the f-grams, where they are not their ids (see FgramsManifest)."""


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
    content = _read_json(path)
    if content.get("contract") != kind.CONTRACT:
        raise ArtifactError(
            f"{folder}: holds {content.get('contract')!r}, but {kind.CONTRACT!r} is needed here"
        )
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ArtifactError(f"{path}: not a valid {kind.CONTRACT} manifest: {error}") from error


def claim(
    kind: type[AnyManifest], folder: str, config: StageConfig, inputs: Mapping[str, str]
) -> AnyManifest | None:
    """Claim `folder` as the output of `config`; the finished manifest when there is nothing left to
    do.

    An unfinished folder of the same configuration is resumed: its receipts are kept. Nothing that
    exists is changed
    before every check has passed.

    Raises:
        ArtifactError: `folder` belongs to another configuration (the differing fields are named) or
        holds files
            that no stage wrote.
        OSError: `folder` cannot be written.
    """
    plan = {"contract": kind.CONTRACT, "config": config.semantic_fields(), "inputs": dict(inputs)}
    if storage.exists(storage.join(folder, MANIFEST)):
        _refuse_other_plan(folder, _read_json(storage.join(folder, MANIFEST)), plan)
        return load_manifest(kind, folder)
    if storage.exists(storage.join(folder, PLAN)):
        if not storage.is_empty_folder(storage.join(folder, RECEIPTS)):
            _refuse_other_plan(folder, _read_json(storage.join(folder, PLAN)), plan)
    elif not storage.is_empty_folder(folder):
        raise ArtifactError(
            f"out={folder!r} is not empty and was not written by this stage; choose another folder"
        )
    storage.write_bytes(storage.join(folder, PLAN), _to_json(plan))
    return None


def publish(folder: str, manifest: AnyManifest) -> AnyManifest:
    """Write the manifest, last; then drop the receipts and the plan, which it replaces. What killed
    attempts left half written is dropped before.
    """
    storage.remove_abandoned(folder)
    storage.write_bytes(storage.join(folder, MANIFEST), _to_json(manifest.model_dump(mode="json")))
    storage.remove_folder(storage.join(folder, RECEIPTS))
    storage.remove(storage.join(folder, PLAN))
    return manifest


def plan_fields(
    kind: type[Manifest], config: StageConfig, inputs: Mapping[str, str]
) -> dict[str, Any]:
    """The fields that every manifest shares, for `kind(**plan_fields(...), ...)`."""
    fields = config.semantic_fields()
    return {
        "fingerprint": fingerprint(kind.CONTRACT, fields, dict(inputs)),
        "config": fields,
        "inputs": dict(inputs),
    }


def write_receipt(folder: str, name: str, content: Mapping[str, Any]) -> None:
    """Record that the unit of work `name` is finished; `content` is what the manifest needs to know
    of it.
    """
    storage.write_bytes(storage.join(folder, RECEIPTS, f"{name}.json"), _to_json(content))


def read_receipt(folder: str, name: str) -> dict[str, Any] | None:
    """The receipt of the unit of work `name`; None when it has not finished."""
    path = storage.join(folder, RECEIPTS, f"{name}.json")
    return _read_json(path) if storage.exists(path) else None


def remove_receipt(folder: str, name: str) -> None:
    """Forget that the unit of work `name` is finished."""
    storage.remove(storage.join(folder, RECEIPTS, f"{name}.json"))


def write_shard(folder: str, name: str, batch: pa.RecordBatch, *, first_id: int = 0) -> Shard:
    """Publish `batch` as one Arrow IPC file with one uncompressed record batch, its body on a page
    boundary.
    """
    num_bytes, sha256 = storage.write_atomic(
        storage.join(folder, name), lambda file: _write_ipc(file, batch)
    )
    return Shard(
        name=name, num_rows=batch.num_rows, num_bytes=num_bytes, sha256=sha256, first_id=first_id
    )


def map_shard(folder: str, shard: Shard) -> pa.RecordBatch:
    """Map a shard without copying it; a remote one is downloaded to the local cache first.

    Raises:
        ArtifactError: missing, truncated, compressed or not exactly one record batch.
    """
    with pa.memory_map(str(local_shard(folder, shard))) as source:
        return single_batch(source, storage.join(folder, shard.name))


def local_shard(folder: str, shard: Shard) -> Path:
    """The local file of a shard of the right size; a remote one is downloaded first and its sha256
    checked.

    Raises:
        ArtifactError: missing, truncated, or the download differs from the manifest.
    """
    path = storage.join(folder, shard.name)
    _check_size(path, shard)
    try:
        return storage.local_copy(path, sha256=shard.sha256)
    except storage.DamagedCopyError as error:
        raise ArtifactError(f"{error}; restore it or rebuild {folder}") from error


def single_batch(source: pa.NativeFile | pa.Buffer, path: str) -> pa.RecordBatch:
    """The record batch of an Arrow file as a view of its memory.

    Raises:
        ArtifactError: `path` is damaged, compressed or not exactly one record batch.
    """
    try:
        reader = pa.ipc.open_file(source)
        if reader.num_record_batches != 1:
            raise ArtifactError(
                f"{path}: {reader.num_record_batches} record batches, exactly one is needed"
            )
        before = pa.total_allocated_bytes()
        batch = reader.get_batch(0)
        if pa.total_allocated_bytes() - before > PAGE_BYTES:
            raise ArtifactError(
                f"{path}: compressed shards cannot be mapped; rewrite it uncompressed"
            )
        batch.validate()
        return batch
    except (pa.ArrowException, OSError) as error:
        raise ArtifactError(
            f"{path}: damaged Arrow file ({error}); delete it and run its stage again"
        ) from error


def verify_shards(folder: str, shards: Iterable[Shard]) -> None:
    """Compare size and sha256 of every shard with the manifest.

    Raises:
        ArtifactError: names the first shard that differs.
    """
    for shard in shards:
        path = storage.join(folder, shard.name)
        _check_size(path, shard)
        if storage.sha256_of(path) != shard.sha256:
            raise ArtifactError(
                f"{path}: sha256 differs from its manifest; restore it or rebuild {folder}"
            )


def require_equal(field: str, found: object, expected: object, remedy: str) -> None:
    """Refuse artifacts that do not belong together.

    Raises:
        ArtifactError: names the field, both values and the remedy.
    """
    if found != expected:
        raise ArtifactError(f"{field}: found {found!r}, expected {expected!r}; {remedy}")


def _refuse_other_plan(folder: str, existing: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    if existing.get("contract") != plan["contract"]:
        raise ArtifactError(
            f"out={folder!r} holds {existing.get('contract')!r}; choose another folder"
        )
    changes = [
        f"{name}: {existing[part].get(name)!r} there, {plan[part].get(name)!r} here"
        for part in ("config", "inputs")
        for name in sorted(existing[part].keys() | plan[part].keys())
        if existing[part].get(name) != plan[part].get(name)
    ]
    if changes:
        raise ArtifactError(
            f"out={folder!r} belongs to another configuration ({'; '.join(changes)}); "
            "choose another folder or use that configuration"
        )


def _check_size(path: str, shard: Shard) -> None:
    size = storage.file_size(path)
    if size is None:
        raise ArtifactError(
            f"{path}: listed in {MANIFEST} but missing; restore it or run its stage again"
        )
    if size != shard.num_bytes:
        raise ArtifactError(
            f"{path}: {size} bytes, {shard.num_bytes} in {MANIFEST}; restore it or rebuild it"
        )


def _write_ipc(file: Path, batch: pa.RecordBatch) -> None:
    if batch.num_rows:
        batch = _pad_schema(batch)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _pad_schema(batch: pa.RecordBatch) -> pa.RecordBatch:
    """`batch` with schema metadata padded so that the body of its IPC file starts on a page."""
    metadata = {**(batch.schema.metadata or {}), b"padding": b""}
    empty = batch.replace_schema_metadata(metadata)
    metadata[b"padding"] = b"." * (-_body_offset(empty) % PAGE_BYTES)
    return batch.replace_schema_metadata(metadata)


def _body_offset(batch: pa.RecordBatch) -> int:
    """Bytes before the body in the IPC file of `batch`: magic, schema message, batch header."""
    message = pa.ipc.read_message(batch.slice(0, 1).serialize())
    header = batch.slice(0, 1).serialize().size - message.body.size
    return 8 + batch.schema.serialize().size + header


def _read_json(path: str) -> dict[str, Any]:
    try:
        return json.loads(storage.read_bytes(path))
    except ValueError as error:
        raise ArtifactError(
            f"{path}: not readable as JSON ({error}); delete the folder and run its stage again"
        ) from error


def _to_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
