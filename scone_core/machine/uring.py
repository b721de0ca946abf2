"""Many reads at a time through Linux's io_uring, its rings mapped and filled by compiled code.

Written here because the wheel of PyPI's `liburing` is compiled for its builder's CPU and ends the
process elsewhere (docs/LOG.md). Layouts are those of linux/io_uring.h.

Shapes: U reads.
"""

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Iterator

import numba as nb
import numpy as np

_SETUP, _ENTER = 425, 426
"""System calls, the same on every architecture."""
_SQ_RING, _SQES = 0, 0x1000_0000
"""Offsets of the mappings."""
_GET_EVENTS = 1
_SINGLE_MMAP = 1
_READ = 22
"""Operation of a request: pread."""
_NUM_PARAMS = 30
"""Words (uint32) of struct io_uring_params: 10 fields, then 10 offsets of each ring."""
_SQE_WORDS = 8
"""Words (uint64) of a request."""
HEAD, TAIL, MASK, ARRAY, RESULTS = 0, 1, 2, 6, 5
"""Which of a ring's offsets: ARRAY is the submission ring's, RESULTS the completion ring's."""

PARTS = 4
"""Of a full queue: so many times its results are handed over while the rest is on its way."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Ring:
    """One submission and one completion ring; not to be used by two threads at a time."""

    def __init__(self, depth: int) -> None:
        """`depth`: reads in flight, at most.

        Raises:
            OSError: this kernel, or this container, has no io_uring.
        """
        params = np.zeros(_NUM_PARAMS, np.uint32)
        self.in_flight = 0
        """Reads that were begun and whose results were not taken."""
        self._depth, self._fd = depth, _syscall(_SETUP, depth, params.ctypes.data)
        weakref.finalize(self, os.close, self._fd)
        if not params[5] & _SINGLE_MMAP:
            raise OSError(errno.ENOSYS, "io_uring of a kernel before 5.4")
        self._sq, self._cq = (params[first : first + 10].astype(np.int64) for first in (10, 20))
        num_bytes = max(
            self._sq[ARRAY] + 4 * int(params[0]), self._cq[RESULTS] + 16 * int(params[1])
        )
        self._rings = self._map(int(num_bytes), _SQ_RING)
        self._requests = self._map(8 * _SQE_WORDS * int(params[0]), _SQES).view(np.uint64)

    def _map(self, num_bytes: int, offset: int) -> np.ndarray:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return np.frombuffer(mmap.mmap(self._fd, num_bytes, flags, offset=offset), np.uint8)

    def read(
        self,
        files_U: np.ndarray,
        offsets_U: np.ndarray,
        addresses_U: np.ndarray,
        num_bytes: int,
        needed_U: np.ndarray,
    ) -> Iterator[np.ndarray]:
        """Read `num_bytes` of every file (descriptor) from its offset on to its address; all int64.
        The ring is not to be used for others while some of them are in flight.

        Yields:
            The numbers of reads as they are done, int64, some at a time. The first result, which
            may be empty, is there as soon as the kernel has the first requests.

        Raises:
            OSError: a read failed, or gave less than `needed_U` bytes.
        """
        num, begun, done, failure = len(files_U), 0, 0, 0
        words, done_U = self._rings.view(np.uint32), np.empty(len(files_U), np.int64)
        num_awaited = 0
        while done < num:
            last = min(num, done + self._depth) if not failure else begun
            _add_requests(
                words, self._requests, self._sq, begun, last, files_U, offsets_U, addresses_U,
                num_bytes,
            )  # fmt: skip
            self.in_flight += last - begun
            begun = last
            if begun == done:
                break
            self._enter(words, num_awaited)
            taken, failed = _take_results(words, self._rings, self._cq, needed_U, done_U[done:])
            self.in_flight -= taken
            failure = failure or failed
            yield done_U[done : done if failure else done + taken]
            done += taken
            num_awaited = min(begun - done, max(1, self._depth // PARTS))
        if failure < 0:
            raise OSError(-failure, os.strerror(-failure))
        if failure > 0:
            raise OSError(errno.EIO, f"{failure - 1} bytes of {num_bytes}")

    def _enter(self, words: np.ndarray, num_results: int) -> None:
        """Hand over what was added and wait for some results."""
        while True:
            waiting = int(words[self._sq[TAIL] // 4]) - int(words[self._sq[HEAD] // 4])
            try:
                _syscall(_ENTER, self._fd, waiting % (1 << 32), num_results, _GET_EVENTS, 0, 0)
                return
            except InterruptedError:
                pass  # a signal; what was handed over is not handed over again


def _syscall(number: int, *arguments: int) -> int:
    result = _libc.syscall(number, *map(ctypes.c_long, arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@nb.njit(nogil=True, cache=True)
def _add_requests(
    words: np.ndarray,
    requests: np.ndarray,
    sq: np.ndarray,
    first: int,
    last: int,
    files_U: np.ndarray,
    offsets_U: np.ndarray,
    addresses_U: np.ndarray,
    num_bytes: int,
) -> None:
    """Put reads `first` to `last` into the submission ring; the kernel looks there when entered."""
    tail, mask = words[sq[TAIL] // 4], words[sq[MASK] // 4]
    for u in range(first, last):
        slot = np.int64(tail & mask)
        request = requests[slot * _SQE_WORDS : (slot + 1) * _SQE_WORDS]
        request[:] = 0
        request[0] = np.uint64(_READ) | np.uint64(files_U[u]) << np.uint64(32)
        request[1], request[2] = np.uint64(offsets_U[u]), np.uint64(addresses_U[u])
        request[3], request[4] = np.uint64(num_bytes), np.uint64(u)
        words[sq[ARRAY] // 4 + slot] = np.uint32(slot)
        tail = np.uint32(tail + np.uint32(1))
    words[sq[TAIL] // 4] = tail


@nb.njit(nogil=True, cache=True)
def _take_results(
    words: np.ndarray,
    rings: np.ndarray,
    cq: np.ndarray,
    needed_U: np.ndarray,
    done: np.ndarray,
) -> tuple[int, int]:
    """Take all results off the completion ring and put the numbers of their reads to the front of
    `done`: how many, and what went wrong first: 0 nothing, -e the error e, n + 1 a read of n bytes
    only.
    """
    head, tail, mask = words[cq[HEAD] // 4], words[cq[TAIL] // 4], words[cq[MASK] // 4]
    results = rings[cq[RESULTS] :]
    failure = 0
    num = int(tail - head)
    for i in range(num):
        at = np.int64(head & mask) * 16
        done[i] = u = results[at : at + 8].view(np.int64)[0]
        num_bytes = int(results[at + 8 : at + 12].view(np.int32)[0])
        if num_bytes < needed_U[u] and failure == 0:
            failure = num_bytes if num_bytes < 0 else num_bytes + 1
        head = np.uint32(head + np.uint32(1))
    words[cq[HEAD] // 4] = head
    return num, failure
