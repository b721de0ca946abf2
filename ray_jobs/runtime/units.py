"""Units of work -> receipts: units run as tasks of Ray Data."""

from collections.abc import Callable, Sequence
from functools import partial

import ray
import ray.data

from ray_jobs.runtime.progress import Progress
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.units import R, read_receipt, read_receipts, write_receipt


def units_dataset(numbers: Sequence[int]) -> ray.data.Dataset:
    """A data set with one row `number`, and so one task, for every unit of work.

    Ray Data divides the cluster among the operators of a pipeline; with one operator that left a
    CPU of two idle, so the division is switched off.
    """
    rows = [{"number": number} for number in numbers]
    units = ray.data.from_items(rows, override_num_blocks=len(rows))
    units.context.op_resource_reservation_enabled = False
    return units


def run_units(
    title: str,
    names: Sequence[str],
    unit: Callable[[int], R],
    *,
    kind: type[R],
    folder: str,
    memory_bytes: int = 0,
) -> list[R]:
    """A `scone_core.artifacts.units.DoUnits`: every unit is one Ray Data task, which writes its own
    receipt. Ray reserves `memory_bytes` for each task.

    Raises:
        ArtifactError: a unit left no receipt.
        ValueError: no node of the cluster can hold a task.
    """
    todo = [i for i, name in enumerate(names) if read_receipt(folder, name, kind) is None]
    if todo:
        _require_node(title, memory_bytes)
        do_unit = partial(_run_unit, names=names, unit=unit, folder=folder)
        done = units_dataset(todo).map(do_unit, num_cpus=1, memory=memory_bytes)
        progress = Progress(title, unit="units", total=len(names), done=len(names) - len(todo))
        for _ in done.iter_rows():
            progress.advance()
    return read_receipts(title, names, kind=kind, folder=folder)


def _run_unit(
    row: dict[str, int], *, names: Sequence[str], unit: Callable[[int], Frozen], folder: str
) -> dict[str, int]:
    write_receipt(folder, names[row["number"]], unit(row["number"]))
    return row


def _require_node(title: str, memory_bytes: int) -> None:
    """Refuse a task that fits no node: it would wait for ever."""
    most = max(node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"])
    if memory_bytes > most:
        raise ValueError(
            f"{title}: a task needs {memory_bytes >> 20} MiB, the largest node offers Ray "
            f"{int(most) >> 20}; lower memory_mb or add memory"
        )
