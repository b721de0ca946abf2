"""ids of cold rows -> addresses of their bytes in memory: read from disk, many at a time.

Shapes: U distinct ids of one lookup, R bytes of one stored row.
"""

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Protocol

import numba as nb
import numpy as np
from numba.core import types

from scone_core.artifacts.manifests import ArtifactError
from scone_core.machine.mapped_memory import PAGE
from scone_core.machine.uring import Ring
from scone_core.table.tiers import Tiers

_WILL_NEED = mmap.MADV_WILLNEED


@dataclass(frozen=True)
class ColdFile:
    """Where the rows of one shard lie on disk."""

    path: Path
    first_id: int
    offset: int
    """Bytes before the first row."""
    address: int
    """Of the first row in the mapped file."""


class ColdReader(Protocol):
    """Reads rows that are not expected in memory."""

    capacity: int
    """Ids of one `fetch`, at most."""
    lock: threading.Lock
    """To be held from `fetch` until its addresses are no longer needed."""

    def fetch(self, ids_U: np.ndarray) -> tuple[np.ndarray, Iterator[np.ndarray]]:
        """Begin to read rows.

        Returns:
            The address of every row's bytes, int64 [U], valid until the next `fetch`; which of them
            are there (positions in `ids_U`, int64), as they come.

        Raises:
            ArtifactError: (from the iterator) a read failed or met the end of a file.
        """
        ...


def open_reader(files: Sequence[ColdFile], row_bytes: int, tiers: Tiers) -> ColdReader:
    """The reader that `tiers.io` names.

    Raises:
        ValueError: direct reads without io_uring or on a filesystem that has none.
    """
    if tiers.io == "mmap":
        return MappedReader(files, row_bytes)
    return DirectReader(files, row_bytes, tiers.queue_depth)


class _Places:
    """id -> (file, first byte)."""

    def __init__(self, files: Sequence[ColdFile], row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.first_ids = np.array([file.first_id for file in files], np.int64)

    def of(self, ids_U: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The number of each row's file, and its byte when those of file f begin at `starts[f]`."""
        file_U = np.searchsorted(self.first_ids, ids_U, side="right") - 1
        return file_U, starts[file_U] + (ids_U - self.first_ids[file_U]) * self.row_bytes


class MappedReader:
    """Asks the kernel for all pages of a batch before they are touched."""

    capacity = 256
    """As many as a disk queue takes: of 4,096 pages asked for at once many were not read ahead."""

    def __init__(self, files: Sequence[ColdFile], row_bytes: int) -> None:
        self.lock = threading.Lock()
        self._places = _Places(files, row_bytes)
        self._bases = np.array([file.address for file in files], np.int64)

    def fetch(self, ids_U: np.ndarray) -> tuple[np.ndarray, Iterator[np.ndarray]]:
        _, addresses_U = self._places.of(ids_U, self._bases)
        _will_need(addresses_U, self._places.row_bytes)
        return addresses_U, iter([np.arange(len(ids_U))])


class DirectReader:
    """Reads past the page cache through one io_uring, into memory of its own."""

    capacity = 4096

    def __init__(self, files: Sequence[ColdFile], row_bytes: int, queue_depth: int) -> None:
        self.lock = threading.Lock()
        self._depth, self._ring = queue_depth, _open_ring(queue_depth)
        self._files = [_open_direct(file.path) for file in files]
        self._descriptors = np.array([file.fileno() for file in self._files], np.int64)
        self._places = _Places(files, row_bytes)
        self._offsets = np.array([file.offset for file in files], np.int64)
        is_aligned = row_bytes % PAGE == 0 and not (self._offsets % PAGE).any()
        self._slot_bytes = row_bytes if is_aligned else (row_bytes // PAGE + 2) * PAGE
        self._memory = np.empty(0, np.uint8)  # comes with the first rows
        self._given_up: list[tuple[Ring, np.ndarray]] = []

    def fetch(self, ids_U: np.ndarray) -> tuple[np.ndarray, Iterator[np.ndarray]]:
        if self._ring.in_flight:  # of a batch that was given up: they arrive in memory that stays
            self._given_up.append((self._ring, self._memory))
            self._ring, self._memory = _open_ring(self._depth), np.empty(0, np.uint8)
        file_U, first_U = self._places.of(ids_U, self._offsets)
        inside_U = first_U % PAGE
        num_bytes = self._slot_bytes * len(ids_U)
        if num_bytes > len(self._memory):
            self._memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)  # begins on a page
        slots_U = self._memory.ctypes.data + np.arange(len(ids_U)) * self._slot_bytes
        needed_U = inside_U + self._places.row_bytes
        reads = self._ring.read(
            self._descriptors[file_U], first_U - inside_U, slots_U, self._slot_bytes, needed_U
        )
        arrivals = _arrivals(reads, self._files[int(file_U[0])].name)
        return slots_U + inside_U, chain([next(arrivals)], arrivals)


def _arrivals(reads: Iterator[np.ndarray], name: str) -> Iterator[np.ndarray]:
    try:
        yield from reads
    except OSError as error:
        raise ArtifactError(
            f"{name} or a later shard: a row could not be read ({error}); verify the table"
        ) from error


def _open_ring(queue_depth: int) -> Ring:
    """
    Raises:
        ValueError: there is no io_uring.
    """
    try:
        return Ring(queue_depth)
    except OSError as error:
        raise ValueError(
            f"io='direct': io_uring is not to be had here ({error.strerror}; containers often "
            "forbid it); use io='mmap'"
        ) from error


def _open_direct(path: Path) -> FileIO:
    """
    Raises:
        ValueError: the filesystem has no direct reads.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        raise ValueError(
            f"io='direct': {path} cannot be opened with O_DIRECT ({error.strerror}); use io='mmap'"
        ) from error
    file = FileIO(descriptor, "rb")
    file.name = str(path)
    return file


_madvise = types.ExternalFunction("madvise", types.int32(types.int64, types.int64, types.int32))


@nb.njit(nogil=True, cache=True)
def _will_need(addresses_U: np.ndarray, row_bytes: int) -> None:
    """MADV_WILLNEED for the pages of every row. The result does not matter: a page that was not
    read ahead is read when it is touched.
    """
    for u in range(len(addresses_U)):
        first = addresses_U[u] // PAGE * PAGE
        _madvise(first, addresses_U[u] + row_bytes - first, _WILL_NEED)
