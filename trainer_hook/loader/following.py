"""Following a data loader: identifying the samples of the batch that the training loop has just taken.

Following changes two things. The loader's batch sampler becomes one that draws through a `Planner`, and its draws are
recorded. The loader's class becomes one whose iterator reports when the loop takes a batch, and when it leaves the
iterator. Attributes, isinstance and length answer as before. Nothing here keeps the loader alive: when a loader with
persistent workers was freed by the garbage collector, ending each worker took 5 s.
"""

from __future__ import annotations

import copyreg
import logging
import operator
import weakref
from collections.abc import Callable, Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainer_hook.isolation import ErrorBoundary
from trainer_hook.loader.accelerate import AccelerateAdapter, drawing_loader, is_wrapper, track_skipping
from trainer_hook.loader.epoch_order import Indices
from trainer_hook.loader.iterating import Listener, LoaderPass, TrackedIterator, Tracker
from trainer_hook.loader.planner import PlannedPass, Planner, epoch_sampler, has_state, indices_of
from trainer_hook.loader.repeating import KeptIterator, Rounds, index_sampler_of, is_repeating

log = logging.getLogger("trainer_hook")

# The attribute of a followed loader's class that has the class it had before.
_MARK = "_followed_by_spiderfs"


class Follower(Tracker):
    """Notifies the planner, and then the listener, when the loop takes a batch from `loader`.

    Raises ValueError for a loader that `check` refuses.
    """

    def __init__(
        self, loader: DataLoader[Any], planner: Planner, boundary: ErrorBoundary, listener: Listener | None
    ) -> None:
        self.check(loader)
        super().__init__(planner, boundary, listener)
        self.early = LoaderPass()
        """The next pass, if the loader makes its iterator before the loop asks for it (`StatefulDataLoader`)."""
        self.latest: Callable[[], TrackedIterator | None] = lambda: None
        self._said = False
        drawing = drawing_loader(loader)
        self.loader = weakref.ref(drawing)
        self._loaders = [self.loader]
        self._name = "sampler" if drawing.batch_sampler is None else "batch_sampler"
        self._original = index_sampler_of(drawing)
        self.rounds = (
            Rounds(planner.draw, planner.missed, self.samples_of, PlannedPass) if is_repeating(drawing) else None
        )
        # What another makes by the sampler's type, as Lightning does for its ranks, is of the own type.
        kind = type(self._original)

        def new(cls: type[_FollowedSampler], *args: Any, **options: Any) -> Any:
            return kind(*args, **options)

        followed: type[_FollowedSampler] = type("_FollowedSampler", (_FollowedSampler,), {"__new__": new})
        made: _FollowedSampler = object.__new__(followed)
        made._sampler, made._follower = self._original, self
        self._set_sampler(drawing, made)
        _become(drawing, _followed_class(type(drawing), weakref.ref(self), _follow))
        if is_wrapper(loader):
            self._loaders.append(weakref.ref(loader))
            _become(loader, _followed_class(type(loader), weakref.ref(self), _follow_wrapper))

    @staticmethod
    def check(loader: DataLoader[Any]) -> None:
        """Raise ValueError for what cannot be followed: what is no loader, or one without indices, or not in order.

        A loader that is followed already, or whose EpochSampler is for a data set of another length, is refused too.
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
        sampler = epoch_sampler(loader)
        dataset: object = loader.dataset
        if sampler is not None and isinstance(dataset, Sized) and sampler.samples != len(dataset):
            raise ValueError(
                f"the {type(sampler).__name__} draws from {sampler.samples} samples, and the data set has "
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

    def samples_of(self, iteration: PlannedPass, drawn: Any) -> Indices | None:
        """The samples of a batch that was drawn; the planner gets their number."""
        if (indices := indices_of(drawn)) is not None:
            self.boundary.call(self.planner.dispatched, iteration, len(indices))
        return indices

    def warn_of_other_loader(self) -> None:
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
        if issubclass(type(state.get(self._name)), _FollowedSampler):
            state[self._name] = self._original
        return state

    def _set_sampler(self, loader: DataLoader[Any], sampler: Any) -> None:
        if self.rounds is not None:
            self.rounds.set_sampler(loader, sampler, follow=sampler is not self._original)
            return
        # A DataLoader forbids setting the attribute; with persistent workers its iterator has a reference too.
        loader.__dict__[self._name] = sampler
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:
            iterator._index_sampler = sampler


def _become(loader: DataLoader[Any], kind: type[DataLoader[Any]]) -> None:
    # Accelerate's loader has a property `__class__` that names the class of the loader inside it.
    vars(object)["__class__"].__set__(loader, kind)


Follow = Callable[[Follower, type[DataLoader[Any]], DataLoader[Any]], Iterator[Any]]


def _followed_class(
    kind: type[DataLoader[Any]], followed_by: weakref.ref[Follower], follow: Follow
) -> type[DataLoader[Any]]:
    """A subclass of the loader's class in which iterating is followed; copies, and what is made by it, are not."""

    def new(cls: type[DataLoader[Any]], *args: Any, **options: Any) -> DataLoader[Any]:
        return kind(*args, **options)

    def iterate(self: DataLoader[Any]) -> Iterator[Any]:
        return follow(_known(followed_by), kind, self)

    def state_dict(self: Any) -> dict[str, Any]:
        follower = _known(followed_by)
        if getattr(self, "_iterator", None) is None:
            follower.early = follower.now = LoaderPass()
        try:
            return kind.state_dict(self)  # type: ignore[attr-defined, no-any-return]
        finally:
            follower.now = None

    def reduce(self: DataLoader[Any], protocol: Any) -> Any:
        # A copy is not followed.
        plain = kind.__new__(kind)
        follower = followed_by()
        plain.__dict__.update(self.__dict__ if follower is None else follower.plain_state(self))
        made = plain.__reduce_ex__(protocol)
        # pickle demands that an object made by copyreg has the class of the original.
        return (object.__new__, *made[1:]) if made[0] is copyreg.__newobj__ else made  # type: ignore[attr-defined]

    followed: dict[str, Any] = {"__new__": new, "__iter__": iterate, "__reduce_ex__": reduce, _MARK: kind}
    if has_state(kind) and follow is _follow:
        followed["state_dict"] = state_dict
    # The class has no second base: that would change the layout, and then `_become` could not set it.
    return type(kind.__name__, (kind,), followed)


