"""Functions to measure -> their times, in rounds in which each has its turn."""

import statistics
from collections.abc import Callable
from time import perf_counter

Metrics = dict[str, float]
Rounds = dict[str, list[float]]
"""Measurements by name, in order."""


def wall_us(run: Callable[..., object], *arguments: object) -> float:
    started = perf_counter()
    run(*arguments)
    return (perf_counter() - started) * 1e6


def interleave(runs: dict[str, Callable[[], float]], num_rounds: int) -> Rounds:
    """What every run returns over rounds in which each has its turn; the first is a rehearsal."""
    found: Rounds = {name: [] for name in runs}
    for number in range(num_rounds + 1):
        for name, run in runs.items():
            value = run()
            if number:
                found[name].append(value)
    return found


def interleaved_medians(runs: dict[str, Callable[[], float]], num_rounds: int) -> Metrics:
    """The median of every run, all of them long: no rehearsal, and every round is printed."""
    found: Rounds = {name: [] for name in runs}
    for _ in range(num_rounds):
        for name, run in runs.items():
            found[name].append(run())
    for name, values in found.items():
        print(f"{name}: " + " ".join(f"{value:.2f}" for value in values), flush=True)
    return medians(found)


def medians(found: Rounds) -> Metrics:
    return {name: statistics.median(values) for name, values in found.items()}
