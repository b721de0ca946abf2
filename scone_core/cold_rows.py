"""ids of cold rows -> addresses of their bytes in memory: read from disk, many at a time.

Shapes: U distinct ids of one lookup, R bytes of one stored row.
"""

import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import numba as nb
import numpy as np
from numba.core import types

from scone_core.artifacts import ArtifactError
from scone_core.extras import import_extra
from scone_core.tiers import PAGE, Tiers

_WILL_NEED = mmap.MADV_WILLNEED

SUBMIT_EVERY = 32
"""Requests that are prepared before the kernel hears of them: the disk starts while Python goes on
preparing (about 1 us a request, a read takes the disk 18)."""


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

    def fetch(self, ids_U: np.ndarray) -> np.ndarray:
        """The address of every row's bytes, int64 [U], valid until the next `fetch`.

        Raises:
            ArtifactError: a read failed or met the end of a file.
        """
        ...


def open_reader(files: Sequence[ColdFile], row_bytes: int, tiers: Tiers) -> ColdReader:
    """The reader that `tiers.io` names.

    Raises:
        ValueError: direct reads without `liburing` or on a filesystem that has none.
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

    def fetch(self, ids_U: np.ndarray) -> np.ndarray:
        _, addresses_U = self._places.of(ids_U, self._bases)
        _will_need(addresses_U, self._places.row_bytes)
        return addresses_U


class DirectReader:
    """Reads past the page cache through one io_uring, into memory of its own."""

    capacity = 4096

    def __init__(self, files: Sequence[ColdFile], row_bytes: int, queue_depth: int) -> None:
        self.lock = threading.Lock()
        self._uring = _liburing()
        self._depth = queue_depth
        self._files = [_open_direct(file.path) for file in files]
        self._places = _Places(files, row_bytes)
        self._offsets = np.array([file.offset for file in files], np.int64)
        is_aligned = row_bytes % PAGE == 0 and not (self._offsets % PAGE).any()
        self._slot_bytes = row_bytes if is_aligned else (row_bytes // PAGE + 2) * PAGE
        self._start()

    def _start(self) -> None:
        """A ring of our own; memory for rows comes with the first of them."""
        self._ring, self._cqe = self._uring.Ring(), self._uring.Cqe()
        self._uring.io_uring_queue_init(self._depth, self._ring)
        weakref.finalize(self, self._uring.io_uring_queue_exit, self._ring)
        self._memory = np.empty(0, np.uint8)
        self._iovecs: list[Any] = []

    def fetch(self, ids_U: np.ndarray) -> np.ndarray:
        file_U, first_U = self._places.of(ids_U, self._offsets)
        inside_U = first_U % PAGE
        self._make_room(len(ids_U))
        descriptors = [self._files[number].fileno() for number in file_U.tolist()]
        needed_U = inside_U + self._places.row_bytes
        try:
            self._read(descriptors, (first_U - inside_U).tolist(), needed_U.tolist())
        except OSError as error:
            self._start()  # what is still on its way goes to the old memory, which it holds
            name = self._files[int(file_U[0])].name
            raise ArtifactError(
                f"{name} or a later shard: a row could not be read ({error}); verify the table"
            ) from error
        slots_U = np.arange(len(ids_U), dtype=np.int64) * self._slot_bytes
        return self._memory.ctypes.data + slots_U + inside_U

    def _make_room(self, num_rows: int) -> None:
        """Slots for `num_rows` rows, each on a page."""
        if num_rows <= len(self._iovecs):
            return
        num_bytes = self._slot_bytes << (num_rows - 1).bit_length()
        view = memoryview(mmap.mmap(-1, num_bytes))
        self._memory = np.frombuffer(view, np.uint8)
        slots = range(0, num_bytes, self._slot_bytes)
        self._iovecs = [self._uring.Iovec([view[at : at + self._slot_bytes]]) for at in slots]

    def _read(self, descriptors: list[int], starts: list[int], needed: list[int]) -> None:
        """Read slot by slot, at most `queue_depth` at a time, until all have arrived."""
        uring, ring, num = self._uring, self._ring, len(starts)
        begun = done = 0
        while done < num:
            first, begun = begun, min(num, done + self._depth)
            for slot in range(first, begun):
                sqe = uring.io_uring_get_sqe(ring)
                uring.io_uring_prep_readv(sqe, descriptors[slot], self._iovecs[slot], starts[slot])
                sqe.user_data = slot
                if slot % SUBMIT_EVERY == SUBMIT_EVERY - 1:
                    uring.io_uring_submit(ring)
            in_flight = begun - done
            wait_for = in_flight if begun == num else max(1, in_flight // 4)
            uring.io_uring_submit_and_wait(ring, wait_for)
            done += self._collect(needed)

    def _collect(self, needed: list[int]) -> int:
        """Take all reads that have arrived off the ring; their number.

        Raises:
            OSError: one failed or ended early.
        """
        cqe, num = self._cqe, 0
        for _ in self._uring.CqeIter(self._ring, cqe):
            entry, num = cqe[0], num + 1
            if entry.res < needed[entry.user_data]:
                raise OSError(f"{entry.res} of {needed[entry.user_data]} bytes")
        self._uring.io_uring_cq_advance(self._ring, num)
        return num


def _liburing() -> Any:
    return import_extra(
        "liburing",
        needed_for="io='direct'",
        remedy="install scone[direct], or use io='mmap'",
    )


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
