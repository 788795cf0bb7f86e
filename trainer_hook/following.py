"""Following a data loader: to know which samples are in the batch that the training loop has just taken.

Following changes two things. The loader's batch sampler becomes one that draws through a `Planner` and notes the draws.
The loader's class becomes one whose iterator tells us when the loop takes a batch, and when it leaves the iterator.
Attributes, isinstance and length answer as before. Nothing here keeps the loader alive: when a loader with persistent
workers was freed by the garbage collector, ending each worker took 5 s.
"""

from __future__ import annotations

import copyreg
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, IterableDataset

from trainer_hook.boundary import Boundary
from trainer_hook.planner import Planner, _spider_sampler, indices_of

log = logging.getLogger("trainer_hook")

# The attribute of a followed loader's class that has the class it had before.
_MARK = "_followed_by_spiderfs"

Indices = npt.NDArray[np.uint32]


class Listener(Protocol):
    """An object that the follower tells what the loop does with the loader."""

    def taken(self, iteration: object, indices: Indices, batch: Any) -> None:
        """The loop has taken this batch, which has these samples."""

    def over(self, iteration: object) -> None:
        """The iteration gives no more batches: it has ended, or the loop has left it."""


def drawing_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader that draws batches: accelerate's `prepare` wraps it in another loader."""
    inner = getattr(loader, "base_dataloader", None)
    return inner if isinstance(inner, DataLoader) else loader


class _Iteration:
    """One pass over the loader: the indices of the batches that were drawn for it and not taken yet.

    If another loader wraps this one, `around` is the pass over the wrapper that this pass serves.
    """

    def __init__(self, around: _IterationAround | None = None) -> None:
        self.drawn: deque[Indices | None] = deque()
        self.around = around


class _IterationAround:
    """One pass over accelerate's loader, which takes the next batch, or sees the end, before it gives a batch."""

    def __init__(self) -> None:
        self._asked = 0
        self._taken: dict[int, tuple[_Iteration, Indices]] = {}

    def asked(self, iteration: _Iteration, indices: Indices | None) -> None:
        """The loader has asked that pass for a batch and got one with these samples, or none (None)."""
        if indices is not None:
            self._taken[self._asked] = iteration, indices
        self._asked += 1

    def given(self) -> tuple[_Iteration, Indices] | None:
        """The batch that the loader gives now: the pass that it comes from, and its samples."""
        given = self._asked - 2
        batch = self._taken.get(given)
        self._taken = {number: taken for number, taken in self._taken.items() if number > given}
        return batch


