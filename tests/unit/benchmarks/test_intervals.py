"""Intervals of benchmarks against values from tables and closed forms."""

from __future__ import annotations

import math

import pytest

from benchmarks.common.intervals import Interval, interval_of, is_equivalent, seeds_needed, shown, verdict


def test_the_interval_is_that_of_students_table() -> None:
    # t(0.975) is 4.303 with 2 degrees of freedom and 2.571 with 5; the deviation of 1, 2, 3 is 1.
    found = interval_of([1.0, 2.0, 3.0])
    assert (found.mean, found.seeds, found.deviation) == (2.0, 3, 1.0)
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3), abs=1e-3)
    six = interval_of([-0.1, -0.1, -1.4, -0.3, -0.7, -1.6])
    assert six.mean == pytest.approx(-0.7)
    assert six.deviation == pytest.approx(0.6603, abs=1e-4)
    assert six.half_width == pytest.approx(2.5706 * 0.6603 / math.sqrt(6), abs=1e-3)
    assert (six.low, six.high) == (six.mean - six.half_width, six.mean + six.half_width)


def test_one_seed_says_nothing_of_the_spread() -> None:
    found = interval_of([0.4])
    assert found == Interval(0.4, math.inf, 1, 0.0)
    assert not is_equivalent(found)
    with pytest.raises(ValueError, match="at least one"):
        interval_of([])


@pytest.mark.parametrize(
    ("deviation", "half_width", "needed"),
    # t(n - 1) * s / sqrt(n): 2.447 * 0.5 / sqrt(7) = 0.462 and 2.571 * 0.5 / sqrt(6) = 0.525.
    [(0.5, 0.5, 7), (0.7, 0.5, 11), (1.0, 0.5, 18), (0.0, 0.5, 2), (1.0, 1e-4, None)],
)
def test_seeds_needed(deviation: float, half_width: float, needed: int | None) -> None:
    assert seeds_needed(deviation, half_width) == needed


def test_only_an_interval_above_the_margin_is_equivalent() -> None:
    assert is_equivalent(Interval(-0.1, 0.39, 9, 0.5))
    assert not is_equivalent(Interval(-0.1, 0.4, 9, 0.5))
    assert not is_equivalent(Interval(0.3, 0.9, 3, 0.4))


def test_what_is_shown() -> None:
    assert shown([]) == verdict([]) == ""
    assert shown([0.25], "+.2f") == "+0.25"
    assert verdict([0.25]) == "one seed"
    assert shown([1.0, 2.0, 3.0]) == "+2.0 [-0.5, +4.5]"
    assert verdict([0.0, 0.0, 0.0]) == "the same training"
    assert verdict([-0.1, 0.0, 0.1]) == "at most 0.5 lower"
    assert verdict([-5.1, -5.0, -4.9]) == "lower"
    assert verdict([-1.4, -0.7, 0.0]) == "open: 11 seeds for ±0.5"