def _known(followed_by: weakref.ref[Follower]) -> Follower:
    follower = followed_by()
    assert follower is not None, "the loader's sampler holds a reference to it"
    return follower


def _follow(follower: Follower, kind: type[DataLoader[Any]], loader: DataLoader[Any]) -> TrackedIterator:
    early = getattr(loader, "_initial_iter_for_state_dict", False)
    iteration = follower.early if early else follower.new_pass()
    source = None
    if follower.rounds is not None:
        source, iteration.drawn = KeptIterator(loader), follower.rounds.follow(loader)
    # The loader iterates over its batch sampler now; or at its first batch, if its `__iter__` is a generator.
    follower.now = iteration
    try:
        iterator = kind.__iter__(loader)
    finally:
        follower.now = None
    before = follower.latest()
    if before is not None:
        before.hand_over(iterator, iteration)
    made = TrackedIterator(iterator, follower, iteration, iterator if source is None else source)
    follower.latest = weakref.ref(made)
    return made


def _follow_wrapper(follower: Follower, kind: type[DataLoader[Any]], loader: DataLoader[Any]) -> AccelerateAdapter:
    return AccelerateAdapter(kind.__iter__(loader), follower)


class _FollowedSampler:
    """A batch sampler (or a sampler, if the loader makes no batches) whose draws are recorded."""

    _sampler: Any
    _follower: Follower

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: the sampler's own iterator must be made now, while `now` is the iteration that asks for it.
        follower = self._follower
        if follower.rounds is not None:
            return follower.rounds.begin()
        iteration = follower.now or follower.boundary.call(track_skipping, follower, self)
        if iteration is None:
            follower.boundary.call(follower.warn_of_other_loader)
            return iter(self._sampler)
        # If the loader makes a second iterator for this pass, it does not use the first.
        iteration.drawn.clear()
        return follower.planner.draw(
            iteration, lambda drawn: iteration.drawn.append((iteration, follower.samples_of(iteration, drawn)))
        )

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
        return operator.getitem, ((self._sampler,), 0)
