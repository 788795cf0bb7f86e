"""Tracking the passes over a loader: which samples are in the batch that the loop has just taken.

A pass notes what is drawn for it (`following.py`), and takes that in order when the loop takes the batches. By the
loader's own count it knows which draws are skipped: those that a training has consumed before it goes on.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from trainer_hook.isolation import ErrorBoundary
from trainer_hook.loader.epoch_order import Indices
from trainer_hook.loader.planner import PlannedPass, Planner


class Listener(Protocol):
    """An object that is notified of what the loop does with the loader."""

    def taken(self, iteration: object, indices: Indices, batch: Any) -> None:
        """The loop has taken this batch, which has these samples."""

    def over(self, iteration: object) -> None:
        """The iteration gives no more batches: it has ended, or the loop has left it."""


class Tracker:
    """What the iterators over one loader share: through it they notify the planner, and then the listener."""

    def __init__(self, planner: Planner, boundary: ErrorBoundary, listener: Listener | None) -> None:
        self.planner, self.boundary, self.listener = planner, boundary, listener
        self.now: LoaderPass | None = None
        """The pass for which the loader draws now."""
        self.new_pass: Callable[[], LoaderPass] = LoaderPass
        """Makes the next pass over the loader; a wrapper of it has a kind of its own (`accelerate.py`)."""

    def taken(self, iteration: object, drawn_for: PlannedPass, indices: Indices, batch: Any) -> None:
        self.planner.taken(drawn_for, len(indices))
        if self.listener is not None:
            self.listener.taken(iteration, indices, batch)

    def over(self, iteration: object) -> None:
        if self.listener is not None:
            self.listener.over(iteration)


class LoaderPass(PlannedPass):
    """One pass over the loader: the indices of the batches that were drawn for it and not taken yet.

    `first` is how many batches the loader's iterator counts before the first of `drawn`.
    """

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        # Each batch stands beside the pass or the round (`repeating.py`) that it was drawn for.
        self.drawn: deque[tuple[PlannedPass, Indices | None]] = deque()
        self.first = first

    def next(self) -> tuple[PlannedPass, Indices | None]:
        """What the next batch was drawn for, and its samples; None if they are not known."""
        self.first += 1
        return self.drawn.popleft() if self.drawn else (self, None)

    def delivered(self, tracker: Tracker, drawn_for: PlannedPass, indices: Indices | None, batch: Any) -> None:
        """The loader's iterator has returned this batch."""
        if indices is not None:
            tracker.taken(self, drawn_for, indices, batch)

    def ended(self, tracker: Tracker) -> None:
        """The loader's iterator has come to its end."""
        tracker.planner.left(self, asked=True)
        tracker.over(self)

    def left(self, tracker: Tracker) -> None:
        """The loader's iterator is asked no more."""
        tracker.planner.left(self)
        tracker.over(self)


class TrackedIterator:
    """An iterator over a followed loader, which takes its batches from `source`."""

    def __init__(self, iterator: Iterator[Any], tracker: Tracker, iteration: LoaderPass, source: Any) -> None:
        self._iterator, self._source = iterator, source
        self._tracker, self._iteration = tracker, iteration
        self._unread: list[tuple[PlannedPass, Indices | None]] = []
        """Batches that have failed since the last one that the loop took."""
        self._is_left = False
        if self._given and not isinstance(getattr(iterator, "_sampler_iter", None), itertools.islice):
            # A loader that goes on (torchdata's) counts the batches that it gave before. Its sampler draws the rest, of
            # which the loader may leave out some; or it draws all, and the loader leaves out what it gave before.
            iteration.first += self._given - (self._received or 0)

    def __iter__(self) -> TrackedIterator:
        return self

    def __next__(self) -> Any:
        call = self._tracker.boundary.call
        self._tracker.now = self._iteration
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
            self._tracker.now = None
        call(self._took, batch)
        return batch

    def hand_over(self, iterator: Iterator[Any], iteration: LoaderPass) -> None:
        """Where workers stay, the loader has one iterator: batches that this pass takes then are of the later pass."""
        if iterator is self._iterator:
            self._tracker.boundary.call(self._tracker.planner.left, self._iteration)
            self._iteration = iteration

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
        self._iteration.delivered(self._tracker, drawn_for, indices, batch)

    def _pass_over_to(self, given: int) -> None:
        """The loader has given `given` batches; the loop will not get those that it has not got from here."""
        while self._iteration.first < given and self._iteration.drawn:
            self._passed_over(*self._iteration.next())

    def _passed_over(self, drawn_for: PlannedPass, indices: Indices | None) -> None:
        """The loop will not see this batch: it has failed, or was consumed before."""
        if indices is not None:
            self._tracker.planner.taken(drawn_for, len(indices))

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
        self._pass_over_to(self._given or 0)
        self._iteration.ended(self._tracker)

    def leave(self) -> None:
        """Say that the iterator is asked no more."""
        if not self._is_left:
            self._is_left = True
            self._tracker.boundary.call(self._iteration.left, self._tracker)

    def __del__(self) -> None:
        self.leave()

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_iterator"], name)
