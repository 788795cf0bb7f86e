"""Whether a home is asked, and for how long, by a clock that the tests turn: late is not down."""

from __future__ import annotations

import random

import pytest

from spiderfs.sources.peers import FAILURES, LONGER, LONGEST_PAUSE_S, PAUSE_S, Breaker

LEAST_S = 0.2


class Asking:
    """One reader that asks a server again and again; each answer takes as long as `take` says."""

    def __init__(self, start_s: float = 1e6) -> None:
        self.breaker = Breaker()
        self.now = start_s
        self.in_time = 0

    def ask(self, takes_s: float, least_s: float = LEAST_S) -> bool | None:
        """Whether an answer came in time; None if it was not asked."""
        asked_s, patience_s = self.now, self.breaker.patience_s(least_s, self.now)
        if not patience_s:
            return None
        self.now += min(takes_s, patience_s)
        if takes_s <= patience_s:
            self.breaker.answered(self.now)
            self.in_time += 1
        else:
            self.breaker.late(asked_s, self.now)
        return takes_s <= patience_s


@pytest.mark.parametrize("factor", [1.01, 1.5, 2.0, 3.0, 3.99])
def test_a_home_that_is_slow_and_alive_is_never_down(factor: float) -> None:
    asking = Asking()
    in_time = []
    for _ in range(200):
        in_time.append(asking.ask(factor * LEAST_S))
        assert not asking.breaker.is_resting
    assert None not in in_time
    assert all(in_time[1:]), "it is waited for as long as it takes"


def test_stalls_of_a_busy_machine_are_not_the_end_of_a_home() -> None:
    rng = random.Random(3)
    asking = Asking()
    for number in range(5000):
        # One answer in ten takes up to four times as long as a question may take at first, and now and then one longer.
        stalls = number % 100 == 50
        asking.ask(LEAST_S * (9 if stalls else rng.uniform(0.1, 0.5) if rng.random() < 0.9 else rng.uniform(1, LONGER)))
        assert not asking.breaker.is_resting
    assert asking.in_time > 4940


def test_questions_side_by_side_that_are_late_together_are_late_once() -> None:
    breaker = Breaker()
    for _ in range(64):
        assert breaker.patience_s(LEAST_S, 100.0) == LEAST_S
    for _ in range(64):
        breaker.late(100.0, 100.2)
    assert not breaker.is_resting
    assert breaker.patience_s(LEAST_S, 100.2) == LONGER * LEAST_S
    breaker.answered(100.3)
    # A question of before the answer is late after it, and so says nothing of the peer.
    breaker.late(100.2, 101.0)
    breaker.late(101.0, 101.8)
    assert not breaker.is_resting
    breaker.late(101.8, 102.6)
    assert breaker.is_resting


def test_a_home_that_gives_no_sign_is_left_after_two_waits_of_each_reader_and_tried_again() -> None:
    for answers in (0, 1):
        asking = Asking()
        for _ in range(answers):
            assert asking.ask(0.01)
        assert [asking.ask(1e9) for _ in range(3)] == [False, False, None]
        assert asking.breaker.is_resting
        pauses = []
        for _ in range(9):
            left_s = asking.now
            while asking.ask(1e9) is None:
                asking.now += 0.01
            pauses.append(asking.now - left_s - LONGER * LEAST_S)
        assert pauses[:3] == pytest.approx([PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S], abs=0.02)
        assert max(pauses) < LONGEST_PAUSE_S + 0.02
        asking.now += LONGEST_PAUSE_S
        assert asking.ask(0.01)
        assert not asking.breaker.is_resting


def test_one_that_cannot_be_reached_is_left_at_once_and_many_questions_are_one_failure() -> None:
    breaker = Breaker()
    for _ in range(64):
        assert breaker.patience_s(LEAST_S, 5.0)
    for _ in range(64):
        breaker.failed(5.0, 1, 5.1)
    assert breaker.is_resting
    assert not breaker.patience_s(LEAST_S, 5.1 + 0.9 * PAUSE_S)
    # Sixty-four questions of one moment do not make the pause longer.
    assert breaker.patience_s(LEAST_S, 5.1 + PAUSE_S) > 0
    assert not breaker.patience_s(LEAST_S, 5.2 + PAUSE_S), "one tries, and the others learn of it"


def test_wrong_answers_count_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(9):
        for _ in range(FAILURES - 1):
            breaker.failed(1.0, FAILURES, 1.0)
        breaker.answered(1.0)
    assert not breaker.is_resting
    for _ in range(FAILURES):
        breaker.failed(1.0, FAILURES, 1.0)
    assert breaker.is_resting
