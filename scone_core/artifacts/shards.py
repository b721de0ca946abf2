"""Shards: Arrow files of one uncompressed record batch that readers map."""

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from scone_core.artifacts import storage
from scone_core.artifacts.manifests import MANIFEST, ArtifactError, Shard

PAGE_BYTES = 4096


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
