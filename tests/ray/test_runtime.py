"""Laws of run_units: each unit is done once, and an error is the user's own."""

from pathlib import Path

import pytest

from ray_jobs.runtime.cluster import connect
from ray_jobs.runtime.config import Cluster
from ray_jobs.runtime.units import run_units
from scone_core.artifacts.folders import write_receipt

NAMES = [f"unit-{number}" for number in range(5)]


@pytest.fixture(autouse=True)
def connected() -> None:
    connect(Cluster())


def test_receipts_come_in_order_and_finished_units_are_not_done_again(tmp_path: Path) -> None:
    write_receipt(str(tmp_path), "unit-2", {"square": "done before"})
    receipts = run_units("squares", NAMES, lambda i: {"square": i * i}, folder=str(tmp_path))
    assert [receipt["square"] for receipt in receipts] == [0, 1, "done before", 9, 16]


def test_a_failing_unit_raises_its_own_error_and_a_second_run_goes_on(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with pytest.raises(ZeroDivisionError):
        run_units("shares", NAMES, lambda i: {"share": 12 // (i + 1) // (i != 3)}, folder=folder)
    receipts = run_units("shares", NAMES, lambda i: {"share": 12 // (i + 1)}, folder=folder)
    assert [receipt["share"] for receipt in receipts] == [12, 6, 4, 3, 2]


def test_a_unit_that_fits_no_node_is_refused_instead_of_waiting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lower memory_mb"):
        run_units("none", NAMES, lambda i: {}, folder=str(tmp_path), memory_bytes=1 << 50)
