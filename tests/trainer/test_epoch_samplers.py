"""What all samplers that draw by the seed and the number of the epoch promise: repeated, resumed, published early."""

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

from trainer_hook import EchoSampler, ImpactSampler, InfoBatchSampler, PoolSampler, ShadeSampler, SpiderSampler, plan

infobatch = partial(InfoBatchSampler, epochs=9)
# Without losses, an InfoBatchSampler draws as an EchoSampler does.
SAMPLERS = pytest.mark.parametrize(
    "kind",
    [EchoSampler, partial(PoolSampler, block=4), infobatch, partial(infobatch, times=2)],
    ids=["echo", "pool", "infobatch", "infobatch echo"],
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
