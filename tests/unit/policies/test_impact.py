"""The policy impact: which samples it keeps and which are substitutes, by example and against a model."""

from __future__ import annotations

import hypothesis.strategies as st
import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from spiderfs.core.engine import NOTHING, Engine
from spiderfs.core.events import Epoch, Labels, Pinning, Scored, WarmUp
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.policy import PINNED, SAMPLES, Key, pinned_limit
from spiderfs.policies import impact
from spiderfs.policies.impact import Impact, SingleUseSubstitutes
from spiderfs.simulation import replay
from spiderfs.trace import Accesses

SIZE = 10


def learned(
    engine: Engine, losses: dict[int, float], labels: dict[Key, int] | None = None, job_dataset_id: str = "train"
) -> Impact:
    """Losses of one epoch, and the list of H-samples that follows from them."""
    policy = engine.policy
    assert isinstance(policy, Impact)
    if labels is not None:
        policy.listed(job_dataset_id, labels)
    for key, loss in losses.items():
        scored(engine, key, loss, job_dataset_id)
    policy.new_epoch(job_dataset_id)
    return policy


def scored(engine: Engine, key: int, loss: float, job_dataset_id: str = "train", worth: float | None = None) -> None:
    """A new loss; with one job dataset it is the worth too."""
    assert isinstance(engine.policy, Impact)
    engine.scored(key, loss if worth is None else worth)
    engine.policy.scored_by(job_dataset_id, key, loss)


def opened(engine: Engine, *keys: int) -> None:
    for key in keys:
        engine.opened(key, SIZE)


# Ten samples, of which those above 5 are hard; label is the last bit.
LOSSES = {key: float(key) for key in range(1, 11)}
LABELS: dict[Key, int] = {key: key % 2 for key in LOSSES}


def with_low_members(*job_dataset_ids: str) -> tuple[Engine, Impact]:
    """All these job datasets find samples above 5 hard; of the four members 1, 2 and 3 are L-members."""
    engine = Engine(Impact(), 4 * SIZE)
    opened(engine, 1, 2, 3, 10)
    for job_dataset_id in job_dataset_ids:
        learned(engine, LOSSES, LABELS, job_dataset_id)
    policy = engine.policy
    assert isinstance(policy, Impact)
    return engine, policy


class TestHighPart:
    def test_uses_the_losses_of_the_last_epoch_end_until_the_next(self) -> None:
        engine = Engine(Impact(), 2 * SIZE)
        opened(engine, 6, 8)
        policy = learned(engine, LOSSES)
        scored(engine, 8, 0.1)
        scored(engine, 6, 20)
        assert engine.opened(7, SIZE).drop == (6,)
        policy.new_epoch("train")
        assert engine.opened(9, SIZE).drop == (8,)
        assert engine.opened(6, SIZE).drop == (7,)

    def test_members_pass_to_the_new_parts_some_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(impact, "PASSED_AT_ONCE", 1)
        engine = Engine(Impact(), 4 * SIZE)
        opened(engine, 7, 8, 9, 10)
        policy = learned(engine, LOSSES)
        opened(engine, 7, 7, 7)
        assert list(policy.eviction_order()) == [7, 8, 9, 10]
        learned(engine, {7: 70, 8: 60, 9: 50, 10: 40})
        # One member has passed: the others are still in their old parts, and leave first.
        assert list(policy.eviction_order()) == [8, 9, 10, 7]
        opened(engine, 7, 7)
        assert list(policy.eviction_order()) == [10, 9, 8, 7]
        opened(engine, 7)
        assert list(policy.eviction_order()) == [10, 9, 8, 7]


