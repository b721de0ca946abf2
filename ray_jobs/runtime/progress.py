"""One line a second at most: what is done, how fast, how long still."""

import time
from datetime import timedelta


class Progress:
    """One line a second at most: what is done, how fast, how long still."""

    def __init__(self, stage: str, *, unit: str, total: int | None = None, done: int = 0) -> None:
        """`total` and `done` in `unit`s; `done` were finished by an earlier attempt."""
        self._stage, self._unit, self._total = stage, unit, total
        self._first, self._done = done, done
        self._started = self._shown = time.monotonic()

    def advance(self, amount: int = 1, note: str = "") -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._shown >= 1 or self._done == self._total:
            self._shown = now
            print(self._line(now, note), flush=True)

    def _line(self, now: float, note: str) -> str:
        rate = (self._done - self._first) / max(now - self._started, 1e-9)
        line = f"{self._stage}: {self._done:,}"
        if self._total is not None:
            line += f"/{self._total:,}"
        line += f" {self._unit}, {rate:,.1f}/s"
        if self._total is not None and rate > 0:
            line += f", ETA {timedelta(seconds=round((self._total - self._done) / rate))}"
        return f"{line} {note}".rstrip()
