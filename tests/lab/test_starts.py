"""Verdicts over random starts: sides of a threshold, and how many starts it would take to tell."""

from __future__ import annotations

import math
from statistics import mean, stdev

import pytest

from headwise.lab.starts import (
    MOST,
    _student,
    above,
    below,
    describe_mean,
    describe_need,
    mean_interval,
    starts_needed,
)

SPLIT = [1.0, 2.0, 3.0, 4.0, 5.0]  # starts that disagree about thresholds between 1 and 5


@pytest.mark.parametrize(
    ("degrees", "level", "table"),
    [(1, 0.95, 12.706), (2, 0.95, 4.303), (4, 0.95, 2.776), (19, 0.95, 2.093), (4, 0.99, 4.604), (999, 0.95, 1.962)],
)
def test_student_quantiles_match_the_printed_tables(degrees: int, level: float, table: float) -> None:
    assert _student(degrees, level) == pytest.approx(table, abs=6e-4)


def test_the_interval_of_a_mean_is_students() -> None:
    half_width = 2.7764 * math.sqrt(2.5 / 5)
    assert mean_interval(SPLIT) == pytest.approx((3 - half_width, 3 + half_width), abs=1e-4)
    assert mean_interval([3.0]) == (-math.inf, math.inf)
    low, high = mean_interval(SPLIT, 0.99)
    assert low < 3 - half_width and high > 3 + half_width


def test_starts_that_agree_decide_however_few_they_are() -> None:
    assert above([1.0, 9.0], 0.5) and not below([1.0, 9.0], 0.5)
    assert below([1.0, 9.0], 9.0) and not above([1.0, 9.0], 9.0)
    assert above([1.0], 0.5) and below([1.0], 1.0)


def test_starts_that_disagree_decide_by_the_interval_of_their_mean() -> None:
    low, high = mean_interval(SPLIT)
    assert min(SPLIT) < low < high < max(SPLIT)
    assert above(SPLIT, low - 0.01) and not below(SPLIT, low - 0.01)
    assert below(SPLIT, high + 0.01) and not above(SPLIT, high + 0.01)
    for threshold in (low + 0.01, 3.0, high - 0.01):
        assert not above(SPLIT, threshold) and not below(SPLIT, threshold)


@pytest.mark.parametrize("threshold", [2.0, 2.5, 2.9, 3.4])
def test_the_number_of_starts_needed_is_the_first_whose_interval_leaves_the_threshold(threshold: float) -> None:
    count = starts_needed(SPLIT, threshold)
    assert count is not None and count > len(SPLIT)
    widths = [_student(n - 1, 0.95) * stdev(SPLIT) / math.sqrt(n) for n in (count - 1, count)]
    assert widths[0] >= abs(mean(SPLIT) - threshold) > widths[1]


def test_no_number_of_starts_separates_a_mean_from_itself() -> None:
    assert starts_needed(SPLIT, 3.0) is None
    assert starts_needed(SPLIT, 3.0 + 1e-6) is None
    assert f"more than {MOST:,} random starts instead of 5" in describe_need(SPLIT, 3.0)


def test_needs_and_means_are_told_with_their_unit_and_level() -> None:
    count = starts_needed(SPLIT, 2.5)
    assert describe_need(SPLIT, 2.5, " %") == (
        f"about {count} random starts instead of 5, for the 95 % interval of the mean to leave 2.5 % (mean 3 %, "
        "standard deviation 1.6 %)"
    )
    assert describe_need([2.0], 1.0, noun="draws") == "at least two draws, to know their spread"
    assert describe_mean(SPLIT, " nats") == "5 random starts, 1 to 5 nats, 95 % interval of the mean 1.04 to 4.96 nats"
    assert describe_mean([2.0]) == "1 random starts, 2 to 2"
