"""Laws of progress: rate and ETA are those of the last seconds, one line a second at most."""

import pytest

from ray_jobs.runtime.progress import WINDOW_SECONDS, Progress


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines_of(
    capsys: pytest.CaptureFixture[str], times: list[tuple[float, int]], *, total: int | None
) -> list[str]:
    """The lines after every `(seconds since the line before, units done)` of `times`."""
    clock = Clock()
    progress = Progress("train", unit="steps", total=total, clock=clock)
    for seconds, amount in times:
        clock.now += seconds
        progress.advance(amount, "loss 1.5")
    return capsys.readouterr().out.splitlines()


def test_the_first_line_has_no_rate_and_no_eta(capsys: pytest.CaptureFixture[str]) -> None:
    """The seconds before it are those in which workers started."""
    assert lines_of(capsys, [(60, 10)], total=1000) == ["train: 10/1,000 steps loss 1.5"]


def test_the_start_of_workers_is_in_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, [(60, 10), (2, 20)], total=1030)
    assert lines[1] == "train: 30/1,030 steps, 10.0/s, ETA 0:01:40 loss 1.5"


def test_the_rate_is_that_of_the_last_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = [(1.0, 1)] * 60, [(1.0, 5)] * WINDOW_SECONDS
    lines = lines_of(capsys, [*slow, *fast], total=1110)
    assert ", 1.0/s, ETA 0:17:30" in lines[59]
    assert ", 5.0/s, ETA 0:03:20" in lines[-1]


def test_units_that_last_longer_than_the_window_have_a_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = lines_of(capsys, [(1, 1), (40, 1), (20, 1)], total=5)
    assert ", 0.0/s, ETA 0:02:00" in lines[1]
    assert ", 0.1/s, ETA 0:00:40" in lines[2]


def test_there_is_one_line_a_second_at_most_and_one_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = lines_of(capsys, [(0.125, 1)] * 100, total=100)
    assert len(lines) == 13
    assert lines[-1] == "train: 100/100 steps, 8.0/s loss 1.5"


def test_without_a_total_there_is_a_rate_and_no_eta(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, [(1, 5000), (1, 5000)], total=None)
    assert lines == ["train: 5,000 steps loss 1.5", "train: 10,000 steps, 5,000.0/s loss 1.5"]


def test_what_an_earlier_attempt_did_is_in_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = Progress("count", unit="units", total=20, done=10, clock=clock)
    for _ in range(2):
        clock.now += 2
        progress.advance(1)
    assert capsys.readouterr().out.splitlines()[-1] == "count: 12/20 units, 0.5/s, ETA 0:00:16"
