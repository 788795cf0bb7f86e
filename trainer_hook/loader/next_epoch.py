"""Foreseeing the next epochs of a loader: what it will draw, if that can be known without drawing.

This module knows only torch's own samplers. It draws from copies of them, with copies of their random generators, so
it does not change what the loader will draw. The next epochs of three kinds of samplers can be foreseen: a
SequentialSampler; a DistributedSampler, whose order follows from its seed and the number of the epoch; and a sampler
with a `torch.Generator`, its own or the loader's. A sampler that uses torch's global generator cannot be foreseen,
because its draws depend on what the training draws from that generator before.
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

from trainer_hook.loader.repeating import is_repeating

_WITH_GENERATOR = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def batches_of(index_sampler: Any, indices: Iterable[int]) -> list[Any] | None:
    """The batches of a loader's index sampler if its sampler draws `indices`; None if it is not one of torch's own."""
    if not isinstance(index_sampler, BatchSampler):
        return list(indices)
    if type(index_sampler).__iter__ is not BatchSampler.__iter__:
        return None
    cut = copy.copy(index_sampler)
    cut.sampler = indices
    return list(cut)


class NextEpoch:
    """Foresees the next epochs of one loader; the loader draws its batches from `index_sampler`."""

    def __init__(self, loader: DataLoader[Any], index_sampler: Any) -> None:
        self._index_sampler = index_sampler
        self._sampler = getattr(index_sampler, "sampler", index_sampler)
        # Each new iterator of a loader first draws a seed for its loader workers from the loader's generator.
        shared = loader.generator is not None and getattr(self._sampler, "generator", None) is loader.generator
        makes_iterators = not (loader.persistent_workers and loader.num_workers) and not is_repeating(loader)
        self._draws_seeds = shared and makes_iterators
        # By how much the training increases a DistributedSampler's epoch: by 1, or by 0 if it does not call set_epoch.
        self._step = 1
        self._epoch_before: int | None = None

    def drawn(self) -> None:
        """Note that an epoch has been drawn; to be called once in each epoch, before any epoch is foreseen from it."""
        if _draws_like(self._sampler, DistributedSampler):
            if self._epoch_before is not None:
                self._step = self._sampler.epoch - self._epoch_before
            self._epoch_before = self._sampler.epoch

    def foresee(self, ended: Any, passed: int = 0) -> list[Any] | None:
        """The epoch that comes `passed` epochs after the next one; None if it cannot be known.

        `ended` is the index sampler, or a copy of it, in its state at the end of the current epoch.
        """
        copied = self._copied(getattr(ended, "sampler", ended), passed)
        return None if copied is None else batches_of(self._index_sampler, copied)

    def _copied(self, sampler: Any, passed: int) -> Iterable[int] | None:
        """A copy of the sampler in its state at the beginning of that epoch; None if that cannot be known."""
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