class Follower:
    """Tells the planner, and then the listener, when the loop takes a batch from `loader`.

    Raises ValueError for a loader that `check` refuses.
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
        """Raise ValueError for what cannot be followed: what is no loader, or one without indices, or not in order.

        So too for a loader that is followed already, or whose SpiderSampler is for a data set of another length.
        """
        loader = drawing_loader(loader)
        if not isinstance(loader, DataLoader):
            kind = type(loader).__name__
            raise ValueError(
                f"the loader is a {kind}, no torch DataLoader: give the mount's directory, then the loader"
            )
        if hasattr(type(loader), _MARK):
            raise ValueError("this loader has a plan or a hook already: close that one first")
        if isinstance(loader.dataset, IterableDataset):
            raise ValueError(
                "an iterable data set has no indices: attach with loader=None and call hook.batch(indices)"
            )
        if not getattr(loader, "in_order", True):
            raise ValueError("the loader must hand out batches in order (in_order=True)")
        sampler = _spider_sampler(loader)
        dataset: object = loader.dataset
        if sampler is not None and isinstance(dataset, Sized) and sampler._samples != len(dataset):
            raise ValueError(
                f"the {type(sampler).__name__} draws from {sampler._samples} samples, and the data set has "
                f"{len(dataset)}: make it with the length of the data set"
            )

    def undo(self) -> None:
        """Make the loader as it was before; an iteration that goes on is no longer followed."""
        self.listener = None
        self._said = True
        for number, reference in enumerate(self._loaders):
            loader = reference()
            if loader is not None and hasattr(type(loader), _MARK):
                if number == 0:
                    self._set_sampler(loader, self._original)
                _become(loader, getattr(type(loader), _MARK))

    def taken(self, iteration: _Iteration | _IterationAround, indices: Indices, batch: Any) -> None:
        if self.listener is not None:
            self.listener.taken(iteration, indices, batch)

    def over(self, iteration: _Iteration | _IterationAround) -> None:
        if self.listener is not None:
            self.listener.over(iteration)

    def say_elsewhere(self) -> None:
        """Log, once, that another loader draws from this loader's sampler."""
        if not self._said:
            self._said = True
            log.warning(
                "another loader draws from the sampler of the attached loader, and is not followed: attach after the "
                "call that makes new loaders (Accelerator.prepare)"
            )

    def plain_state(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """The attributes of a copy of the loader: those that the loader would have without us."""
        state = dict(loader.__dict__)
        if type(state.get(self._name)) is _FollowedSampler:
            state[self._name] = self._original
        return state

    def _set_sampler(self, loader: DataLoader[Any], sampler: Any) -> None:
        # A DataLoader forbids setting the attribute; with persistent workers its iterator has a reference too.
        loader.__dict__[self._name] = sampler
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:
            iterator._index_sampler = sampler


def _gives_one_behind(loader: DataLoader[Any]) -> bool:
    """Whether this is accelerate's loader that gives whole batches; its other loader cuts batches up for ranks."""
    return any(kind.__name__ == "DataLoaderShard" for kind in type(loader).__mro__)


def _become(loader: DataLoader[Any], kind: type[DataLoader[Any]]) -> None:
    # Accelerate's loader has a property `__class__` that names the class of the loader inside it.
    vars(object)["__class__"].__set__(loader, kind)


Follow = Callable[[Follower, type[DataLoader[Any]], DataLoader[Any]], Iterator[Any]]


def _followed_class(
    kind: type[DataLoader[Any]], followed_by: weakref.ref[Follower], follow: Follow
) -> type[DataLoader[Any]]:
    """A subclass of the loader's class in which iterating is followed, and whose copies are not followed."""

    def iterate(self: DataLoader[Any]) -> Iterator[Any]:
        follower = followed_by()
        assert follower is not None, "the loader's sampler holds a reference to it"
        return follow(follower, kind, self)

    def reduce(self: DataLoader[Any], protocol: Any) -> Any:
        # A copy is not followed.
        plain = kind.__new__(kind)
        follower = followed_by()
        plain.__dict__.update(self.__dict__ if follower is None else follower.plain_state(self))
        made = plain.__reduce_ex__(protocol)
        # pickle demands that an object made by copyreg has the class of the original.
        return (object.__new__, *made[1:]) if made[0] is copyreg.__newobj__ else made  # type: ignore[attr-defined]

    # The class has no second base: that would change the layout, and then `_become` could not set it.
    return type(kind.__name__, (kind,), {"__iter__": iterate, "__reduce_ex__": reduce, _MARK: kind})


def _follow(follower: Follower, kind: type[DataLoader[Any]], loader: DataLoader[Any]) -> _FollowedIterator:
    iteration = _Iteration(follower.around)
    # The loader iterates over its batch sampler now; or at its first batch, if its `__iter__` is a generator.
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
        """How many batches the loader workers have delivered, failed ones included; None without loader workers."""
        return getattr(self._iterator, "_rcvd_idx", None)

    def _took(self, batch: Any) -> None:
        indices = self._iteration.drawn.popleft() if self._iteration.drawn else None
        if self._iteration.around is not None:
            self._iteration.around.asked(self._iteration, indices)
        elif indices is not None:
            self._follower.planner.taken(self._iteration, len(indices))
            self._follower.taken(self._iteration, indices, batch)

    def _failed(self, before: int | None) -> None:
        """Forget the draws of batches that have failed: of one whose samples could not be read, or of none."""
        after = self._received
        drawn = self._iteration.drawn
        failed = len(drawn) if before is None or after is None else after - before
        for _ in range(min(failed, len(drawn))):
            indices = drawn.popleft()
            if indices is not None:
                self._follower.planner.taken(self._iteration, len(indices))

    def _ended(self) -> None:
        if self._iteration.around is not None:
            self._iteration.around.asked(self._iteration, None)
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
    """The iterator that accelerate's loader gives: its batches are on their device, one behind those it has taken."""

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
        given = self._iteration.given()
        if given is not None:
            drawing, indices = given
            self._follower.planner.taken(drawing, len(indices))
            self._follower.taken(self._iteration, indices, batch)

    def __del__(self) -> None:
        self._follower.boundary.enter(self._follower.over, self._iteration)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)


class _FollowedSampler:
    """A batch sampler (or a sampler, if the loader makes no batches) that notes its draws."""

    def __init__(self, sampler: Any, follower: Follower) -> None:
        self._sampler = sampler
        self._follower = follower

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: the sampler's own iterator must be made now, while `now` is the iteration that asks for it.
        iteration = self._follower.now
        if iteration is None:
            self._follower.boundary.enter(self._follower.say_elsewhere)
            return iter(self._sampler)
        return self._noted(iteration, self._follower.planner.draw(iteration))

    def _noted(self, iteration: _Iteration, drawing: Iterator[Any]) -> Iterator[Any]:
        for drawn in drawing:
            indices = indices_of(drawn)
            iteration.drawn.append(indices)
            if indices is not None:
                self._follower.boundary.enter(self._follower.planner.dispatched, iteration, len(indices))
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
        # A copy is not followed.
        return _itself, (self._sampler,)


def _itself(sampler: Any) -> Any:
    return sampler
