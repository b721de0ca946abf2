"""embeddings/v1 -> rows: the f-gram embedding table, mapped once and gathered from directly.

Shapes: S rows of the table, M ids of one lookup, T rows of the caller's buffer, N rows of one
shard, D width, C columns of a stored row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import numpy as np
import pyarrow as pa
import torch

from scone_core.artifacts import storage
from scone_core.artifacts.manifests import (
    ArtifactError,
    EmbeddingsManifest,
    RowFormat,
    Shard,
    load_manifest,
    require_equal,
)
from scone_core.artifacts.shards import local_shard, single_batch
from scone_core.fgrams.ranks import map_ranks
from scone_core.machine.intrinsics import CACHE_LINE
from scone_core.machine.mapped_memory import expect_hits, expect_random_reads, lock_rows
from scone_core.table.cold_rows import ColdFile, ColdReader, open_reader
from scone_core.table.lookup_statistics import LookupStatistics
from scone_core.table.row_formats import (
    NUMPY_OF,
    STORAGE,
    as_array,
    as_tensor,
    byte_values,
    embedding_type,
    table_rows,
)
from scone_core.table.row_kernels import copy_rows, decode_rows, decode_rows_bf16, locate
from scone_core.table.tiers import ALL_MAPPED, Tiers, hot_extents

NEVER = 1 << 62
"""The first cold id of a table without cold rows."""


def aligned_empty(num_rows: int, width: int, dtype: np.dtype) -> np.ndarray:
    """An uninitialised [num_rows, width] array whose first byte lies on a cache line: copies into
    one that is not 32-byte aligned took 3.2 times as long.
    """
    num_bytes = num_rows * width * dtype.itemsize
    memory = np.empty(num_bytes + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + num_bytes].view(dtype).reshape(num_rows, width)


@dataclass(frozen=True)
class MappedShard:
    """One shard in memory and on disk."""

    rows_NC: np.ndarray
    """Views the mapped file and keeps it mapped."""
    first_id: int
    path: Path
    offset: int
    """Bytes of the file before the first row."""

    @property
    def last_id(self) -> int:
        """One behind its last row."""
        return self.first_id + len(self.rows_NC)

    @property
    def address(self) -> int:
        return self.rows_NC.ctypes.data


class EmbeddingTable:
    """The rows of an embeddings/v1 artifact, or of some of its shards, mapped; processes of a node
    share one copy.

    Safe to share between threads: lookups of rows in memory run beside each other, those with cold
    rows one after the other.
    """

    def __init__(
        self,
        manifest: EmbeddingsManifest,
        shards: list[MappedShard],
        tiers: Tiers,
        ranks_S: np.ndarray,
    ) -> None:
        """`ranks_S`: uint32, the rank of every id; empty where ids are ranks."""
        self.manifest = manifest
        self.num_rows = manifest.num_rows
        self.width = manifest.width
        self.row_format: RowFormat = manifest.row_format
        self.statistics = LookupStatistics()
        self._storage = STORAGE[manifest.row_format]
        is_plain = self._storage.quantised is None
        self._byte_values = byte_values("fp8") if self.row_format == "fp8" else _NO_VALUES
        self._native = {self.vector_dtype} if is_plain else {self.vector_dtype, _FLOAT32}
        self._direct = (
            {self._storage.vectors} if is_plain else {self._storage.vectors, torch.float32}
        )
        self._row_bytes = self._storage.num_bytes(self.width)
        self._shards = shards
        self._addresses = np.array([shard.address for shard in shards], np.int64)
        self._first_ids = np.array([shard.first_id for shard in shards], np.int64)
        self._cold_from = NEVER if tiers.cold_from is None else tiers.cold_from
        self.ids = range(shards[0].first_id, shards[-1].last_id)
        self._ranks = ranks_S
        self._limits = (self.ids.stop, self._row_bytes, tiers.hot_rows, self._cold_from)
        self._settle(tiers)

    @classmethod
    def open(
        cls,
        folder: str,
        *,
        expected: Mapping[str, object] | None = None,
        tiers: Tiers = ALL_MAPPED,
        shards: range | None = None,
    ) -> "EmbeddingTable":
        """Map the table in `folder`, after checking its files' sizes (not what is in them:
        `verify_shards` does).

        Args:
            folder: folder or URI of an embeddings/v1 artifact.
            expected: manifest fields the reader depends on, e.g. `{"fgrams_fingerprint": ...}`.
            tiers: where its rows live.
            shards: numbers of the shards to map; by default all. Others have no rows here.

        Raises:
            ArtifactError: missing, damaged, incomplete, or a field differs from `expected`.
            ValueError: `tiers` cannot be had on this machine.
        """
        manifest = load_manifest(EmbeddingsManifest, folder)
        for field, value in (expected or {}).items():
            require_equal(
                f"{folder}: {field}",
                getattr(manifest, field),
                value,
                "use the table that was precomputed from this model and these f-grams",
            )
        return cls.map(folder, manifest, tiers=tiers, shards=shards)

    @classmethod
    def map(
        cls,
        folder: str,
        manifest: EmbeddingsManifest,
        *,
        tiers: Tiers = ALL_MAPPED,
        shards: range | None = None,
    ) -> "EmbeddingTable":
        """`open` for a manifest that is at hand, and perhaps not published yet."""
        _require_all_ids(folder, manifest)
        chosen = range(len(manifest.shards)) if shards is None else shards
        mapped = [_map(folder, manifest, manifest.shards[number]) for number in chosen]
        ranks_S = _NO_RANKS if manifest.ranks is None else map_ranks(folder, manifest.ranks)
        return cls(manifest, mapped, tiers, ranks_S)

    @property
    def vector_dtype(self) -> np.dtype:
        """Of the rows that lookups give; uint16 stands for bfloat16."""
        return NUMPY_OF[self._storage.vectors]

    def empty(self, num_rows: int) -> np.ndarray:
        """An aligned [num_rows, D] buffer of `vector_dtype` for `gather`."""
        return aligned_empty(num_rows, self.width, self.vector_dtype)

    def gather(self, ids_M: np.ndarray, out_MD: np.ndarray) -> None:
        """Row `ids_M[m]` becomes `out_MD[m]`, dequantised where the table is.

        Args:
            ids_M: int64, each in `ids`.
            out_MD: C-contiguous float32, float16 or uint16 (the bits of bfloat16). `vector_dtype`
                is written directly, and float32 from quantised rows; the rest takes one more pass.
                `empty(M)` gives a fast one, `as_array` makes one of a pinned tensor.

        Raises:
            ValueError: an id without a row; nothing is written.
            ArtifactError: a cold row cannot be read.
        """
        assert out_MD.shape == (len(ids_M), self.width), "one row of D values per id"
        assert out_MD.flags.c_contiguous
        if out_MD.dtype in self._native:
            self._gather(ids_M, np.arange(len(ids_M)), out_MD)
        else:
            as_tensor(out_MD).copy_(self.vectors(ids_M))

    def put_rows(self, ids_M: np.ndarray, places_M: np.ndarray, inputs_TD: torch.Tensor) -> None:
        """Row `ids_M[m]` becomes `inputs_TD[places_M[m]]`, on any device; other rows stay.

        Args:
            ids_M: int64, each in `ids`.
            places_M: int64, distinct.
            inputs_TD: any floating dtype. Contiguous memory of the CPU in `vector_dtype` is written
                directly, in float32 also from quantised rows; the rest takes one more pass.

        Raises:
            ValueError: an id without a row; nothing is written.
            ArtifactError: a cold row cannot be read.
        """
        is_plain_memory = inputs_TD.is_cpu and inputs_TD.is_contiguous()
        if is_plain_memory and not inputs_TD.requires_grad and inputs_TD.dtype in self._direct:
            self._gather(ids_M, places_M, as_array(inputs_TD))
        else:
            put_tensor(self.vectors(ids_M), places_M, inputs_TD)

    def vectors(self, ids_M: np.ndarray) -> torch.Tensor:
        """The rows of `ids_M` as a torch tensor [M, D] of `vector_dtype`."""
        out_MD = self.empty(len(ids_M))
        self.gather(ids_M, out_MD)
        return as_tensor(out_MD)

    def stored(self, ids_M: np.ndarray) -> np.ndarray:
        """The rows of `ids_M` as they are stored, [M, C] copied from the map, cold ones too."""
        addresses_M = np.empty(len(ids_M), np.int64)
        self._locate(ids_M, addresses_M)
        rows_MC = np.empty((len(ids_M), self._storage.columns(self.width)), self._storage.stored)
        places_M = np.arange(len(ids_M))
        copy_rows(addresses_M, places_M, places_M, rows_MC.view(np.uint8))
        return rows_MC

    def stored_shard(self, shard: int) -> np.ndarray:
        """The mapped rows [N, C] of one shard, as `row_formats` describes them."""
        return self._shards[shard].rows_NC

    def _gather(self, ids_M: np.ndarray, places_M: np.ndarray, out_TD: np.ndarray) -> None:
        """Row `ids_M[m]` becomes `out_TD[places_M[m]]`."""
        started = perf_counter_ns()
        addresses_M = np.empty(len(ids_M), np.int64)
        num_hot, num_cold = self._locate(ids_M, addresses_M)
        num_reads = 0
        if num_cold:
            num_reads = self._gather_cold(ids_M, places_M, addresses_M, out_TD)
        else:
            self._write(addresses_M, np.arange(len(ids_M)), places_M, out_TD)
        self.statistics.add_rows(
            len(ids_M),
            num_hot=num_hot,
            num_cold=num_cold,
            num_reads=num_reads,
            num_bytes=len(ids_M) * self._row_bytes,
            ns=perf_counter_ns() - started,
        )

    def _settle(self, tiers: Tiers) -> None:
        """Lock the hot rows, and get ready to read the cold ones."""
        hot = [(0, tiers.hot_rows)]
        first_cold, files = self._cold_from, []
        if len(self._ranks):
            hot = hot_extents(self._ranks, tiers.hot_rows).tolist()
            first_cold = NEVER if tiers.cold_from is None else 0  # any id may have a cold rank
        for shard in self._shards:
            expect_hits(shard.rows_NC)
            for first_id, last_id in hot:
                part = slice(max(first_id - shard.first_id, 0), max(last_id - shard.first_id, 0))
                if len(rows_NC := shard.rows_NC[part]):
                    lock_rows(rows_NC)
            if shard.last_id > first_cold:
                expect_random_reads(shard.rows_NC[max(first_cold - shard.first_id, 0) :])
                files.append(ColdFile(shard.path, shard.first_id, shard.offset, shard.address))
        self._reader = open_reader(files, self._row_bytes, tiers) if files else None

    def _locate(self, ids_M: np.ndarray, addresses_M: np.ndarray) -> tuple[int, int]:
        """Fill `addresses_M` with where the rows are mapped; the numbers of hot and cold ones."""
        bad, num_hot, num_cold = locate(
            ids_M, self._first_ids, self._addresses, self._limits, self._ranks, addresses_M
        )
        if bad >= 0:
            raise ValueError(
                f"f-gram id {ids_M[bad]} has no row: the table holds ids {self.ids.start}.."
                f"{self.ids.stop - 1}; "
                "match with the f-gram set it was precomputed for"
            )
        return num_hot, num_cold

    def _gather_cold(
        self, ids_M: np.ndarray, places_M: np.ndarray, addresses_M: np.ndarray, out_TD: np.ndarray
    ) -> int:
        """`_gather` where some rows are cold. Returns the number of rows read."""
        assert self._reader is not None, "cold rows have a reader"
        num_reads = 0
        with self._reader.lock:
            for first in range(0, len(ids_M), self._reader.capacity):
                part = slice(first, first + self._reader.capacity)
                num_reads += self._gather_part(
                    self._reader, ids_M[part], places_M[part], addresses_M[part], out_TD
                )
        return num_reads

    def _gather_part(
        self,
        reader: ColdReader,
        ids_P: np.ndarray,
        places_P: np.ndarray,
        addresses_P: np.ndarray,
        out_TD: np.ndarray,
    ) -> int:
        """Each distinct cold row is read once (sorting ids costs about 0.1 us each, a read 8);
        the others, and those that have come, are written while more are on their way.
        """
        ranks_P = self._ranks[ids_P] if len(self._ranks) else ids_P
        is_cold_P = ranks_P >= self._cold_from
        cold = is_cold_P.nonzero()[0]
        ids_U, place = np.unique(ids_P[cold], return_inverse=True)
        if not len(ids_U):
            self._write(addresses_P, np.arange(len(ids_P)), places_P, out_TD)
            return 0
        addresses_U, arrivals = reader.fetch(ids_U)
        addresses_P[cold] = addresses_U[place]
        self._write(addresses_P, (~is_cold_P).nonzero()[0], places_P, out_TD)
        has_come_U = np.zeros(len(ids_U), np.bool_)
        for arrived in arrivals:
            has_come_U[:] = False
            has_come_U[arrived] = True
            self._write(addresses_P, cold[has_come_U[place]], places_P, out_TD)
        return len(ids_U)

    def _write(
        self, addresses_M: np.ndarray, chosen: np.ndarray, places_M: np.ndarray, out_TD: np.ndarray
    ) -> None:
        """Copy or dequantise the row at `addresses_M[m]` to `out_TD[places_M[m]]`, for all m in
        `chosen`.
        """
        if self._storage.quantised is None:
            copy_rows(addresses_M, chosen, places_M, out_TD.view(np.uint8))
        elif out_TD.dtype == _FLOAT32:
            decode_rows(addresses_M, chosen, places_M, self._byte_values, out_TD)
        else:
            decode_rows_bf16(addresses_M, chosen, places_M, self._byte_values, out_TD)


def put_tensor(rows_MD: torch.Tensor, places_M: np.ndarray, inputs_TD: torch.Tensor) -> None:
    """`rows_MD[m]` becomes `inputs_TD[places_M[m]]`, on its device and in its dtype; autograd knows
    of it.
    """
    where_M = torch.from_numpy(places_M).to(inputs_TD.device)
    inputs_TD.index_copy_(0, where_M, rows_MD.to(inputs_TD.device, inputs_TD.dtype))


_FLOAT32 = np.dtype(np.float32)
_NO_VALUES = np.empty(0, np.float32)
_NO_RANKS = np.empty(0, np.uint32)


def _require_all_ids(folder: str, manifest: EmbeddingsManifest) -> None:
    next_id = 0
    for shard in manifest.shards:
        require_equal(f"{folder}/{shard.name}: first_id", shard.first_id, next_id, "rebuild it")
        next_id += shard.num_rows
    require_equal(f"{folder}: rows in shards", next_id, manifest.num_rows, "rebuild it")


def _map(folder: str, manifest: EmbeddingsManifest, shard: Shard) -> MappedShard:
    local, name = local_shard(folder, shard), storage.join(folder, shard.name)
    if shard.num_bytes == 0:
        raise ArtifactError(f"{name}: empty; rebuild the table")
    with pa.memory_map(str(local)) as source:  # unlike Python's mmap it keeps no descriptor open
        memory = source.read_buffer()
    batch = single_batch(memory, name)
    kind = embedding_type(manifest.row_format, manifest.width)
    found = dict(zip(batch.schema.names, batch.schema.types, strict=True)).get("embedding")
    if found != kind or batch.num_rows != shard.num_rows:
        raise ArtifactError(
            f"{name}: {batch.num_rows} rows of {found}, the manifest says {shard.num_rows} of "
            f"{kind}; rebuild the table"
        )
    rows_NC = table_rows(batch)
    return MappedShard(rows_NC, shard.first_id, local, rows_NC.ctypes.data - memory.address)
