"""A pool that blocks of neighbours fill: each sample comes once, neighbours near each other, and a state resumes."""

from __future__ import annotations

import numpy as np
import pytest
from hook_daemon import HookDaemon
from hypothesis import given
from hypothesis import strategies as st
from tiny_training import SIZE, loader

from trainer_hook import PoolSampler, plan
from trainer_hook.samplers.epoch import through_pool


def apart(order: list[int]) -> float:
    """How far two neighbours of the list are drawn from each other on average, as a share of the epoch."""
    return float(np.abs(np.diff(np.argsort(order))).mean()) / len(order)


@given(st.integers(1, 300), st.integers(1, 40), st.floats(0.001, 1), st.integers(0, 9))
def test_an_epoch_is_a_permutation(samples: int, block: int, pool: float, seed: int) -> None:
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


@pytest.mark.parametrize("wrong", [{"block": 0}, {"pool": 0}, {"pool": 1.5}, {"samples": 0}])
def test_refuses_impossible_options(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|share"):
        PoolSampler(**{"samples": 4, **wrong})


def test_its_samples_are_not_exchanged(daemon: HookDaemon) -> None:
    with pytest.raises(ValueError, match="share=True: PoolSampler draws neighbours near each other"):
        plan(daemon.mount, loader(sampler=PoolSampler(SIZE), shuffle=False), share=True)
