"""What every stage shares: its Ray and MLflow options, the connection to Ray, the command line."""

import logging
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import ray
import ray.data
import tyro
from pydantic import Field
from ray.exceptions import RayError, UserCodeException
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback
from ray.train.v2.api.exceptions import RayTrainError, WorkerGroupError

from scone_core.artifacts.config import Frozen, OutputPath, Resource, Role, StageConfig
from scone_core.artifacts.manifests import Manifest, read_receipt, write_receipt

RETRY_NOTE = "\nFailed to apply UDF transform"
"""Where Ray Data's advice on retries begins, which it adds to every message of a task."""


class Cluster(Frozen):
    """Where a stage runs. With RAY_ADDRESS set (as `ray job submit` does) it joins that cluster
    instead.
    """

    num_cpus: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1)
    """CPUs of the local Ray."""
    object_store_mb: int = Field(default=1024, ge=80)
    """Object store of the local Ray, MiB."""


class Tracking(Frozen):
    """Where MLflow records the run."""

    uri: str | None = None
    """sqlite:///<absolute path>.db or http(s)://; by default MLFLOW_TRACKING_URI, else mlflow.db
    beside `out`.
    """
    experiment: str = "scone"


class JobConfig(StageConfig):
    """Base of the configurations of the stages that run on Ray."""

    out: OutputPath
    """Folder or URI of the artifact that this stage writes."""
    cluster: Resource[Cluster] = Cluster()
    tracking: Resource[Tracking] = Tracking()


Config = TypeVar("Config", bound=JobConfig)


def connect(cluster: Cluster) -> None:
    """Join the cluster of RAY_ADDRESS or start a local Ray with explicit CPUs and object store."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.raise_original_map_exception = True
    context.issue_detectors_config.detectors = []
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(logging_level=logging.WARNING)
        return
    ray.init(
        address="local",
        num_cpus=cluster.num_cpus,
        object_store_memory=cluster.object_store_mb << 20,
        include_dashboard=False,
        log_to_driver=False,  # errors of tasks come as exceptions, the rest lies in Ray's log files
        logging_level=logging.WARNING,
    )


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


def units_dataset(numbers: Sequence[int]) -> ray.data.Dataset:
    """One row `number`, and so one task, for every unit of work. Ray Data shares the cluster out
    among the operators of a pipeline; with one operator that left a CPU of two idle.
    """
    rows = [{"number": number} for number in numbers]
    units = ray.data.from_items(rows, override_num_blocks=len(rows))
    units.context.op_resource_reservation_enabled = False
    return units


def run_units(
    stage: str,
    names: Sequence[str],
    task: Callable[[int], dict[str, Any]],
    *,
    folder: str,
    memory_bytes: int = 0,
) -> list[dict[str, Any]]:
    """Run `task(number)` as one Ray Data task for every unit of work that has no receipt in
    `folder`.

    Args:
        names: of the receipts, by number.
        task: gives the content of the receipt, which is written where the task runs.
        memory_bytes: what Ray reserves for each task.

    Returns:
        The receipts of all units in the order of `names`.

    Raises:
        ValueError: no node of the cluster can hold a task.
    """
    todo = [i for i, name in enumerate(names) if read_receipt(folder, name) is None]
    if todo:
        _require_node(stage, memory_bytes)
        units = units_dataset(todo)
        do_unit = partial(_run_unit, names=names, task=task, folder=folder)
        done = units.map(do_unit, num_cpus=1, memory=memory_bytes)
        progress = Progress(stage, unit="units", total=len(names), done=len(names) - len(todo))
        for _ in done.iter_rows():
            progress.advance()
    receipts = [read_receipt(folder, name) for name in names]
    return [receipt for receipt in receipts if receipt is not None]


def _run_unit(
    row: dict[str, int],
    *,
    names: Sequence[str],
    task: Callable[[int], dict[str, Any]],
    folder: str,
) -> dict[str, int]:
    write_receipt(folder, names[row["number"]], task(row["number"]))
    return row


def _require_node(stage: str, memory_bytes: int) -> None:
    """A task that fits no node would wait for ever."""
    most = max(node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"])
    if memory_bytes > most:
        raise ValueError(
            f"{stage}: a task needs {memory_bytes >> 20} MiB, the largest node offers Ray "
            f"{int(most) >> 20}; lower memory_mb or add memory"
        )


def main(kind: type[Config], run: Callable[[Config], Manifest | None]) -> None:
    """Run a stage from the command line: bad input ends in one `error:` line and exit code 1."""
    config = tyro.cli(kind, description=run.__doc__)
    with one_line_errors():
        refuse_relative_paths(config)
        manifest = run(config)
    if manifest is not None:
        print(f"{manifest.contract} at {config.out} (fingerprint {manifest.fingerprint[:12]})")


@contextmanager
def one_line_errors() -> Generator[None]:
    """End the process with one `error:` line when input, files or the cluster are at fault."""
    try:
        yield
    except (ValueError, OSError, RayError, RayTrainError) as error:
        reason, _, _ = str(root_cause(error)).partition(RETRY_NOTE)
        sys.exit(f"error: {reason}")


def root_cause(error: BaseException) -> BaseException:
    """The exception of the user's task or train loop behind Ray's wrappers."""
    while isinstance(error, RayError | RayTrainError | UserCodeException):
        cause = getattr(error, "cause", None) or error.__cause__
        if isinstance(error, WorkerGroupError):
            cause = next(iter(error.worker_failures.values()))
        elif isinstance(error, UserExceptionWithTraceback):
            cause = error._base_exc
        if not isinstance(cause, BaseException):
            break
        error = cause
    return error


def refuse_relative_paths(config: StageConfig) -> None:
    """A submitted job runs in a temporary copy of its working folder: a relative output would
    vanish with it.
    """
    if "working_dir_files" not in os.getcwd():
        return
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        is_path = any(mark in field.metadata for mark in (Role("input"), Role("output")))
        if is_path and isinstance(value, str) and "://" not in value and not os.path.isabs(value):
            raise ValueError(
                f"{name}={value!r}: a submitted job needs an absolute path or a URI here"
            )