class TestLowPart:
    def test_a_candidate_evicts_a_member_that_was_read(self) -> None:
        engine = Engine(Impact(), 3 * SIZE)
        opened(engine, 1, 2, 3)
        learned(engine, LOSSES)
        assert engine.opened(4, SIZE) == NOTHING
        opened(engine, 2)
        assert engine.opened(5, SIZE).drop == (2,)
        assert engine.opened(4, SIZE).drop == (5,)

    def test_gives_room_to_the_high_part_down_to_its_share(self) -> None:
        engine = Engine(Impact(), 10 * SIZE)
        opened(engine, *range(20, 30))
        learned(engine, {key: float(key) for key in range(20, 40)})
        drops = [drop for key in range(30, 40) for drop in engine.opened(key, SIZE).drop]
        assert drops == [*range(20, 29), 30]
        assert 29 in engine.members

    def test_follows_how_often_each_part_is_read(self) -> None:
        engine = Engine(Impact(), 10 * SIZE)
        policy = learned(engine, LOSSES)
        assert policy.ratio == pytest.approx(0.9)
        for _ in range(500):
            opened(engine, 1)
        assert policy.ratio == pytest.approx(450 / 1000)

    def test_reads_before_there_is_a_list_do_not_move_the_ratio(self) -> None:
        engine = Engine(Impact(), 3 * SIZE)
        policy = learned(engine, {})
        for _ in range(500):
            opened(engine, 1, 10)
        assert policy.ratio == pytest.approx(0.9)
        # The first list comes with the paper's 9 to 1.
        learned(engine, LOSSES)
        assert policy.ratio == pytest.approx(0.9)


class TestSubstitutes:
    def test_each_change_is_returned_once(self) -> None:
        engine, policy = with_low_members("train")
        assert sorted(policy.redirects_changed()) == [("train", 4, 2), ("train", 5, 1)]
        assert policy.redirects_changed() == []
        policy.forget_published()
        assert sorted(policy.redirects_changed()) == [("train", 4, 2), ("train", 5, 1)]
        opened(engine, 2, 4)
        assert policy.redirects_changed() == [("train", 4, None)]
        engine.change_policy(fresh := Impact())
        assert fresh.redirects_changed() == []

    def test_missed_ids_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(impact, "MAX_MISSED", 2)
        engine, policy = with_low_members("train")
        scored(engine, 77, 0.5)
        opened(engine, 4, 5, 77, 88)
        assert list(policy.missed_ids) == [5, 77]


def pinned(engine: Engine, *keys: int, job_dataset_id: str = "train") -> None:
    """Read as the daemon does: a sample that is no member is not cached."""
    policy = engine.policy
    assert isinstance(policy, Impact)
    for key in policy.pin(job_dataset_id, keys):
        if key in engine.members:
            engine.place(key, SIZE)


def sections(engine: Engine) -> dict[str, set[Key]]:
    return {
        name: {key for key, member in engine.members.items() if member.section == name} for name in (SAMPLES, PINNED)
    }


class TestPins:
    def test_enter_when_they_are_read_and_fill_a_quarter_at_most(self) -> None:
        engine = Engine(Impact(), 8 * SIZE)
        opened(engine, *range(1, 9))
        learned(engine, {key: float(key) for key in range(1, 9)})
        pinned(engine, 21, 22, 23)
        opened(engine, 21, 22, 23)
        assert sections(engine)[PINNED] == {21, 22}
        assert engine.used_bytes == 8 * SIZE
        engine.resize(4 * SIZE, 0)
        assert len(sections(engine)[PINNED]) == 1

    def test_hold_while_plans_are_followed(self) -> None:
        engine = Engine(Impact(), 8 * SIZE)
        opened(engine, *range(1, 9))
        pinned(engine, 1, 2)
        order = np.arange(3, 20, dtype=np.uint32)
        engine.plan("reader", "train", PlannedEpoch(0, [*range(20)], {key: key for key in range(20)}, order), 0.0)
        for time, key in enumerate(range(3, 20)):
            engine.wanted("reader", key, float(time))
            opened(engine, key)
        assert sections(engine)[PINNED] == {1, 2}

    def test_too_many_are_not_saved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = Engine(Impact(), 8 * SIZE)
        pinned(engine, 1, 2)
        assert engine.policy.state()["pins"] == {"train": [1, 2]}
        monkeypatch.setattr(impact, "MAX_SAVED", 1)
        assert engine.policy.state()["pins"] == {}

    def test_are_replayed(self) -> None:
        accesses = Accesses.of([1, 2, 3, 4, 5, 6, 7, 8, 1, 9], [SIZE] * 10, ["1"] * 10)
        scores = ((4, Scored("1", [key], [float(key)])) for key in range(1, 11))
        hints = [(4, Labels("1", {1: 0, 5: 1, 6: 1, 7: 1, 8: 1})), *scores, (4, Epoch("1"))]
        without = replay(Engine(Impact(), 4 * SIZE), accesses, 10, hints)
        pinning = replay(Engine(Impact(), 4 * SIZE), accesses, 10, [*hints, (4, Pinning("1", (1,)))])
        assert (without.hits.tolist(), pinning.hits.tolist()) == ([0], [1])


