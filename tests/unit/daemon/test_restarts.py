"""Who has died is started again: how soon, how often, and which request is to blame."""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from spiderfs.daemon.restarts import (
    DEATHS,
    FIRST_PAUSE_S,
    LIVED_S,
    LONGEST_BUSY_PAUSE_S,
    LONGEST_PAUSE_S,
    REFUSED_AFTER,
    Restarts,
    Suspects,
)

examples = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def test_deaths_in_vain_end_the_mount_after_a_minute() -> None:
    restarts = Restarts(1, DEATHS)
    pauses = [restarts.died(0, [7], [0.1]) for _ in range(DEATHS)]
    assert pauses[:4] == [0.0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-2:] == [LONGEST_PAUSE_S, None]
    assert sum(pause for pause in pauses if pause) == pytest.approx(61.35)


def test_who_may_always_come_back_pauses_for_no_longer_than_that() -> None:
    """A float has no room for 2 to the power of 1,024: the manager of a mount may die as often as that."""
    restarts = Restarts(1)
    pauses = [restarts.died(0, [7], [0.1]) for _ in range(2_000)]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_one_worker_that_dies_at_once_ends_nothing_while_another_one_lives() -> None:
    restarts = Restarts(2, 3)
    pauses = [restarts.died(1, [50, 0], [LIVED_S + second, 0.1]) for second in range(100)]
    assert pauses[0] == 0.0
    assert pauses[-1] == LONGEST_PAUSE_S, "not with the pauses of a worker that does something"


# Which worker died, how much each of three had done since the death before, and how long each had lived.
DEATH = st.tuples(
    st.integers(0, 2),
    st.lists(st.sampled_from([0, 0, 0, 1, 40]), min_size=3, max_size=3),
    st.lists(st.sampled_from([0.0, 0.1, 10.0, LIVED_S, 3600.0]), min_size=3, max_size=3),
)


@examples
@given(deaths=st.lists(DEATH, max_size=60), limit=st.integers(2, 5))
def test_a_mount_ends_after_deaths_in_a_row_without_progress_and_only_then(
    deaths: list[tuple[int, list[int], list[float]]], limit: int
) -> None:
    restarts = Restarts(3, limit)
    done = [0, 0, 0]
    in_vain = 0
    for number, (who, more, lived_s) in enumerate(deaths):
        done = [before + added for before, added in zip(done, more, strict=True)]
        progress = number == 0 or any(more) or max(lived_s) >= LIVED_S
        in_vain = 1 if progress else in_vain + 1
        pause_s = restarts.died(who, done, lived_s)
        assert (pause_s is None) == (in_vain == limit)
        if pause_s is None:
            return
        assert 0 <= pause_s <= LONGEST_PAUSE_S


@examples
@given(deaths=st.lists(DEATH, max_size=60))
def test_pauses_grow_while_a_worker_dies_early_and_stay_short_for_one_that_does_something(
    deaths: list[tuple[int, list[int], list[float]]],
) -> None:
    restarts = Restarts(3)
    done, own, early = [0, 0, 0], [0, 0, 0], [0, 0, 0]
    for who, more, lived_s in deaths:
        done = [before + added for before, added in zip(done, more, strict=True)]
        pause_s = restarts.died(who, done, lived_s)
        assert pause_s is not None
        if lived_s[who] >= LIVED_S:
            assert pause_s == 0.0
            early[who] = 1
        else:
            early[who] += 1
            # 0.05 s, 0.1 s, ... 0.5 s
            least_s = [0.0, *(FIRST_PAUSE_S * 2**doubled for doubled in range(10))][min(early[who], 10) - 1]
            assert pause_s >= min(least_s, LONGEST_BUSY_PAUSE_S)
        if done[who] > own[who]:
            assert pause_s <= LONGEST_BUSY_PAUSE_S
        own[who] = done[who]


# -- requests at which workers die


class Life:
    """A mount with requests that are handed out until they are answered; some of them kill whoever begins them."""

    def __init__(self, workers: int, innocent: int, deadly: int, seed: int) -> None:
        self.suspects = Suspects(sole=workers == 1)
        self.random = Random(seed)
        self.waiting = set(range(1, innocent + deadly + 1))
        self.deadly = set(self.random.sample(sorted(self.waiting), deadly))
        self.refused: set[int] = set()
        self.deaths = 0
        self.resent = False

    def live(self) -> None:
        """One worker takes all requests, in any order, and answers them until it dies or is done."""
        known = self.suspects.alone()
        order = self.random.sample(sorted(self.waiting), len(self.waiting))
        at_once = [number for number in order if number not in known]
        alone = [number for number in order if number in known]
        # A request that waits for the source is begun and not answered when the worker dies.
        begun = {number for number in at_once if number in self.deadly or self.random.random() < 0.5}
        self.waiting -= set(at_once) - begun
        held = begun | set(alone)
        if not begun & self.deadly:
            self.waiting -= begun
            held -= begun
            begun = set()
            for number in alone:
                if known[number] >= REFUSED_AFTER:
                    self.refused.add(number)
                elif number in self.deadly:
                    begun = {number}
                    break
                held.discard(number)
                self.waiting.discard(number)
        if begun & self.deadly:
            self.deaths += 1
            # What comes for the first time is not noted.
            self.suspects.died(begun if self.resent else (), held - begun if self.resent else ())
            self.resent = True


@examples
@given(workers=st.integers(1, 2), innocent=st.integers(0, 600), deadly=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_each_request_that_kills_is_refused_in_time_and_no_other(
    workers: int, innocent: int, deadly: int, seed: int
) -> None:
    mount = Life(workers, innocent, deadly, seed)
    while mount.waiting:
        assert mount.deaths <= 1 + REFUSED_AFTER * deadly
        mount.live()
    assert mount.refused == mount.deadly


def test_with_one_worker_a_request_that_was_answered_is_forgotten() -> None:
    """Where a number follows from what is asked, the same question may come again and again."""
    suspects = Suspects(sole=True)
    for _ in range(3 * REFUSED_AFTER):
        suspects.died({1, 2}, ())
        suspects.died({2}, {3})
        assert 1 not in suspects.alone()
    assert suspects.alone()[2] >= REFUSED_AFTER


def test_one_that_kills_is_remembered_among_very_many() -> None:
    suspects = Suspects(sole=False)
    for death in range(REFUSED_AFTER):
        suspects.died({1, *range(1_000 * (death + 1), 1_000 * (death + 1) + 511)}, ())
    assert suspects.alone() == {1: REFUSED_AFTER}
    for death in range(100):
        suspects.died(set(range(100_000 + 512 * death, 100_000 + 512 * (death + 1))), ())
    assert len(suspects._deaths) == 4096
