"""Draws of whose opens nobody hears: each is seen or unseen, whatever becomes of the clock."""

from __future__ import annotations

from spiderfs.core.unseen_draws import UNSEEN_AFTER_S, UnseenDraws


def test_a_draw_is_unseen_when_its_open_was_not_heard_of() -> None:
    draws = UnseenDraws()
    draws.took(1, 100.0)
    draws.took(2, 100.1)
    assert draws.heard(2, 100.0)
    assert draws.take(100.0 + UNSEEN_AFTER_S / 2) == []
    assert draws.take(100.2 + UNSEEN_AFTER_S) == [1]
    assert draws.take(200.0) == []


def test_a_clock_that_was_set_back_keeps_no_draw_waiting() -> None:
    draws = UnseenDraws()
    draws.took(1, 10_000.0)
    assert draws.take(6_400.0) == [1]
    draws.took(2, 6_400.0)
    assert draws.take(6_400.0) == []
    assert draws.take(6_400.0 + UNSEEN_AFTER_S) == [2]
