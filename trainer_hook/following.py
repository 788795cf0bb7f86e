"""Following a data loader: which indices are in the batch that the loop has just taken.

The loader's batch sampler is replaced by one that draws through a `Planner` and notes what comes, and the loader's
class by one whose iterator says when the loop takes a batch, and when it lets go. Both stay what they are to everybody
who looks (attributes, isinstance, length). Nothing here keeps the loader alive: collected as part of a cycle, one with
persistent workers took 5 s for each of them to end.
"""

from __future__ import annotations

import copyreg
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, IterableDataset

from trainer_hook.boundary import Boundary
from trainer_hook.planner import Planner, indices_of

log = logging.getLogger("trainer_hook")

# On the class of a followed loader: the class it had.
_MARK = "_followed_by_spiderfs"

Indices = npt.NDArray[np.uint32]


class Listener(Protocol):
    """Who is told what the loop does with the loader."""

    def taken(self, iteration: object, indices: Indices, batch: Any) -> None:
        """It was given this batch, of these samples."""

    def over(self, iteration: object) -> None:
        """It is given no more in this iteration, or has let go of it."""


def drawing_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader that draws batches: accelerate's `prepare` puts one into another."""
    inner = getattr(loader, "base_dataloader", None)
    return inner if isinstance(inner, DataLoader) else loader


class _Iteration:
    """One pass over the loader: what was drawn for it and not taken yet.

    Of a loader around it, `around` is the pass that this one is for.
    """

    def __init__(self, around: _IterationAround | None = None) -> None:
        self.drawn: deque[Indices | None] = deque()
        self.around = around


class _IterationAround:
    """A pass over accelerate's loader, which asks for the next batch, or for the end, before it gives one."""

    def __init__(self) -> None:
        self._asked = 0
        self._taken: dict[int, Indices] = {}

    def asked(self, indices: Indices | None) -> None:
        """It has asked for a batch, and was given one of these samples; None if it got none."""
        if indices is not None:
            self._taken[self._asked] = indices
        self._asked += 1

    def given(self) -> Indices | None:
        """The samples of the batch that it gives now."""
        place = self._asked - 2
        indices = self._taken.get(place)
        self._taken = {number: taken for number, taken in self._taken.items() if number > place}
        return indices


