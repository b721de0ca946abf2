"""What the finished units of a count leave for later units and for the manifest."""

from scone_core.artifacts.config import Frozen
from scone_core.artifacts.manifests import Shard
from scone_core.counting.ranges import Cut
from scone_core.fgrams.ngrams import NGram

Counts = tuple[tuple[NGram, int], ...]
"""Pairs of an n-gram and its count."""


class ChunkReceipt(Frozen):
    """A mapped chunk."""

    shard: Shard


class CutsReceipt(Frozen):
    """The cuts of a round: range i holds everything between the cuts i and i + 1."""

    cuts: tuple[Cut, ...]

    @property
    def num_ranges(self) -> int:
        return len(self.cuts) - 1


class RangeReceipt(Frozen):
    """A counted range."""

    rows: Shard
    """The n-grams of the range at `min_count` or above in rank order, without those in `across`."""
    classes: Shard
    """The sizes of their classes of equal count and length."""
    across: Counts = ()
    """The occurrences in this range of the n-grams that one of its two cuts divides."""
    included: Counts = ()
    """The occurrences in this range of the n-grams that the user asked to include."""
