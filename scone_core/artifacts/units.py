"""Units of work -> their receipts: a unit is done once, wherever and however often its stage runs.

A receipt is a small JSON file in the folder of an unfinished artifact. It says that a unit is
finished and holds what later units and the manifest need to know of it.
"""

import json
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from pydantic import ValidationError

from scone_core.artifacts import storage
from scone_core.artifacts.config import Frozen
from scone_core.artifacts.folders import RECEIPTS
from scone_core.artifacts.manifests import ArtifactError

R = TypeVar("R", bound=Frozen)


class DoUnits(Protocol):
    """Where units run is a parameter: in this process (`do_here`), or as tasks of Ray
    (`ray_jobs.runtime.units.run_units`).
    """

    def __call__(
        self,
        title: str,
        names: Sequence[str],
        unit: Callable[[int], R],
        *,
        kind: type[R],
        folder: str,
        memory_bytes: int = 0,
    ) -> list[R]:
        """Run `unit(number)` for every unit that has no receipt in `folder` yet.

        Args:
            title: what the units do, for the progress line.
            names: the name of each unit's receipt, by the unit's number.
            unit: does one unit; what it returns is written as its receipt.
            kind: the class of the receipts.
            memory_bytes: the memory that one unit needs.

        Returns:
            The receipts of all units in the order of `names`.

        Raises:
            ArtifactError: a unit left no receipt, or one of another class than `kind`.
        """
        ...


def do_here(
    title: str,
    names: Sequence[str],
    unit: Callable[[int], R],
    *,
    kind: type[R],
    folder: str,
    memory_bytes: int = 0,
) -> list[R]:
    """A `DoUnits` that runs unit after unit in this process."""
    for number, name in enumerate(names):
        if read_receipt(folder, name, kind) is None:
            write_receipt(folder, name, unit(number))
    return read_receipts(title, names, kind=kind, folder=folder)


def read_receipts(title: str, names: Sequence[str], *, kind: type[R], folder: str) -> list[R]:
    """The receipts `names` in `folder`, in this order.

    Raises:
        ArtifactError: a unit has no receipt, or one of another class than `kind`.
    """
    receipts = []
    for name in names:
        receipt = read_receipt(folder, name, kind)
        if receipt is None:
            raise ArtifactError(
                f"{title}: the unit {name!r} left no receipt in {folder}/{RECEIPTS}; every node "
                "must see that folder, and nothing else may delete files there"
            )
        receipts.append(receipt)
    return receipts


def read_receipt(folder: str, name: str, kind: type[R]) -> R | None:
    """The receipt of the unit `name`; None when the unit is not finished.

    Raises:
        ArtifactError: the receipt is damaged or of another class than `kind`.
    """
    path = _receipt_path(folder, name)
    if not storage.exists(path):
        return None
    try:
        return kind.model_validate_json(storage.read_bytes(path))
    except ValidationError as error:
        raise ArtifactError(
            f"{path}: not a valid {kind.__name__} ({error}); delete it to do its unit again"
        ) from error


def write_receipt(folder: str, name: str, receipt: Frozen) -> None:
    """Record that the unit `name` is finished. Figures may be infinite or no number."""
    content = json.dumps(receipt.model_dump(mode="json"), indent=1)
    storage.write_bytes(_receipt_path(folder, name), content.encode())


def remove_receipt(folder: str, name: str) -> None:
    """Forget that the unit `name` is finished."""
    storage.remove(_receipt_path(folder, name))


def _receipt_path(folder: str, name: str) -> str:
    return storage.join(folder, RECEIPTS, f"{name}.json")
