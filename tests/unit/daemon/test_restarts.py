"""Who has died is started again: how soon, and how often."""

from __future__ import annotations

from spiderfs.daemon.restarts import FIRST_PAUSE_S, LONGEST_PAUSE_S, Restarts


def test_who_had_got_on_is_started_again_at_once_however_often() -> None:
    restarts = Restarts(3)
    assert [restarts.died(done) for done in range(100)] == [0.0] * 100


def test_who_dies_in_vain_is_started_later_and_later() -> None:
    restarts = Restarts()
    pauses = [restarts.died(7) for _ in range(100)]
    assert pauses[:4] == [0.0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert restarts.died(8) == 0.0


def test_it_is_given_up_after_deaths_in_a_row_alone() -> None:
    restarts = Restarts(3)
    assert [restarts.died(1), restarts.died(1), restarts.died(2), restarts.died(2)] != [None] * 4
    assert restarts.died(2) is None
