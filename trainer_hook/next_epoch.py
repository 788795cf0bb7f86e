"""What a loader will draw in its next epoch, where that can be known without drawing it.

Only torch's own samplers are looked through, and only by copies of them with copies of their random generators, so
nothing that the loader will draw changes. Known is the next epoch of a SequentialSampler, of a DistributedSampler (its
order follows from seed and epoch), and of a sampler with a `torch.Generator` of its own, or of the loader's. What is
drawn from the global generator depends on what the training draws from it until then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

_WITH_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def batches_of(index_sampler: Any, indices: Iterable[int]) -> list[Any] | None:
    """What the loader's index sampler would draw if its sampler drew `indices`; None if it is not one of torch's."""
    if not isinstance(index_sampler, BatchSampler):
        return list(indices)
    if type(index_sampler).__iter__ is not BatchSampler.__iter__:
        return None
    cut = copy.copy(index_sampler)
    cut.sampler = indices
    return list(cut)


class NextEpoch:
    """Foresees the next epoch of one loader; `index_sampler` is what the loader draws batches from."""

    def __init__(self, loader: DataLoader[Any], index_sampler: Any) -> None:
        self._loaders_generator = loader.generator
        self._new_iterators = not (loader.persistent_workers and loader.num_workers)
        self._index_sampler = index_sampler
        self._sampler = getattr(index_sampler, "sampler", index_sampler)
        # By how much the training moves a DistributedSampler's epoch on: one, unless it forgets to.
        self._step = 1
        self._epoch_before: int | None = None

    def foresee(self) -> list[Any] | None:
        """To be asked once in each epoch, after it has been drawn; None where the next one cannot be known."""
        copied = self._copied()
        return None if copied is None else batches_of(self._index_sampler, copied)

    def _copied(self) -> Iterable[int] | None:
        """The sampler as it will be when the next epoch begins."""
        sampler = self._sampler
        if _draws_like(sampler, SequentialSampler):
            return sampler  # type: ignore[no-any-return]
        if _draws_like(sampler, DistributedSampler):
            if self._epoch_before is not None:
                self._step = sampler.epoch - self._epoch_before
            self._epoch_before = sampler.epoch
            copied = copy.copy(sampler)
            copied.epoch = sampler.epoch + self._step
            return copied  # type: ignore[no-any-return]
        if any(_draws_like(sampler, kind) for kind in _WITH_GENERATOR) and sampler.generator is not None:
            copied = copy.copy(sampler)
            copied.generator = self._generator(sampler.generator)
            return copied  # type: ignore[no-any-return]
        return None

    def _generator(self, generator: torch.Generator) -> torch.Generator:
        copied = torch.Generator(generator.device)
        copied.set_state(generator.get_state())
        if generator is self._loaders_generator and self._new_iterators:
            # Each new iterator of a loader first draws a seed for its workers.
            torch.empty((), dtype=torch.int64).random_(generator=copied)
        return copied


def _draws_like(sampler: Any, kind: type[Any]) -> bool:
    draw: Callable[..., Any] = kind.__iter__
    return isinstance(sampler, kind) and type(sampler).__iter__ is draw