class TestJobDatasets:
    """Job dataset "a" finds samples above 5 hard, and "b" those up to 5; a worth is the larger of the two ranks."""

    def engine(self, capacity: int = 4) -> tuple[Engine, Impact]:
        engine = Engine(Impact(), capacity * SIZE)
        for job_dataset_id in ("a", "b"):
            opposite = {key: 11.0 - key for key in LOSSES}
            learned(engine, opposite if job_dataset_id == "b" else LOSSES, LABELS, job_dataset_id)
        for key in LOSSES:
            engine.scored(key, max(key, 11 - key) / 10)
        policy = engine.policy
        assert isinstance(policy, Impact)
        return engine, policy

    def read(self, engine: Engine, job_dataset_id: str, *keys: int) -> None:
        assert isinstance(engine.policy, Impact)
        for key in keys:
            engine.policy.read_by(job_dataset_id, key)
            opened(engine, key)

    def test_an_l_sample_of_one_is_an_h_sample_of_another(self) -> None:
        engine, policy = self.engine()
        self.read(engine, "b", 1, 2)
        # 1 and 2 are hard for b and easy for a, and no reader of a has got them.
        assert (policy.substitute_for("a", 3), policy.substitute_for("a", 4)) == (1, 2)
        assert (policy.substitute_for("a", 7), policy.substitute_for("b", 3), policy.substitute_for("b", 7)) == (
            None,
            None,
            None,
        )
        policy.substituted("a", 1, 3)
        opened(engine, 1)
        assert policy.substitute_for("a", 5) is None
        policy.new_epoch("b")
        assert policy.substitute_for("a", 5) is None
        policy.new_epoch("a")
        assert policy.substitute_for("a", 5) == 1

    def test_each_has_its_own_single_uses_and_readers(self) -> None:
        engine, policy = with_low_members("a", "b")
        assert (policy.substitute_for("a", 4), policy.substitute_for("b", 4)) == (2, 2)
        policy.substituted("a", 2, 4)
        opened(engine, 2)
        assert (policy.substitute_for("a", 4), policy.substitute_for("b", 4)) == (None, 2)
        # Both have to use a member up before an L-sample may take its place.
        assert engine.opened(5, SIZE) == NOTHING
        self.read(engine, "b", 2)
        policy.read_by("b", 5)
        assert engine.opened(5, SIZE).drop == (2,)

    def test_an_epoch_of_one_leaves_the_reads_of_the_other(self) -> None:
        engine, policy = with_low_members("a", "b")
        self.read(engine, "b", 2)
        policy.new_epoch("a")
        assert (policy.substitute_for("a", 4), policy.substitute_for("b", 4)) == (2, None)
        policy.new_epoch("b")
        assert policy.substitute_for("b", 4) == 2

    def test_a_job_dataset_that_reads_nothing_keeps_nothing(self) -> None:
        engine, policy = with_low_members("train")
        policy.listed("whole", LABELS)
        for _ in range(2):
            policy.new_epoch("whole")
        self.read(engine, "train", 2, 5)
        assert 2 not in engine.members


class TestLists:
    def test_a_list_is_made_again_while_an_epoch_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(impact, "LISTED_AFTER_READS", 4)
        engine = Engine(Impact(), 2 * SIZE)
        opened(engine, 6, 8)
        policy = learned(engine, LOSSES, LABELS)
        scored(engine, 8, 0.1)
        opened(engine, 6, 6, 6)
        assert not policy.ranks_low(8)
        opened(engine, 6)
        assert policy.ranks_low(8)
        assert engine.opened(7, SIZE).drop == (8,)
        # Which samples readers have got is not forgotten for that.
        assert policy.substitute_for("train", 4) is None


