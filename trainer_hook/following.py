"""Following a data loader: which indices are in the batch that the loop has just taken.

The loader's batch sampler is replaced by one that draws through a `Planner` and notes what comes, and the loader's
class by one whose iterator says when the loop takes a batch, and when it lets go. Both stay what they are to everybody
who looks (attributes, isinstance, length). Nothing here keeps the loader alive: collected as part of a cycle, one with
persistent workers took 5 s for each of them to end.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, IterableDataset

from trainer_hook.planner import Planner, indices_of

# On the class of a followed loader: the class it had.
_MARK = "_followed_by_spiderfs"

Taken = Callable[[object, npt.NDArray[np.uint32]], None]


def drawing_loader(loader: DataLoader[Any]) -> tuple[DataLoader[Any], int]:
    """The loader that draws batches, and how many the one around it takes from it ahead of the loop.

    Accelerate's `prepare` puts a loader into another, which takes one batch ahead to know which is the last.
    """
    inner = getattr(loader, "base_dataloader", None)
    return (inner, 1) if isinstance(inner, DataLoader) else (loader, 0)


class _Iteration:
    """One pass over the loader: what was drawn for it and not taken yet."""

    def __init__(self) -> None:
        self.drawn: deque[npt.NDArray[np.uint32] | None] = deque()


class Follower:
    """Tells the planner, then calls `taken(iteration, indices)`, when the loop takes a batch.

    Raises ValueError for a loader that fails the `check`.
    """

    def __init__(self, loader: DataLoader[Any], planner: Planner, taken: Taken) -> None:
        self.check(loader)
        self.planner = planner
        self.taken = taken
        self.now: _Iteration | None = None
        self._loader = weakref.ref(loader)
        self._name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._original = loader.__dict__[self._name]
        self._set_sampler(loader, _FollowedSampler(self._original, self))
        loader.__class__ = _followed_class(type(loader), weakref.ref(self))

    @staticmethod
    def check(loader: DataLoader[Any]) -> None:
        """Raise ValueError for a loader that has no indices, mixes up its batches, or is followed already."""
        if hasattr(loader, _MARK):
            raise ValueError("this loader has a hook already: close that first")
        if isinstance(loader.dataset, IterableDataset):
            raise ValueError(
                "an iterable data set has no indices: attach with loader=None and call hook.batch(indices)"
            )
        if not getattr(loader, "in_order", True):
            raise ValueError("the loader must hand out batches in order (in_order=True)")

    def undo(self) -> None:
        """Leave the loader as it was; an iteration that goes on is no longer followed."""
        self.taken = lambda iteration, indices: None
        loader = self._loader()
        if loader is not None:
            self._set_sampler(loader, self._original)
            loader.__class__ = getattr(type(loader), _MARK)

    def _set_sampler(self, loader: DataLoader[Any], sampler: Any) -> None:
        # A DataLoader forbids to set it; one with persistent workers keeps a reference in its iterator.
        loader.__dict__[self._name] = sampler
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:
            iterator._index_sampler = sampler


def _followed_class(kind: type[DataLoader[Any]], followed_by: weakref.ref[Follower]) -> type[DataLoader[Any]]:
    """The loader's own class, but for what iterating over it gives."""

    def follow(self: DataLoader[Any]) -> _FollowedIterator:
        follower = followed_by()
        assert follower is not None, "the loader's sampler keeps it"
        iteration = _Iteration()
        # The loader asks its batch sampler for an iterator now, or, if it is a generator, at its first batch.
        follower.now = iteration
        try:
            iterator = kind.__iter__(self)
        finally:
            follower.now = None
        return _FollowedIterator(iterator, follower, iteration)

    # No second base: it would change the layout, and the class of an object could not be set.
    return type(kind.__name__, (kind,), {"__iter__": follow, _MARK: kind})


class _FollowedIterator:
    def __init__(self, iterator: Iterator[Any], follower: Follower, iteration: _Iteration) -> None:
        self._iterator = iterator
        self._follower = follower
        self._iteration = iteration

    def __iter__(self) -> _FollowedIterator:
        return self

    def __next__(self) -> Any:
        self._follower.now = self._iteration
        try:
            batch = next(self._iterator)
        finally:
            self._follower.now = None
        if self._iteration.drawn:
            indices = self._iteration.drawn.popleft()
            if indices is not None:
                self._follower.planner.taken(self._iteration, len(indices))
                self._follower.taken(self._iteration, indices)
        return batch

    def __del__(self) -> None:
        self._follower.planner.left(self._iteration)

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)


class _FollowedSampler:
    """A batch sampler (or a sampler, of a loader that does not batch) that notes what it draws."""

    def __init__(self, sampler: Any, follower: Follower) -> None:
        self._sampler = sampler
        self._follower = follower

    def __iter__(self) -> Iterator[Any]:
        # A plain function: the sampler's own iterator is made now, and the iteration is the one that asks.
        iteration = self._follower.now
        if iteration is None:
            return iter(self._sampler)
        return self._noted(iteration, self._follower.planner.draw(iteration))

    def _noted(self, iteration: _Iteration, drawing: Iterator[Any]) -> Iterator[Any]:
        for drawn in drawing:
            iteration.drawn.append(indices_of(drawn))
            yield drawn

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)
