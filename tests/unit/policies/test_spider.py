"""The policy spider: its two sections and its redirects, by example and against a model."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from seen_samples import engine_with

from spiderfs.core.engine import BLOCKS, NOTHING, Changes, Engine
from spiderfs.core.policy import Hub, HubLimits
from spiderfs.policies.spider import HOMOPHILY, IMPORTANCE, MAX_WAITING, Homophily, Spider


def hub(key: int, *neighbours: int, job_dataset_id: str = "train", nearest: float = 0.1) -> Hub:
    return Hub(key, job_dataset_id, neighbours, [nearest + 0.1 * rank for rank in range(len(neighbours))])


class TestImportance:
    def test_follows_scores_that_change_in_the_cache(self) -> None:
        policy = Spider()
        engine = engine_with(policy, 30, {1: 0.3, 2: 0.5, 3: 0.7})
        policy.scored(4, 0.4)
        policy.scored(1, 0.9)
        policy.scored(3, 0.1)
        assert list(policy.eviction_order(IMPORTANCE)) == [3, 2, 1]
        assert engine.opened(4, 10).drop == (3,)

    def test_without_a_trainer_it_fills_once(self) -> None:
        engine = Engine(Spider(), 30)
        assert [bool(engine.opened(key, 10).keep) for key in range(5)] == [True, True, True, False, False]

    def test_a_sample_without_a_score_leaves_for_any_scored_one(self) -> None:
        policy = Spider()
        engine = Engine(policy, 10)
        engine.opened(1, 10)
        policy.scored(2, 0.01)
        assert engine.opened(2, 10).drop == (1,)
        assert engine.opened(1, 10) == NOTHING

    def test_a_score_is_positive(self) -> None:
        for score in (0.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match="positive"):
                Spider().scored(1, score)


class TestHomophily:
    def test_a_hub_takes_back_what_importance_borrowed(self) -> None:
        policy = Spider(ratio=0.75)
        engine = engine_with(policy, 40, {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4})
        policy.hub_found(hub(9, 7, 8))
        assert engine.place(9, 10) == Changes(((9, HOMOPHILY),), (1,))
        assert engine.section_bytes == {BLOCKS: 0, IMPORTANCE: 30, HOMOPHILY: 10}

    def test_a_hub_found_again_has_new_neighbours_and_its_old_age(self) -> None:
        policy = Spider(ratio=0.5)
        engine = Engine(policy, 40)
        for each in (hub(1, 50), hub(2, 60), hub(1, 51)):
            policy.hub_found(each)
            engine.place(each.key, 10)
        assert (policy.substitute_for("train", 50), policy.substitute_for("train", 51)) == (None, 1)
        assert list(policy.eviction_order(HOMOPHILY)) == [1, 2]

    def test_a_hub_without_its_bytes_waits_for_them(self) -> None:
        policy = Spider(ratio=0.5)
        engine = Engine(policy, 40)
        for key in range(1, MAX_WAITING + 2):
            policy.hub_found(hub(key, 500))
        assert policy.substitute_for("train", 500) is None
        assert engine.opened(2, 10).keep == ((2, HOMOPHILY),)
        assert engine.opened(1, 10).keep == ((1, IMPORTANCE),)
        assert policy.substitute_for("train", 500) == 2

    def test_a_lower_ratio_evicts_no_one_until_hubs_come_and_a_higher_one_at_once(self) -> None:
        policy = Spider(ratio=0.5)
        engine = engine_with(policy, 40, {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4})
        for key in (5, 6):
            policy.hub_found(hub(key, 50))
            engine.place(key, 10)
        policy.set_ratio(0.25)
        assert engine.settle() == NOTHING
        policy.set_ratio(0.75)
        assert engine.settle() == Changes(drop=(5,))
        assert engine.section_bytes[HOMOPHILY] == 10
        policy.set_ratio(1.0)
        assert engine.settle() == Changes(drop=(6,))

    def test_the_nearest_hub_substitutes_so_often_and_then_the_next(self) -> None:
        policy = Spider(0, HubLimits(substitutions=2))
        engine = Engine(policy, 100)
        for each in (hub(1, 50, nearest=0.3), hub(2, 50, nearest=0.2), hub(3, 50, job_dataset_id="other")):
            policy.hub_found(each)
            engine.place(each.key, 10)
        given = []
        while (substitute := policy.substitute_for("train", 50)) is not None:
            policy.substituted("train", substitute, 50)
            given.append(substitute)
        assert given == [2, 2, 1, 1]
        policy.new_epoch("train")
        assert policy.substitute_for("train", 50) == 2
        assert policy.substitute_for("other", 50) == 3

    def test_as_the_paper_has_it_a_hub_has_no_limits(self) -> None:
        policy = Spider(0, HubLimits(substitutions=None, neighbours=None))
        engine = Engine(policy, 1000)
        policy.hub_found(hub(1, *range(100, 300)))
        engine.place(1, 10)
        for key in [*range(100, 300)] * 2:
            assert policy.substitute_for("train", key) == 1
            policy.substituted("train", 1, key)

    def test_a_hub_has_few_neighbours_and_none_twice(self) -> None:
        section = Homophily(HubLimits(neighbours=3))
        section.put(Hub(1, "train", [1, 5, 5, 6, 7, 8], [0, 0.1, 0.1, 0.2, 0.3, 0.4]))
        assert section.job_datasets_of(1)["train"].neighbours == (5, 6, 7)
        assert section.job_datasets_of(1)["train"].distances == (0.1, 0.2, 0.3)
        section.remove(1)
        assert (len(section), section.substitute_for("train", 5)) == (0, None)

    def test_an_impossible_ratio_is_refused(self) -> None:
        with pytest.raises(ValueError, match="between 0 and 1"):
            Spider(ratio=2)

    def test_limits_change_while_it_runs(self) -> None:
        policy = Spider(0, HubLimits(substitutions=1, neighbours=1))
        engine = Engine(policy, 100)
        policy.hub_found(hub(1, 50, 51))
        engine.place(1, 10)
        policy.substituted("train", 1, 50)
        assert (policy.substitute_for("train", 50), policy.redirects_changed()) == (None, [])
        policy.limit_hubs(HubLimits(substitutions=2, neighbours=None))
        assert policy.redirects_changed() == [("train", 50, 1)]
        policy.hub_found(hub(1, 50, 51))
        assert policy.substitute_for("train", 51) == 1
        policy.limit_hubs(HubLimits(substitutions=0))
        assert sorted(policy.redirects_changed()) == [("train", 50, None)]

    def test_each_job_dataset_counts_for_itself(self) -> None:
        policy = Spider(0, HubLimits(substitutions=1))
        engine = Engine(policy, 100)
        for each in (
            hub(1, 50),
            hub(1, 50, 60, job_dataset_id="other"),
            hub(2, 60, job_dataset_id="other", nearest=0.5),
        ):
            policy.hub_found(each)
            engine.place(each.key, 10)
        assert (policy.is_hub("train", 1), policy.is_hub("other", 1), policy.is_hub("train", 2)) == (True, True, False)
        policy.substituted("train", 1, 50)
        assert (policy.substitute_for("train", 50), policy.substitute_for("other", 50)) == (None, 1)
        policy.substituted("other", 1, 50)
        policy.new_epoch("train")
        assert (policy.substitute_for("train", 50), policy.substitute_for("other", 50)) == (1, None)
        assert policy.substitute_for("other", 60) == 2
        # A job dataset that is over leaves the hubs of others alone, and its counts with them.
        policy.forget_job_dataset("train", [])
        assert (policy.substitute_for("other", 50), policy.substitute_for("other", 60)) == (None, 2)

    def test_a_sample_waits_to_be_a_hub_of_two_job_datasets(self) -> None:
        policy = Spider(ratio=0.5)
        engine = Engine(policy, 100)
        for job_dataset_id in ("train", "other", "third"):
            policy.hub_found(hub(1, 50, job_dataset_id=job_dataset_id))
        policy.forget_job_dataset("third", [])
        engine.opened(1, 10)
        assert [policy.substitute_for(job_dataset_id, 50) for job_dataset_id in ("train", "other", "third")] == [
            1,
            1,
            None,
        ]
        again = Engine(Spider(), 100)
        again.restore([(1, 10, HOMOPHILY)], engine.state())
        assert [again.policy.substitute_for(name, 50) for name in ("train", "other")] == [1, 1]  # type: ignore[attr-defined]
        engine.evict([1])
        assert [policy.substitute_for(job_dataset_id, 50) for job_dataset_id in ("train", "other")] == [None, None]


def test_a_remount_goes_on_with_hubs_and_scores() -> None:
    policy = Spider(ratio=0.5)
    engine = engine_with(policy, 40, {1: 0.4, 2: 0.2})
    for each in (hub(5, 50), hub(6, 50, nearest=0.05)):
        policy.hub_found(each)
        engine.place(each.key, 10)
    policy.set_ratio(0.6)
    state = msgpack.unpackb(msgpack.packb(engine.state()), use_list=False, strict_map_key=False)
    again = Engine(Spider(), 40)
    stored = [(key, member.size, member.section) for key, member in engine.members.items()]
    changes = again.restore(stored, state)
    # The ratio was saved too: 16 bytes of hubs are one.
    assert changes == Changes(drop=(5,))
    spider = again.policy
    assert isinstance(spider, Spider)
    assert (spider.ratio, spider.substitute_for("train", 50)) == (0.6, 6)
    assert (list(spider.eviction_order(IMPORTANCE)), spider.score(1)) == ([2, 1], 0.4)
    assert spider.redirects_changed() == [("train", 50, 6)]
    again.restore(stored, {})
    assert spider.redirects_changed() == [("train", 50, None)]


SAMPLES = st.integers(0, 24)
LISTS = {"even": 0, "all": 1}
MAX_SUBSTITUTIONS = 3


def label_of(job_dataset_id: str, key: int) -> int:
    """Two trainers may see the same samples under different labels."""
    return key % 3 if job_dataset_id == "even" else key % 5


class SpiderAgainstModel(RuleBasedStateMachine):
    """In whatever order events come: substitutes have the label, hubs leave by age, and none is a substitute too
    often."""

    @initialize(capacity=st.integers(0, 150), ratio=st.sampled_from([0.0, 0.5, 0.8, 1.0]))
    def begin(self, capacity: int, ratio: float) -> None:
        self.policy = Spider(ratio, HubLimits(MAX_SUBSTITUTIONS))
        self.engine = Engine(self.policy, capacity)
        self.hubs: list[int] = []
        self.found: dict[tuple[str, int], Hub] = {}
        self.scores: dict[int, float] = {}
        self.substituted: dict[tuple[str, int], int] = {}
        self.published: dict[tuple[str, int], int] = {}

    def follow(self, changes: Changes) -> None:
        """The members that left were the oldest hubs, and the least important of the others."""
        gone = [key for key in changes.drop if key in self.hubs]
        assert gone == self.hubs[: len(gone)]
        del self.hubs[: len(gone)]
        for key, section in changes.keep:
            if section == HOMOPHILY:
                self.hubs.append(int(str(key)))

    @rule(key=SAMPLES)
    def opened(self, key: int) -> None:
        members = dict(self.engine.members)
        changes = self.engine.opened(key, size_of(key))
        for victim in changes.drop:
            if members[victim].section == IMPORTANCE and changes.keep[0][1] == IMPORTANCE:
                assert self.scores.get(int(str(victim)), 0) < self.scores[key]
        self.follow(changes)

    @rule(key=SAMPLES, score=st.floats(0.01, 4))
    def scored(self, key: int, score: float) -> None:
        self.policy.scored(key, score)
        self.scores[key] = score

    @rule(
        key=SAMPLES,
        others=st.lists(SAMPLES, max_size=8),
        job_dataset_id=st.sampled_from(sorted(LISTS)),
        here=st.booleans(),
    )
    def hub_found(self, key: int, others: list[int], job_dataset_id: str, here: bool) -> None:
        alike = [other for other in others if label_of(job_dataset_id, other) == label_of(job_dataset_id, key)]
        found = Hub(key, job_dataset_id, alike, [0.1 * other for other in alike])
        self.policy.hub_found(found)
        self.found[job_dataset_id, key] = found
        if here:
            self.follow(self.engine.place(key, size_of(key)))

    @rule(key=SAMPLES, job_dataset_id=st.sampled_from(sorted(LISTS)))
    def redirect(self, key: int, job_dataset_id: str) -> None:
        substitute = self.policy.substitute_for(job_dataset_id, key)
        if substitute is None:
            return
        hub_key = int(str(substitute))
        found = self.found[job_dataset_id, hub_key]
        assert label_of(job_dataset_id, hub_key) == label_of(job_dataset_id, key)
        assert self.engine.members[hub_key].section == HOMOPHILY
        assert key not in self.engine.members
        assert key in found.neighbours
        assert self.policy.is_hub(job_dataset_id, hub_key)
        self.policy.substituted(job_dataset_id, hub_key, key)
        self.substituted[job_dataset_id, hub_key] = self.substituted.get((job_dataset_id, hub_key), 0) + 1
        assert self.substituted[job_dataset_id, hub_key] <= MAX_SUBSTITUTIONS

    @rule(job_dataset_id=st.sampled_from(sorted(LISTS)))
    def new_epoch(self, job_dataset_id: str) -> None:
        self.policy.new_epoch(job_dataset_id)
        self.substituted = {owned: count for owned, count in self.substituted.items() if owned[0] != job_dataset_id}

    @rule(ratio=st.floats(0, 1))
    def set_ratio(self, ratio: float) -> None:
        self.policy.set_ratio(ratio)
        self.follow(self.engine.settle())

    @rule(capacity=st.integers(0, 150))
    def resize(self, capacity: int) -> None:
        self.follow(self.engine.resize(capacity, 0))

    @rule(key=SAMPLES)
    def lose(self, key: int) -> None:
        self.engine.forget(key)
        self.hubs = [each for each in self.hubs if each != key]

    @rule(block=st.integers(0, 5))
    def block_read(self, block: int) -> None:
        self.follow(self.engine.block_read((99, block), 8))

    @rule()
    def publish(self) -> None:
        for job_dataset_id, key, substitute in self.policy.redirects_changed():
            sample = int(str(key))
            if substitute is None:
                del self.published[job_dataset_id, sample]
            else:
                assert self.published.get((job_dataset_id, sample)) != substitute
                self.published[job_dataset_id, sample] = int(str(substitute))
        for job_dataset_id in LISTS:
            for sample in range(25):
                assert self.policy.substitute_for(job_dataset_id, sample) == self.published.get(
                    (job_dataset_id, sample)
                )

    @invariant()
    def sections_keep_their_limits_and_orders(self) -> None:
        assert list(self.policy.eviction_order(HOMOPHILY)) == self.hubs
        order = list(self.policy.eviction_order(IMPORTANCE))
        assert all(self.policy.score(one) <= self.policy.score(other) for one, other in pairwise(order))
        assert {*order, *self.hubs} == {key for key, member in self.engine.members.items() if member.section != BLOCKS}
        for section in self.policy.sections:
            held = sum(member.size for member in self.engine.members.values() if member.section == section)
            assert held == self.engine.section_bytes[section]
        assert self.engine.section_bytes[HOMOPHILY] <= self.engine.budget_bytes * (1 - self.policy.ratio) + 1
        assert self.engine.used_bytes <= self.engine.budget_bytes


def size_of(key: int) -> int:
    return 5 + key * 7 % 17


TestSpiderAgainstModel = SpiderAgainstModel.TestCase
TestSpiderAgainstModel.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