class TestWarmUp:
    def test_ends_when_the_list_is_declared_again(self) -> None:
        engine = Engine(Impact(), 3 * SIZE)
        policy = learned(engine, LOSSES, LABELS)
        policy.warm_up("train", True)
        policy.listed("train", LABELS)
        policy.new_epoch("train")
        assert not policy.ranks_low(10)

    def test_of_one_job_dataset_does_not_bind_another(self) -> None:
        engine = Engine(Impact(), 3 * SIZE)
        opened(engine, 6, 7, 8)
        policy = learned(engine, LOSSES, LABELS)
        policy.listed("other", LABELS)
        policy.warm_up("other", True)
        policy.read_by("other", 10)
        assert engine.opened(10, SIZE) == NOTHING
        policy.read_by("train", 10)
        assert engine.opened(10, SIZE).drop == (6,)
        policy.forget_job_dataset("other", [])
        assert engine.opened(9, SIZE).drop == (7,)

    def test_is_replayed(self) -> None:
        accesses = Accesses.of([1, 2, 10, 9, 1, 2], [SIZE] * 6, ["1"] * 6)
        hints = [(0, Labels("1", LABELS)), (2, Scored("1", [*LOSSES], [*LOSSES.values()])), (2, Epoch("1"))]
        without = replay(Engine(Impact(), 2 * SIZE), accesses, 6, hints)
        warming = replay(Engine(Impact(), 2 * SIZE), accesses, 6, [*hints[:1], (0, WarmUp("1", True)), *hints[1:]])
        assert (without.hits.tolist(), warming.hits.tolist()) == ([0], [2])


class TestSingleUseSubstitutes:
    def test_members_wait_while_many_are_offered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(impact, "SAMPLES_EACH", 1)
        monkeypatch.setattr(impact, "MAX_OFFERED", 2)
        substitutes = SingleUseSubstitutes(lambda key: key >= 100)
        substitutes.listed(dict.fromkeys([1, 2, 3, 100, 101, 102], 0))
        for key in (1, 2, 3):
            substitutes.add(key)
        assert [substitutes.substitute_for(key) for key in (100, 101, 102)] == [1, 2, None]
        substitutes.discard(1)
        assert substitutes.substitute_for(102) == 3
        substitutes.take_back(101)
        assert substitutes.substitute_for(100) == 2

    def test_a_list_declared_again_has_other_labels(self) -> None:
        substitutes = SingleUseSubstitutes(lambda key: key >= 100)
        substitutes.listed({1: 0, 100: 0, 101: 1})
        substitutes.add(1)
        assert substitutes.substitute_for(100) == 1
        substitutes.listed({1: 1, 100: 0, 101: 1})
        assert [substitutes.substitute_for(key) for key in (100, 101)] == [None, 1]


def test_losses_are_positive() -> None:
    for loss in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="positive"):
            Impact().scored(1, loss)


def test_it_replays_what_was_learned() -> None:
    accesses = Accesses.of([1, 2, 3, 4, 3, 4, 3, 4], [SIZE] * 8, ["1"] * 8)
    hints = [
        (0, Labels("1", {1: 0, 2: 0, 3: 0, 4: 0})),
        (4, Scored("1", [1, 2, 3, 4, 9, 8, 7], [0.1, 0.2, 0.3, 0.4, 5.0, 5.0, 5.0])),
        (4, Epoch("1")),
    ]
    result = replay(Engine(Impact(), 2 * SIZE), accesses, 4, hints)
    assert result.redirects.tolist() == [0, 2]
    # Both members have been substitutes: now 3 and 4 are read themselves, and enter.
    assert result.hits.tolist() == [0, 2]


KEYS = st.integers(0, 24)
CLASSES = 3
# How many samples each job dataset has.
JOB_DATASETS = {"one": 25, "two": 12}


