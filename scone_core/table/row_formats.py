"""float32 vectors <-> stored rows: the five row formats of embeddings/v1 and their Arrow columns.

Shapes: N rows of one shard, M rows of one lookup, D width, C columns of a stored row: D values, or
the 4 + D bytes of a record (float32 scale, then one byte per value).
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from scone_core.artifacts.manifests import (
    RowFormat,
)

SCALE_BYTES = 4
"""The float32 scale that stands before the values of an int8 or fp8 record."""


@dataclass(frozen=True)
class Storage:
    """How one row format lies on disk and what readers get of it."""

    vectors: torch.dtype
    """Of the rows that a lookup gives."""
    stored: np.dtype
    """Of the array of stored rows; bytes where a row is a record."""
    quantised: torch.dtype | None = None
    """Of the values of a record."""

    def columns(self, width: int) -> int:
        """C, the columns of a stored row of `width` values."""
        return width + (SCALE_BYTES if self.quantised else 0)

    def num_bytes(self, width: int) -> int:
        """Of one stored row of `width` values."""
        return self.columns(width) * self.stored.itemsize


UINT8, BF16_BITS = np.dtype(np.uint8), np.dtype(np.uint16)

STORAGE: dict[RowFormat, Storage] = {
    "bf16": Storage(torch.bfloat16, BF16_BITS),
    "fp16": Storage(torch.float16, np.dtype(np.float16)),
    "fp32": Storage(torch.float32, np.dtype(np.float32)),
    "int8": Storage(torch.bfloat16, UINT8, torch.int8),
    "fp8": Storage(torch.bfloat16, UINT8, torch.float8_e4m3fn),
}
"""Quantised rows are read as bfloat16, which rounds to 2^-8 of a value; they are off by 2^-8 of the
row's largest value (int8) or 2^-4 of a value (fp8)."""

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What the largest absolute value of a row becomes."""

NUMPY_OF = {
    torch.bfloat16: BF16_BITS,
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
}
"""NumPy has no bfloat16: arrays of uint16 hold its bits."""
TORCH_OF = {numpy_dtype: torch_dtype for torch_dtype, numpy_dtype in NUMPY_OF.items()}


def as_tensor(rows_MD: np.ndarray) -> torch.Tensor:
    """The torch view of an array of vectors, where uint16 are the bits of bfloat16."""
    return torch.from_numpy(rows_MD.view(UINT8)).view(TORCH_OF[rows_MD.dtype])


def as_array(vectors_MD: torch.Tensor) -> np.ndarray:
    """The inverse of `as_tensor`, e.g. to `gather` into a pinned tensor; shares its memory."""
    return vectors_MD.detach().view(torch.uint8).numpy().view(NUMPY_OF[vectors_MD.dtype])


def to_storage(vectors_ND: torch.Tensor, row_format: RowFormat) -> np.ndarray:
    """`vectors_ND` rounded to the row format once: the array [N, C] that goes to disk.

    Raises:
        ValueError: a quantised format is asked of a row that is not finite.
    """
    storage = STORAGE[row_format]
    if storage.quantised is None:
        return as_array(vectors_ND.detach().to("cpu", storage.vectors).contiguous())
    return _quantise(vectors_ND.detach().to("cpu", torch.float32), storage.quantised, row_format)


def from_storage(rows_MC: np.ndarray, row_format: RowFormat) -> torch.Tensor:
    """The vectors of stored rows, float32 where they are records; others share their memory."""
    storage = STORAGE[row_format]
    if storage.quantised is None:
        return as_tensor(rows_MC)
    values_MD, scale_M = split_records(rows_MC, row_format)
    return values_MD.float() * scale_M[:, None]


def split_records(rows_MC: np.ndarray, row_format: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The values [M, D] (int8 or float8_e4m3fn) and the scales [M] (float32) of records, copied."""
    quantised = STORAGE[row_format].quantised
    assert quantised is not None, "other rows have no scale"
    scale_M = rows_MC[:, :SCALE_BYTES].copy().view(np.float32).reshape(-1)
    values_MD = rows_MC[:, SCALE_BYTES:].copy()
    return torch.from_numpy(values_MD).view(quantised), torch.from_numpy(scale_M)


def byte_values(row_format: RowFormat) -> np.ndarray:
    """What each of the 256 bytes of a record stands for before scaling, float32 [256]."""
    quantised = STORAGE[row_format].quantised
    assert quantised is not None, "other rows have no scale"
    return torch.arange(256, dtype=torch.uint8).view(quantised).float().numpy()


