"""Loaders that repeat their sampler: InfiniteDataLoader of Ultralytics and MultiEpochsDataLoader of timm.

Such a loader makes one iterator when it is made itself, over a batch sampler that draws from another one again and
again. Each pass over the loader takes as many batches from that iterator as the other sampler has. So the workers draw
the next round while the loop takes the last batches of this one, and what they drew before we came is not known.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

Samples = npt.NDArray[np.uint32] | None


def running_iterator(loader: DataLoader[Any]) -> Any:
    """The iterator from which all passes over such a loader take their batches; None for any other loader."""
    repeating = _sampler_of(loader)
    # Another loader that keeps an iterator has a sampler that says how many batches an epoch has.
    if hasattr(type(repeating), "__len__") or not hasattr(repeating, "sampler"):
        return None
    return next((kept for kept in vars(loader).values() if isinstance(kept, _BaseDataLoaderIter)), None)


def index_sampler_of(loader: DataLoader[Any]) -> Any:
    """The sampler that draws the batches of an epoch, or its samples if the loader makes no batches."""
    sampler = _sampler_of(loader)
    return sampler if running_iterator(loader) is None else sampler.sampler


def _sampler_of(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


class Rounds:
    """The rounds of a loader that repeats its sampler: what each of them draws, and which one a batch is of.

    `draw` gives the draws of a new round, `missed` is called for one that has begun already, and `samples_of` gives the
    samples of a draw.
    """

    def __init__(
        self,
        draw: Callable[[object], Iterator[Any]],
        missed: Callable[[], None],
        samples_of: Callable[[object, Any], Samples],
    ) -> None:
        self.drawn: deque[tuple[object, Samples]] = deque()
        """The round and the samples of each batch that was drawn and not taken; None for samples that are not known."""
        self._draw = draw
        self._missed = missed
        self._samples_of = samples_of
        self._round = object()
        self._before: Iterator[Any] | None = None
        self._noting: Iterator[Any] | None = None

    def set_sampler(self, loader: DataLoader[Any], sampler: Any, follow: bool) -> None:
        """Have the loader repeat this sampler, which calls `begin` for each round; or its own, without `follow`."""
        iterator = running_iterator(loader)
        _sampler_of(loader).sampler = sampler
        if follow:
            drawing = iterator._sampler_iter
            if not inspect.isgenerator(drawing) or inspect.getgeneratorstate(drawing) != inspect.GEN_CREATED:
                self._missed()
            self.note(loader)
        elif iterator._sampler_iter is self._noting:
            iterator._sampler_iter = self._before

    def begin(self) -> Iterator[Any]:
        """The draws of a new round."""
        self._round = object()
        return self._draw(self._round)

    def note(self, loader: DataLoader[Any]) -> tuple[Any, deque[tuple[object, Samples]]]:
        """Note what the iterator, which may be another now, draws from now on; returns it, and `drawn`."""
        iterator = running_iterator(loader)
        if iterator._sampler_iter is not self._noting:
            not_known = getattr(iterator, "_send_idx", 0) - getattr(iterator, "_rcvd_idx", 0)
            self.drawn = deque([(self._round, None)] * not_known)
            self._before = iterator._sampler_iter
            self._noting = iterator._sampler_iter = self._noted(iterator._sampler_iter)
        return iterator, self.drawn

    def _noted(self, drawing: Iterator[Any]) -> Iterator[Any]:
        for drawn in drawing:
            self.drawn.append((self._round, self._samples_of(self._round, drawn)))
            yield drawn


def rounds_of(loader: DataLoader[Any], *given: Any) -> Rounds | None:
    """The `Rounds` of a loader, made with what is given; None for a loader that does not repeat its sampler."""
    return None if running_iterator(loader) is None else Rounds(*given)
