"""Publishing what a loader will read: each epoch as a whole when it begins, the next ones where they can be known.

An epoch is **rehearsed** (`rehearsal.py`) when the loader asks for its first batch: a copy of the sampler draws it,
that is published, and the sampler itself draws when the loader asks. So a loader with a plan draws exactly what it
draws without. A sampler that cannot be rehearsed is not planned, and one that draws something else than was rehearsed
is not planned any more; both are said. A SpiderSampler, and any sampler with `draw_ahead`, is drawn to its end at once
instead: the former's draws follow from nothing that anybody else changes, and the latter is the user's leave to draw
otherwise.

The next epoch is published beforehand in one of three ways: foreseen (`next_epoch.py`) when this one has begun;
drawn by a SpiderSampler when as much of this one as it says has been handed out; or, with `draw_ahead`, drawn when its
last batch has been handed out, from any sampler, and kept for the next iteration. What was foreseen wrongly costs what
the daemon fetched for it, so after two mistakes nothing is foreseen any more.

Where samples are drawn with replacement the epoch after the next is foreseen too: many samples that the cache has room
for are not drawn in the next one. (With three quarters cached, knowing two epochs costs 7 % more bytes than knowing
three; at a fifth, nothing: benchmarks/training/lookahead.py.) Where each sample is drawn once the daemon has no use for
that.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from spiderfs.protocol import DEFAULT_LIMITS, Plan
from trainer_hook.boundary import Boundary
from trainer_hook.client import Client
from trainer_hook.next_epoch import NextEpoch, batches_of
from trainer_hook.rehearsal import Rehearsal, why_not
from trainer_hook.sampler import SpiderSampler

log = logging.getLogger("trainer_hook")

_MISTAKES_MAX = 2
# Epochs after the current one, of samplers that draw with replacement.
_FORESEEN_MAX = 2

Indices = npt.NDArray[np.uint32]


def indices_of(drawn: Any) -> Indices | None:
    """The indices of what a sampler drew at once; None if it drew something else."""
    try:
        return np.atleast_1d(np.asarray(drawn, dtype=np.uint32))
    except (ValueError, TypeError, OverflowError):
        return None


def _order(batches: Iterable[Any]) -> Indices | None:
    parts = [indices_of(batch) for batch in batches]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return np.concatenate([np.empty(0, np.uint32), *known])


def _repeats(order: Indices | None) -> bool:
    """Whether some index is drawn more than once."""
    return order is not None and len(order) > 0 and int(np.bincount(order).max()) > 1


class Planner:
    """Stands between one loader's index sampler and the loader, for the list `name` of `client`, of so many samples.

    With `publish` false it draws nothing beforehand; a SpiderSampler is told of its scores and position all the same.
    `draw_ahead` is for samplers whose next epoch cannot be known: it is really drawn before this one has ended.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        client: Client,
        name: str,
        *,
        boundary: Boundary,
        samples: int,
        publish: bool = True,
        draw_ahead: bool = False,
    ) -> None:
        self._client = client
        self._boundary = boundary
        self._samples = samples
        self._name = name
        self._index_sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self.sampler = _spider_sampler(loader)
        self._rehearses = self.sampler is None and not draw_ahead
        self._next_epoch = NextEpoch(loader, self._index_sampler)
        self._publish = publish and self._can_be_planned()
        self._draws_ahead = draw_ahead
        self._ahead: deque[Any] | None = None
        # What was published of epochs to come, by their numbers.
        self._foreseen: dict[int, Indices] = {}
        self._mistakes = 0
        # The iteration that began last, its number, how many samples it is planned to draw and the loop has taken.
        self._current: object = None
        self._epoch = -1
        self._planned = 0
        self._position = 0
        # Whether that iteration has drawn to its end.
        self._ended = False
        if self.sampler is not None:
            self.sampler.bind(client, name, _whole_batches(loader))

    def close(self) -> None:
        self._publish = False
        if self.sampler is not None:
            self.sampler.unbind()

    # -- what the follower calls

    def draw(self, iteration: object) -> Iterator[Any]:
        """What the index sampler draws for this iteration over the loader, to be called when the loader asks for that.

        The sampler makes its iterator now, for some have drawn everything by then; the rest begins at the first batch.
        """
        if self._ahead is not None:
            return self._draw(iteration, iter(()), None)
        rehearsal = None
        if self._publish and self._rehearses:
            rehearsal = self._boundary.enter(Rehearsal, self._index_sampler)
        return self._draw(iteration, iter(self._index_sampler), rehearsal)

    def _draw(self, iteration: object, drawing: Iterator[Any], rehearsal: Rehearsal | None) -> Iterator[Any]:
        self._current, self._position, self._planned, self._ended = iteration, 0, 0, False
        batches, self._ahead = self._ahead, None
        if not self._publish:
            yield from drawing if batches is None else batches
            return
        if batches is None:
            # One more than its length, so that it comes to its end. If it goes on for ever, the rest is not planned.
            most = len(self._index_sampler) + 1
            if rehearsal is None:
                batches = deque(itertools.islice(drawing, most))
            else:
                batches = deque(self._boundary.enter(rehearsal.draw, most) or ())
        self._boundary.enter(self._begin_with, batches)
        ended = self._index_sampler if rehearsal is None else rehearsal.sampler
        planned = self._as_planned(iteration, batches, ended)
        if rehearsal is None:
            yield from planned
            yield from drawing
        else:
            yield from self._as_rehearsed(iteration, drawing, planned)
        if iteration is self._current:
            self._ended = True

    def _as_planned(self, iteration: object, batches: deque[Any], ended: Any) -> Iterator[Any]:
        """The batches one by one; in between later epochs become known. `ended` is the sampler at this one's end."""
        settled = 1.0 if self.sampler is None else self.sampler.settled
        look_ahead_at = max(1, round(len(batches) * (1 - settled)))
        foreseen = False
        while batches:
            if len(batches) == look_ahead_at:
                self._boundary.enter(self._look_ahead)
            yield batches.popleft()
            if not foreseen and iteration is self._current:
                # Not before the first batch has gone: of a million samples it takes some tenths of a second.
                self._boundary.enter(self._foresee_after, ended)
                foreseen = True

    def _as_rehearsed(self, iteration: object, drawing: Iterator[Any], planned: Iterator[Any]) -> Iterator[Any]:
        """What the sampler draws, for as long as that is what was planned."""
        for drawn in drawing:
            if self._publish and not _same(drawn, next(planned, drawn)):
                self._give_up("its sampler draws something else than a copy of it did")
                if iteration is self._current:
                    self._withdraw()
            yield drawn
        # Lets the epochs to come be known after a last batch that was the first, too.
        if self._publish and next(planned, None) is not None:
            self._give_up("its sampler draws less than a copy of it did")

    def taken(self, iteration: object, samples: int) -> None:
        """The loop has taken a batch of so many samples in this iteration."""
        if iteration is self._current:
            self._position += samples
            self._client.reached(self._name, self._position)
            if self.sampler is not None:
                self.sampler.took(samples)

    def left(self, iteration: object) -> None:
        """The loop has let go of this iteration: what it has not taken will not be read."""
        if not self._publish or iteration is not self._current:
            return
        if self._rehearses and not self._ended:
            # What follows was foreseen for an epoch that comes to its end.
            self._foreseen.clear()
            self._foresee(self._index_sampler)
        if self._position < self._planned:
            self._withdraw()

    def _withdraw(self) -> None:
        """Nothing more will be read of this epoch, as far as is known."""
        self._planned = 0
        self._client.plan(Plan(self._name, self._epoch, 0, True, np.empty(0, np.uint32)))

    # -- publishing

    def _begin_with(self, batches: Iterable[Any]) -> None:
        order = _order(batches)
        if order is None or len(order) > DEFAULT_LIMITS.samples:
            self._give_up("its sampler draws more, or something else, than a list of indices")
        elif not self._has_all(order):
            self._give_up("its sampler draws indices that the list of samples does not have")
        else:
            self._begin(order)

    def _has_all(self, order: Indices) -> bool:
        return not len(order) or int(order.max()) < self._samples

    def _begin(self, order: Indices) -> None:
        self._epoch += 1
        self._planned = len(order)
        self._client.plan(Plan(self._name, self._epoch, 0, True, order))
        foreseen = self._foreseen.pop(self._epoch, order)
        if not np.array_equal(foreseen, order):
            self._mistakes += 1
            # What was to follow it will not come either, and the daemon knows that.
            self._foreseen.clear()

    def _foresee_after(self, ended: Any) -> None:
        self._next_epoch.drawn()
        self._foresee(ended)

    def _foresee(self, ended: Any) -> None:
        """Publish the epochs to come where they can be known from the index sampler as it is before them."""
        if not self._publish or self._mistakes >= _MISTAKES_MAX:
            return
        for passed in range(_FORESEEN_MAX):
            number = self._epoch + 1 + passed
            if number not in self._foreseen:
                self._publish_ahead(number, self._next_epoch.foresee(ended, passed))
            if not _repeats(self._foreseen.get(number)):
                return

    def _look_ahead(self) -> None:
        number = self._epoch + 1
        if not self._publish or number in self._foreseen:
            return
        if self.sampler is not None:
            indices = self.sampler.draw_ahead()
            self._publish_ahead(number, None if indices is None else batches_of(self._index_sampler, indices))
        elif self._draws_ahead:
            self._ahead = deque(self._index_sampler)
            self._publish_ahead(number, self._ahead)

    def _publish_ahead(self, number: int, batches: Iterable[Any] | None) -> None:
        order = None if batches is None else _order(batches)
        if order is not None and self._has_all(order):
            self._foreseen[number] = order
            self._client.plan(Plan(self._name, number, 0, False, order))

    def _can_be_planned(self) -> bool:
        try:
            len(self._index_sampler)
        except (TypeError, NotImplementedError):
            log.warning("the loader's sampler has no length, so its epochs are not planned")
            return False
        reason = why_not(self._index_sampler) if self._rehearses else None
        if reason is not None:
            log.warning("the loader's epochs are not planned, for a plan must not change what is drawn: %s", reason)
        return reason is None

    def _give_up(self, reason: str) -> None:
        self._publish = False
        log.warning("the loader's epochs are not planned any more: %s", reason)


def _spider_sampler(loader: DataLoader[Any]) -> SpiderSampler | None:
    for place in (loader, loader.batch_sampler):
        sampler = getattr(place, "sampler", None)
        if isinstance(sampler, SpiderSampler):
            return sampler
    return None


def _whole_batches(loader: DataLoader[Any]) -> int:
    """How many samples there have to be for another batch: all of one where the loader leaves out the last, or one."""
    batches = loader.batch_sampler
    return int(getattr(batches, "batch_size", 1)) if getattr(batches, "drop_last", False) else 1


def _same(drawn: Any, planned: Any) -> bool:
    return np.array_equal(np.asarray(drawn), np.asarray(planned))
