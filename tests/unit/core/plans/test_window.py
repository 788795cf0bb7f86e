"""The window of a small cache: what makes it larger, and what makes it smaller."""

from __future__ import annotations

import random

import pytest

from spiderfs.core.plans.fetch_limits import FIRST, LATE_EVERY, LEAST, MOST, Window


def test_opens_that_wait_for_an_idle_source_make_the_window_larger() -> None:
    window = Window()
    for opens in range(1, 40):
        window.opened(opens, opens, idle=True)
    assert window.samples == MOST


def test_opens_that_do_not_wait_make_the_window_smaller() -> None:
    window = Window()
    window.opened(LATE_EVERY, 0, idle=True)
    assert 0.85 * FIRST < window.samples < FIRST
    window.opened(1_000_000, 0, idle=True)
    assert window.samples == LEAST


def test_the_window_does_not_grow_while_the_source_is_never_idle() -> None:
    window = Window()
    window.opened(1000, 1000, idle=False)
    assert window.samples == FIRST


def test_only_opens_after_the_window_was_made_count() -> None:
    window = Window(1000, 500)
    window.opened(1000, 500, idle=True)
    assert window.samples == FIRST


@pytest.mark.parametrize("needed", [50, 100, 200])
def test_the_window_comes_to_a_size_at_which_few_opens_wait(needed: int) -> None:
    """An open waits if it needs more samples ahead than the window has; opens need about `needed` of them."""
    rng = random.Random(needed)
    window = Window()
    late, late_before = 0, 0
    for opens in range(1, 60_001):
        late += rng.gauss(needed, needed / 20) > window.samples
        window.opened(opens, late, idle=True)
        if opens == 30_000:
            late_before = late
    assert 0.5 / LATE_EVERY < (late - late_before) / 30_000 < 2 / LATE_EVERY
    assert 0.9 * needed < window.samples < 1.4 * needed
