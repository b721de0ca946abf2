"""files that are tokenized already -> documents of token ids.

| file | what it holds | a document ends |
|---|---|---|
| `.parquet`, `.arrow` | Hugging Face data set, column `input_ids` | with its row, at separators |
| `.npy` | Dolma, OLMo: a flat array, with or without header | at separators |
| `.bin` beside `.idx` | Megatron: sequences | as the index says, at separators |
| `.bin` alone | nanoGPT: a flat array | at separators |

Shapes: L tokens, V vocabulary.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.corpus.documents import document_id
from scone_core.corpus.input_files import SourceFile

BLOCK_TOKENS = 1 << 22
"""Tokens of a flat array that are read at a time."""
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}


class TokenFormat(Frozen):
    """How files that are tokenized already hold token ids."""

    column: str = "input_ids"
    """Column of Parquet and Arrow files that holds the ids."""
    flat_dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the ids in `.npy` files without NumPy's header and in nanoGPT's `.bin`."""


@dataclass
class TokenPack:
    """Consecutive documents that become one shard."""

    number: int = 0
    doc_ids: list[int] = field(default_factory=list)
    documents: list[np.ndarray] = field(default_factory=list)
    num_bytes: int = 0
    """UTF-8 bytes of the text behind the tokens."""


class Row(NamedTuple):
    """Part of a file's flat stream: it begins a document, or continues the one before."""

    tokens_L: np.ndarray
    begins: bool


def read_token_packs(
    sources: Iterable[SourceFile],
    form: TokenFormat,
    pack_bytes: int,
    *,
    separator_id: int,
    bytes_V: np.ndarray,
) -> Iterator[TokenPack]:
    """Stream files as packs of about `pack_bytes` of text; memory holds one pack and one document.

    Args:
        bytes_V: UTF-8 bytes behind every token id; its length is the vocabulary size.

    Raises:
        ValueError: names the file that is damaged, or holds other than ids of the vocabulary.
    """
    pack = TokenPack()
    for source in sources:
        documents = read_token_documents(source, form, separator_id=separator_id)
        for number, tokens_L in enumerate(documents):
            if tokens_L.max() >= len(bytes_V):
                raise ValueError(
                    f"{source.path}, document {number}: token id {tokens_L.max()}, the tokenizer "
                    f"has ids below {len(bytes_V)}; give the one that made this file"
                )
            pack.doc_ids.append(document_id(source, number))
            pack.documents.append(tokens_L)
            pack.num_bytes += int(bytes_V[tokens_L].sum())
            if pack.num_bytes >= pack_bytes:
                yield pack
                pack = TokenPack(pack.number + 1)
    if pack.documents:
        yield pack


def read_token_documents(
    source: SourceFile, form: TokenFormat, *, separator_id: int
) -> Iterator[np.ndarray]:
    """The documents of a file in order, uint32; empty ones are left out.

    Args:
        separator_id: ends a document wherever it stands, and is in none.

    Raises:
        ValueError: names the file that is damaged or holds no integers.
    """
    try:
        yield from split_rows(
            _rows(source.path, form.column, np.dtype(form.flat_dtype)), separator_id
        )
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        raise ValueError(f"{source.path}: damaged file: {error}") from error


def _rows(path: str, column: str, flat_dtype: np.dtype) -> Iterator[Row]:
    suffix = Path(path).suffix
    if suffix == ".parquet":
        return _parquet_rows(path, column)
    if suffix == ".arrow":
        return _arrow_rows(path, column)
    local = str(storage.local_copy(path))
    if suffix == ".npy":
        return _flat_rows(path, _map_npy(local, flat_dtype))
    index = path.removesuffix(".bin") + ".idx"
    if storage.exists(index):
        return _megatron_rows(path, local, storage.read_bytes(index))
    return _flat_rows(path, _map_flat(local, flat_dtype))


def split_rows(rows: Iterable[Row], separator_id: int) -> Iterator[np.ndarray]:
    """Documents end where a row begins one, and at separators."""
    open_parts: list[np.ndarray] = []
    for tokens_L, begins in rows:
        ends = np.flatnonzero(tokens_L == separator_id)
        parts = np.split(tokens_L, ends)
        pieces = [parts[0], *(part[1:] for part in parts[1:])]
        for number, piece in enumerate(pieces):
            if number or begins:
                yield from _joined(open_parts)
                open_parts = []
            open_parts.append(piece.astype(np.uint32))
    yield from _joined(open_parts)


def _joined(parts: list[np.ndarray]) -> Iterator[np.ndarray]:
    if sum(map(len, parts)):
        yield np.concatenate(parts)


def _parquet_rows(path: str, column: str) -> Iterator[Row]:
    filesystem, inner = storage.resolve(path)
    with pq.ParquetFile(
        inner, filesystem=filesystem, buffer_size=1 << 20, pre_buffer=False
    ) as file:
        _require_column(path, column, file.schema_arrow)
        for batch in file.iter_batches(batch_size=256, columns=[column]):
            yield from _list_rows(path, batch.column(column))


