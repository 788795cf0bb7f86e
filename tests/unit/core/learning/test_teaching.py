"""What trainings teach reaches policy and engine, each course by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from recording_policy import RecordingPolicy

from spiderfs.core.engine import Engine
from spiderfs.core.guided import Guided, HasStandIns
from spiderfs.core.hints import AtHand, Epoch, Hint, Hub, Labels, Pinning, Ratio, Scored
from spiderfs.core.learning.elastic import ElasticOptions
from spiderfs.core.learning.teaching import (
    DUE_WITH_READ,
    DUE_WITH_SCORES,
    KEPT_JOBS,
    PLANNED_RATIO,
    Teaching,
    TeachingOptions,
)
from spiderfs.core.learning.worths import QUANTILES
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.policy import Key
from spiderfs.errors import ConfigError
from spiderfs.policies import POLICIES
from spiderfs.policies.spider import HOMOPHILY, Spider
from spiderfs.simulation.replay import Teacher

SIZE = 10
LABELS: dict[Key, int] = {key: key % 2 for key in range(20)}


class Harness:
    def __init__(self, policy: str | Guided = "spider", capacity: int = 10 * SIZE, **options: Any) -> None:
        made = POLICIES[policy]() if isinstance(policy, str) else policy
        self.engine = Engine(made, capacity)
        self.landing: set[Key] = set()
        self.hints: list[Hint] = []
        self.teaching = Teaching(self.engine, self.size_of, TeachingOptions(**options), self.hints.append)

    def size_of(self, key: Key) -> int | None:
        return SIZE if key in self.engine.members or key in self.landing else None

    def read(self, *keys: Key) -> None:
        for key in keys:
            self.engine.opened(key, SIZE)

    @property
    def ratio(self) -> float | None:
        return self.teaching.status().ratio

    def end_epochs(self, job_id: str, sigmas: list[float], first: int = 0) -> None:
        for epoch, sigma in enumerate(sigmas, first):
            self.teaching.epoch_ended(job_id, epoch, {"a": sigma}, 0.5)


FALLING = [5.0, 4.0, 3.0, 2.0, 1.0]


def hub_of(key: int, *neighbours: int, course_id: str = "a") -> Hub:
    return Hub(key, course_id, neighbours, [0.1 * place for place in range(len(neighbours))])


def test_a_hub_whose_bytes_are_at_hand_is_placed() -> None:
    harness = Harness()
    harness.teaching.begin("a", "job", LABELS)
    assert harness.teaching.hub_found(hub_of(2, 4, 6)).keep == ()
    harness.landing.add(8)
    assert harness.teaching.hub_found(hub_of(8, 4, 6)).keep == ((8, HOMOPHILY),)
    assert [harness.teaching.is_hub("a", key) for key in (2, 8)] == [False, True]
    assert harness.teaching.stand_in("a", 4) == 8
    assert harness.teaching.stand_in("b", 4) is None


def test_the_ratio_moves_with_the_share_of_the_epochs_that_are_over() -> None:
    harness = Harness(elastic=ElasticOptions(0.9, 0.5, half_growth=1e9), epochs=100)
    harness.teaching.begin_job("job", epochs=10)
    harness.teaching.begin("a", "job", LABELS)
    harness.end_epochs("job", FALLING)
    # Beta is 1, and u is next to 0: after epoch 4, which is the fifth, half of the way is done.
    assert harness.ratio == pytest.approx(0.7)
    harness.end_epochs("job", FALLING, first=5)
    assert harness.ratio == pytest.approx(0.5)
    assert harness.teaching.status().jobs[0].epochs_done == 10


def test_a_training_that_does_not_say_its_length_gets_the_option() -> None:
    harness = Harness(elastic=ElasticOptions(0.9, 0.5, half_growth=1e9), epochs=20)
    harness.teaching.begin("a", "job", LABELS)
    harness.end_epochs("job", FALLING)
    assert harness.ratio == pytest.approx(0.8)


def test_the_largest_ratio_of_the_running_jobs_counts() -> None:
    harness = Harness(elastic=ElasticOptions(0.9, 0.5), epochs=5)
    harness.teaching.begin("a", "job", LABELS)
    harness.end_epochs("job", FALLING)
    assert harness.ratio == pytest.approx(0.5)
    harness.teaching.begin("b", "other", LABELS)
    assert harness.ratio == pytest.approx(0.9)
    assert [job.ratio for job in harness.teaching.status().jobs] == pytest.approx([0.5, 0.9])
    harness.teaching.end("b")
    assert harness.ratio == pytest.approx(0.5)
    harness.teaching.end("a")
    assert harness.ratio == pytest.approx(0.5), "nobody wants another"


def test_a_job_without_scores_asks_for_no_ratio_beside_one_that_has_some() -> None:
    harness = Harness(elastic=ElasticOptions(0.9, 0.5), epochs=5)
    harness.teaching.begin("a", "job", LABELS)
    harness.teaching.scored("a", [1, 2], [0.5, 0.25])
    harness.end_epochs("job", FALLING)
    harness.teaching.begin("b", "plans only", LABELS)
    assert harness.ratio == pytest.approx(0.5)
    harness.teaching.scored("b", [1, 2], [0.5, 0.25])
    harness.teaching.begin_job("plans only")
    assert harness.ratio == pytest.approx(0.9)


def test_a_job_that_comes_back_goes_on_and_a_new_one_begins_afresh() -> None:
    harness = Harness(elastic=ElasticOptions(0.9, 0.5), epochs=5)
    harness.teaching.begin("a", "job", LABELS)
    harness.end_epochs("job", FALLING)
    harness.teaching.pin_ratio(0.3)
    again = Harness(elastic=ElasticOptions(0.9, 0.5), epochs=5)
    again.teaching.restore(msgpack.unpackb(msgpack.packb(harness.teaching.state())))
    again.teaching.begin("a", "job", LABELS)
    assert again.ratio == 0.3
    again.teaching.pin_ratio(None)
    assert again.ratio == pytest.approx(0.5)
    harness.teaching.pin_ratio(None)
    assert again.teaching.status() == harness.teaching.status()
    again.teaching.begin("b", "new", LABELS)
    assert [job.epochs_done for job in again.teaching.status().jobs] == [5, 0]
    again.teaching.begin_job("new", epochs=8, epochs_done=4)
    assert (again.teaching.status().jobs[1].epochs_done, again.teaching.status().jobs[1].epochs) == (4, 8)


def test_a_bounded_number_of_jobs_is_kept() -> None:
    harness = Harness()
    harness.teaching.begin("a", "running", LABELS)
    for number in range(2 * KEPT_JOBS):
        harness.teaching.begin(f"{number}", f"job {number}", {})
        harness.teaching.end(f"{number}")
    kept = [job_id for job_id, *_ in harness.teaching.state()["jobs"]]
    assert len(kept) == KEPT_JOBS
    assert (kept[0], kept[-1]) == ("running", f"job {2 * KEPT_JOBS - 1}")


def test_a_pinned_ratio_holds_for_the_next_policy_too() -> None:
    harness = Harness()
    harness.teaching.begin("a", "job", LABELS)
    harness.teaching.pin_ratio(0.25)
    harness.end_epochs("job", FALLING)
    assert harness.ratio == 0.25
    harness.engine.change_policy(Spider())
    harness.teaching.policy_changed()
    assert harness.ratio == 0.25
    harness.teaching.pin_ratio(None)
    assert harness.ratio is not None
    assert harness.ratio > 0.8


@pytest.mark.parametrize("policy", ["impact", "shade", "lru"])
def test_a_ratio_that_cannot_be_set_is_refused(policy: str) -> None:
    harness = Harness(policy)
    with pytest.raises(ConfigError, match=rf"^ratio: policy={policy} has no ratio that can be set; [^\n]*$"):
        harness.teaching.pin_ratio(0.5)
    harness.teaching.pin_ratio(None)
    assert harness.teaching.status().pinned is None


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_what_is_no_share_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="from 0 to 1"):
        Harness().teaching.pin_ratio(ratio)


@pytest.mark.parametrize("only_late", [True, False])
def test_followed_plans_leave_hubs_little_if_only_late_reads_get_stand_ins(only_late: bool) -> None:
    harness = Harness(only_late=only_late)
    harness.teaching.begin("a", "job", LABELS)
    epoch = PlannedEpoch(0, [1, 2], {1: 0, 2: 1}, np.array([0, 1], np.uint32))
    harness.engine.plan("trainer", "train", epoch, 0.0)
    harness.teaching.schedule_changed()
    assert harness.ratio == (PLANNED_RATIO if only_late else 0.9)
    harness.engine.unplan("trainer")
    harness.teaching.schedule_changed()
    assert harness.ratio == 0.9


def test_one_jobs_epoch_is_no_other_ones() -> None:
    policy = RecordingPolicy()
    harness = Harness(policy)
    for course_id, job_id in (("a", "one"), ("b", "one"), ("c", "other")):
        harness.teaching.begin(course_id, job_id, LABELS)
    harness.teaching.epoch_ended("one", 0, {"a": 1.0})
    assert [told[1] for told in policy.told if told[0] == "new_epoch"] == ["a", "b"]
    assert [job.epochs_done for job in harness.teaching.status().jobs] == [1, 0]


def test_scores_of_two_courses_are_merged_and_of_one_they_stay() -> None:
    harness = Harness("shade")
    harness.teaching.begin("a", "one", LABELS)
    harness.teaching.scored("a", [1, 2], [3.0, 5.0])
    assert [harness.engine.score(key) for key in (1, 2)] == [3.0, 5.0]
    harness.teaching.begin("b", "other", LABELS)
    harness.teaching.scored("b", [1, 2], [300.0, 100.0])
    assert [harness.engine.score(key) for key in (1, 2)] == [0.75, 0.75]
    harness.teaching.end("b", [])
    assert [harness.engine.score(key) for key in (1, 2)] == [3.0, 5.0]


def test_worths_that_change_together_are_told_a_few_at_a_call() -> None:
    """So the manager's event loop goes on; reads alone bring the rest, also if no more scores come."""
    policy, keys = RecordingPolicy(), list(range(5 * DUE_WITH_SCORES))
    harness, told = Harness(policy), dict[object, object]()

    def tell(most: int, call: Callable[..., object], *arguments: object) -> bool:
        """Whether the call told any worth."""
        policy.told.clear()
        call(*arguments)
        scored = [entry[1:] for entry in policy.told if entry[0] == "scored"]
        assert len(scored) <= most
        told.update(scored)
        return bool(scored)

    teaching = harness.teaching
    for course_id in ("a", "b"):
        teaching.begin(course_id, course_id, {})
    tell(len(keys), teaching.scored, "a", keys, [1000.0 + key for key in keys])
    tell(2 + DUE_WITH_SCORES, teaching.scored, "b", keys[:2], [1.0, 2.0])
    assert told[keys[2]] == 1002.0, "not told yet"
    while tell(DUE_WITH_READ, teaching.served, "a", 1, 1):
        pass
    ranks = [(key + 0.5) / len(keys) for key in keys]
    assert [told[key] for key in keys[2:]] == pytest.approx(ranks[2:], abs=1 / QUANTILES)
    tell(DUE_WITH_SCORES, teaching.epoch_ended, "a", 0, {})
    tell(DUE_WITH_SCORES, teaching.end, "b")
    while tell(DUE_WITH_READ, teaching.served, "a", 1, 1):
        pass
    assert told == {key: 1000.0 + key for key in keys}


