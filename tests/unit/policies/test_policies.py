"""The contract that every policy in the table keeps, and the rules of each policy."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator

import msgpack  # type: ignore[import-untyped]
import pytest

from spiderfs.core.engine import Engine
from spiderfs.core.heap import Heap
from spiderfs.core.policy import Policy, in_saved_order
from spiderfs.policies import POLICIES, mountable_policies
from spiderfs.policies.baselines import LFU, LRU, Belady, MinIO

OPENS = random.Random(0).choices(range(60), k=1500)


@pytest.fixture(params=POLICIES)
def kind(request: pytest.FixtureRequest) -> type[Policy]:
    return POLICIES[request.param]


@pytest.fixture
def engine(kind: type[Policy]) -> Engine:
    """Half-way through the opens, with twenty of sixty samples cached."""
    engine = Engine(kind.foreseeing(OPENS), 20)
    for key in OPENS[:750]:
        engine.opened(key, 1)
    assert engine.used_bytes == 20
    return engine


class TestContract:
    def test_is_listed_under_its_name(self, kind: type[Policy]) -> None:
        assert POLICIES[kind.name] is kind

    def test_eviction_order_names_every_member_once(self, engine: Engine) -> None:
        order = list(engine.policy.eviction_order())
        assert sorted(order, key=repr) == sorted(engine.members, key=repr)
        by_section = [key for section in engine.policy.sections for key in engine.policy.eviction_order(section)]
        assert sorted(by_section, key=repr) == sorted(order, key=repr)

    def test_orders_change_nothing_even_when_left_half_read(self, engine: Engine) -> None:
        before = list(engine.policy.eviction_order())
        next(engine.policy.eviction_order())
        outsider = next(key for key in range(60) if key not in engine.members)
        next(engine.policy.victims_for(outsider, 1, None), None)
        assert list(engine.policy.eviction_order()) == before

    def test_victims_are_members_in_order_of_value(self, engine: Engine) -> None:
        order = list(engine.policy.eviction_order())
        outsider = next(key for key in range(60) if key not in engine.members)
        victims = list(engine.policy.victims_for(outsider, 1, None))
        assert victims == order[: len(victims)]

    def test_shrinking_keeps_the_most_valuable(self, engine: Engine) -> None:
        order = list(engine.policy.eviction_order())
        assert list(engine.resize(8, 0).drop) == order[:12]
        assert list(engine.policy.eviction_order()) == order[12:]

    def test_sections_belong_to_the_policy(self, engine: Engine) -> None:
        assert {engine.policy.section_for(key) for key in range(60)} <= set(engine.policy.sections)

    def test_state_survives_a_remount(self, kind: type[Policy], engine: Engine) -> None:
        state = msgpack.unpackb(msgpack.packb(engine.state()))
        # After a remount a policy has what `state` returned and the store's own order; a policy may need less.
        stored = [(key, 1, section) for key, (_, section) in engine.members.items()]
        again = Engine(kind.foreseeing(OPENS[750:]), 20)
        again.restore(stored, state)
        for key in OPENS[750:]:
            assert again.opened(key, 1) == engine.opened(key, 1)

    def test_restores_without_state(self, kind: type[Policy], engine: Engine) -> None:
        again = Engine(kind.foreseeing(OPENS), 20)
        again.restore([(key, 1, section) for key, (_, section) in engine.members.items()], {})
        assert again.members == engine.members
        for key in OPENS:
            again.opened(key, 1)
            assert again.used_bytes <= 20

    def test_takes_over_from_every_other(self, kind: type[Policy], engine: Engine) -> None:
        for other in POLICIES.values():
            engine.change_policy(other.foreseeing(OPENS))
            engine.change_policy(kind.foreseeing(OPENS))
            assert len(list(engine.policy.eviction_order())) == 20

    def test_scores_are_numbers_for_members_and_others(self, engine: Engine) -> None:
        assert all(isinstance(engine.score(key), float) for key in range(-1, 60))


def test_only_belady_cannot_be_mounted() -> None:
    assert POLICIES.keys() - mountable_policies().keys() == {"belady"}


def test_minio_never_evicts() -> None:
    engine = Engine(MinIO(), 3)
    drops = [engine.opened(key, 1).drop for key in OPENS]
    assert not any(drops)
    assert list(engine.members) == list(dict.fromkeys(OPENS))[:3]


def test_lru_is_the_textbook_one() -> None:
    engine, model = Engine(LRU(), 10), OrderedDict[int, None]()
    for key in OPENS:
        engine.opened(key, 1)
        model[key] = None
        model.move_to_end(key)
        if len(model) > 10:
            model.popitem(last=False)
        assert list(engine.policy.eviction_order()) == list(model)
    assert engine.score(OPENS[-1]) == len(OPENS)


def test_lfu_evicts_the_least_often_opened_and_ages() -> None:
    engine = Engine(LFU(), 2)
    for key in (1, 1, 1, 2):
        engine.opened(key, 1)
    assert engine.score(1) == 3
    assert engine.opened(3, 1).drop == (2,)
    # Each victim raises the age, so that a member that was once opened often does not stay for good.
    drops = [engine.opened(key, 1).drop for key in (4, 5)]
    assert drops == [(3,), (1,)]


def test_lfu_does_not_age_when_the_user_evicts() -> None:
    engine = Engine(LFU(), 3)
    for key in (1, 1, 1, 1, 2, 2, 3):
        engine.opened(key, 1)
    engine.evict([1])
    engine.opened(4, 1)
    assert engine.score(4) == 1


def test_belady_bypasses_what_is_needed_later_than_all_members() -> None:
    engine = Engine(Belady([1, 2, 3, 2, 1, 3]), 2)
    changes = [engine.opened(key, 1) for key in (1, 2, 3)]
    assert changes[2].keep == changes[2].drop == ()
    assert [key in engine.members for key in (2, 1, 3)] == [True, True, False]


def optimal_hits(opens: tuple[int, ...], room: int) -> int:
    """The most hits any policy can reach, by trying every set of members after every open."""
    reached = {frozenset[int](): 0}
    for key in opens:
        following: dict[frozenset[int], int] = {}
        for cached, hits in reached.items():
            after = hits + (key in cached)
            choices = {cached}
            if key not in cached:
                choices |= {cached | {key}} if len(cached) < room else {cached - {old} | {key} for old in cached}
            for choice in choices:
                following[choice] = max(following.get(choice, 0), after)
        reached = following
    return max(reached.values())


@pytest.mark.parametrize("seed", range(6))
def test_belady_is_optimal_for_equal_sizes(seed: int) -> None:
    opens = tuple(random.Random(seed).choices(range(6), k=24))
    engine = Engine(Belady(opens), 3)
    hits = 0
    for key in opens:
        hits += key in engine.members
        engine.opened(key, 1)
    assert hits == optimal_hits(opens, 3)


def test_heap_against_a_sorted_list() -> None:
    rng = random.Random(1)
    heap, model, clock = Heap[int](), dict[int, tuple[float, int]](), 0
    for _ in range(3000):
        key = rng.randrange(40)
        if rng.random() < 0.7:
            clock += 1
            priority = float(rng.randrange(10))
            heap.set(key, priority)
            model[key] = (priority, clock)
        else:
            heap.discard(key)
            model.pop(key, None)
        assert list(heap.ascending()) == sorted(model, key=model.__getitem__)
        assert len(heap) == len(model)


def test_saved_order_copes_with_lost_and_new_members_and_msgpacks_lists() -> None:
    def members() -> Iterator[object]:
        yield from (1, 2, (9, 0), 4)

    assert in_saved_order(members(), [[9, 0], 77, 2]) == [(9, 0), 2, 1, 4]
