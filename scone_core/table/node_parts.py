"""One table on many nodes: which of them owns a row, and rows back in the order of their ids.

Shapes: M ids of one lookup, U distinct ones, D width, O owners.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from scone_core.artifacts.manifests import EmbeddingsManifest


class LookupPlan(NamedTuple):
    """What to ask whom."""

    ids_by_owner: dict[int, np.ndarray]
    """int64, distinct and ascending; owners of none are left out."""
    place_M: np.ndarray
    """int64: where each id of the lookup stands among those of all owners, one after another."""

    def in_order(self, rows_by_owner: Mapping[int, np.ndarray]) -> np.ndarray:
        """The rows [M, D] of the lookup, from those that every owner gave for its ids."""
        parts = [rows_by_owner[owner] for owner in self.ids_by_owner]
        return np.concatenate(parts)[self.place_M]


class TableParts:
    """A table cut into ranges of shards of about as many rows each."""

    def __init__(self, manifest: EmbeddingsManifest, num_owners: int) -> None:
        """No owner is without a shard, so there may be fewer than `num_owners` (>= 1)."""
        self.num_rows = manifest.num_rows
        middles = [shard.first_id + shard.num_rows // 2 for shard in manifest.shards]
        owners = np.array(middles) * num_owners // max(manifest.num_rows, 1)
        cuts = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
        self.shards = [range(*cut) for cut in zip(cuts[:-1], cuts[1:], strict=True)]
        """Numbers of each owner's shards."""
        self.first_ids = np.array([manifest.shards[part[0]].first_id for part in self.shards])

    def plan(self, ids_M: np.ndarray) -> LookupPlan:
        """Ask every owner once, for each of its ids once.

        Args:
            ids_M: int64.

        Raises:
            ValueError: an id without a row.
        """
        ids_U, place_M = np.unique(ids_M, return_inverse=True)
        bad_U = ids_U[(ids_U < 0) | (ids_U >= self.num_rows)]
        if len(bad_U):
            raise ValueError(
                f"f-gram id {bad_U[0]} has no row: the table holds ids 0..{self.num_rows - 1}; "
                "match with the f-gram set it was precomputed for"
            )
        parts = np.split(ids_U, np.searchsorted(ids_U, self.first_ids[1:]))
        asked = {owner: ids for owner, ids in enumerate(parts) if len(ids)}
        return LookupPlan(asked or {0: ids_U}, place_M)
