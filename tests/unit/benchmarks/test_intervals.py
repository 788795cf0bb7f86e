"""Intervals of benchmarks against values from tables and closed forms."""

from __future__ import annotations

import math

import pytest

from benchmarks.common.intervals import Interval, interval_of, is_equivalent


def test_the_interval_is_that_of_students_table() -> None:
    # t(0.975) is 4.303 with 2 degrees of freedom and 2.571 with 5; the deviation of 1, 2, 3 is 1.
    found = interval_of([1.0, 2.0, 3.0])
    assert (found.mean, found.seeds) == (2.0, 3)
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3), abs=1e-3)
    six = interval_of([-0.1, -0.1, -1.4, -0.3, -0.7, -1.6])
    assert six.mean == pytest.approx(-0.7)
    assert six.half_width == pytest.approx(2.5706 * 0.6603 / math.sqrt(6), abs=1e-3)
    assert (six.low, six.high) == (six.mean - six.half_width, six.mean + six.half_width)


def test_one_seed_says_nothing_of_the_spread() -> None:
    found = interval_of([0.4])
    assert found == Interval(0.4, math.inf, 1)
    assert not is_equivalent(found)
    with pytest.raises(ValueError, match="at least one"):
        interval_of([])


def test_only_an_interval_above_the_margin_is_equivalent() -> None:
    assert is_equivalent(Interval(-0.1, 0.39, 9))
    assert not is_equivalent(Interval(-0.1, 0.4, 9))
    assert not is_equivalent(Interval(0.3, 0.9, 3))