@pytest.mark.parametrize("policy", ["spider", "shade", "impact"])
def test_a_replay_tells_the_same_worths_at_each_read(policy: str) -> None:
    """Also while many worths are due, and where one end of an epoch is the end of two courses' epochs."""
    count, rng = 4 * DUE_WITH_SCORES, np.random.default_rng(1)
    harness, reads, noted = Harness(policy, count // 5 * SIZE), list[Key](), list[tuple[int, Hint]]()
    teaching, kept = harness.teaching, list[list[Key]]()
    teaching._note = lambda hint: noted.append((len(reads), hint))

    def read(*keys: Key) -> None:
        for key in keys:
            reads.append(key)
            teaching.served("a", key, key)
            harness.read(key)
        kept.append(sorted(harness.engine.members, key=str))

    keys: list[Key] = list(range(count))
    for course_id in ("a", "b"):
        teaching.begin(course_id, "job", dict.fromkeys(keys, 0))
        teaching.scored(course_id, keys, (rng.random(count) + 0.01).tolist())
        for some in np.array_split(rng.permutation(count), 20):
            read(*some.tolist())
    teaching.epoch_ended("job", 0, {})
    for some in np.array_split(rng.permutation(count), 20):
        read(*some.tolist())

    engine, again = Engine(POLICIES[policy](), count // 5 * SIZE), list[list[Key]]()
    teacher = Teacher(engine, dict.fromkeys(keys, SIZE), noted, None)
    for number, key in enumerate(reads):
        teacher.give(number)
        teacher.served("a", key, key)
        engine.opened(key, SIZE)
        if (number + 1) % (count // 20) == 0:
            again.append(sorted(engine.members, key=str))
    assert again == kept
    assert kept[-1] != kept[19]


def test_all_that_was_taught_is_noted() -> None:
    harness = Harness()
    hub = hub_of(2, 4)
    harness.teaching.begin("a", "job", LABELS)
    harness.teaching.scored("a", [1], [2.0])
    harness.teaching.hub_found(hub)
    harness.teaching.epoch_ended("job", 0, {}, 0.5)
    harness.teaching.pin_ratio(0.7)
    assert list(harness.teaching.pin("a", [1])) == []
    told = [Labels("a", LABELS), Ratio(0.9), Scored("a", (1,), (2.0,)), hub, Epoch("a", 0.5), Ratio(0.7)]
    assert harness.hints == told
    impact = Harness("impact")
    impact.read(1, 2, 3)
    (changes,) = impact.teaching.pin("a", [1])
    assert changes.keep == ((1, "pinned"),)
    assert impact.hints == [AtHand(1, SIZE), Pinning("a", (1,))]


COURSES = {"a": "one", "b": "one", "c": "other"}
KEYS = st.integers(0, 19)


class TaughtEngine(RuleBasedStateMachine):
    """Whatever several courses teach, the engine's books are right, and no course uses up another's stand-ins."""

    policy = ""

    @initialize()
    def begin(self) -> None:
        self.harness = Harness(self.policy)
        for course_id, job_id in COURSES.items():
            self.harness.teaching.begin(course_id, job_id, LABELS)
        self.epochs = {"one": 0, "other": 0}
        # How often each sample stood in for others, in this epoch of a course.
        self.stood_in = {course_id: Counter[Key]() for course_id in COURSES}

    @rule(key=KEYS)
    def reads(self, key: int) -> None:
        self.harness.read(key)

    @rule(course_id=st.sampled_from(list(COURSES)), scores=st.dictionaries(KEYS, st.floats(0.01, 100)))
    def scores(self, course_id: str, scores: dict[Key, float]) -> None:
        self.harness.teaching.scored(course_id, list(scores), list(scores.values()))

    @rule(course_id=st.sampled_from(list(COURSES)), keys=st.lists(KEYS, min_size=1, max_size=5, unique=True))
    def hub(self, course_id: str, keys: list[int]) -> None:
        alike = [key for key in keys if key % 2 == keys[0] % 2]
        self.harness.landing = {keys[0]}
        self.harness.teaching.hub_found(hub_of(keys[0], *alike, course_id=course_id))
        self.harness.landing = set()

    @rule(job_id=st.sampled_from(["one", "other"]), sigma=st.floats(0, 2), accuracy=st.floats(0, 1))
    def ends_an_epoch(self, job_id: str, sigma: float, accuracy: float) -> None:
        sigmas = {course_id: sigma for course_id, owner in COURSES.items() if owner == job_id}
        self.harness.teaching.epoch_ended(job_id, self.epochs[job_id], sigmas, accuracy)
        self.epochs[job_id] += 1
        for course_id in sigmas:
            self.stood_in[course_id].clear()

    @rule(course_id=st.sampled_from(list(COURSES)), keys=st.lists(KEYS, max_size=5, unique=True))
    def pins(self, course_id: str, keys: list[Key]) -> None:
        for _ in self.harness.teaching.pin(course_id, keys):
            pass

    @rule(course_id=st.sampled_from(list(COURSES)), key=KEYS)
    def asks(self, course_id: str, key: int) -> None:
        found = self.harness.teaching.stand_in(course_id, key)
        given = key if found is None else found
        self.harness.teaching.served(course_id, key, given)
        self.stood_in[course_id].update([given] if given != key else [])
        self.harness.read(given)

    @rule(course_id=st.sampled_from(list(COURSES)))
    def ends_and_begins(self, course_id: str) -> None:
        self.harness.teaching.end(course_id)
        self.harness.teaching.begin(course_id, COURSES[course_id], LABELS)
        self.stood_in[course_id].clear()

    @invariant()
    def each_course_counts_its_own_stand_ins(self) -> None:
        """What one course does leaves alone how often samples stood in for readers of the others."""
        if hasattr(self, "harness") and isinstance(self.harness.engine.policy, Spider):
            counted = self.harness.engine.policy._homophily._stood_in
            assert {course_id: Counter(counted.get(course_id, {})) for course_id in COURSES} == self.stood_in

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "harness"):
            return
        engine = self.harness.engine
        assert engine.used_bytes == SIZE * len(engine.members) == sum(engine.section_bytes.values())
        assert engine.used_bytes <= engine.budget_bytes
        if isinstance(engine.policy, HasStandIns):
            for key in LABELS:
                for course_id in COURSES:
                    given = self.harness.teaching.stand_in(course_id, key)
                    assert given is None or (given in engine.members and LABELS[given] == LABELS[key])


def machine(name: str) -> Any:
    made = type(f"Taught_{name}", (TaughtEngine,), {"policy": name})
    made.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
    return made.TestCase


TestSpider, TestShade, TestImpact = machine("spider"), machine("shade"), machine("impact")
