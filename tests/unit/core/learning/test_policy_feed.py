"""What trainings feed reaches policy and engine, each job dataset by itself."""

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
from spiderfs.core.events import AtHand, Epoch, Hint, Labels, Pinning, Ratio, Scored
from spiderfs.core.feed import (
    DUE_WITH_READ,
    DUE_WITH_SCORES,
    PLANNED_RATIO,
    QUANTILES,
    ElasticOptions,
    PolicyFeed,
    PolicyFeedOptions,
)
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.policy import Hub, Key, Policy
from spiderfs.errors import ConfigError
from spiderfs.policies import POLICIES
from spiderfs.policies.spider import HOMOPHILY, Spider
from spiderfs.simulation import ReplayedFeed

SIZE = 10
LABELS: dict[Key, int] = {key: key % 2 for key in range(20)}


class Harness:
    def __init__(self, policy: str | Policy = "spider", capacity: int = 10 * SIZE, **options: Any) -> None:
        made = POLICIES[policy]() if isinstance(policy, str) else policy
        self.engine = Engine(made, capacity)
        self.landing: set[Key] = set()
        self.hints: list[Hint] = []
        self.feed = PolicyFeed(self.engine, self.size_of, PolicyFeedOptions(**options), self.hints.append)

    def size_of(self, key: Key) -> int | None:
        return SIZE if key in self.engine.members or key in self.landing else None

    def read(self, *keys: Key) -> None:
        for key in keys:
            self.engine.opened(key, SIZE)

    @property
    def ratio(self) -> float | None:
        return self.feed.status().ratio

    def end_epochs(self, job_id: str, sigmas: list[float], first: int = 0) -> None:
        for epoch, sigma in enumerate(sigmas, first):
            self.feed.epoch_ended(job_id, epoch, {"a": sigma}, 0.5)


FALLING = [5.0, 4.0, 3.0, 2.0, 1.0]


def hub_of(key: int, *neighbours: int, job_dataset_id: str = "a") -> Hub:
    return Hub(key, job_dataset_id, neighbours, [0.1 * place for place in range(len(neighbours))])


def test_a_hub_whose_bytes_are_at_hand_is_placed() -> None:
    harness = Harness()
    harness.feed.begin("a", "job", LABELS)
    assert harness.feed.hub_found(hub_of(2, 4, 6)).keep == ()
    harness.landing.add(8)
    assert harness.feed.hub_found(hub_of(8, 4, 6)).keep == ((8, HOMOPHILY),)
    assert [harness.feed.is_hub("a", key) for key in (2, 8)] == [False, True]
    assert harness.feed.substitute("a", 4) == 8
    assert harness.feed.substitute("b", 4) is None


def test_the_ratio_moves_with_the_share_of_the_epochs_that_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spiderfs.core.feed.HALF_GROWTH", 1e9)
    harness = Harness(elastic=ElasticOptions(0.9, 0.5), epochs=100)
    harness.feed.begin_job("job", epochs=10)
    harness.feed.begin("a", "job", LABELS)
    harness.end_epochs("job", FALLING)
    # Beta is 1, and u is next to 0: after epoch 4, which is the fifth, half of the way is done.
    assert harness.ratio == pytest.approx(0.7)
    harness.end_epochs("job", FALLING, first=5)
    assert harness.ratio == pytest.approx(0.5)
    assert harness.feed.status().jobs[0].epochs_done == 10


def test_the_largest_ratio_of_the_running_jobs_counts() -> None:
    harness = Harness(elastic=ElasticOptions(0.9, 0.5), epochs=5)
    harness.feed.begin("a", "job", LABELS)
    harness.end_epochs("job", FALLING)
    assert harness.ratio == pytest.approx(0.5)
    harness.feed.begin("b", "other", LABELS)
    assert harness.ratio == pytest.approx(0.9)
    assert [job.ratio for job in harness.feed.status().jobs] == pytest.approx([0.5, 0.9])
    harness.feed.end("b")
    assert harness.ratio == pytest.approx(0.5)
    harness.feed.end("a")
    assert harness.ratio == pytest.approx(0.5), "no one wants another"


