"""accelerate's loaders: one that `prepare` wraps around a loader, and one that `skip_first_batches` makes of it.

The wrapper moves batches to their device, and gives each batch only when it has taken the next one, or has seen the
end: so it knows which batch is the last.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trainer_hook.isolation import callers
from trainer_hook.loader.epoch_order import Indices
from trainer_hook.loader.iterating import LoaderPass, TrackedIterator, Tracker
from trainer_hook.loader.planner import PlannedPass

_WRAPPER = "DataLoaderShard"


def drawing_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader that draws batches, which accelerate's `prepare` wraps in another loader."""
    inner = getattr(loader, "base_dataloader", None)
    return inner if isinstance(inner, DataLoader) else loader


def is_wrapper(loader: DataLoader[Any]) -> bool:
    """Whether this is accelerate's loader that gives whole batches; its other loader cuts batches up for ranks."""
    return drawing_loader(loader) is not loader and any(kind.__name__ == _WRAPPER for kind in type(loader).__mro__)


class _WrapperPass:
    """One pass over the wrapper: the batches that it has taken of the loader, and not given yet."""

    def __init__(self) -> None:
        self._received = 0
        self._held: dict[int, tuple[PlannedPass, Indices, Any]] = {}

    def inner(self) -> LoaderPass:
        """A pass over the loader inside."""
        return _InnerPass(self)

    def received(self, drawn_for: PlannedPass, indices: Indices | None, batch: Any) -> None:
        """The wrapper has asked the loader for a batch and got one with these samples, or none (None)."""
        if indices is not None:
            self._held[self._received] = drawn_for, indices, batch
        self._received += 1

    def given(self) -> tuple[PlannedPass, Indices, Any] | None:
        """The batch that the wrapper gives now: what it was drawn for, its samples, and the batch as received."""
        given = self._received - 2
        batch = self._held.get(given)
        self._held = {number: held for number, held in self._held.items() if number > given}
        return batch


class _InnerPass(LoaderPass):
    """A pass over the loader inside a wrapper: what it delivers, the loop takes later."""

    def __init__(self, wrapper: _WrapperPass, first: int = 0) -> None:
        super().__init__(first)
        self._wrapper = wrapper

    def delivered(self, tracker: Tracker, drawn_for: PlannedPass, indices: Indices | None, batch: Any) -> None:
        self._wrapper.received(drawn_for, indices, batch)

    def ended(self, tracker: Tracker) -> None:
        self.delivered(tracker, self, None, None)

    def left(self, tracker: Tracker) -> None:
        tracker.planner.left(self)


class AccelerateAdapter:
    """The iterator that the wrapper gives: the loop's batches are on their device."""

    def __init__(self, iterator: Iterator[Any], tracker: Tracker) -> None:
        self._iterator = iterator
        self._tracker = tracker
        self._pass = _WrapperPass()

    def __iter__(self) -> AccelerateAdapter:
        return self

    def __next__(self) -> Any:
        tracker = self._tracker
        before, tracker.new_pass = tracker.new_pass, self._pass.inner
        try:
            batch = next(self._iterator)
        except StopIteration:
            tracker.boundary.call(tracker.over, self._pass)
            raise
        finally:
            tracker.new_pass = before
        tracker.boundary.call(self._took, batch)
        return batch

    def _took(self, batch: Any) -> None:
        given = self._pass.given()
        if given is not None:
            self._tracker.taken(self._pass, *given[:2], batch)

    def __del__(self) -> None:
        self._tracker.boundary.call(self._tracker.over, self._pass)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)


# -- skip_first_batches


class _SkippingPass(_InnerPass):
    """A pass over the loader inside a wrapper that is not followed: as the loader delivers, the wrapper gives."""

    def delivered(self, tracker: Tracker, drawn_for: PlannedPass, indices: Indices | None, batch: Any) -> None:
        super().delivered(tracker, drawn_for, indices, batch)
        given = self._wrapper.given()
        if given is not None:
            tracker.taken(self._wrapper, *given)

    def left(self, tracker: Tracker) -> None:
        super().left(tracker)
        tracker.over(self._wrapper)


class _Original:
    """An iterator as its class made it, though it has become one of a subclass; this does not keep it alive."""

    def __init__(self, iterator: Any) -> None:
        self._reference = weakref.ref(iterator)
        self._kind = type(iterator)

    def __next__(self) -> Any:
        return self._kind.__next__(self._reference())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_reference"](), name)


def track_skipping(tracker: Tracker, sampler: object) -> LoaderPass | None:
    """Track the iterator that draws from this sampler now, if it is of a loader by `skip_first_batches`.

    That loader draws from the sampler of the loader that it was made of, and leaves out the first batches. To be called
    by what the iterator calls; returns None if there is none.
    """
    iterator: Any = None
    is_wrapped = False
    for caller in callers():
        if iterator is None and isinstance(caller, _BaseDataLoaderIter):
            iterator = caller
        elif iterator is not None and type(caller).__name__ == _WRAPPER:
            is_wrapped = True
            break
    drawing: Any = None if iterator is None else iterator._index_sampler
    if type(drawing).__name__ != "SkipBatchSampler" or drawing.batch_sampler is not sampler:
        return None
    first = -drawing.skip_batches
    iteration = _SkippingPass(_WrapperPass(), first) if is_wrapped else LoaderPass(first)
    original = _Original(iterator)
    tracked = TrackedIterator(original, tracker, iteration, original)
    kind = type(iterator)

    def end(self: Any) -> None:
        tracked.leave()
        getattr(kind, "__del__", lambda _: None)(self)

    # An iterator that is drawing already cannot be replaced by another one, but it can become one of another class.
    iterator.__class__ = type(kind.__name__, (kind,), {"__next__": lambda _: next(tracked), "__del__": end})
    return iteration
