"""The policy shade: its rule of admission, by example and against a model."""

from __future__ import annotations

import hypothesis.strategies as st
import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from seen_samples import engine_with

from spiderfs.core.engine import NOTHING, Changes, Engine
from spiderfs.core.events import Epoch, Ratio, Scored
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.policy import SAMPLES
from spiderfs.policies import shade
from spiderfs.policies.shade import Shade
from spiderfs.simulation import replay
from spiderfs.trace import Accesses


class TestAdmission:
    def test_a_candidate_gets_all_the_room_it_needs_or_none(self) -> None:
        engine = engine_with(Shade(), 30, {1: 1.0, 2: 2.0, 3: 5.0})
        engine.scored(4, 3.0)
        assert engine.opened(4, 30) == NOTHING
        assert engine.opened(4, 20).drop == (1, 2)

    def test_a_score_is_positive(self) -> None:
        for score in (0.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match="positive"):
                Shade().scored(1, score)


class TestGhosts:
    def test_are_bounded_and_the_lowest_go_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shade, "MAX_GHOSTS", 16)
        policy = Shade()
        for key in range(17):
            policy.scored(key, 1.0 + key)
        assert len(policy.state()["ghosts"]) == 14
        assert [policy.score(key) for key in (2, 3)] == [0, 4]

    def test_a_member_keeps_its_score_without_its_ghost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shade, "MAX_GHOSTS", 8)
        policy = Shade()
        engine = engine_with(policy, 20, {1: 1.0, 2: 1.5})
        for key in range(3, 10):
            engine.scored(key, 5.0)
        assert (policy.score(1), list(policy.eviction_order())) == (1.0, [1, 2])

    def test_the_highest_are_saved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shade, "SAVED_GHOSTS", 2)
        engine = engine_with(Shade(), 10, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})
        again = Engine(Shade(), 10)
        again.restore([(4, 10, SAMPLES)], msgpack.unpackb(msgpack.packb(engine.state())))
        assert [again.score(key) for key in (1, 2, 3, 4)] == [0, 0, 3, 4]


def test_it_has_no_use_for_hubs_pins_and_ratios() -> None:
    assert not any((Shade.has_hubs, Shade.has_substitutes, Shade.adjustable))
    assert Shade().ratio is None
    assert not Shade().pin("1", [1])


def test_the_plan_overrules_it() -> None:
    engine = engine_with(Shade(), 20, {1: 3.0, 2: 4.0, 3: 1.0})
    keys = [1, 2, 3]
    place_of = {key: place for place, key in enumerate(keys)}
    order = [2, 1, 2, 0]
    engine.plan("t", "train", PlannedEpoch(0, keys, place_of, np.array(order, np.uint32)), 0.0)
    # Samples 3, 2, 3, 1 come: the one that is used last leaves, however hard it was.
    engine.wanted("t", 3, 0.0)
    assert engine.opened(3, 10) == Changes(((3, SAMPLES),), (1,))


def test_it_replays_what_was_scored() -> None:
    accesses = Accesses.of([1, 2, 3, 3, 1, 3], [10] * 6)
    hints = [
        (2, Scored("1", [1], [2.0])),
        (2, Scored("1", [2], [1.0])),
        (2, Ratio(0.5)),
        (3, Scored("1", [3], [3.0])),
        (4, Epoch("1")),
    ]
    # 3 comes in for 2 at its second access, once it is known.
    assert replay(Engine(Shade(), 20), accesses, 6, hints).hits.tolist() == [2]


KEYS = st.integers(0, 14)
SCORES = st.sampled_from([1.0, 2.0, 3.0, 4.0, 5.0])


class ShadeMachine(RuleBasedStateMachine):
    """Against the paper's algorithm 1 on plain dicts; all samples are of one size."""

    @initialize(room=st.integers(1, 5))
    def begin(self, room: int) -> None:
        self.room = room
        self.engine = Engine(Shade(), 10 * room)
        self.known: dict[int, float] = {}

    @rule(key=KEYS, score=SCORES)
    def score(self, key: int, score: float) -> None:
        self.engine.scored(key, score)
        self.known[key] = score

    @rule(key=KEYS)
    def open(self, key: int) -> None:
        before = dict.fromkeys(self.engine.members)
        changes = self.engine.opened(key, 10)
        if key in before:
            assert changes == NOTHING
        elif len(before) < self.room:
            assert changes == Changes(((key, SAMPLES),))
        else:
            lowest = min(self.known.get(member, 0) for member in before)  # type: ignore[call-overload]
            if key in self.known and self.known[key] >= lowest:
                (dropped,) = changes.drop
                assert self.known.get(dropped, 0) == lowest  # type: ignore[call-overload]
            else:
                assert changes == NOTHING

    @rule(key=KEYS)
    def take_away(self, key: int) -> None:
        self.engine.evict([key])

    @rule(room=st.integers(1, 5))
    def resize(self, room: int) -> None:
        self.room = room
        self.engine.resize(10 * room, 0)

    @rule()
    def remount(self) -> None:
        stored = [(key, size, section) for key, (size, section) in self.engine.members.items()]
        again = Engine(Shade(), 10 * self.room)
        again.restore(stored, msgpack.unpackb(msgpack.packb(self.engine.state())))
        assert list(again.policy.eviction_order()) == list(self.engine.policy.eviction_order())
        self.engine = again

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "engine"):
            order = list(self.engine.policy.eviction_order())
            scores = [self.known.get(key, 0) for key in order]  # type: ignore[call-overload]
            assert sorted(order) == sorted(self.engine.members)  # type: ignore[type-var]
            assert scores == sorted(scores) == [self.engine.score(key) for key in order]
            assert self.engine.used_bytes == 10 * len(order) <= 10 * self.room


TestShadeMachine = ShadeMachine.TestCase
TestShadeMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