def test_a_job_without_scores_asks_for_no_ratio_beside_one_that_has_some() -> None:
    harness = Harness(elastic=ElasticOptions(0.9, 0.5), epochs=5)
    harness.feed.begin("a", "job", LABELS)
    harness.feed.scored("a", [1, 2], [0.5, 0.25])
    harness.end_epochs("job", FALLING)
    harness.feed.begin("b", "plans only", LABELS)
    assert harness.ratio == pytest.approx(0.5)
    harness.feed.scored("b", [1, 2], [0.5, 0.25])
    harness.feed.begin_job("plans only")
    assert harness.ratio == pytest.approx(0.9)


def test_a_job_that_comes_back_goes_on_and_a_new_one_begins_afresh() -> None:
    harness = Harness(elastic=ElasticOptions(0.9, 0.5), epochs=5)
    harness.feed.begin("a", "job", LABELS)
    harness.end_epochs("job", FALLING)
    harness.feed.pin_ratio(0.3)
    again = Harness(elastic=ElasticOptions(0.9, 0.5), epochs=5)
    again.feed.restore(msgpack.unpackb(msgpack.packb(harness.feed.state())))
    again.feed.begin("a", "job", LABELS)
    assert again.ratio == 0.3
    again.feed.pin_ratio(None)
    assert again.ratio == pytest.approx(0.5)
    harness.feed.pin_ratio(None)
    assert again.feed.status() == harness.feed.status()
    again.feed.begin("b", "new", LABELS)
    assert [job.epochs_done for job in again.feed.status().jobs] == [5, 0]
    again.feed.begin_job("new", epochs=8, epochs_done=4)
    assert (again.feed.status().jobs[1].epochs_done, again.feed.status().jobs[1].epochs) == (4, 8)


def test_a_pinned_ratio_holds_for_the_next_policy_too() -> None:
    harness = Harness()
    harness.feed.begin("a", "job", LABELS)
    harness.feed.pin_ratio(0.25)
    harness.end_epochs("job", FALLING)
    assert harness.ratio == 0.25
    harness.engine.change_policy(Spider())
    harness.feed.policy_changed()
    assert harness.ratio == 0.25
    harness.feed.pin_ratio(None)
    assert harness.ratio is not None
    assert harness.ratio > 0.8


@pytest.mark.parametrize("policy", ["impact", "shade", "lru"])
def test_a_ratio_that_cannot_be_set_is_refused(policy: str) -> None:
    harness = Harness(policy)
    with pytest.raises(ConfigError, match=rf"^ratio: policy={policy} has no ratio that can be set; [^\n]*$"):
        harness.feed.pin_ratio(0.5)
    harness.feed.pin_ratio(None)
    assert harness.feed.status().pinned is None


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_what_is_no_share_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="from 0 to 1"):
        Harness().feed.pin_ratio(ratio)


@pytest.mark.parametrize("only_late", [True, False])
def test_followed_plans_leave_hubs_little_if_only_late_reads_get_substitutes(only_late: bool) -> None:
    harness = Harness(only_late=only_late)
    harness.feed.begin("a", "job", LABELS)
    epoch = PlannedEpoch(0, [1, 2], {1: 0, 2: 1}, np.array([0, 1], np.uint32))
    harness.engine.plan("trainer", "train", epoch, 0.0)
    harness.feed.schedule_changed()
    assert harness.ratio == (PLANNED_RATIO if only_late else 0.9)
    harness.engine.unplan("trainer")
    harness.feed.schedule_changed()
    assert harness.ratio == 0.9


def test_scores_of_two_job_datasets_are_merged_and_of_one_they_stay() -> None:
    harness = Harness("shade")
    harness.feed.begin("a", "one", LABELS)
    harness.feed.scored("a", [1, 2], [3.0, 5.0])
    assert [harness.engine.score(key) for key in (1, 2)] == [3.0, 5.0]
    harness.feed.begin("b", "other", LABELS)
    harness.feed.scored("b", [1, 2], [300.0, 100.0])
    assert [harness.engine.score(key) for key in (1, 2)] == [0.75, 0.75]
    harness.feed.end("b", [])
    assert [harness.engine.score(key) for key in (1, 2)] == [3.0, 5.0]


