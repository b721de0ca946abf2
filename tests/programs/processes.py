"""What tests that start processes of their own need."""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 400
FORKS = multiprocessing.get_context("forkserver")
"""Processes that have the modules below when they start, whose imports take 15 s."""
FORKS.set_forkserver_preload(
    ["tests.oracles.plain_count", "tests.oracles.plain_precompute", "tests.programs.train_ranks"]
)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.5)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def script(name: str) -> str:
    """A command of the environment that runs the tests."""
    return str(Path(sys.executable).with_name(name))


def kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def write_output_to(path: Path) -> None:
    """Send all that this process prints from now on to a file, C libraries' words included."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
