"""A program looks at batches of the loader that its training reads: the state, and the plan, are the training's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from choices import all_or_covering
from hook_daemon import HookDaemon, until
from tiny_training import SIZE, WORKERS, Indexed
from torch import nn
from torch.utils.data import DataLoader

import trainer_hook
from trainer_hook import EchoSampler, ImpactSampler, InfoBatchSampler, PoolSampler, ShadeSampler, SpiderSampler

SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"shuffle": True},
    "generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "workers": lambda: {"shuffle": True, **WORKERS},
    "spider": lambda: {"sampler": SpiderSampler(SIZE)},
    "pool in workers": lambda: {"sampler": PoolSampler(SIZE), **WORKERS},
    "echo": lambda: {"sampler": EchoSampler(SIZE)},
    "infobatch": lambda: {"sampler": InfoBatchSampler(SIZE, epochs=9, times=2)},
    "shade": lambda: {"sampler": ShadeSampler(SIZE)},
    "impact": lambda: {"sampler": ImpactSampler(SIZE)},
}
kept: list[Any] = []
LOOKS: dict[str, Callable[[Any], object]] = {
    "one batch": lambda batches: next(iter(batches)),
    "a whole pass": list,
    "two whole passes": lambda batches: [*batches, *batches],
    "an iterator that is kept": lambda batches: next(kept.append(iter(batches)) or kept[-1]),  # type: ignore[func-returns-value]
    # With loader workers it draws at once.
    "made": lambda batches: kept.append(iter(batches)),  # type: ignore[func-returns-value]
}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[HookDaemon]:
    with HookDaemon(tmp_path) as daemon:
        yield daemon
    kept.clear()


def loader(kind: str, prepared: bool = False) -> Any:
    made = DataLoader(Indexed(), 8, **SAMPLERS[kind]())
    return Accelerator(cpu=True).prepare(made) if prepared else made


def epoch(batches: Any, look: Callable[[Any], object], look_at: int, end_at: int) -> list[int]:
    taken: list[int] = []
    for number, batch in enumerate(batches):
        taken += batch.tolist()
        if number == look_at:
            look(batches)
        if number == end_at:
            break
    return taken


# Each way to look with one that draws in the loader, in workers and by a sampler of ours, and each sampler once.
@pytest.mark.parametrize(
    ("kind", "look", "end_at"),
    [
        *all_or_covering(("shuffle", "workers", "spider"), LOOKS, (1, 3), together=2),
        *((kind, "one batch", 3) for kind in SAMPLERS if kind not in ("shuffle", "workers", "spider")),
    ],
)
def test_the_state_is_the_trainings(daemon: HookDaemon, kind: str, look: str, end_at: int) -> None:
    """A state directly after the look, and one of two batches later."""
    if look == "two whole passes" and end_at == 1:
        # Such a state cannot be told from one after an iterator that was left for good.
        end_at = 2
    batches, again = loader(kind), loader(kind)
    with trainer_hook.plan(daemon.mount, batches) as planning:
        taken = epoch(batches, LOOKS[look], 1, end_at)
        state = planning.state_dict()
    with trainer_hook.plan(daemon.mount, again) as planning:
        planning.load_state_dict(state)
        rest = [index for batch in again for index in batch.tolist()]
    assert sorted(taken + rest) == sorted(torch.as_tensor(state["order"]).tolist())
    assert state["consumed"] == len(taken)


@pytest.mark.parametrize(
    ("kind", "look"), [("shuffle", "one batch"), ("workers", "a whole pass"), ("spider", "one batch")]
)
def test_the_state_of_a_hook_and_of_a_prepared_loader(daemon: HookDaemon, kind: str, look: str) -> None:
    batches, again = loader(kind, prepared=True), loader(kind, prepared=True)
    model = nn.Linear(1, 2)
    hook = trainer_hook.attach(daemon.mount, model, batches)
    taken = epoch(batches, LOOKS[look], 1, 3)
    state = hook.state_dict()
    hook.close()
    hook = trainer_hook.attach(daemon.mount, model, again)
    hook.load_state_dict(state)
    rest = [index for batch in again for index in batch.tolist()]
    hook.close()
    assert sorted(taken + rest) == [*range(SIZE)]
    assert state["consumed"] == len(taken) == 32


@pytest.mark.parametrize(
    ("kind", "look"),
    [*(("spider", look) for look in LOOKS), ("echo", "one batch"), ("pool in workers", "a whole pass")],
)
def test_a_sampler_without_a_plan_has_the_state_of_the_training(kind: str, look: str) -> None:
    sampler, again = SAMPLERS[kind]()["sampler"], SAMPLERS[kind]()["sampler"]
    batches = DataLoader(Indexed(), 8, sampler=sampler)
    whole, after = (list(itertools.chain(*([*DataLoader(Indexed(), 8, sampler=again)]))) for _ in range(2))
    taken = epoch(batches, LOOKS[look], 1, 3)
    state = sampler.state_dict()
    assert (taken, state["consumed"], state["epoch"]) == ([int(one) for one in whole[:32]], 32, 0)
    # The look was no epoch.
    assert [index for batch in batches for index in batch.tolist()] == [int(one) for one in after]
    kept.clear()


@pytest.mark.parametrize(
    ("kind", "look"),
    [
        *itertools.product(("shuffle", "pool in workers"), ("one batch", "an iterator that is kept", "made")),
        *((kind, "one batch") for kind in ("generator", "workers", "spider", "echo")),
    ],
)
def test_a_look_before_a_training_goes_on_takes_nothing_of_its_epoch(daemon: HookDaemon, kind: str, look: str) -> None:
    """As for a graph of the model, or to make its lazy parameters."""
    batches, again = loader(kind), loader(kind)
    with trainer_hook.plan(daemon.mount, batches) as planning:
        taken = epoch(batches, lambda batches: None, 0, 3)
        state = planning.state_dict()
    with trainer_hook.plan(daemon.mount, again) as planning:
        planning.load_state_dict(state)
        LOOKS[look](again)
        rest = [index for batch in again for index in batch.tolist()]
        assert sorted(taken + rest) == sorted(torch.as_tensor(state["order"]).tolist())
        # The epoch after it is whole.
        assert len([index for batch in again for index in batch.tolist()]) == SIZE


@pytest.mark.parametrize("kind", ["shuffle", "workers", "spider", "pool in workers", "echo"])
def test_a_rest_of_one_batch_is_no_look(daemon: HookDaemon, kind: str) -> None:
    batches, again = loader(kind), loader(kind)
    with trainer_hook.plan(daemon.mount, batches) as planning:
        epoch(batches, lambda batches: None, 0, len(batches) - 2)
        state = planning.state_dict()
    with trainer_hook.plan(daemon.mount, again) as planning:
        planning.load_state_dict(state)
        assert [sum(len(batch) for batch in again) for _ in range(2)] == [SIZE - state["consumed"], SIZE]


def test_a_loop_of_one_batch_a_pass_goes_on(daemon: HookDaemon) -> None:
    """Only one look is expected: `next(iter(loader))` may be how the training reads."""
    with trainer_hook.plan(daemon.mount, batches := loader("shuffle")) as planning:
        next(iter(batches))
        planning.load_state_dict(planning.state_dict())
        firsts = {tuple(next(iter(batches)).tolist()) for _ in range(5)}
        assert len(firsts) == 4


def test_an_iterator_that_was_left_before_the_training_is_not_the_trainings(daemon: HookDaemon) -> None:
    """As in notebooks: `images = next(dataiter)` shows some images, and `dataiter` lives on."""
    for first in (1, 4):
        with trainer_hook.plan(daemon.mount, batches := loader("shuffle")) as planning:
            dataiter = iter(batches)
            for _ in range(first):
                next(dataiter)
            for number in range(3):
                for end in (5, None):
                    taken = sum(len(batch) for batch in itertools.islice(batches, end))
                    if number or first == 1:
                        assert planning.state_dict().get("consumed", SIZE) == taken
            del dataiter


def test_the_mount_follows_the_plan_of_the_training_again(daemon: HookDaemon) -> None:
    with trainer_hook.plan(daemon.mount, batches := loader("shuffle")):
        reading = iter(batches)
        taken = [index for _ in range(2) for index in next(reading).tolist()]
        assert len([*batches]) == 7
        rest = [index for batch in reading for index in batch.tolist()]
        until(lambda: any(one.begun and one.order.tolist() == taken + rest for _, one in daemon.sink.plans))
        # Messages that another one has replaced are not sent, so all of it may have come at once.
        until(lambda: any(told.taken == SIZE for _, told in daemon.sink.progress))
    last = [one for _, one in daemon.sink.plans if one.begun and len(one.order)][-1]
    assert last.order.tolist() == taken + rest
    assert last.position <= SIZE


@pytest.mark.parametrize("loading", [{}, WORKERS])
def test_a_share_goes_on_after_a_look(daemon: HookDaemon, loading: dict[str, Any]) -> None:
    batches = DataLoader(Indexed(), 8, shuffle=True, **loading)
    with trainer_hook.plan(daemon.mount, batches, share=True) as planning:
        reading = iter(batches)
        taken = next(reading).tolist() + next(reading).tolist()
        assert sorted(index for batch in batches for index in batch.tolist()) == [*range(SIZE)]
        assert planning.state_dict()["consumed"] == 16
        assert sorted(taken + [index for batch in reading for index in batch.tolist()]) == [*range(SIZE)]
        assert planning.state_dict() == {}


@pytest.mark.parametrize("sampled", [False, True])
def test_with_workers_that_stay_the_training_goes_on_in_the_pass_of_the_look(daemon: HookDaemon, sampled: bool) -> None:
    """torch has one iterator for both, so what the loop takes after the look is of the later pass."""

    def made() -> DataLoader[int]:
        drawn = {"sampler": PoolSampler(SIZE)} if sampled else {"generator": torch.Generator().manual_seed(3)}
        return DataLoader(Indexed(), 8, shuffle=None if sampled else True, persistent_workers=True, **drawn, **WORKERS)  # type: ignore[arg-type]

    plain = epoch(made(), LOOKS["one batch"], 1, 99)
    batches, again = made(), made()
    with trainer_hook.plan(daemon.mount, batches) as planning:
        taken = epoch(batches, LOOKS["one batch"], 1, 3)
        state = planning.state_dict()
    assert taken == plain[:32]
    with trainer_hook.plan(daemon.mount, again) as planning:
        planning.load_state_dict(state)
        rest = [index for batch in again for index in batch.tolist()]
    assert state["consumed"] == 24
    assert len(taken) + len(rest) == len(plain)
    assert sorted(rest) == sorted({*range(SIZE)} - {*torch.as_tensor(state["order"]).tolist()[:24]})
    assert taken[16:] == torch.as_tensor(state["order"]).tolist()[8:24]