def _arrow_rows(path: str, column: str) -> Iterator[Row]:
    """Hugging Face writes streams; the file format is read as well."""
    with pa.memory_map(str(storage.local_copy(path))) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        _require_column(path, column, reader.schema)
        numbers = range(reader.num_record_batches) if is_file else None
        batches = map(reader.get_batch, numbers) if numbers is not None else reader
        for batch in batches:
            yield from _list_rows(path, batch.column(column))


def _require_column(path: str, column: str, schema: pa.Schema) -> None:
    if column not in schema.names:
        raise ValueError(f"{path}: no column={column!r} (found {schema.names})")


def _list_rows(path: str, lists: pa.Array) -> Iterator[Row]:
    for row in lists:
        if not row.is_valid:
            raise ValueError(f"{path}: a null row of tokens")
        yield Row(_unsigned(path, row.values.to_numpy(zero_copy_only=False)), begins=True)


def _map_npy(local: str, flat_dtype: np.dtype) -> np.ndarray:
    with open(local, "rb") as file:
        has_header = file.read(6) == b"\x93NUMPY"
    return np.load(local, mmap_mode="r") if has_header else _map_flat(local, flat_dtype)


def _map_flat(local: str, dtype: np.dtype) -> np.ndarray:
    num_bytes = Path(local).stat().st_size
    if num_bytes % dtype.itemsize:
        raise ValueError(f"{local}: {num_bytes} bytes are no flat array of {dtype}")
    return np.memmap(local, dtype, "r") if num_bytes else np.empty(0, dtype)


def _flat_rows(path: str, tokens_L: np.ndarray) -> Iterator[Row]:
    if tokens_L.ndim != 1:
        raise ValueError(f"{path}: {tokens_L.ndim} dimensions, a flat array is expected")
    for start in range(0, len(tokens_L), BLOCK_TOKENS):
        yield Row(_unsigned(path, tokens_L[start : start + BLOCK_TOKENS]), begins=start == 0)


def _megatron_rows(path: str, local: str, index: bytes) -> Iterator[Row]:
    """Sequences with their lengths and, at last, the first sequence of every document."""
    if not index.startswith(MEGATRON_MAGIC) or index[17] not in MEGATRON_DTYPES:
        raise ValueError(f"{path}: its .idx is no Megatron index")
    dtype = np.dtype(MEGATRON_DTYPES[index[17]])
    num_rows, num_bounds = np.frombuffer(index, np.int64, 2, offset=18).tolist()
    lengths = np.frombuffer(index, np.int32, num_rows, offset=34)
    starts = np.frombuffer(index, np.int64, num_rows, offset=34 + 4 * num_rows)
    bounds = np.frombuffer(index, np.int64, num_bounds, offset=34 + 12 * num_rows)
    tokens_L = _map_flat(local, dtype)
    begins = np.zeros(num_rows + 1, bool)
    begins[bounds] = True
    for start, length, is_first in zip(starts // dtype.itemsize, lengths, begins[:-1], strict=True):
        yield Row(_unsigned(path, tokens_L[start : start + length]), begins=bool(is_first))


def _unsigned(path: str, tokens_L: np.ndarray) -> np.ndarray:
    if tokens_L.dtype.kind not in "iu":
        raise ValueError(f"{path}: tokens of type {tokens_L.dtype}, integers are expected")
    if tokens_L.dtype.kind == "i" and len(tokens_L) and tokens_L.min() < 0:
        raise ValueError(f"{path}: token id {tokens_L.min()} < 0")
    return tokens_L


def documents_to_batch(
    doc_ids: list[int],
    documents: list[np.ndarray],
    vocab_size: int,
    targets: list[np.ndarray] | None = None,
) -> pa.RecordBatch:
    """One tokens/v1 record batch: `doc_id uint64, tokens large_list<uint16 or uint32>`, and of chat
    `is_target large_list<uint8>`.
    """
    dtype = np.uint16 if vocab_size <= 65_535 else np.uint32
    offsets = np.zeros(len(documents) + 1, np.int64)
    np.cumsum([len(document) for document in documents], out=offsets[1:])
    tokens = np.concatenate([np.empty(0, dtype), *documents], casting="unsafe", dtype=dtype)
    columns = {
        "doc_id": pa.array(doc_ids, pa.uint64()),
        "tokens": pa.LargeListArray.from_arrays(offsets, pa.array(tokens)),
    }
    if targets is not None:
        flat = np.concatenate([np.empty(0, np.uint8), *targets])
        columns["is_target"] = pa.LargeListArray.from_arrays(offsets, pa.array(flat))
    return pa.record_batch(columns)
