"""Samplers that draw by the seed and the number of the epoch: repeated, resumed, published early, and what echoes and
pools draw."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hook_daemon import HookDaemon, until
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import SIZE, loader

from spiderfs.core.engine import Engine
from spiderfs.policies import POLICIES
from spiderfs.simulation import policy_for, replay
from spiderfs.trace import Accesses
from trainer_hook import EchoSampler, ImpactSampler, InfoBatchSampler, PoolSampler, ShadeSampler, SpiderSampler, plan
from trainer_hook.samplers.epoch import NEAREST, through_pool

infobatch = partial(InfoBatchSampler, epochs=9)
# Without losses, an InfoBatchSampler draws as an EchoSampler does; without scores, a SpiderSampler draws all.
SAMPLERS = pytest.mark.parametrize(
    "kind",
    [EchoSampler, partial(PoolSampler, block=4), infobatch, partial(infobatch, times=2), SpiderSampler],
    ids=["echo", "pool", "infobatch", "infobatch echo", "spider"],
)


@SAMPLERS
def test_every_epoch_is_another_one_and_a_seed_repeats_them(kind: Any) -> None:
    one, again, other = (kind(50, seed=seed) for seed in (1, 1, 2))
    epochs = [list(one) for _ in range(6)]
    assert [list(again) for _ in range(6)] == epochs
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert list(other) != epochs[0]
    one.set_epoch(1)
    assert list(one) == epochs[1]
    left_early = kind(50, seed=1)
    next(iter(left_early))
    assert list(left_early) == epochs[1]


@SAMPLERS
@settings(max_examples=30)
@given(samples=st.integers(1, 60), taken=st.integers(0, 59), epochs=st.integers(0, 2))
def test_resumes_where_it_was(kind: Any, samples: int, taken: int, epochs: int) -> None:
    whole, stopped, resumed = (kind(samples, seed=3) for _ in range(3))
    for _ in range(epochs):
        assert list(whole) == list(stopped)
    expected = list(whole)
    drawing = iter(stopped)
    taken = min(taken, samples)
    begun = [next(drawing) for _ in range(taken)]
    resumed.load_state_dict(stopped.state_dict())
    if taken < samples:
        assert begun + list(resumed) == expected
    assert list(resumed) == list(whole)


@pytest.mark.parametrize(
    "kind",
    [partial(EchoSampler, window=0.5), partial(PoolSampler, block=4), partial(infobatch, times=9)],
    ids=["echo", "pool", "infobatch echo"],
)
def test_the_next_epoch_is_published_as_this_one_begins(daemon: HookDaemon, kind: Any) -> None:
    sampler, expected = (kind(SIZE, seed=5) for _ in range(2))
    data = loader(sampler=sampler, shuffle=False)
    with plan(daemon.mount, data):
        for epoch in range(3):
            assert [*data]
            # A plan that was not sent before the next epoch begins is not sent at all.
            known = {*range(epoch + 2)}
            until(lambda known=known: {each.epoch for _, each in daemon.sink.plans} == known)  # type: ignore[misc]
    published = {each.epoch: each.order.tolist() for _, each in daemon.sink.plans}
    assert [published[epoch] for epoch in range(4)] == [list(expected) for _ in range(4)]


@pytest.mark.parametrize("kind", [EchoSampler, partial(PoolSampler, block=3)], ids=["echo", "pool"])
def test_ranks_share_an_epoch(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = list(kind(11, seed=2))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    drawn = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        drawn.append(list(kind(11, seed=2)))
    assert np.stack(drawn, axis=1).ravel().tolist() == [*alone, alone[0]]


ALL = pytest.mark.parametrize("kind", [EchoSampler, PoolSampler, SpiderSampler, ImpactSampler, ShadeSampler, infobatch])


@ALL
def test_an_option_that_is_no_whole_number_is_refused_at_once(kind: Any) -> None:
    counts = {EchoSampler: "times", PoolSampler: "block", ImpactSampler: "warm_up", infobatch: "times"}
    for name in ("seed", counts.get(kind, "draws")):
        for wrong in (2.5, "2", -1):
            with pytest.raises(ValueError, match=f"^{name}={wrong}: give a whole number of at least [01]$"):
                kind(10, **{name: wrong})
    with pytest.raises(ValueError, match=r"^samples=2.5: give a whole number of at least 1$"):
        kind(2.5)


WRONG: dict[Any, list[dict[str, Any]]] = {
    SpiderSampler: [{"samples": 0}, {"draws": 0}, {"coverage": 1.5}],
    ShadeSampler: [{"repeats": 0.5}],
    ImpactSampler: [{"sharpness": 0}, {"warm_up": -1}],
    EchoSampler: [{"samples": 0}, {"times": 0}, {"window": 0}, {"window": 1.5}],
    PoolSampler: [{"samples": 0}, {"block": 0}, {"pool": 0}, {"pool": 1.5}],
    infobatch: [{"epochs": 0}, {"times": 0}, {"prune": 1}, {"prune": -0.1}, {"anneal": 2}],
}


@pytest.mark.parametrize(("kind", "wrong"), [(kind, wrong) for kind in WRONG for wrong in WRONG[kind]])
def test_an_option_that_cannot_be_is_refused(kind: Any, wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"^{name}={value}: give "):
        kind(**{"samples": 4, **wrong})


@ALL
def test_what_is_no_state_is_refused(kind: Any) -> None:
    sampler = kind(10)
    state = sampler.state_dict()
    for name in state.keys() - {"samples"}:
        lacking = {key: value for key, value in state.items() if key != name}
        for wrong in (lacking, {**lacking, name: object()}):
            with pytest.raises(ValueError, match=r"^the state is not one that state_dict\(\) returned$"):
                sampler.load_state_dict(wrong)
    with pytest.raises(ValueError, match=r"^the state is not one that state_dict\(\) returned$"):
        sampler.load_state_dict({**state, "epoch": "a"})
    sampler.load_state_dict(state)


def cycle_of(sampler: EchoSampler, times: int) -> list[int]:
    return [index for _ in range(times) for index in sampler]


@given(st.integers(1, 200), st.integers(1, 5), st.floats(0.01, 1), st.integers(0, 9))
def test_a_cycle_draws_each_sample_equally_often(samples: int, times: int, window: float, seed: int) -> None:
    sampler = EchoSampler(samples, times=times, window=window, seed=seed)
    for _ in range(2):
        drawn = cycle_of(sampler, times)
        assert np.bincount(drawn, minlength=samples).tolist() == [times] * samples
    assert sampler.weights([0]).tolist() == [1]


@given(st.integers(100, 2_000), st.integers(2, 4), st.floats(0.05, 0.5))
def test_all_draws_of_a_sample_lie_within_the_window(samples: int, times: int, window: float) -> None:
    drawn = np.array(cycle_of(EchoSampler(samples, times=times, window=window), times))
    first_use = np.zeros(len(drawn), bool)
    first_use[np.unique(drawn, return_index=True)[1]] = True
    begun = np.cumsum(first_use)
    order = np.argsort(drawn, kind="stable").reshape(samples, times)
    # In samples begun meanwhile; towards the end of the cycle no more are.
    ways = np.diff(begun[order], axis=1)
    longest = window * samples / (times - 1)
    assert ways.max() <= longest + 1
    early = begun[order[:, -1]] < samples
    assert (ways[early] >= NEAREST * longest - 1).all()


@pytest.mark.parametrize("times", [2, 3, 4])
def test_with_a_plan_the_source_is_read_once_in_a_cycle(times: int) -> None:
    samples, cached = 2_000, 0.2
    sampler = EchoSampler(samples, times=times, window=cached)
    drawn = [index for _ in range(3) for index in cycle_of(sampler, times)]
    accesses = Accesses.of(drawn, [1] * len(drawn))
    result = replay(Engine(policy_for(POLICIES["belady"], accesses), int(cached * samples)), accesses, samples * times)
    assert (result.origin_bytes[1:] <= samples).all()
    lru = replay(Engine(POLICIES["lru"](), int(cached * samples)), accesses, samples * times)
    assert lru.origin_bytes[1:].sum() > 1.2 * result.origin_bytes[1:].sum()


def apart(order: list[int]) -> float:
    """How far two neighbours of the list are drawn from each other on average, as a share of the epoch."""
    return float(np.abs(np.diff(np.argsort(order))).mean()) / len(order)


@given(st.integers(1, 300), st.integers(1, 40), st.floats(0.001, 1), st.integers(0, 9))
def test_an_epoch_of_a_pool_is_a_permutation(samples: int, block: int, pool: float, seed: int) -> None:
    sampler = PoolSampler(samples, block=block, pool=pool, seed=seed)
    for _ in range(2):
        assert sorted(sampler) == [*range(samples)]
    assert len(sampler) == samples
    assert sampler.weights([0]).tolist() == [1]


@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 200), st.integers(0, 9))
def test_a_block_enters_only_when_the_pool_has_room_for_it(count: int, size: int, more: int, seed: int) -> None:
    blocks = np.arange(count * size, dtype=np.uint32).reshape(count, size)
    room = size + more
    order = through_pool(blocks, room, np.random.default_rng(seed))
    entered = (order // size + 1) * size
    assert (np.arange(len(order)) >= entered.astype(np.int64) - room).all()


def test_neighbours_come_sooner_after_each_other_than_in_a_shuffle() -> None:
    distance = [apart(list(PoolSampler(10_000, block=16, pool=pool))) for pool in (0.05, 0.2, 1.0)]
    assert distance[0] < 0.07
    assert 0.15 < distance[1] < 0.2
    assert 0.32 < distance[2] < 0.35
    assert 0.32 < apart(list(PoolSampler(10_000, block=1, pool=0.2))) < 0.35, "blocks of one sample are a shuffle"


def test_its_samples_are_not_exchanged(daemon: HookDaemon) -> None:
    with pytest.raises(ValueError, match="share=True: PoolSampler draws neighbours near each other"):
        plan(daemon.mount, loader(sampler=PoolSampler(SIZE), shuffle=False), share=True)
