"""Loaders that keep one iterator for all epochs, as those of Ultralytics and timm: what is learned and planned."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from choices import all_or_covering
from hook_daemon import HookDaemon, until
from loops import InfiniteDataLoader, LateInfiniteDataLoader, LateMultiEpochsDataLoader, MultiEpochsDataLoader
from tiny_training import SIZE, Network, Numbered, recorded, train
from torch.utils.data import DataLoader

from trainer_hook import attach, plan

SIZE_OF_BATCH = 4
BATCHES = 13  # of 50 samples in fours
AHEAD = 4  # two for each of two loader workers

LATE = [LateInfiniteDataLoader, LateMultiEpochsDataLoader]
KINDS = [InfiniteDataLoader, MultiEpochsDataLoader, *LATE]


class WithIndex(Numbered):
    """Its samples say their indices."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], index


def make(kind: type[DataLoader[Any]], workers: int, dataset: Any = None, **options: Any) -> Any:
    if workers:
        options["multiprocessing_context"] = "fork"
    options = {"shuffle": True, "generator": torch.Generator().manual_seed(5)} | options
    return kind(dataset or Numbered(), batch_size=SIZE_OF_BATCH, num_workers=workers, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_all_is_learned_but_what_was_drawn_before(
    daemon: HookDaemon, kind: type[DataLoader[Any]], workers: int
) -> None:
    model, batches = Network(), make(kind, workers)
    hook = attach(daemon.mount, model, batches)
    for epoch in range(3):
        for step in train(model, batches):
            if epoch == 1 and step == 2:
                break
        hook.epoch_end()
    hook.close()
    recorded(daemon, 2 * BATCHES + 3 - (AHEAD if workers and kind not in LATE else 0))


@pytest.mark.parametrize(("kind", "workers", "seeded"), all_or_covering(KINDS, (0, 2), (True, False), together=2))
def test_each_epoch_is_planned_that_begins_after_the_call(
    daemon: HookDaemon, kind: type[DataLoader[Any]], workers: int, seeded: bool
) -> None:
    batches = make(kind, workers, WithIndex(), **({} if seeded else {"generator": None}))
    planning = plan(daemon.mount, batches)
    # Workers that the loader has had since it was made have begun the first epoch.
    unknown = {0} if workers and kind not in LATE else set()
    drawn = {}
    for epoch in range(4):
        taken = []
        for _, indices in batches:
            taken.append(indices)
            if epoch or not unknown:
                # A plan that waits to be sent gives way to the next one, which is made before the last batch is taken.
                until(lambda number=epoch: any(said.begun and said.epoch == number for _, said in daemon.sink.plans))
        drawn[epoch] = torch.cat(taken).tolist()
    planning.close()
    plans = [said for _, said in daemon.sink.plans if len(said.order)]
    begun = {said.epoch: said.order.tolist() for said in plans if said.begun}
    assert begun.keys() - {4} == {0, 1, 2, 3} - unknown
    assert all(order == drawn[epoch] for epoch, order in begun.items() if epoch in drawn)
    foreseen = {said.epoch: said.order.tolist() for said in plans if not said.begun}
    assert bool(foreseen) is seeded
    assert all(order == drawn[epoch] for epoch, order in foreseen.items() if epoch in drawn)


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_left_of_a_hook_that_was_closed(daemon: HookDaemon, workers: int) -> None:
    batches: Any = make(InfiniteDataLoader, workers)
    sampler, drawing = batches.batch_sampler.sampler, batches.iterator._sampler_iter
    hook = attach(daemon.mount, Network(), batches)
    assert batches.iterator._sampler_iter is not drawing
    hook.close()
    assert type(batches) is InfiniteDataLoader
    assert batches.batch_sampler.sampler is sampler
    assert batches.iterator._sampler_iter is drawing
    assert inspect.isgenerator(drawing)
    assert len(list(batches)) == BATCHES
    gone = weakref.ref(batches)
    del batches
    assert gone() is None


def test_such_an_epoch_cannot_go_on(daemon: HookDaemon, caplog: pytest.LogCaptureFixture) -> None:
    batches = make(MultiEpochsDataLoader, 0)
    with plan(daemon.mount, batches) as planning:
        assert planning.state_dict() == {}
        next(iter(batches))
        assert planning.state_dict() == {}
        assert "as the loader repeats its sampler: it begins again" in caplog.text
        with pytest.raises(ValueError, match="none can go on"):
            planning.load_state_dict({"order": np.arange(SIZE), "consumed": 8})
    with pytest.raises(ValueError, match="a MultiEpochsDataLoader repeats its sampler"):
        plan(daemon.mount, batches, share=True)
