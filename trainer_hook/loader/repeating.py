"""Loaders that repeat their sampler: InfiniteDataLoader of Ultralytics and MultiEpochsDataLoader of timm.

Such a loader makes one iterator, over a batch sampler that draws from another one again and again. Each pass over the
loader takes as many batches from that iterator as the other sampler has. So the workers draw the next round while the
loop takes the last batches of this one. The loader makes the iterator when it is made itself, or, in later versions of
both packages, in its first pass. In the first case what the workers drew before we came is not known.
"""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

Samples = npt.NDArray[np.uint32] | None


def is_repeating(loader: DataLoader[Any]) -> bool:
    """Whether all passes over a loader take their batches from one iterator."""
    repeating = _sampler_of(loader)
    # Another loader that keeps an iterator has a sampler that says how many batches an epoch has.
    if hasattr(type(repeating), "__len__") or not hasattr(repeating, "sampler"):
        return False
    return _kept_iterator(loader) is not None or getattr(loader, "iterator", loader) is None


def _kept_iterator(loader: DataLoader[Any]) -> Any:
    return next((kept for kept in vars(loader).values() if isinstance(kept, _BaseDataLoaderIter)), None)


class KeptIterator:
    """The iterator that a repeating loader keeps, whichever that is at the moment; this does not keep it alive."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = weakref.ref(loader)

    @property
    def _rcvd_idx(self) -> int | None:
        loader = self._loader()
        iterator = None if loader is None else _kept_iterator(loader)
        if iterator is None:
            return 0 if loader is not None and loader.num_workers else None
        return getattr(iterator, "_rcvd_idx", None)


def index_sampler_of(loader: DataLoader[Any]) -> Any:
    """The sampler that draws the batches of an epoch, or its samples if the loader makes no batches."""
    sampler = _sampler_of(loader)
    return sampler.sampler if is_repeating(loader) else sampler


def _sampler_of(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


class Rounds:
    """The rounds of a loader that repeats its sampler: what each of them draws, and which one a batch is of.

    `draw` gives the draws of a new round, `missed` is called for one that has begun already, and `samples_of` gives the
    samples of a draw.
    """

    def __init__(
        self,
        draw: Callable[[Any, Callable[[Any], object]], Iterator[Any]],
        missed: Callable[[], None],
        samples_of: Callable[[Any, Any], Samples],
        new_round: Callable[[], object],
    ) -> None:
        self.drawn: deque[tuple[Any, Samples]] = deque()
        """The round and the samples of each batch that was drawn and not taken; None for samples that are not known."""
        self._draw, self._missed = draw, missed
        self._samples_of, self._new_round = samples_of, new_round
        self._round = new_round()
        # The loader may have had an iterator before this object: what draws for it, and what records its draws.
        self._before: Iterator[Any] | None = None
        self._recording: Iterator[Any] | None = None
        # Whether the loader makes its iterator after this object: then each round is recorded from its begin.
        self._from_the_first = False

    def set_sampler(self, loader: DataLoader[Any], sampler: Any, follow: bool) -> None:
        """Have the loader repeat this sampler, which calls `begin` for each round; or its own, without `follow`."""
        iterator = _kept_iterator(loader)
        _sampler_of(loader).sampler = sampler
        if follow:
            drawing = None if iterator is None else iterator._sampler_iter
            created = inspect.isgenerator(drawing) and inspect.getgeneratorstate(drawing) == inspect.GEN_CREATED
            if drawing is not None and not created:
                self._missed()
            self.follow(loader)
        elif iterator is not None and iterator._sampler_iter is self._recording:
            iterator._sampler_iter = self._before

    def begin(self) -> Iterator[Any]:
        """The draws of a new round."""
        self._round = self._new_round()
        return self._draw(self._round, self._record if self._from_the_first else lambda drawn: None)

    def follow(self, loader: DataLoader[Any]) -> deque[tuple[Any, Samples]]:
        """Record in `drawn` what the loader's iterator, which may be a new one, draws from now on; returns `drawn`."""
        iterator = _kept_iterator(loader)
        if iterator is None:
            self._from_the_first = True
            self.drawn.clear()
        elif not self._from_the_first and iterator._sampler_iter is not self._recording:
            not_known = getattr(iterator, "_send_idx", 0) - getattr(iterator, "_rcvd_idx", 0)
            self.drawn = deque([(self._round, None)] * not_known)
            self._before = iterator._sampler_iter
            self._recording = iterator._sampler_iter = recorded(iterator._sampler_iter, self._record)
        return self.drawn

    def _record(self, drawn: Any) -> None:
        self.drawn.append((self._round, self._samples_of(self._round, drawn)))


def recorded(drawing: Iterator[Any], record: Callable[[Any], object]) -> Iterator[Any]:
    """The same draws; `record` is called with each."""
    for drawn in drawing:
        record(drawn)
        yield drawn