def _quantise(
    vectors_ND: torch.Tensor, quantised: torch.dtype, row_format: RowFormat
) -> np.ndarray:
    """Records: the scale makes the row's largest absolute value the format's largest."""
    largest_N = vectors_ND.abs().amax(1)
    if not torch.isfinite(largest_N).all():
        row = int(torch.nonzero(~torch.isfinite(largest_N))[0, 0])
        raise ValueError(
            f"row_format={row_format!r}: row {row} of a block holds infinity or NaN, "
            "which has no scale; look for the cause in the checkpoint, or use bf16 or fp32"
        )
    scale_N = largest_N / LARGEST[quantised]
    scaled_ND = vectors_ND / scale_N.where(scale_N > 0, 1.0)[:, None]
    scaled_ND = scaled_ND.clamp(-LARGEST[quantised], LARGEST[quantised])
    if quantised == torch.int8:
        scaled_ND = scaled_ND.round()
    values_ND = scaled_ND.to(quantised).view(torch.uint8)
    return torch.cat([scale_N[:, None].view(torch.uint8), values_ND], 1).numpy()


def rounding_error(vectors_MD: torch.Tensor, row_format: RowFormat) -> torch.Tensor:
    """How far a stored value may be from what it was, float32 [M, D]: half a step of the format
    (bf16 has 7 bits behind the leading one, fp16 10, fp8 3 and a smallest step of 2^-9).
    """
    size_MD = vectors_MD.float().abs()
    scale_M1 = size_MD.amax(1, keepdim=True)
    match row_format:
        case "bf16":
            return size_MD * 2**-8
        case "fp16":
            return (size_MD * 2**-11).clamp(min=2**-25)
        case "fp32":
            return torch.zeros_like(size_MD)
        case "int8":
            return (scale_M1 / 127 / 2).expand_as(size_MD)
        case "fp8":
            return torch.maximum(size_MD * 2**-4, scale_M1 / 448 * 2**-10)


def embedding_type(row_format: RowFormat, width: int) -> pa.DataType:
    """The Arrow type of the column `embedding`."""
    storage = STORAGE[row_format]
    if storage.quantised:
        return pa.binary(storage.columns(width))
    return pa.list_(pa.from_numpy_dtype(storage.stored), width)


def embedding_batch(rows_NC: np.ndarray, row_format: RowFormat) -> pa.RecordBatch:
    """The record batch of one shard, a column `embedding`; shares the memory of `rows_NC`."""
    assert rows_NC.dtype == STORAGE[row_format].stored, "rows come from to_storage()"
    rows_NC = np.ascontiguousarray(rows_NC)
    kind = embedding_type(row_format, width_of(rows_NC, row_format))
    if pa.types.is_fixed_size_binary(kind):
        column = pa.Array.from_buffers(kind, len(rows_NC), [None, pa.py_buffer(rows_NC)])
    else:
        column = pa.FixedSizeListArray.from_arrays(pa.array(rows_NC.reshape(-1)), type=kind)
    field = pa.field("embedding", kind, nullable=False)
    return pa.record_batch([column], schema=pa.schema([field], metadata={"rows": row_format}))


def table_rows(batch: pa.RecordBatch) -> np.ndarray:
    """The stored rows [N, C] of a mapped shard, not copied."""
    column = batch.column("embedding")
    if not pa.types.is_fixed_size_binary(column.type):
        return column.flatten().to_numpy().reshape(len(column), column.type.list_size)
    columns, last = column.type.byte_width, column.offset + len(column)
    records = np.frombuffer(column.buffers()[1], np.uint8, last * columns)
    return records.reshape(last, columns)[column.offset :]


def width_of(rows_NC: np.ndarray, row_format: RowFormat) -> int:
    """D, the values of a stored row."""
    return rows_NC.shape[1] - STORAGE[row_format].columns(0)


ROWS_PER_BLOCK = 1 << 12
"""Rows that are float32 at a time; a shard is never."""


def convert_rows(rows_NC: np.ndarray, source: RowFormat, target: RowFormat) -> np.ndarray:
    """Stored rows of the format `source` as stored rows of the format `target`."""
    columns = STORAGE[target].columns(width_of(rows_NC, source))
    out_NC = np.empty((len(rows_NC), columns), STORAGE[target].stored)
    for first in range(0, len(rows_NC), ROWS_PER_BLOCK):
        part = slice(first, first + ROWS_PER_BLOCK)
        vectors_ND = from_storage(rows_NC[part].copy(), source).float()
        out_NC[part] = to_storage(vectors_ND, target)
    return out_NC
