"""Run pipeline scripts as a user does, and kill them as a machine does."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

from tests import ROOT
from tests.programs.processes import FORKS

TIMEOUT_S = 480


def start_script(script: str, *args: str) -> subprocess.Popen[str]:
    """`python pipelines/<script> <args>` with a local Ray of its own, in its own process group."""
    command = [sys.executable, str(ROOT / "pipelines" / script), *args, "--cluster.num-cpus", "2"]
    return subprocess.Popen(
        [*command, "--cluster.object-store-mb", "128"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_script(script: str, *args: str) -> tuple[int, str]:
    """Exit code and output (stdout and stderr together) of a pipeline script."""
    process = start_script(script, *args)
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def kill_when(condition: Callable[[], bool], script: str, *args: str) -> None:
    """Start a script and send SIGKILL to it and all its workers as soon as `condition` holds."""
    process = start_script(script, *args)
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, f"finished before it was killed: {process.communicate()[0]}"
        assert time.monotonic() < deadline, "the condition to kill on never held"
        time.sleep(0.01)
    # Ray's processes are in groups of their own and would go on for a while.
    for each in [process, *psutil.Process(process.pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.communicate()


def kill_at_random_points(
    work: Callable[..., None], *args: str, out: Path, num_files: int, num_kills: int = 10
) -> dict[str, str]:
    """Let `work`, which ends with `num_files` files in `out`, run again and again in processes of
    its own, and kill each once it has written a random number of files more, temporary and half
    written ones included; then let it end. What is in `out` then, files of killed attempts apart.
    """
    goals = np.random.default_rng().choice(np.arange(1, num_files), num_kills, replace=False)
    for goal in sorted(goals):
        process = FORKS.Process(target=work, args=args)
        process.start()
        while len([path for path in out.rglob("*") if path.is_file()]) < goal:
            assert process.is_alive(), f"finished before it had {goal} files"
        process.kill()
        process.join()
    process = FORKS.Process(target=work, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0
    return {name: sha for name, sha in snapshot(out).items() if not name.endswith(".tmp")}


def snapshot(folder: Path) -> dict[str, str]:
    """sha256 of every file below `folder`, by relative name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
