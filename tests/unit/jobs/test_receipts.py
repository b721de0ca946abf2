"""Laws of units: each is done once, its receipt keeps its type, and none is missing in silence."""

import math
from pathlib import Path

import pytest

from scone_core.artifacts.config import Frozen
from scone_core.artifacts.manifests import ArtifactError
from scone_core.artifacts.units import (
    do_here,
    read_receipt,
    read_receipts,
    remove_receipt,
    write_receipt,
)

NAMES = [f"unit-{number}" for number in range(5)]


class Square(Frozen):
    square: float


def square(number: int) -> Square:
    return Square(square=number**2)


def test_receipts_come_in_order_and_finished_units_are_not_done_again(tmp_path: Path) -> None:
    write_receipt(str(tmp_path), "unit-2", Square(square=-1))
    receipts = do_here("squares", NAMES, square, kind=Square, folder=str(tmp_path))
    assert receipts == [Square(square=value) for value in (0, 1, -1, 9, 16)]


def test_a_second_run_continues_after_a_unit_that_failed(tmp_path: Path) -> None:
    done: list[int] = []

    def fail_at_3(number: int) -> Square:
        if number == 3 and 3 not in done:
            done.append(3)
            raise ZeroDivisionError
        done.append(number)
        return square(number)

    for _ in range(2):
        try:
            do_here("squares", NAMES, fail_at_3, kind=Square, folder=str(tmp_path))
        except ZeroDivisionError:
            assert done == [0, 1, 2, 3]
    assert done == [0, 1, 2, 3, 3, 4]


def test_a_missing_receipt_is_an_error_that_names_its_unit(tmp_path: Path) -> None:
    folder = str(tmp_path)
    do_here("squares", NAMES, square, kind=Square, folder=folder)
    remove_receipt(folder, "unit-3")
    assert read_receipt(folder, "unit-3", Square) is None
    with pytest.raises(ArtifactError, match="squares: the unit 'unit-3' left no receipt"):
        read_receipts("squares", NAMES, kind=Square, folder=folder)


@pytest.mark.parametrize("content", ["{", '{"cube": 8}'])
def test_a_receipt_of_another_class_is_refused(tmp_path: Path, content: str) -> None:
    write_receipt(str(tmp_path), "unit-0", Square(square=0))
    (tmp_path / "_receipts/unit-0.json").write_text(content)
    with pytest.raises(ArtifactError, match=r"(?s)unit-0\.json: not a valid Square.*delete it"):
        read_receipt(str(tmp_path), "unit-0", Square)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.1])
def test_a_receipt_holds_any_figure(tmp_path: Path, value: float) -> None:
    write_receipt(str(tmp_path), "unit-0", Square(square=value))
    found = read_receipt(str(tmp_path), "unit-0", Square)
    assert found is not None
    assert found.square == pytest.approx(value, nan_ok=True)
