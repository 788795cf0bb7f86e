"""torchdata's StatefulDataLoader with a plan or a hook: its own states are what they are without one."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from choices import all_or_covering
from hook_daemon import HookDaemon, until
from tiny_training import SIZE, WORKERS, Numbered, samples_of
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from trainer_hook import SpiderSampler, plan

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it

TAKEN = 3
"""After so many batches, of eight samples, the state is saved."""


class Counting(Sampler[list[int]]):
    """Batches of a sampler that has a state of its own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[list[int]]:
        begun, self.at = self.at, 0
        for first in range(begun, SIZE, 8):
            self.at = first + 8
            yield [(7 * number) % SIZE for number in range(first, min(first + 8, SIZE))]
        self.at = 0

    def __len__(self) -> int:
        return -(-SIZE // 8)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def shuffled() -> RandomSampler:
    return RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(6))


KINDS: dict[str, Any] = {
    "shuffle": lambda: {"batch_size": 8, "shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "in order": lambda: {"batch_size": 8},
    "torch's sampler": lambda: {"batch_size": 8, "sampler": shuffled()},
    "torch's batches": lambda: {"batch_sampler": BatchSampler(shuffled(), 8, drop_last=False)},
    "own batches": lambda: {"batch_sampler": Counting()},
    "ranks": lambda: {"batch_size": 8, "sampler": StatefulDistributedSampler(Numbered(), 1, 0, seed=4)},
    "torch's ranks": lambda: {"batch_size": 8, "sampler": DistributedSampler(Numbered(), 1, 0, seed=4)},
}
LOADING: dict[str, dict[str, Any]] = {
    "here": {},
    "in workers": WORKERS,
    "in workers that stay": {"persistent_workers": True, **WORKERS},
    "with few snapshots": {"snapshot_every_n_steps": 2, **WORKERS},
}


def loader(kind: str, loading: str) -> StatefulDataLoader[Any]:
    torch.manual_seed(5)  # from which the seeds of workers are drawn
    return StatefulDataLoader(Numbered(), **KINDS[kind](), **LOADING[loading])


def which(batch: Any) -> list[int]:
    return samples_of(batch[0])


def unfollowed(kind: str, loading: str) -> tuple[list[list[int]], list[list[int]], list[list[int]], dict[str, Any]]:
    """What a training reads without us: before its state is saved, in the rest of its epoch, and in the next one."""
    again, batches = loader(kind, loading), loader(kind, loading)
    before = [which(batch) for batch in itertools.islice(iter(batches), TAKEN)]
    state = copy.deepcopy(batches.state_dict())
    again.load_state_dict(copy.deepcopy(state))
    return before, [which(batch) for batch in again], [which(batch) for batch in again], state


def begun(daemon: HookDaemon) -> int:
    """How many plans of epochs that have begun the daemon has heard of."""
    return sum(one.begun and len(one.order) > 0 for _, one in daemon.sink.plans)


@pytest.mark.parametrize(("kind", "loading"), all_or_covering(KINDS, LOADING))
def test_a_plan_changes_neither_what_is_read_nor_the_state(daemon: HookDaemon, kind: str, loading: str) -> None:
    before, rest, following, state = unfollowed(kind, loading)
    again, batches = loader(kind, loading), loader(kind, loading)
    with plan(daemon.mount, batches):
        iterator = iter(batches)
        assert [which(batch) for batch in itertools.islice(iterator, TAKEN)] == before
        saved = copy.deepcopy(batches.state_dict())
        del iterator
    assert str(saved) == str(state)
    daemon.sink.plans.clear()
    with plan(daemon.mount, again) as planning:
        again.load_state_dict(saved)
        assert [which(batch) for batch in again] == rest
        # The plan of an epoch that is over is not sent once another has begun.
        until(lambda: begun(daemon) == 1)
        assert planning.state_dict() == {}
        assert [which(batch) for batch in again] == following
    until(lambda: begun(daemon) == 2)
    plans = [one.order.tolist() for _, one in daemon.sink.plans if one.begun and len(one.order)]
    assert plans[0][-sum(map(len, rest)) :] == list(itertools.chain(*rest))
    assert plans[1] == list(itertools.chain(*following))


@pytest.mark.parametrize("loading", LOADING)
def test_a_sampler_by_score_goes_on_by_the_loaders_state(daemon: HookDaemon, loading: str) -> None:
    def made() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(Numbered(), batch_size=8, sampler=SpiderSampler(SIZE, seed=2), **LOADING[loading])

    batches, again = made(), made()
    with plan(daemon.mount, batches):
        iterator = iter(batches)
        before = [which(batch) for batch in itertools.islice(iterator, TAKEN)]
        state = copy.deepcopy(batches.state_dict())
        whole = [*itertools.chain(*before), *itertools.chain(*map(which, iterator))]
    with plan(daemon.mount, again):
        again.load_state_dict(state)
        rest = [which(batch) for batch in again]
        assert list(itertools.chain(*before, *rest)) == whole
        assert sum(len(which(batch)) for batch in again) == SIZE


def test_a_state_before_the_first_batch_is_of_the_epoch_that_begins(daemon: HookDaemon) -> None:
    batches, again = loader("shuffle", "here"), loader("shuffle", "here")
    expected = [which(batch) for batch in loader("shuffle", "here")]
    with plan(daemon.mount, batches) as planning:
        state = copy.deepcopy(batches.state_dict())
        assert [which(batch) for batch in itertools.islice(batches, TAKEN)] == expected[:TAKEN]
        assert planning.state_dict()["consumed"] == 8 * TAKEN
    with plan(daemon.mount, again):
        again.load_state_dict(state)
        assert [which(batch) for batch in again] == expected
    until(
        lambda: any(one.begun and one.order.tolist() == [*itertools.chain(*expected)] for _, one in daemon.sink.plans)
    )
