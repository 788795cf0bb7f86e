"""Exchange between jobs, by example and against a model: exactly once, whatever is lost, late, or dies."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spiderfs.core.engine import Engine
from spiderfs.core.plans.exchange import SharedList
from spiderfs.core.policy import Key
from spiderfs.policies.baselines import LRU
from trainer_hook.loader.epoch_order import EpochOrder

SAMPLES = 6


def shared_list(samples: int = SAMPLES, seed: int = 1, exchanged_share: float = 1.0) -> SharedList:
    """A list whose sample n is the file n + 1."""
    return list_for(lambda key: None, samples, random.Random(seed), exchanged_share)


def list_for(
    changed: Callable[[Key], None], samples: int, randomness: random.Random, exchanged_share: float = 1.0, **given: Any
) -> SharedList:
    keys = range(1, samples + 1)
    index_of: dict[Key, int] = {key: sample for sample, key in enumerate(keys)}
    return SharedList(keys, index_of, randomness.random, changed, exchanged_share, **given)


def two_jobs(shared: SharedList, order: list[int] | None = None) -> None:
    for job in ("a", "b"):
        shared.begin(job, job, np.array(order or range(len(shared))))


# -- the choice


def test_a_cached_sample_takes_the_place_of_one_that_is_not_cached() -> None:
    shared = shared_list()
    two_jobs(shared)
    shared.entered(4)
    assert shared.ask("a", [0]) == [4]


def test_a_job_may_have_what_another_one_is_about_to_fetch() -> None:
    shared = shared_list()
    two_jobs(shared)
    shared.dispatched("a", shared.ask("a", [0]))
    assert shared.ask("b", [5]) == [0]


def test_a_ready_partial_sample_is_at_hand_and_a_candidate() -> None:
    shared, ready = shared_list(), np.zeros(SAMPLES, np.bool_)
    two_jobs(shared)
    ready[[0, 4]] = True
    assert shared.ask("a", [0, 1], ready) == [0, 4]
    shared.dispatched("a", [0, 4])
    # The list has nothing else that is at hand, and what was given is given once.
    assert shared.ask("a", [2], ready) == [2]
    # For the other job nothing is ready but what this one is about to fetch.
    assert shared.ask("b", [0], np.zeros(SAMPLES, np.bool_)) == [2]


def test_what_is_ready_is_not_fetched_ahead() -> None:
    shared = shared_list()
    two_jobs(shared)
    ready = np.arange(len(shared)) > 0
    shared.ask("a", [], ready)
    shared.ask("b", [], ready)
    assert shared.due(lambda rank_id: len(shared) - 1) is None
    found = {shared.due(lambda rank_id: len(shared)) for _ in range(50)} - {None}
    assert {sample for _, sample in found} <= {0}


def test_a_sample_that_is_wanted_twice_is_reserved_once() -> None:
    shared = shared_list()
    two_jobs(shared)
    assert shared.ask("a", [0, 0]) == [0, 0]
    assert shared.wanted_by(0) == 2
    shared.dispatched("a", [0, 0])
    shared.taken("a", 2)
    assert (shared.reserved(0), shared.pending_ranks(0)) == (False, 1), "it is pending for the other job"


def test_a_share_of_the_misses_is_left_alone() -> None:
    shared = shared_list(2000, exchanged_share=0.8)
    two_jobs(shared)
    for sample in range(1000, 2000):
        shared.entered(sample)
    given = shared.ask("a", range(1000))
    exchanged = [sample for sample in given if sample >= 1000]
    assert 760 <= len(exchanged) <= 840
    assert shared.dispatched("a", given) == exchanged
    assert shared.ranks["a"].counts.exchanged == len(exchanged)


def test_candidates_have_the_same_probability() -> None:
    drawn = []
    for seed in range(300):
        shared = shared_list(seed=seed)
        two_jobs(shared)
        shared.entered(1)
        shared.entered(2)
        drawn += shared.ask("a", [0])
    assert 120 <= drawn.count(1) <= 180
    assert set(drawn) == {1, 2}


def test_what_the_cache_can_never_hold_keeps_its_place() -> None:
    """Else such samples would come at the end of every epoch, when there is nothing left to take in their places."""
    shared = list_for(lambda key: None, 2000, random.Random(1), cacheable=lambda key: int(key) % 2 == 0)
    two_jobs(shared)
    for sample in range(1001, 2000, 2):
        shared.entered(sample)
    given = shared.ask("a", range(1000))
    assert [sample for sample in given if sample % 2 == 0] == list(range(0, 1000, 2))
    assert all(sample > 1000 for sample in given if sample % 2)
    shared.dispatched("a", given)
    # Nor is one given in the place of another because some rank is about to read it.
    shared.dispatched("b", range(1000, 1020, 2))
    assert not {*range(0, 1000, 2), *range(1000, 1020, 2)} & {*shared.ask("b", range(1, 1000, 2))}


# -- promises


def test_a_reserved_sample_is_pending_again_if_the_rank_does_not_take_it_up() -> None:
    shared = shared_list()
    two_jobs(shared)
    shared.entered(2)
    assert shared.ask("a", [0]) == [2]
    assert shared.reserved(2)
    shared.dispatched("a", [0])  # the answer came too late
    assert not shared.reserved(2)
    assert shared.reserved(0)
    assert shared.ranks["a"].counts.exchanged == 0
    assert shared.ask("a", [1]) == [2]


def test_a_new_question_withdraws_an_answer_that_no_one_has_seen() -> None:
    shared = shared_list()
    two_jobs(shared)
    shared.entered(2)
    assert shared.ask("a", [0]) == [2]
    assert shared.ask("a", [0]) == [2]
    assert shared.ranks["a"].counts.withdrawn == 1


def test_a_promise_lasts_until_the_loop_has_taken_the_sample() -> None:
    shared = shared_list()
    two_jobs(shared)
    shared.entered(2)
    shared.dispatched("a", shared.ask("a", [0, 1]))
    shared.taken("a", 1)
    assert [shared.reserved(sample) for sample in (0, 1, 2)] == [False, True, False]
    shared.taken("a", 1)
    assert not shared.reserved(1)


# -- what to fetch ahead, and what leaves


def test_what_is_pending_for_most_ranks_is_fetched_ahead() -> None:
    shared = shared_list()
    two_jobs(shared)
    shared.dispatched("a", [0, 1, 2, 3])
    due = due_of(shared, 3)
    assert due in (4, 5)
    shared.fetching(due)
    assert due_of(shared, 3) == 9 - due


def due_of(shared: SharedList, ready: int) -> Any:
    found = shared.due(lambda _: ready)
    return None if found is None else found[1]


def engine_with_two_jobs(capacity: int) -> Engine:
    engine = Engine(LRU(), capacity)
    shared = list_for(engine.exchange_pending.changed, SAMPLES, random.Random(1))
    engine.share("list", shared)
    two_jobs(shared)
    engine.rerank()
    return engine


def test_the_sample_that_is_pending_for_the_fewest_ranks_leaves_first() -> None:
    engine = engine_with_two_jobs(2)
    shared = engine.exchange_pending.lists["list"]
    engine.opened(1, 1)
    engine.opened(2, 1)
    shared.dispatched("a", [1])
    shared.taken("a", 1)
    assert engine.place(3, 1).drop == (2,)


def test_a_reserved_sample_leaves_only_when_the_cache_becomes_smaller() -> None:
    engine = engine_with_two_jobs(2)
    shared = engine.exchange_pending.lists["list"]
    engine.opened(1, 1)
    engine.opened(2, 1)
    for rank in ("a", "b"):
        shared.dispatched(rank, shared.ask(rank, [0, 1]))
    assert not engine.would_keep(3, 1)
    shared.taken("a", 2)
    assert not engine.would_keep(3, 1)
    assert engine.resize(1, 0).drop != ()


def test_when_no_one_shares_any_more_the_policy_decides() -> None:
    engine = engine_with_two_jobs(2)
    engine.opened(1, 1)
    engine.opened(2, 1)
    engine.exchange_pending.lists["list"].end("b")
    engine.rerank()
    assert engine.opened(3, 1).drop == (1,)
    engine.exchange_pending.remove("list")
    engine.rerank()
    assert engine.opened(4, 1).drop == (2,)


# -- exactly once, whatever happens


@dataclass
class Rank:
    """A rank as its own process sees it: its order is what counts."""

    job: str
    planned: list[int]
    order: EpochOrder
    handed: list[int] = field(default_factory=list)
    taken: int = 0

    @property
    def pending(self) -> set[int]:
        """The samples that are still to come."""
        return set(self.order.coming(len(self.order)))


class Jobs(RuleBasedStateMachine):
    """Ranks of several jobs, and one list in an engine; answers get lost, come late, or name nonsense."""

    SAMPLES = 9
    CAPACITY = 3

    @initialize(seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.5, 1.0]))
    def mount(self, seed: int, share: float) -> None:
        self.share, self.randomness = share, random.Random(seed)
        self.ranks: dict[Hashable, Rank] = {}
        self.start_manager({})

    def start_manager(self, members: dict[Key, int]) -> None:
        self.engine = Engine(LRU(), self.CAPACITY)
        self.engine.restore([(key, size, "samples") for key, size in members.items()], {})
        self.shared = list_for(self.engine.exchange_pending.changed, self.SAMPLES, self.randomness, self.share)
        self.engine.share("list", self.shared)

    def tell_of_epoch(self, name: Hashable) -> None:
        rank = self.ranks[name]
        self.shared.begin(name, rank.job, rank.order.order[rank.order.position :])
        self.engine.rerank()

    @rule(
        job=st.sampled_from("abc"), number=st.integers(0, 1), planned=st.permutations(range(9)), cut=st.integers(1, 9)
    )
    def begin_an_epoch(self, job: str, number: int, planned: list[int], cut: int) -> None:
        planned = planned[:cut]
        self.ranks[f"{job}{number}"] = Rank(job, planned, EpochOrder(planned, self.SAMPLES))
        self.tell_of_epoch(f"{job}{number}")

    @precondition(lambda self: self.ranks)
    @rule(data=st.data(), fate=st.sampled_from(["in time", "lost", "late", "nonsense"]), count=st.integers(1, 4))
    def dispatch(self, data: st.DataObject, fate: str, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(map(str, self.ranks))))
        rank = self.ranks[name]
        wanted = rank.order.coming(count)
        if fate == "lost":
            batch = rank.order.hand_on((), count)
        elif fate == "nonsense":
            batch = rank.order.hand_on(data.draw(st.lists(st.integers(-1, 12), max_size=4)), count)
        else:
            given = self.shared.ask(name, wanted)
            assert len(set(given)) == len(given) == len(wanted)
            assert rank.pending.issuperset(given)
            batch = rank.order.hand_on(given if fate == "in time" else (), count)
        self.shared.dispatched(name, batch)
        rank.handed += batch
        assert len(set(rank.handed)) == len(rank.handed)
        if rank.order.position == len(rank.order):
            assert sorted(rank.handed) == sorted(rank.planned)

    @precondition(lambda self: self.ranks)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """A rank opens its dispatched samples, and its loop takes them."""
        name = data.draw(st.sampled_from(sorted(map(str, self.ranks))))
        rank = self.ranks[name]
        for sample in rank.handed[rank.taken :]:
            members: Any = self.engine.members
            pinned = {key for key in members if self.shared.active and self.shared.reserved(key - 1)}
            changes = self.engine.opened(sample + 1, 1)
            assert not pinned & set(changes.drop)
        self.shared.taken(name, len(rank.handed) - rank.taken)
        rank.taken = len(rank.handed)

    @precondition(lambda self: self.ranks)
    @rule(data=st.data())
    def break_off(self, data: st.DataObject) -> None:
        """A rank ends, or breaks its epoch off."""
        name = data.draw(st.sampled_from(sorted(map(str, self.ranks))))
        del self.ranks[name]
        self.shared.end(name)
        self.engine.rerank()

    @rule()
    def manager_dies(self) -> None:
        self.start_manager({key: member.size for key, member in self.engine.members.items()})
        for name in self.ranks:
            self.tell_of_epoch(name)

    @rule(sample=st.integers(0, 8))
    def delete_a_file(self, sample: int) -> None:
        self.engine.forget(sample + 1)

    @rule(ready=st.integers(0, 4), arrives=st.booleans())
    def fetch_ahead(self, ready: int, arrives: bool) -> None:
        due = due_of(self.shared, ready)
        if due is None:
            return
        assert due + 1 not in self.engine.members
        self.shared.fetching(due)
        if not arrives or not self.engine.place(due + 1, 1).keep:
            self.shared.not_kept(due)

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "shared"):
            return
        # What the last manager was told: after it died, what is in hand is neither pending nor reserved.
        for sample in range(self.SAMPLES):
            exchange_pending = sum(sample in rank.pending for rank in self.ranks.values())
            offered = sum(sample in rank.offered for rank in self.shared.ranks.values())
            assert self.shared.pending_ranks(sample) == exchange_pending - offered
        for name, mine in self.shared.ranks.items():
            members: Any = self.engine.members
            here = {key - 1 for key in members}
            assert set(mine.candidates) == (here & self.ranks[name].pending) - set(mine.offered)
        ranked: list[Any] = list(self.engine._foresight.eviction_order())
        if self.shared.active:
            assert sorted(map(str, ranked)) == sorted(map(str, self.engine.members))
            keys = [self.shared.reserved(key - 1) * 100 + self.shared.pending_ranks(key - 1) for key in ranked]
            reserved = [key >= 100 for key in keys]
            assert reserved == sorted(reserved)
            assert [key for key in keys if key < 100] == sorted(key for key in keys if key < 100)


TestJobs = Jobs.TestCase
TestJobs.settings = settings(max_examples=60, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow])
