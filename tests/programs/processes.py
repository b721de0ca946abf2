"""What tests that start servers of their own need."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 400


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
