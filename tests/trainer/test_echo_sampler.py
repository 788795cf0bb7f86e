"""Echoing: a cycle draws each sample equally often and within its window; with a plan it reads few origin bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spiderfs.core.engine import Engine
from spiderfs.policies import POLICIES
from spiderfs.simulation.replay import policy_for, replay
from spiderfs.trace.format import Accesses
from trainer_hook import EchoSampler
from trainer_hook.samplers.epoch import NEAREST


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


@pytest.mark.parametrize("wrong", [{"times": 0}, {"window": 0}, {"window": 1.5}, {"samples": 0}])
def test_refuses_impossible_options(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|share"):
        EchoSampler(**{"samples": 4, **wrong})


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