def test_worths_that_change_together_are_passed_on_a_few_at_a_call() -> None:
    """So the manager's event loop goes on; reads alone bring the rest, also if no more scores come."""
    policy, keys = RecordingPolicy(), list(range(5 * DUE_WITH_SCORES))
    harness, ranked = Harness(policy), dict[object, object]()

    def passes(most: int, call: Callable[..., object], *arguments: object) -> bool:
        """Whether the call passed on any worth."""
        policy.calls.clear()
        call(*arguments)
        scored = [entry[1:] for entry in policy.calls if entry[0] == "scored"]
        assert len(scored) <= most
        ranked.update(scored)
        return bool(scored)

    feed = harness.feed
    for job_dataset_id in ("a", "b"):
        feed.begin(job_dataset_id, job_dataset_id, {})
    passes(len(keys), feed.scored, "a", keys, [1000.0 + key for key in keys])
    passes(2 + DUE_WITH_SCORES, feed.scored, "b", keys[:2], [1.0, 2.0])
    assert ranked[keys[2]] == 1002.0, "not passed on yet"
    while passes(DUE_WITH_READ, feed.served, "a", 1, 1):
        pass
    ranks = [(key + 0.5) / len(keys) for key in keys]
    assert [ranked[key] for key in keys[2:]] == pytest.approx(ranks[2:], abs=1 / QUANTILES)
    passes(DUE_WITH_SCORES, feed.epoch_ended, "a", 0, {})
    passes(DUE_WITH_SCORES, feed.end, "b")
    while passes(DUE_WITH_READ, feed.served, "a", 1, 1):
        pass
    assert ranked == {key: 1000.0 + key for key in keys}