def label_of(job_dataset_id: str, key: int) -> int:
    return key % CLASSES if job_dataset_id == "one" else key // 4


class ImpactMachine(RuleBasedStateMachine):
    """Samples of 8 and of 16 bytes; job dataset "two" has half of the samples, other labels, and losses of its own."""

    @initialize(room=st.integers(4, 14))
    def begin(self, room: int) -> None:
        self.policy = Impact()
        self.engine = Engine(self.policy, 8 * room)
        self.losses: dict[str, dict[int, float]] = {job_dataset_id: {} for job_dataset_id in JOB_DATASETS}
        self.high: dict[str, set[int]] = {job_dataset_id: set() for job_dataset_id in JOB_DATASETS}
        self.read: dict[str, set[int]] = {job_dataset_id: set() for job_dataset_id in JOB_DATASETS}
        self.used: dict[str, set[int]] = {job_dataset_id: set() for job_dataset_id in JOB_DATASETS}
        self.warm: set[str] = set()
        self.published: dict[tuple[str, Key], Key] = {}
        self.declare()

    def declare(self, *job_dataset_ids: str) -> None:
        """Declare these job datasets (default all), which ends their warm-ups."""
        for job_dataset_id in job_dataset_ids or JOB_DATASETS:
            keys = range(JOB_DATASETS[job_dataset_id])
            self.policy.listed(job_dataset_id, {key: label_of(job_dataset_id, key) for key in keys})

    @staticmethod
    def size(key: int) -> int:
        return 16 if key % 5 == 0 else 8

    def worth(self, key: int) -> float:
        return max(losses.get(key, 0.0) for losses in self.losses.values())

    @rule(job_dataset_id=st.sampled_from([*JOB_DATASETS]), key=KEYS, loss=st.integers(1, 50))
    def score(self, job_dataset_id: str, key: int, loss: int) -> None:
        if key < JOB_DATASETS[job_dataset_id]:
            # Different losses, so that the list is clear.
            self.losses[job_dataset_id][key] = loss + key / 100
            self.engine.scored(key, self.worth(key))
            self.policy.scored_by(job_dataset_id, key, self.losses[job_dataset_id][key])

    @rule(job_dataset_id=st.sampled_from([*JOB_DATASETS, "unknown"]), key=KEYS)
    def open(self, job_dataset_id: str, key: int) -> None:
        if job_dataset_id in JOB_DATASETS:
            self.policy.read_by(job_dataset_id, key)
        members = set(self.engine.members)
        self.engine.opened(key, self.size(key))
        readers = [job_dataset_id] if job_dataset_id in JOB_DATASETS else [*JOB_DATASETS]
        for reader in readers:
            self.read[reader].add(key)
        if self.warm.issuperset(readers) and not any(key in pins for pins in self.policy.pinned.values()):
            assert members <= set(self.engine.members), "a warm-up evicts nothing"

    @rule(job_dataset_id=st.sampled_from([*JOB_DATASETS]), key=KEYS)
    def look_up(self, job_dataset_id: str, key: int) -> None:
        given = self.policy.substitute_for(job_dataset_id, key)
        if given is None:
            return
        hub = int(str(given))
        assert key not in self.engine.members
        assert key in self.losses[job_dataset_id], "what no batch has named may be a validation's"
        assert not any(key in pins for pins in self.policy.pinned.values())
        assert self.engine.members[hub].section == SAMPLES
        assert label_of(job_dataset_id, hub) == label_of(job_dataset_id, key)
        assert not {key, hub} & self.high[job_dataset_id]
        assert job_dataset_id not in self.warm
        assert hub not in self.read[job_dataset_id] | self.used[job_dataset_id], "each once in an epoch"
        self.policy.substituted(job_dataset_id, hub, key)
        self.engine.opened(hub, self.size(hub))
        self.used[job_dataset_id].add(hub)
        assert key in self.policy.missed_ids

    @rule(job_dataset_id=st.sampled_from([*JOB_DATASETS]))
    def new_epoch(self, job_dataset_id: str) -> None:
        self.policy.new_epoch(job_dataset_id)
        self.renew_list(job_dataset_id)
        self.read[job_dataset_id].clear()
        self.used[job_dataset_id].clear()

    def renew_list(self, job_dataset_id: str) -> None:
        losses = self.losses[job_dataset_id]
        order = sorted(losses, key=losses.__getitem__)
        self.high[job_dataset_id] = set() if job_dataset_id in self.warm else set(order[len(order) - len(order) // 2 :])

    @rule(job_dataset_id=st.sampled_from([*JOB_DATASETS]), active=st.booleans())
    def warm_up(self, job_dataset_id: str, active: bool) -> None:
        self.policy.warm_up(job_dataset_id, active)
        if active != (job_dataset_id in self.warm):
            self.warm ^= {job_dataset_id}
            self.renew_list(job_dataset_id)

    @rule(job_dataset_id=st.sampled_from([*JOB_DATASETS]), keys=st.frozensets(KEYS, max_size=4))
    def pin(self, job_dataset_id: str, keys: frozenset[int]) -> None:
        for key in self.policy.pin(job_dataset_id, keys):
            if key in self.engine.members:
                self.engine.place(key, self.size(int(str(key))))

    @rule(key=KEYS)
    def take_away(self, key: int) -> None:
        self.engine.evict([key])

    @rule(room=st.integers(4, 14))
    def resize(self, room: int) -> None:
        self.engine.resize(8 * room, 0)

    @rule()
    def publish(self) -> None:
        for job_dataset_id, key, given in self.policy.redirects_changed():
            if given is None:
                self.published.pop((job_dataset_id, key), None)
            else:
                self.published[job_dataset_id, key] = given
        # What was published is what would be answered.
        for job_dataset_id in JOB_DATASETS:
            for key in range(25):
                assert self.published.get((job_dataset_id, key)) == self.policy.substitute_for(job_dataset_id, key)

    @rule()
    def remount(self) -> None:
        stored = [(key, size, section) for key, (size, section) in self.engine.members.items()]
        state = msgpack.unpackb(msgpack.packb(self.engine.state()))
        capacity = self.engine.budget_bytes
        self.policy = Impact()
        self.engine = Engine(self.policy, capacity)
        self.engine.restore(stored, state)
        self.declare()
        for job_dataset_id, losses in self.losses.items():
            for key, loss in losses.items():
                self.engine.scored(key, self.worth(key))
                self.policy.scored_by(job_dataset_id, key, loss)
        self.published.clear()
        # Which samples readers asked for is not saved, except for the members that were used.
        for job_dataset_id in JOB_DATASETS:
            saved = {int(str(key)) for key in state["ranks"]["job_datasets"][job_dataset_id]["used"]}
            self.read[job_dataset_id] &= saved
            self.used[job_dataset_id] &= saved
        for job_dataset_id in [*self.warm]:
            self.warm.discard(job_dataset_id)
            self.warm_up(job_dataset_id, True)

    @rule(job_dataset_id=st.sampled_from([*JOB_DATASETS]))
    def forget(self, job_dataset_id: str) -> None:
        self.policy.forget_job_dataset(job_dataset_id, [])
        self.losses[job_dataset_id].clear()
        self.high[job_dataset_id].clear()
        self.read[job_dataset_id].clear()
        self.used[job_dataset_id].clear()
        self.warm.discard(job_dataset_id)
        self.declare(job_dataset_id)

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "engine"):
            order = list(self.policy.eviction_order())
            assert sorted(order, key=repr) == sorted(self.engine.members, key=repr)
            assert self.engine.used_bytes == sum(self.size(int(str(key))) for key in order) <= self.engine.budget_bytes
            assert 0 < self.policy.ratio < 1
            held = sorted(key for key, member in self.engine.members.items() if member.section == PINNED)  # type: ignore[type-var]
            assert held == sorted(self.policy.eviction_order(PINNED))  # type: ignore[type-var]
            assert all(any(key in pins for pins in self.policy.pinned.values()) for key in held)
            assert self.engine.section_bytes[PINNED] <= pinned_limit(self.engine.budget_bytes)


TestImpactMachine = ImpactMachine.TestCase
TestImpactMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
