"""What every stage shares: its Ray and MLflow options, the connection to Ray, the command line."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
import ray.data

from ray_jobs.runtime.progress import Progress
from scone_core.artifacts.folders import read_receipt, write_receipt


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
