"""What a home knows of readers on other nodes, against a model that asks each of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from spiderfs.core.engine import Engine
from spiderfs.core.homes import Homes
from spiderfs.core.plans import remote
from spiderfs.core.plans.remote import HomeSamples, PlanPart, RemoteReaders
from spiderfs.policies.spider import Spider

SAMPLES = 40


def all_of(keys: Sequence[int]) -> HomeSamples:
    return HomeSamples(keys, {key: index for index, key in enumerate(keys)}, np.ones(len(keys), np.bool_))


def noted(readers: RemoteReaders, reader: object, part: PlanPart, now_s: float = 0.0) -> None:
    for _ in readers.plan(reader, part, now_s):
        pass


def order_of(*samples: int) -> npt.NDArray[np.uint32]:
    return np.array(samples, np.uint32)


@pytest.mark.parametrize("seed", range(20))
def test_next_uses_are_those_of_all_readers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_AT_A_TIME", 7)
    rng, readers, samples = random.Random(seed), RemoteReaders(), all_of(range(100, 100 + SAMPLES))
    plans: dict[int, tuple[int, list[int], int]] = {}
    known: dict[int, float | None] = {}
    for step in range(200):
        reader = rng.randrange(6)
        if reader not in plans or rng.random() < 0.1:
            some = rng.choices(range(SAMPLES), k=30) if rng.random() < 0.5 else rng.sample(range(SAMPLES), 30)
            start = rng.choice((0, 0, 5))
            plans[reader] = (step, some, start)
            noted(readers, reader, PlanPart(samples, step, order_of(*some), start))
        elif rng.random() < 0.1:
            del plans[reader]
            readers.drop(reader)
        else:
            epoch, some, come = plans[reader]
            come = min(len(some), come + rng.randrange(8))
            plans[reader] = (epoch, some, come)
            assert readers.progressed(reader, epoch, come, 0.0)
            assert not readers.progressed(reader, epoch + 1, 30, 0.0)
        uses: dict[int, float | None] = dict.fromkeys(range(SAMPLES))
        for one, (_, some, come) in plans.items():
            for position in range(len(some) - 1, come - 1, -1):
                use_s, before = readers._readers[one].time_of(position), uses[some[position]]
                uses[some[position]] = use_s if before is None else min(before, use_s)
        # What plans of the same reader had before is forgotten.
        for sample, next_s in uses.items():
            if next_s is not None or not any(sample in some[:come] for _, some, come in plans.values()):
                assert readers.next_use_s(100 + sample) == next_s
        changed = {key for _ in range(99) for key in readers.taken_changes(3)}
        assert {
            key for key in known.keys() | {100 + sample for sample in uses} if known.get(key) != uses[key - 100]
        } <= (changed)
        known = {100 + sample: use_s for sample, use_s in uses.items()}
    for reader in list(plans):
        readers.drop(reader)
    while readers.taken_changes(9):
        pass
    assert not readers._uses, "nothing is kept of a list that no one reads"


def test_readers_that_share_out_the_samples_take_one_layer_and_jobs_one_each() -> None:
    samples, readers = all_of(range(SAMPLES)), RemoteReaders()
    for rank in range(8):
        noted(readers, rank, PlanPart(samples, 0, order_of(*range(rank, SAMPLES, 8))))
    (uses,) = readers._uses.values()
    assert len(uses.layers) == 1
    for job in range(3):
        noted(readers, f"job {job}", PlanPart(samples, 0, order_of(*range(SAMPLES))))
    assert len(uses.layers) == 4
    for job in range(3):
        readers.drop(f"job {job}")
    assert len(uses.layers) == 1


def test_of_a_plan_that_is_noted_4_bytes_a_draw_stay() -> None:
    samples, readers = all_of(range(SAMPLES)), RemoteReaders()
    part = PlanPart(samples, 0, order_of(*range(SAMPLES)))
    noted(readers, "reader", part)
    assert part.following is None
    assert sum(array.nbytes for array in vars(part).values() if isinstance(array, np.ndarray)) == 4 * SAMPLES


def test_a_plan_that_is_dropped_while_it_is_noted_is_noted_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_AT_A_TIME", 10)
    samples, readers = all_of(range(SAMPLES)), RemoteReaders()
    noting = readers.plan("reader", PlanPart(samples, 0, order_of(*range(SAMPLES))), 0.0)
    next(noting)
    assert [readers.next_use_s(key) is not None for key in (9, 10)] == [True, False]
    readers.drop("reader")
    assert list(noting) == []
    assert all(readers.next_use_s(key) is None for key in range(SAMPLES))


def test_members_are_ranked_by_it_some_at_a_time() -> None:
    keys = [number << 16 for number in range(1, SAMPLES + 1)]
    engine = Engine(Spider(), SAMPLES, homes=Homes({"here": 1.0}, "here"))
    engine.restore([(key, 1, engine.policy.foreseen) for key in keys], {})
    order = random.Random(1).sample(range(SAMPLES), SAMPLES)
    for _ in engine.schedule.remote.plan("reader", PlanPart(all_of(keys), 0, order_of(*order)), 0.0):
        pass
    ranked = 0
    while engine.rank_some(16):
        ranked += 1
    assert ranked == 3
    assert list(engine._foresight.eviction_order()) == [keys[sample] for sample in reversed(order)]
