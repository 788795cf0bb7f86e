"""The passes over a followed loader: which samples are in the batch that the loop has just taken.

A pass notes what is drawn for it (`following.py`), and takes that in order when the loop takes the batches. By the
loader's own count it knows which draws are skipped: those that a training has consumed before it goes on.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data.dataloader import _BaseDataLoaderIter

from trainer_hook.isolation import ErrorBoundary, callers
from trainer_hook.loader.epoch_order import Indices
from trainer_hook.loader.planner import Planner


class Listener(Protocol):
    """An object that is told what the loop does with the loader."""

    def taken(self, iteration: object, indices: Indices, batch: Any) -> None:
        """The loop has taken this batch, which has these samples."""

    def over(self, iteration: object) -> None:
        """The iteration gives no more batches: it has ended, or the loop has left it."""


class Passes:
    """The passes over one loader: the planner, and then the listener, hear of them through the boundary."""

    def __init__(self, planner: Planner, boundary: ErrorBoundary, listener: Listener | None) -> None:
        self.planner = planner
        self.boundary = boundary
        self.listener = listener
        self.now: Iteration | None = None
        """The pass for which the loader draws now."""
        self.around: IterationAround | None = None

    def taken(self, iteration: Iteration, drawn_for: object, indices: Indices, batch: Any) -> None:
        self.planner.taken(drawn_for, len(indices))
        if self.listener is not None:
            self.listener.taken(iteration.around or iteration, indices, batch)

    def over(self, iteration: Iteration | IterationAround) -> None:
        if self.listener is not None:
            self.listener.over(iteration)


class Iteration:
    """One pass over the loader: the indices of the batches that were drawn for it and not taken yet.

    If another loader wraps this one, `around` is the pass over the wrapper that this pass serves. `first` is how many
    batches the loader's iterator counts before the first of `drawn`.
    """

    def __init__(self, around: IterationAround | None = None, first: int = 0) -> None:
        # Each batch stands beside the pass or the round (`repeating.py`) that it was drawn for.
        self.drawn: deque[tuple[object, Indices | None]] = deque()
        self.around = around
        self.first = first

    def next(self) -> tuple[object, Indices | None]:
        """What the next batch was drawn for, and its samples; None if they are not known."""
        self.first += 1
        return self.drawn.popleft() if self.drawn else (self, None)


class IterationAround:
    """One pass over accelerate's loader, which takes the next batch, or sees the end, before it gives a batch."""

    def __init__(self) -> None:
        self._asked = 0
        self._taken: dict[int, tuple[Iteration, object, Indices, Any]] = {}

    def asked(self, iteration: Iteration, drawn_for: object, indices: Indices | None, batch: Any = None) -> None:
        """The loader has asked that pass for a batch and got one with these samples, or none (None)."""
        if indices is not None:
            self._taken[self._asked] = iteration, drawn_for, indices, batch
        self._asked += 1

    def given(self) -> tuple[Iteration, object, Indices, Any] | None:
        """The batch that the loader gives now: its pass, what it was drawn for, its samples, and the batch as asked."""
        given = self._asked - 2
        batch = self._taken.get(given)
        self._taken = {number: taken for number, taken in self._taken.items() if number > given}
        return batch


class FollowedIterator:
    """The iterator of a followed loader, which takes its batches from `source`."""

    def __init__(self, iterator: Iterator[Any], passes: Passes, iteration: Iteration, source: Any) -> None:
        self._iterator = iterator
        self._source = source
        self._passes = passes
        self._iteration = iteration
        self._unread: list[tuple[object, Indices | None]] = []
        """Batches that have failed since the last one that the loop took."""
        if self._given and not isinstance(getattr(iterator, "_sampler_iter", None), itertools.islice):
            # A loader that goes on (torchdata's) counts the batches that it gave before. Its sampler draws the rest, of
            # which the loader may leave out some; or it draws all, and the loader leaves out what it gave before.
            iteration.first += self._given - (self._received or 0)

    def __iter__(self) -> FollowedIterator:
        return self

    def __next__(self) -> Any:
        call = self._passes.boundary.call
        self._passes.now = self._iteration
        before = self._received
        try:
            batch = next(self._iterator)
        except StopIteration:
            call(self._ended)
            raise
        except BaseException:
            call(self._failed, before)
            raise
        finally:
            self._passes.now = None
        call(self._took, batch)
        return batch

    @property
    def _given(self) -> int | None:
        """How many batches the loader has given in this epoch; None if its iterator does not count them."""
        return getattr(self._iterator, "_num_yielded", None)

    @property
    def _received(self) -> int | None:
        """How many batches the loader workers have delivered, failed ones included; None without loader workers."""
        return getattr(self._source, "_rcvd_idx", None)

    def _took(self, batch: Any) -> None:
        self._pass_over_unread()
        self._pass_over_to((self._given or 0) - 1)
        drawn_for, indices = self._iteration.next()
        if self._iteration.around is not None:
            self._iteration.around.asked(self._iteration, drawn_for, indices, batch)
        elif indices is not None:
            self._passes.taken(self._iteration, drawn_for, indices, batch)

    def _pass_over_to(self, given: int) -> None:
        """The loader has given `given` batches; the loop will not get those that it has not got from here."""
        while self._iteration.first < given and self._iteration.drawn:
            self._passed_over(*self._iteration.next())

    def _passed_over(self, drawn_for: object, indices: Indices | None) -> None:
        """The loop will not see this batch: it has failed, or was consumed before."""
        if indices is not None:
            self._passes.planner.taken(drawn_for, len(indices))

    def _pass_over_unread(self) -> None:
        for failed in self._unread:
            self._passed_over(*failed)
        self._unread.clear()

    def _failed(self, before: int | None) -> None:
        """Set aside the draws of batches that have failed: of one whose samples could not be read, or of none.

        They are passed over when the loop goes on. A training that ends here has not consumed them.
        """
        after = self._received
        drawn = self._iteration.drawn
        failed = len(drawn) if before is None or after is None else after - before
        self._unread += [drawn.popleft() for _ in range(min(failed, len(drawn)))]

    def _ended(self) -> None:
        self._pass_over_unread()
        if self._iteration.around is not None:
            self._iteration.around.asked(self._iteration, self._iteration, None)
        else:
            self._passes.over(self._iteration)

    def _left(self) -> None:
        self._passes.planner.left(self._iteration)
        if self._iteration.around is None:
            self._passes.over(self._iteration)

    def __del__(self) -> None:
        self._passes.boundary.call(self._left)

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)


