"""Where the rows of an open table live, by rank: locked in memory, mapped, or read from disk.

Shapes: E extents, N rows of one shard, C columns of a stored row, S f-grams.
"""

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from scone_core.artifacts.config import Frozen


class Tiers(Frozen):
    """A tier is a range of ranks, which are the ids of f-grams until a table grows. By default all
    rows are mapped and none locked: right for a table that fits the memory its node has to spare.
    """

    hot_rows: int = Field(default=0, ge=0)
    """The most frequent rows, read when the table is opened and locked in memory."""
    cold_from: int | None = Field(default=None, ge=0)
    """First rank whose row is read from disk at every lookup; None: no row is."""
    io: Literal["mmap", "direct"] = "direct"
    """How cold rows are read. direct: io_uring past the page cache, which leaves the other tiers in
    memory. mmap: the kernel is told of a batch's pages before they are touched
    (MADV_WILLNEED). 4,096-byte rows, batch 256 / 4,096: 8.7 / 8.4 us a row and 15 / 12; one page
    fault after the other takes 83.
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
MAX_EXTENTS = 4096
"""Ranges of a table that are locked one by one: the kernel keeps a record of each (65,530 mappings
of a process by default)."""


def hot_extents(
    ranks_S: np.ndarray, hot_rows: int, *, max_extents: int = MAX_EXTENTS
) -> np.ndarray:
    """Ranges of ids that hold the hot rows, int64 [E, 2] with ends excluded, E <= max_extents: the
    smallest gaps between hot ids are locked with them where there would be more.
    """
    ids_H = np.flatnonzero(ranks_S < hot_rows)
    if not len(ids_H):
        return np.empty((0, 2), np.int64)
    gaps_H = np.diff(ids_H)
    largest = np.sort(np.argsort(gaps_H, kind="stable")[max(len(gaps_H) - max_extents + 1, 0) :])
    cuts = largest[gaps_H[largest] > 1]
    firsts = ids_H[np.concatenate([[0], cuts + 1])]
    return np.stack([firsts, ids_H[np.concatenate([cuts, [len(ids_H) - 1]])] + 1], axis=1)
