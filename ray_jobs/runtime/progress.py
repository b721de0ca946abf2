"""What a stage has done -> one line a second at most: how much, how fast, how long still."""

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

WINDOW_SECONDS = 10
"""The rate is that of the last seconds: a mean since the start would count the time in which
workers started.
"""


class Progress:
    """Prints one line a second at most.

    The rate is measured from the first `advance` on, over the last ten seconds; where less than one
    unit is done in ten seconds, since the last line. There is no rate and no ETA before one second
    was measured.
    """

    def __init__(
        self,
        stage: str,
        *,
        unit: str,
        total: int | None = None,
        done: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total` and `done` count `unit`s, of which `done` were finished by an earlier attempt.
        `clock` gives seconds.
        """
        self._stage, self._unit, self._total, self._done = stage, unit, total, done
        self._clock, self._shown = clock, clock()
        self._measured: deque[tuple[float, int]] = deque()

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Count `amount` units as done; `note` ends the line, if one is printed now."""
        self._done += amount
        now = self._clock()
        if not self._measured:
            self._measured.append((now, self._done))
        if now - self._shown >= 1 or self._done == self._total:
            self._shown = now
            print(self._line(self._rate(now), note), flush=True)

    def _rate(self, now: float) -> float | None:
        """Units per second; None before one second was measured."""
        self._measured.append((now, self._done))
        while len(self._measured) > 1 and self._measured[1][0] <= now - WINDOW_SECONDS:
            self._measured.popleft()
        since, done_before = self._measured[0]
        return (self._done - done_before) / (now - since) if now - since >= 1 else None

    def _line(self, rate: float | None, note: str) -> str:
        line = f"{self._stage}: {self._done:,}"
        if self._total is not None:
            line += f"/{self._total:,}"
        line += f" {self._unit}"
        if rate is not None:
            line += f", {rate:,.1f}/s"
        if self._total is not None and self._done < self._total and rate:
            line += f", ETA {timedelta(seconds=round((self._total - self._done) / rate))}"
        return f"{line} {note}".rstrip()
