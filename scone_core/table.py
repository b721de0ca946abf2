"""embeddings/v1 -> rows: the f-gram embedding table, mapped once and gathered from directly.

Shapes: S rows of the table, M ids of one lookup, N rows of one shard, D width.
"""

from collections.abc import Mapping
from typing import Any

import numba as nb
import numpy as np
import pyarrow as pa
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from scone_core.artifacts import (
    ArtifactError,
    EmbeddingsManifest,
    load_manifest,
    map_shard,
    require_equal,
)

ALIGNMENT = 64
"""Bytes. Copies into a destination that is not 32-byte aligned took 3.2 times as long."""

STORAGE = {
    "bfloat16": (torch.bfloat16, np.dtype(np.uint16)),
    "float16": (torch.float16, np.dtype(np.float16)),
    "float32": (torch.float32, np.dtype(np.float32)),
}
"""Row dtype -> torch's dtype and NumPy's dtype of the same size (bfloat16 travels as its bits)."""


def to_storage(vectors_ND: torch.Tensor, dtype: str) -> np.ndarray:
    """`vectors_ND` rounded to the row dtype, as the NumPy array that goes to disk."""
    torch_dtype, numpy_dtype = STORAGE[dtype]
    rows_ND = vectors_ND.detach().to("cpu", torch_dtype).contiguous()
    return rows_ND.view(torch.uint8).numpy().view(numpy_dtype)


def from_storage(rows_MD: np.ndarray, dtype: str) -> torch.Tensor:
    """The torch view of stored rows; shares their memory."""
    return torch.from_numpy(rows_MD.view(np.uint8)).view(STORAGE[dtype][0])


def embedding_batch(rows_ND: np.ndarray, dtype: str) -> pa.RecordBatch:
    """The record batch of one shard: `embedding fixed_size_list[D]`, shares the memory of
    `rows_ND`.
    """
    assert rows_ND.dtype == STORAGE[dtype][1], "rows come from to_storage()"
    values = pa.array(np.ascontiguousarray(rows_ND).reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(values, rows_ND.shape[1])
    field = pa.field("embedding", column.type, nullable=False)
    return pa.record_batch([column], schema=pa.schema([field], metadata={"dtype": dtype}))


def table_rows(batch: pa.RecordBatch) -> np.ndarray:
    """The rows [N, D] of a mapped shard, not copied."""
    column = batch.column("embedding")
    return column.values.to_numpy().reshape(len(column), column.type.list_size)


def aligned_empty(num_rows: int, width: int, dtype: np.dtype) -> np.ndarray:
    """An uninitialised [num_rows, width] array whose first byte lies on a cache line."""
    num_bytes = num_rows * width * dtype.itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(num_rows, width)


class EmbeddingTable:
    """All rows of an embeddings/v1 artifact, mapped; processes of a node share one copy."""

    def __init__(self, manifest: EmbeddingsManifest, shards: list[np.ndarray]) -> None:
        self.manifest = manifest
        self.num_rows = manifest.num_rows
        self.width = manifest.width
        self.dtype = manifest.dtype
        self._shards = shards  # keeps the maps alive behind the addresses
        self._addresses = np.array([rows_ND.ctypes.data for rows_ND in shards], np.int64)
        self._first_ids = np.array([shard.first_id for shard in manifest.shards], np.int64)

    @classmethod
    def open(cls, folder: str, *, expected: Mapping[str, object] | None = None) -> "EmbeddingTable":
        """Map the table in `folder`.

        Args:
            folder: folder or URI of an embeddings/v1 artifact.
            expected: manifest fields the reader depends on, e.g. `{"fgrams_fingerprint": ...}`.

        Raises:
            ArtifactError: missing, damaged, incomplete, or a field differs from `expected`.
        """
        manifest = load_manifest(EmbeddingsManifest, folder)
        for field, value in (expected or {}).items():
            require_equal(
                f"{folder}: {field}",
                getattr(manifest, field),
                value,
                "use the table that was precomputed from this model and these f-grams",
            )
        _require_all_ids(folder, manifest)
        return cls(manifest, [_map_rows(folder, manifest, i) for i in range(len(manifest.shards))])

    def empty(self, num_rows: int) -> np.ndarray:
        """An aligned [num_rows, D] buffer of the stored dtype for `gather`."""
        return aligned_empty(num_rows, self.width, STORAGE[self.dtype][1])

    def gather(self, ids_M: np.ndarray, out_MD: np.ndarray) -> None:
        """Copy row `ids_M[m]` to `out_MD[m]`.

        Args:
            ids_M: int64, each in [0, num_rows).
            out_MD: C-contiguous, the stored dtype; `empty(M)` gives a fast one.

        Raises:
            ValueError: an id without a row; nothing is written.
        """
        assert out_MD.shape == (len(ids_M), self.width), "one row of D values per id"
        assert out_MD.dtype == STORAGE[self.dtype][1]
        assert out_MD.flags.c_contiguous
        bad = _gather(ids_M, self._first_ids, self._addresses, self.num_rows, out_MD.view(np.uint8))
        if bad >= 0:
            raise ValueError(
                f"f-gram id {ids_M[bad]} has no row: the table holds ids 0..{self.num_rows - 1}; "
                "match with the f-gram set it was precomputed for"
            )

    def vectors(self, ids_M: np.ndarray) -> torch.Tensor:
        """The rows of `ids_M` as a torch tensor [M, D] of the stored dtype."""
        out_MD = self.empty(len(ids_M))
        self.gather(ids_M, out_MD)
        return from_storage(out_MD, self.dtype)


def _require_all_ids(folder: str, manifest: EmbeddingsManifest) -> None:
    next_id = 0
    for shard in manifest.shards:
        require_equal(f"{folder}/{shard.name}: first_id", shard.first_id, next_id, "rebuild it")
        next_id += shard.num_rows
    require_equal(f"{folder}: rows in shards", next_id, manifest.num_rows, "rebuild it")


def _map_rows(folder: str, manifest: EmbeddingsManifest, index: int) -> np.ndarray:
    shard = manifest.shards[index]
    rows_ND = table_rows(map_shard(folder, shard))
    dtype = STORAGE[manifest.dtype][1]
    if rows_ND.dtype != dtype or rows_ND.shape != (shard.num_rows, manifest.width):
        raise ArtifactError(
            f"{folder}/{shard.name}: {rows_ND.dtype} {rows_ND.shape}, the manifest says "
            f"{dtype} {(shard.num_rows, manifest.width)}; rebuild the table"
        )
    return rows_ND


@intrinsic
def _copy_bytes(typingctx: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """memcpy between two addresses; numba calls this once per type signature."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        to, origin = (builder.inttoptr(address, pointer) for address in args[:2])
        cgutils.raw_memcpy(builder, to, origin, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@nb.njit(nogil=True, cache=True)
def _gather(
    ids_M: np.ndarray,
    first_ids: np.ndarray,
    addresses: np.ndarray,
    num_rows: int,
    out_MR: np.ndarray,
) -> int:
    """Returns the position of the first id without a row, -1 when all rows were copied."""
    for m in range(len(ids_M)):
        if ids_M[m] < 0 or ids_M[m] >= num_rows:
            return m
    row_bytes = out_MR.shape[1]
    for m in range(len(ids_M)):
        shard = np.searchsorted(first_ids, ids_M[m], side="right") - 1
        source = addresses[shard] + (ids_M[m] - first_ids[shard]) * row_bytes
        _copy_bytes(out_MR.ctypes.data + m * row_bytes, source, row_bytes)  # pyrefly: ignore
    return -1
