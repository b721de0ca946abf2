"""Lookups of a table -> counts since it was opened: rows by tier, bytes, and how long they took."""

from scone_core.artifacts.config import Frozen

NUM_BUCKETS = 40
"""Of the latency histogram: bucket b holds lookups of 2^(b - 1) to 2^b - 1 nanoseconds."""


class LookupReport(Frozen):
    """A snapshot of `LookupStatistics`."""

    num_lookups: int
    num_rows: int
    num_hot: int
    """Rows from locked memory."""
    num_cold: int
    """Rows of the cold tier, repeated ones included."""
    num_reads: int
    """Rows that were read from disk for them: a row that a batch wants twice is read once."""
    num_bytes: int
    """Stored bytes of all rows."""
    latency_ns: tuple[int, ...]
    """Lookups by latency: entry b counts those of 2^(b - 1) to 2^b - 1 nanoseconds."""


class LookupStatistics:
    """Counts lookups, about 0.3 us each. Threads that share a table may lose a few."""

    def __init__(self) -> None:
        self._rows = self._hot = self._cold = self._reads = self._bytes = 0
        self._latency = [0] * NUM_BUCKETS

    def add_rows(
        self, num_rows: int, *, num_hot: int, num_cold: int, num_reads: int, num_bytes: int, ns: int
    ) -> None:
        self._rows += num_rows
        self._hot += num_hot
        self._cold += num_cold
        self._reads += num_reads
        self._bytes += num_bytes
        self._latency[min(ns.bit_length(), NUM_BUCKETS - 1)] += 1

    def report(self) -> LookupReport:
        return LookupReport(
            num_lookups=sum(self._latency),
            num_rows=self._rows,
            num_hot=self._hot,
            num_cold=self._cold,
            num_reads=self._reads,
            num_bytes=self._bytes,
            latency_ns=tuple(self._latency),
        )
