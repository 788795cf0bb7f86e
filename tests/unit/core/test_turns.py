"""Jobs that share partial samples: each uses a generation once, and a new one is made only by who has had the old."""

from __future__ import annotations

import random
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from spiderfs.core.partials import MOST_JOBS, Turns

SAMPLES, MANY, EPOCHS = 6, 100, 6
TakeTurn = Callable[[int, int, int], bool]


def take(turns: Turns, job: str, samples: list[int], new: int) -> list[tuple[int, int]]:
    taken, replaces = turns.take(job, np.array(samples, np.uint32), new)
    return list(zip(taken.tolist(), replaces.tolist(), strict=True))


def test_each_job_uses_what_is_there_once_and_then_it_is_replaced():
    turns = Turns(SAMPLES)
    for job in ("a", "b", "c"):
        assert turns.join(job)
    assert take(turns, "a", [0, 1], 10) == [(10, 0), (10, 0)]
    assert take(turns, "b", [1, 2], 20) == [(10, 0), (20, 0)]
    assert take(turns, "c", [1], 30) == [(10, 0)]
    # All have had it: whoever comes next makes another one in its place.
    assert take(turns, "b", [1], 21) == [(21, 10)]
    assert take(turns, "a", [1, 2], 11) == [(21, 0), (20, 0)]
    assert turns.ready("a").tolist() == turns.ready("nobody").tolist() == [False] * SAMPLES
    assert np.flatnonzero(turns.ready("c")).tolist() == [0, 1, 2]
    # A job that comes again before the others does not get the same.
    assert take(turns, "a", [1], 12) == [(12, 21)]


def test_there_is_place_for_so_many_jobs_at_a_time():
    turns = Turns(SAMPLES)
    assert all(turns.join(str(number)) for number in range(MOST_JOBS))
    assert turns.join("0")
    assert take(turns, "5", [0, 1], 2**63 - 1) == [(2**63 - 1, 0)] * 2
    assert not turns.join("more")
    turns.leave("5")
    assert turns.join("more")
    # In the place of the one that has gone it has had nothing.
    assert take(turns, "more", [0], 7) == [(2**63 - 1, 0)]
    assert not turns.join("5")


def made_by(jobs: int, apart: bool, rule: Callable[[int], TakeTurn]) -> float:
    """The share of their draws that jobs make: each draws each sample once an epoch, in its own order, in turns.

    They begin together, or `apart`: each somewhere in the first epoch; that is the mean of many beginnings.
    """
    made = drawn = 0
    for seed in range(5):
        rng, take_turn = random.Random(seed), rule(jobs)
        orders = []
        for _ in range(jobs):
            order = [(epoch, sample) for epoch in range(EPOCHS) for sample in rng.sample(range(MANY), MANY)]
            orders.append(order[rng.randrange(MANY) if apart else 0 :])
        for step in range((EPOCHS - 1) * MANY):
            made += sum(take_turn(job, *orders[job][step]) for job in range(jobs))
            drawn += jobs
    return made / drawn


def by_turns(jobs: int) -> TakeTurn:
    turns = Turns(MANY)
    for job in range(jobs):
        turns.join(str(job))

    def take_turn(job: int, epoch: int, sample: int) -> bool:
        new = 1 + job + jobs * epoch
        return take(turns, str(job), [sample], new)[0][0] == new

    return take_turn


def by_reference_count(jobs: int) -> TakeTurn:
    """Seneca's rule: a sample leaves when all jobs have used it; who comes twice before that makes one for itself."""
    had: dict[int, set[int]] = {}

    def take_turn(job: int, _: int, sample: int) -> bool:
        makes = sample not in had or job in had[sample]
        had.setdefault(sample, set()).add(job)
        if len(had[sample]) == jobs:
            del had[sample]
        return makes

    return take_turn


@pytest.mark.parametrize(("jobs", "turns", "counted"), [(2, 0.53, 0.53), (3, 0.38, 0.40), (5, 0.25, 0.32)])
def test_equally_fast_jobs_make_little_more_than_their_share(jobs: int, turns: float, counted: float):
    for way, share in ((by_turns, turns), (by_reference_count, counted)):
        assert made_by(jobs, False, way) == pytest.approx(1 / jobs, abs=0.01)
        assert made_by(jobs, True, way) == pytest.approx(share, abs=0.01)


class AgainstModel(RuleBasedStateMachine):
    """A job never gets a generation twice, and each that it gets is new or another's that was there."""

    @initialize()
    def begin(self) -> None:
        self.turns = Turns(SAMPLES)
        self.next = 1
        self.present: dict[int, int] = {}
        self.had: dict[str, set[tuple[int, int]]] = {}
        self.here: set[str] = set()

    @rule(job=st.sampled_from("abcd"))
    def join(self, job: str) -> None:
        assert self.turns.join(job)
        self.had.setdefault(job, set())
        self.here.add(job)

    @rule(job=st.sampled_from("abcd"))
    def leave(self, job: str) -> None:
        self.turns.leave(job)
        self.here.discard(job)

    @rule(job=st.sampled_from("abcd"), samples=st.lists(st.integers(0, SAMPLES - 1), unique=True))
    def take(self, job: str, samples: list[int]) -> None:
        if job not in self.here:
            return
        new, self.next = self.next, self.next + 1
        for sample, (taken, replaces) in zip(samples, take(self.turns, job, samples, new), strict=True):
            assert (sample, taken) not in self.had[job]
            before = self.present.get(sample, 0)
            could_use_it = before and (sample, before) not in self.had[job]
            assert (taken, replaces) == ((before, 0) if could_use_it else (new, before))
            self.present[sample] = taken
            self.had[job].add((sample, taken))

    @invariant()
    def jobs_agree(self) -> None:
        assert self.turns.jobs == len(self.here)


TestTurnsAgainstModel = AgainstModel.TestCase
TestTurnsAgainstModel.settings = settings(deadline=None)
