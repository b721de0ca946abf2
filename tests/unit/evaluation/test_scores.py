"""The laws of intervals: they hold the truth as often as they say, and follow the clusters."""

import math

import numpy as np
import pytest

from scone_core.evaluation.scores import ratio_interval, share_interval, student_quantile


@pytest.mark.parametrize(("degrees", "value"), [(4, 2.7764), (10, 2.2281), (30, 2.0423)])
def test_quantiles_of_student_are_those_of_the_tables(degrees: int, value: float) -> None:
    assert student_quantile(degrees) == pytest.approx(value, rel=3e-3)


@pytest.mark.parametrize(("num_right", "n"), [(134, 200), (1, 12), (0, 10), (10, 10)])
def test_a_share_lies_1_96_standard_errors_from_both_ends_of_its_interval(
    num_right: int, n: int
) -> None:
    """Standard errors of the ends, which is what Wilson's interval solves."""
    share = num_right / n
    for end in share_interval(share, n):
        error = math.sqrt(end * (1 - end) / n)
        assert abs(share - end) == pytest.approx(1.959964 * error, rel=1e-6, abs=1e-7)


def test_intervals_of_ratios_hold_the_truth_19_times_of_20() -> None:
    """12 documents of very different length, tokens of one document alike: a token-wise interval
    would hold it far less often.
    """
    rng = np.random.default_rng(0)
    rounds, inside = 4000, 0
    for _ in range(rounds):
        length_A = rng.integers(20, 200, 12)
        sum_A = length_A * rng.normal(3.0, 0.5, 12)
        low, high = ratio_interval(sum_A, length_A)
        inside += low < 3.0 < high
    assert 0.92 < inside / rounds < 0.97


def test_documents_of_equal_length_give_the_interval_of_a_mean() -> None:
    loss_A = np.array([2.0, 3.0, 2.5, 4.0, 3.5, 3.0])
    low, high = ratio_interval(loss_A * 7, np.full(6, 7))
    half = student_quantile(5) * loss_A.std(ddof=1) / math.sqrt(6)
    assert (low, high) == pytest.approx((3.0 - half, 3.0 + half))


def test_few_documents_have_no_interval() -> None:
    assert ratio_interval(np.ones(4), np.ones(4)) is None