@pytest.mark.parametrize("policy", ["spider", "shade", "impact"])
def test_a_replay_ranks_by_the_same_worths_at_each_read(policy: str) -> None:
    """Also while many worths are due, and where one end of an epoch is the end of two job datasets' epochs."""
    count, rng = 4 * DUE_WITH_SCORES, np.random.default_rng(1)
    harness, reads, noted = Harness(policy, count // 5 * SIZE), list[Key](), list[tuple[int, Hint]]()
    feed, kept = harness.feed, list[list[Key]]()
    feed._note = lambda hint: noted.append((len(reads), hint))

    def read(*keys: Key) -> None:
        for key in keys:
            reads.append(key)
            feed.served("a", key, key)
            harness.read(key)
        kept.append(sorted(harness.engine.members, key=str))

    keys: list[Key] = list(range(count))
    for job_dataset_id in ("a", "b"):
        feed.begin(job_dataset_id, "job", dict.fromkeys(keys, 0))
        feed.scored(job_dataset_id, keys, (rng.random(count) + 0.01).tolist())
        for some in np.array_split(rng.permutation(count), 20):
            read(*some.tolist())
    feed.epoch_ended("job", 0, {})
    for some in np.array_split(rng.permutation(count), 20):
        read(*some.tolist())

    engine, again = Engine(POLICIES[policy](), count // 5 * SIZE), list[list[Key]]()
    feed = ReplayedFeed(engine, dict.fromkeys(keys, SIZE), noted, None)
    for number, key in enumerate(reads):
        feed.give(number)
        feed.served("a", key, key)
        engine.opened(key, SIZE)
        if (number + 1) % (count // 20) == 0:
            again.append(sorted(engine.members, key=str))
    assert again == kept
    assert kept[-1] != kept[19]


def test_all_that_the_policy_was_given_is_noted() -> None:
    harness = Harness()
    hub = hub_of(2, 4)
    harness.feed.begin("a", "job", LABELS)
    harness.feed.scored("a", [1], [2.0])
    harness.feed.hub_found(hub)
    harness.feed.epoch_ended("job", 0, {}, 0.5)
    harness.feed.pin_ratio(0.7)
    assert list(harness.feed.pin("a", [1])) == []
    noted = [Labels("a", LABELS), Ratio(0.9), Scored("a", (1,), (2.0,)), hub, Epoch("a", 0.5), Ratio(0.7)]
    assert harness.hints == noted
    impact = Harness("impact")
    impact.read(1, 2, 3)
    (changes,) = impact.feed.pin("a", [1])
    assert changes.keep == ((1, "pinned"),)
    assert impact.hints == [AtHand(1, SIZE), Pinning("a", (1,))]


JOB_DATASETS = {"a": "one", "b": "one", "c": "other"}
KEYS = st.integers(0, 19)


class TaughtEngine(RuleBasedStateMachine):
    """Whatever several job datasets feed, the engine's books are right, and no job dataset uses up another's
    substitutes."""

    policy = ""

    @initialize()
    def begin(self) -> None:
        self.harness = Harness(self.policy)
        for job_dataset_id, job_id in JOB_DATASETS.items():
            self.harness.feed.begin(job_dataset_id, job_id, LABELS)
        self.epochs = {"one": 0, "other": 0}
        # How often each sample was a substitute for others, in this epoch of a job dataset.
        self.substituted = {job_dataset_id: Counter[Key]() for job_dataset_id in JOB_DATASETS}

    @rule(key=KEYS)
    def reads(self, key: int) -> None:
        self.harness.read(key)

    @rule(job_dataset_id=st.sampled_from(list(JOB_DATASETS)), scores=st.dictionaries(KEYS, st.floats(0.01, 100)))
    def scores(self, job_dataset_id: str, scores: dict[Key, float]) -> None:
        self.harness.feed.scored(job_dataset_id, list(scores), list(scores.values()))

    @rule(job_dataset_id=st.sampled_from(list(JOB_DATASETS)), keys=st.lists(KEYS, min_size=1, max_size=5, unique=True))
    def hub(self, job_dataset_id: str, keys: list[int]) -> None:
        alike = [key for key in keys if key % 2 == keys[0] % 2]
        self.harness.landing = {keys[0]}
        self.harness.feed.hub_found(hub_of(keys[0], *alike, job_dataset_id=job_dataset_id))
        self.harness.landing = set()

    @rule(job_id=st.sampled_from(["one", "other"]), sigma=st.floats(0, 2), accuracy=st.floats(0, 1))
    def ends_an_epoch(self, job_id: str, sigma: float, accuracy: float) -> None:
        sigmas = {job_dataset_id: sigma for job_dataset_id, owner in JOB_DATASETS.items() if owner == job_id}
        self.harness.feed.epoch_ended(job_id, self.epochs[job_id], sigmas, accuracy)
        self.epochs[job_id] += 1
        for job_dataset_id in sigmas:
            self.substituted[job_dataset_id].clear()

    @rule(job_dataset_id=st.sampled_from(list(JOB_DATASETS)), keys=st.lists(KEYS, max_size=5, unique=True))
    def pins(self, job_dataset_id: str, keys: list[Key]) -> None:
        for _ in self.harness.feed.pin(job_dataset_id, keys):
            pass

    @rule(job_dataset_id=st.sampled_from(list(JOB_DATASETS)), key=KEYS)
    def asks(self, job_dataset_id: str, key: int) -> None:
        found = self.harness.feed.substitute(job_dataset_id, key)
        given = key if found is None else found
        self.harness.feed.served(job_dataset_id, key, given)
        self.substituted[job_dataset_id].update([given] if given != key else [])
        self.harness.read(given)

    @rule(job_dataset_id=st.sampled_from(list(JOB_DATASETS)))
    def ends_and_begins(self, job_dataset_id: str) -> None:
        self.harness.feed.end(job_dataset_id)
        self.harness.feed.begin(job_dataset_id, JOB_DATASETS[job_dataset_id], LABELS)
        self.substituted[job_dataset_id].clear()

    @invariant()
    def each_job_dataset_counts_its_own_substitutes(self) -> None:
        """What one job dataset does leaves alone how often samples substituted for readers of the others."""
        if hasattr(self, "harness") and isinstance(self.harness.engine.policy, Spider):
            counted = self.harness.engine.policy._homophily._substitutions
            assert {
                job_dataset_id: Counter(counted.get(job_dataset_id, {})) for job_dataset_id in JOB_DATASETS
            } == self.substituted

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "harness"):
            return
        engine = self.harness.engine
        assert engine.used_bytes == SIZE * len(engine.members) == sum(engine.section_bytes.values())
        assert engine.used_bytes <= engine.budget_bytes
        if engine.policy.has_substitutes:
            for key in LABELS:
                for job_dataset_id in JOB_DATASETS:
                    given = self.harness.feed.substitute(job_dataset_id, key)
                    assert given is None or (given in engine.members and LABELS[given] == LABELS[key])


def machine(name: str) -> Any:
    made = type(f"Taught_{name}", (TaughtEngine,), {"policy": name})
    made.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
    return made.TestCase


TestSpider, TestShade, TestImpact = machine("spider"), machine("shade"), machine("impact")
