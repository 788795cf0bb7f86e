"""What a loader will draw in its next epochs, where that can be known without drawing them.

Only torch's own samplers are looked through, and only by copies of them with copies of their random generators, so
nothing that the loader will draw changes. Known are the next epochs of a SequentialSampler, of a DistributedSampler
(its order follows from seed and epoch), and of a sampler with a `torch.Generator` of its own, or of the loader's. What
is drawn from the global generator depends on what the training draws from it until then.
"""

from __future__ import annotations

import copy
from collections import deque
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
    """Foresees the next epochs of one loader; `index_sampler` is what the loader draws batches from."""

    def __init__(self, loader: DataLoader[Any], index_sampler: Any) -> None:
        self._index_sampler = index_sampler
        self._sampler = getattr(index_sampler, "sampler", index_sampler)
        # Each new iterator of a loader first draws a seed for its workers, from the loader's generator.
        shared = loader.generator is not None and getattr(self._sampler, "generator", None) is loader.generator
        self._draws_seeds = shared and not (loader.persistent_workers and loader.num_workers)
        # By how much the training moves a DistributedSampler's epoch on: one, unless it forgets to.
        self._step = 1
        self._epoch_before: int | None = None

    def drawn(self) -> None:
        """An epoch has been drawn: to be called once in each, before any is foreseen from there."""
        if _draws_like(self._sampler, DistributedSampler):
            if self._epoch_before is not None:
                self._step = self._sampler.epoch - self._epoch_before
            self._epoch_before = self._sampler.epoch

    def foresee(self, ended: Any, passed: int = 0) -> list[Any] | None:
        """The epoch that comes `passed` epochs after the next one; None where it cannot be known.

        `ended` is the index sampler, or a copy of it, as it is at the end of the present epoch.
        """
        copied = self._copied(getattr(ended, "sampler", ended), passed)
        return None if copied is None else batches_of(self._index_sampler, copied)

    def _copied(self, sampler: Any, passed: int) -> Iterable[int] | None:
        """The sampler as it will be when that epoch begins."""
        if _draws_like(sampler, SequentialSampler):
            return sampler  # type: ignore[no-any-return]
        if _draws_like(sampler, DistributedSampler):
            copied = copy.copy(sampler)
            copied.epoch = sampler.epoch + self._step * (1 + passed)
            return copied  # type: ignore[no-any-return]
        if any(_draws_like(sampler, kind) for kind in _WITH_GENERATOR) and sampler.generator is not None:
            copied = copy.copy(sampler)
            copied.generator = torch.Generator(sampler.generator.device)
            copied.generator.set_state(sampler.generator.get_state())
            for _ in range(passed):
                self._begin_iterator(copied.generator)
                deque(copied, maxlen=0)
            self._begin_iterator(copied.generator)
            return copied  # type: ignore[no-any-return]
        return None

    def _begin_iterator(self, copied: torch.Generator) -> None:
        if self._draws_seeds:
            torch.empty((), dtype=torch.int64).random_(generator=copied)


def _draws_like(sampler: Any, kind: type[Any]) -> bool:
    draw: Callable[..., Any] = kind.__iter__
    return isinstance(sampler, kind) and type(sampler).__iter__ is draw
