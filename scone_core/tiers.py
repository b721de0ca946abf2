"""Where the rows of an open table live, by rank: locked in memory, mapped, or read from disk."""

import ctypes
import mmap
import os
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from scone_core.config import Frozen

PAGE = mmap.PAGESIZE


class Tiers(Frozen):
    """Ids are ranks, so a tier is a range of ids. By default every row is mapped and none locked:
    right for a table that fits the memory its node has to spare.
    """

    hot_rows: int = Field(default=0, ge=0)
    """The most frequent rows, read when the table is opened and locked in memory."""
    cold_from: int | None = Field(default=None, ge=0)
    """First id whose row is read from disk at every lookup; None: no row is."""
    io: Literal["mmap", "direct"] = "direct"
    """How cold rows are read. direct: io_uring past the page cache, which leaves the other tiers in
    memory (needs `liburing`). mmap: the kernel is told of a batch's pages before they are touched
    (MADV_WILLNEED). 4,096-byte rows, batch 256 / 4,096: 18 / 14 us a row and 20 / 18; one page
    fault after the other takes 81.
    """
    queue_depth: int = Field(default=256, ge=1, le=4096)
    """Reads in flight with `io: direct`."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.cold_from is not None and self.hot_rows > self.cold_from:
            raise ValueError(
                f"hot_rows={self.hot_rows} > cold_from={self.cold_from}: a row cannot be locked in "
                "memory and read from disk; lower hot_rows"
            )
        return self


ALL_MAPPED = Tiers()


def lock_rows(rows_NC: np.ndarray) -> None:
    """Read mapped rows and keep them in memory; processes that lock the same file share its pages.

    Raises:
        ValueError: more than this process may lock.
    """
    libc, address = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p(rows_NC.ctypes.data)
    if libc.mlock(address, ctypes.c_size_t(rows_NC.nbytes)) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ValueError(
            f"hot_rows: cannot lock {rows_NC.nbytes:,} bytes in memory ({reason}); raise the limit "
            "(ulimit -l, in containers also their memory) or lower hot_rows"
        )


def expect_random_reads(rows_NC: np.ndarray) -> None:
    """A fault on these mapped rows reads its own page and nothing around it (up to 8 MiB else)."""
    address = rows_NC.ctypes.data
    first, last = -(-address // PAGE) * PAGE, address + rows_NC.nbytes
    if first < last:
        whole = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
        ctypes.CDLL(None).madvise(*whole, mmap.MADV_RANDOM)
