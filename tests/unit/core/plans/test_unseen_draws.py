"""Draws of whose opens no one hears: each is seen or unseen, whatever becomes of the clock."""

from __future__ import annotations

from spiderfs.core.plans.schedule import AHEAD_S, UNSEEN_AFTER_S, UnseenDraws
from spiderfs.core.policy import Key


def taken(draws: UnseenDraws, now_s: float) -> list[Key]:
    return [draw.key for draw in draws.take(now_s)]


def test_a_clock_that_was_set_back_keeps_no_draw_waiting() -> None:
    draws = UnseenDraws()
    draws.took(1, 10_000.0)
    assert taken(draws, 6_400.0) == [1]
    draws.took(2, 6_400.0)
    assert taken(draws, 6_400.0) == []
    assert taken(draws, 6_400.0 + UNSEEN_AFTER_S) == [2]


def test_an_open_may_be_reported_before_its_draw() -> None:
    draws = UnseenDraws()
    draws.opened_ahead(1, 100.0)
    draws.took(1, 100.0 + AHEAD_S / 2)
    draws.took(1, 100.0 + AHEAD_S / 2)
    assert taken(draws, 200.0) == [1], "one open is that of one draw"


def test_an_open_long_before_a_draw_is_someone_elses() -> None:
    draws = UnseenDraws()
    draws.opened_ahead(1, 100.0)
    draws.took(1, 100.0 + 2 * AHEAD_S)
    draws.opened_ahead(2, 300.0)
    draws.took(2, 200.0)
    assert taken(draws, 400.0) == [1, 2]