class FollowedIteratorAround:
    """The iterator that accelerate's loader gives: its batches are on their device, one behind those it has taken."""

    def __init__(self, iterator: Iterator[Any], passes: Passes) -> None:
        self._iterator = iterator
        self._passes = passes
        self._iteration = IterationAround()

    def __iter__(self) -> FollowedIteratorAround:
        return self

    def __next__(self) -> Any:
        passes = self._passes
        before, passes.around = passes.around, self._iteration
        try:
            batch = next(self._iterator)
        except StopIteration:
            passes.boundary.call(passes.over, self._iteration)
            raise
        finally:
            passes.around = before
        passes.boundary.call(self._took, batch)
        return batch

    def _took(self, batch: Any) -> None:
        given = self._iteration.given()
        if given is not None:
            self._passes.taken(*given[:3], batch)

    def __del__(self) -> None:
        self._passes.boundary.call(self._passes.over, self._iteration)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)


class _FollowedInside(FollowedIterator):
    """The iterator of a loader that nobody follows, which draws from a followed one's sampler, and skips some batches.

    It may be within accelerate's loader, which gives the batches one behind.
    """

    def __init__(self, iterator: Any, passes: Passes, iteration: Iteration) -> None:
        super().__init__(iterator, passes, iteration, iterator)
        self._over = False

    def _took(self, batch: Any) -> None:
        super()._took(batch)
        self._give()

    def _ended(self) -> None:
        self._pass_over_to(self._given or 0)
        super()._ended()
        self._give()

    def _give(self) -> None:
        given = None if self._iteration.around is None else self._iteration.around.given()
        if given is not None:
            self._passes.taken(*given)

    def _left(self) -> None:
        if not self._over:
            self._over = True
            super()._left()
            if self._iteration.around is not None:
                self._passes.over(self._iteration.around)


class _Inner:
    """An iterator as its class made it, though it has become one of a subclass; this does not keep it alive."""

    def __init__(self, iterator: Any) -> None:
        self._reference = weakref.ref(iterator)
        self._kind = type(iterator)

    def __next__(self) -> Any:
        return self._kind.__next__(self._reference())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_reference"](), name)


def follow_skipping(passes: Passes, sampler: object) -> Iteration | None:
    """Follow the iterator that draws from this sampler now, if it is of a loader by accelerate's `skip_first_batches`.

    That loader draws from the sampler of the loader that it was made of, and leaves out the first batches. To be called
    by what the iterator calls; returns None if there is none.
    """
    iterator: Any = None
    around = None
    for caller in callers():
        if iterator is None and isinstance(caller, _BaseDataLoaderIter):
            iterator = caller
        elif iterator is not None and type(caller).__name__ == "DataLoaderShard":
            around = IterationAround()
            break
    drawing: Any = None if iterator is None else iterator._index_sampler
    if type(drawing).__name__ != "SkipBatchSampler" or drawing.batch_sampler is not sampler:
        return None
    iteration = Iteration(around, first=-drawing.skip_batches)
    following = _FollowedInside(_Inner(iterator), passes, iteration)
    kind = type(iterator)

    def end(self: Any) -> None:
        passes.boundary.call(following._left)
        getattr(kind, "__del__", lambda _: None)(self)

    # An iterator that is drawing already cannot be replaced by another one, but it can become one of another class.
    iterator.__class__ = type(kind.__name__, (kind,), {"__next__": lambda _: next(following), "__del__": end})
    return iteration