class Follower:
    """Tells the planner, then the listener, when the loop takes a batch from `loader`.

    Raises ValueError for a loader that fails the `check`.
    """

    def __init__(
        self, loader: DataLoader[Any], planner: Planner, boundary: Boundary, listener: Listener | None
    ) -> None:
        self.check(loader)
        self.planner = planner
        self.boundary = boundary
        self.listener = listener
        self.now: _Iteration | None = None
        self.around: _IterationAround | None = None
        self._said = False
        drawing = drawing_loader(loader)
        self._loaders = [weakref.ref(drawing)]
        self._name = "sampler" if drawing.batch_sampler is None else "batch_sampler"
        self._original = drawing.__dict__[self._name]
        self._set_sampler(drawing, _FollowedSampler(self._original, self))
        _become(drawing, _followed_class(type(drawing), weakref.ref(self), _follow))
        if loader is not drawing and _gives_one_behind(loader):
            self._loaders.append(weakref.ref(loader))
            _become(loader, _followed_class(type(loader), weakref.ref(self), _follow_around))

    @staticmethod
    def check(loader: DataLoader[Any]) -> None:
        """Raise ValueError for a loader that has no indices, mixes up its batches, or is followed already."""
        loader = drawing_loader(loader)
        if hasattr(type(loader), _MARK):
            raise ValueError("this loader has a hook already: close that first")
        if isinstance(loader.dataset, IterableDataset):
            raise ValueError(
                "an iterable data set has no indices: attach with loader=None and call hook.batch(indices)"
            )
        if not getattr(loader, "in_order", True):
            raise ValueError("the loader must hand out batches in order (in_order=True)")

    def undo(self) -> None:
        """Leave the loader as it was; an iteration that goes on is no longer followed."""
        self.listener = None
        self._said = True
        for place, reference in enumerate(self._loaders):
            loader = reference()
            if loader is not None and hasattr(type(loader), _MARK):
                if place == 0:
                    self._set_sampler(loader, self._original)
                _become(loader, getattr(type(loader), _MARK))

    def taken(self, iteration: _Iteration | _IterationAround, indices: Indices, batch: Any) -> None:
        if self.listener is not None:
            self.listener.taken(iteration, indices, batch)

    def over(self, iteration: _Iteration | _IterationAround) -> None:
        if self.listener is not None:
            self.listener.over(iteration)

    def say_elsewhere(self) -> None:
        """Somebody else draws from the loader's sampler."""
        if not self._said:
            self._said = True
            log.warning(
                "another loader uses the sampler of the attached one, and is not followed: attach after what makes new "
                "loaders (Accelerator.prepare)"
            )

    def plain_state(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """What a copy of the loader is made of: the loader as it was."""
        state = dict(loader.__dict__)
        if type(state.get(self._name)) is _FollowedSampler:
            state[self._name] = self._original
        return state

    def _set_sampler(self, loader: DataLoader[Any], sampler: Any) -> None:
        # A DataLoader forbids to set it; one with persistent workers keeps a reference in its iterator.
        loader.__dict__[self._name] = sampler
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:
            iterator._index_sampler = sampler


def _gives_one_behind(loader: DataLoader[Any]) -> bool:
    """Whether it is accelerate's loader for one process; that which distributes batches cuts them up."""
    return any(kind.__name__ == "DataLoaderShard" for kind in type(loader).__mro__)


def _become(loader: DataLoader[Any], kind: type[DataLoader[Any]]) -> None:
    # Accelerate's loader says by a property that it is of the class of the loader inside.
    vars(object)["__class__"].__set__(loader, kind)


Follow = Callable[[Follower, type[DataLoader[Any]], DataLoader[Any]], Iterator[Any]]


def _followed_class(
    kind: type[DataLoader[Any]], followed_by: weakref.ref[Follower], follow: Follow
) -> type[DataLoader[Any]]:
    """A subclass of the loader's class that differs in two things: iterating is followed, and its copies are plain."""

    def iterate(self: DataLoader[Any]) -> Iterator[Any]:
        follower = followed_by()
        assert follower is not None, "the loader's sampler keeps it"
        return follow(follower, kind, self)

    def reduce(self: DataLoader[Any], protocol: Any) -> Any:
        # Nobody follows a copy.
        plain = kind.__new__(kind)
        follower = followed_by()
        plain.__dict__.update(self.__dict__ if follower is None else follower.plain_state(self))
        made = plain.__reduce_ex__(protocol)
        # Pickle insists that what copyreg makes anew has the class of what it was.
        return (object.__new__, *made[1:]) if made[0] is copyreg.__newobj__ else made  # type: ignore[attr-defined]

    # No second base: it would change the layout, and the class of an object could not be set.
    return type(kind.__name__, (kind,), {"__iter__": iterate, "__reduce_ex__": reduce, _MARK: kind})


def _follow(follower: Follower, kind: type[DataLoader[Any]], loader: DataLoader[Any]) -> _FollowedIterator:
    iteration = _Iteration(follower.around)
    # The loader asks its batch sampler for an iterator now, or, if it is a generator, at its first batch.
    follower.now = iteration
    try:
        iterator = kind.__iter__(loader)
    finally:
        follower.now = None
    return _FollowedIterator(iterator, follower, iteration)


def _follow_around(follower: Follower, kind: type[DataLoader[Any]], loader: DataLoader[Any]) -> _IteratorAround:
    return _IteratorAround(kind.__iter__(loader), follower)


class _FollowedIterator:
    def __init__(self, iterator: Iterator[Any], follower: Follower, iteration: _Iteration) -> None:
        self._iterator = iterator
        self._follower = follower
        self._iteration = iteration

    def __iter__(self) -> _FollowedIterator:
        return self

    def __next__(self) -> Any:
        enter = self._follower.boundary.enter
        self._follower.now = self._iteration
        before = self._received
        try:
            batch = next(self._iterator)
        except StopIteration:
            enter(self._ended)
            raise
        except BaseException:
            enter(self._failed, before)
            raise
        finally:
            self._follower.now = None
        enter(self._took, batch)
        return batch

    @property
    def _received(self) -> int | None:
        """How many batches the workers of an iterator have delivered, failed ones included."""
        return getattr(self._iterator, "_rcvd_idx", None)

    def _took(self, batch: Any) -> None:
        indices = self._iteration.drawn.popleft() if self._iteration.drawn else None
        if indices is not None:
            self._follower.planner.taken(self._iteration, len(indices))
        if self._iteration.around is not None:
            self._iteration.around.asked(indices)
        elif indices is not None:
            self._follower.taken(self._iteration, indices, batch)

    def _failed(self, before: int | None) -> None:
        """No batch has come of what was drawn: one whose samples could not be read, or none with dead workers."""
        after = self._received
        drawn = self._iteration.drawn
        failed = len(drawn) if before is None or after is None else after - before
        for _ in range(min(failed, len(drawn))):
            indices = drawn.popleft()
            if indices is not None:
                self._follower.planner.taken(self._iteration, len(indices))

    def _ended(self) -> None:
        if self._iteration.around is not None:
            self._iteration.around.asked(None)
        else:
            self._follower.over(self._iteration)

    def _left(self) -> None:
        self._follower.planner.left(self._iteration)
        if self._iteration.around is None:
            self._follower.over(self._iteration)

    def __del__(self) -> None:
        self._follower.boundary.enter(self._left)

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)


class _IteratorAround:
    """What the loop is given by accelerate's loader: batches on their device, one behind those that it takes."""

    def __init__(self, iterator: Iterator[Any], follower: Follower) -> None:
        self._iterator = iterator
        self._follower = follower
        self._iteration = _IterationAround()

    def __iter__(self) -> _IteratorAround:
        return self

    def __next__(self) -> Any:
        follower = self._follower
        before, follower.around = follower.around, self._iteration
        try:
            batch = next(self._iterator)
        except StopIteration:
            follower.boundary.enter(follower.over, self._iteration)
            raise
        finally:
            follower.around = before
        follower.boundary.enter(self._took, batch)
        return batch

    def _took(self, batch: Any) -> None:
        indices = self._iteration.given()
        if indices is not None:
            self._follower.taken(self._iteration, indices, batch)

    def __del__(self) -> None:
        self._follower.boundary.enter(self._follower.over, self._iteration)

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
            self._follower.boundary.enter(self._follower.say_elsewhere)
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

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_sampler", "_follower"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._sampler, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._sampler)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Nobody follows a copy.
        return _itself, (self._sampler,)


def _itself(sampler: Any) -> Any:
    return sampler
