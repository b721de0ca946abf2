"""Laws of run_units: each unit is done once, and an error is the user's own."""

from functools import partial
from pathlib import Path

import pytest

from ray_jobs.runtime.cluster import connect
from ray_jobs.runtime.config import Cluster
from ray_jobs.runtime.units import run_units
from scone_core.artifacts.units import write_receipt
from tests.builders.receipts import Result

NAMES = [f"unit-{number}" for number in range(5)]


@pytest.fixture(autouse=True)
def connected() -> None:
    connect(Cluster())


def test_receipts_come_in_order_and_finished_units_are_not_done_again(tmp_path: Path) -> None:
    folder = str(tmp_path)
    write_receipt(folder, "unit-2", Result(value=-1))
    receipts = run_units(
        "squares", NAMES, lambda i: Result(value=i * i), kind=Result, folder=folder
    )
    assert [receipt.value for receipt in receipts] == [0, 1, -1, 9, 16]


def test_a_failing_unit_raises_its_own_error_and_a_second_run_continues(tmp_path: Path) -> None:
    do_units = partial(run_units, "shares", NAMES, kind=Result, folder=str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        do_units(lambda i: Result(value=12 // (i + 1) // (i != 3)))
    receipts = do_units(lambda i: Result(value=12 // (i + 1)))
    assert [receipt.value for receipt in receipts] == [12, 6, 4, 3, 2]


def test_a_unit_that_fits_no_node_is_refused_instead_of_waiting(tmp_path: Path) -> None:
    do_units = partial(run_units, "none", NAMES, kind=Result, folder=str(tmp_path))
    with pytest.raises(ValueError, match="lower memory_mb"):
        do_units(lambda i: Result(value=i), memory_bytes=1 << 50)
