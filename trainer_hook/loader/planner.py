"""The planner publishes the reads of a loader: each epoch when it begins, and later epochs if they can be known.

When the loader asks for the first batch of an epoch, a copy of the sampler draws the whole epoch (`rehearsal.py`), and
that is published. The sampler itself draws when the loader asks, so a loader draws exactly the same with a plan and
without. If a sampler cannot be rehearsed, or draws something else than its copy did, its (later) epochs are not
planned; both are logged. An EpochSampler, and any sampler with `draw_ahead`, is drawn to the end at once instead.

The next epoch is published before it begins if it is foreseen (`NextEpoch`), drawn ahead by an EpochSampler
(`settled`), or, with `draw_ahead`, drawn when the loader has got the last batch of this one. After a wrong plan the
daemon has fetched samples in vain, so after two mistakes no epoch is foreseen any more. If samples are drawn with
replacement, the epoch after the next is foreseen too, because the cache has room for many samples that the next epoch
does not draw. (With three quarters cached that saves 7 % of the bytes: benchmarks/training/lookahead.py.)

With `share`, batches are exchanged with other jobs (`exchange.py`): of the sampler's batches only the lengths count. If
the loader is refurbished for one job, a plan has only the samples whose files are opened: those of a generation that
this rank has not drawn before.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from spiderfs.protocol import DEFAULT_LIMITS, Plan
from trainer_hook.connection.client import HookClient
from trainer_hook.isolation import ErrorBoundary
from trainer_hook.loader.epoch_order import EpochOrder, Indices
from trainer_hook.loader.exchange import Exchanging, like, repeats, why_not_replaced
from trainer_hook.loader.rehearsal import NextEpoch, Rehearsal, batches_of, sampler_of, why_not
from trainer_hook.loader.repeating import index_sampler_of, is_repeating, recorded
from trainer_hook.ranges.sample_ranges import SampleGrid, first_of
from trainer_hook.ranks import share_of_rank
from trainer_hook.refurbishing.sampler import RefurbishSampler
from trainer_hook.resuming import EpochProgress, JobOrder, Pass, Passes, check_list, hash_of, number_of_run, restored
from trainer_hook.samplers.epoch import EpochSampler, SampledEpoch

log = logging.getLogger("trainer_hook")

_MISTAKES_MAX = 2
# This many epochs after the current one are foreseen, if the sampler draws with replacement; otherwise one.
_FORESEEN_MAX = 2
_INDEX_MAX = 2**32 - 1
# In the place of a generation: the sample is made again at each use, or was not made yet.
_NOT_KEPT, _NOT_MADE = -1, -2
Opened = npt.NDArray[np.bool_]
# In the place of the state of a sampler's iterator.
_REPLACED = "the samples are not those that the sampler drew"


def indices_of(drawn: Any) -> Indices | None:
    """The indices that a sampler drew at once: an index or a batch of them; None if it drew anything else."""
    try:
        found = np.atleast_1d(np.asarray(drawn))
    except (ValueError, TypeError, RuntimeError):
        return None
    if not found.size:
        return np.empty(0, np.uint32)
    whole = found.ndim == 1 and found.dtype.kind in "iu" and found.min() >= 0 and found.max() <= _INDEX_MAX
    return found.astype(np.uint32) if whole else None


def _order(batches: Iterable[Any]) -> Indices | None:
    """The indices of all batches, in order; None if a batch has anything else."""
    parts = [indices_of(batch) for batch in batches]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return np.concatenate([np.empty(0, np.uint32), *known])


class PlannedPass(Pass):
    """What the planner knows of one pass over the loader."""

    def __init__(self) -> None:
        self.epoch = -1
        self.order: Indices = np.empty(0, np.uint32)
        """What this rank reads in its epoch, if that was planned."""
        # The number of samples in its plan, how many of them the loader's workers were given, how many the loop has
        # taken, and how many of these with its last batch.
        self.planned = self.dispatched = self.taken = self.last = 0
        # Where the loader is refurbished: the generation of each sample, and whether its file is opened to make it. The
        # plan has only these.
        self.generations: npt.NDArray[np.int64] | None = None
        self.opened: Opened | None = None
        # Where the plan has others than the samples, or not all: the position in it of each, and after the last.
        self.positions: npt.NDArray[np.int64] | None = None
        # What the loader gets in the place of the samples of a draw; None if it gets those.
        self.replace: Callable[[Sequence[int]], list[int]] | None = None
        self.exchanging: Exchanging | None = None
        # What this and other ranks read in the epoch; None if that is not known.
        self.job_order: JobOrder | None = None
        # The epoch as an EpochSampler has it.
        self.sampled: SampledEpoch | None = None
        # The state with whose epoch it goes on.
        self.progress: EpochProgress | None = None
        # Whether the training has said that its epoch is over, and whether the sampler has drawn to its end.
        self.is_done = self.has_drawn = False


class Planner:
    """Stands between a loader and its index sampler, and publishes plans for the list `name` through `client`.

    `names` are those of the list. With `publish` false, nothing is drawn beforehand and nothing is published; a
    EpochSampler still gets its scores and its position. With `draw_ahead` the sampler draws its next epoch before the
    current one has ended. The first epoch has the number `first_epoch`. `grid` has the extents of samples that are
    ranges; before each epoch `new_grid` gives one that has taken its place, if there is one.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        client: HookClient,
        name: str,
        *,
        boundary: ErrorBoundary,
        names: Sequence[bytes],
        publish: bool = True,
        draw_ahead: bool = False,
        first_epoch: int = 0,
        share: bool = False,
        grid: SampleGrid | None = None,
        new_grid: Callable[[], SampleGrid | None] = lambda: None,
    ) -> None:
        self._client = client
        self.boundary = boundary
        self._grid, self._new_grid = grid, new_grid
        self.names, self.samples = names, len(names) if grid is None else grid.samples
        self.list = name
        self._index_sampler = index_sampler_of(loader)
        self._repeats = is_repeating(loader)
        sampler = sampler_of(self._index_sampler)
        # The generation of each sample that a refurbished loader has made, or is making; other jobs make theirs too.
        self._made: npt.NDArray[np.int64] | None = None
        if isinstance(sampler, RefurbishSampler) and sampler.shared is None:
            self._made = np.full(self.samples, _NOT_MADE, np.int64)
        self._dataset = loader.dataset
        self.sampler = epoch_sampler(loader)
        # A loader that saves its sampler's state knows its next epochs, and a sampler that is ahead has a wrong state.
        draw_ahead = draw_ahead and not has_state(loader)
        self._rehearses = self.sampler is None and not draw_ahead
        self._next_epoch = NextEpoch(loader, self._index_sampler)
        self._publish = publish and self._can_be_planned()
        self._shares = share and self._publish
        # The progress with which the training goes on, until the epoch begins.
        self._restored: EpochProgress | None = None
        self._may_be_look = False
        # How many samples a further batch needs: a full batch if the loader drops an incomplete last one, else 1.
        drops_last = getattr(self._index_sampler, "drop_last", False)
        self._whole = int(getattr(self._index_sampler, "batch_size", 1)) if drops_last else 1
        self._draws_ahead = draw_ahead
        self._ahead: deque[Any] | None = None
        # The published plans of later epochs, by their numbers.
        self._foreseen: dict[int, Indices] = {}
        self._mistakes = 0
        self._passes: Passes[PlannedPass] = Passes()
        # The pass whose plan the daemon has, and the number of its epoch.
        self._current = PlannedPass()
        self._epoch = first_epoch - 1
        # Which planner of the list's this is, as all ranks count them.
        self._number: int | None = None
        if self.sampler is not None:
            self.sampler.bind(client, name, self._whole)

    def close(self) -> None:
        """Publish nothing more."""
        self._publish = False
        if self._current.exchanging is not None:
            self._current.exchanging.stop()
        if self.sampler is not None:
            self.sampler.unbind()

    # -- a training that goes on

    def state_dict(self, done: bool = True) -> dict[str, Any]:
        """See `Planning.state_dict`. To be called by the training's thread."""
        now = self._passes.now or PlannedPass()
        taken = now.taken - (0 if done else now.last)
        if self.sampler is not None:
            # A pass of which nothing was taken yet may have begun to draw.
            self._settle_sampler()
            ask = self.sampler.state_dict
            return self._list | (ask() if done else self.sampler.at_position(taken, ask))
        if self._restored is not None:
            return self._restored.state() | self._list
        if self._passes.now is None or now.is_done or (self._repeats and not now.taken):
            return {}
        if now.job_order is None or self._repeats:
            why = "the loader repeats its sampler" if self._repeats else "the mount has no plan of it"
            log.warning("the state has no place in the epoch, as %s: it begins again", why)
            return {}
        return {} if taken >= len(now.job_order) else now.job_order.progress(taken).state() | self._list

    @functools.cached_property
    def _list(self) -> dict[str, Any]:
        """What a state says of its list. To hash a million names takes a tenth of a second."""
        return {"samples": self.samples, "names": hash_of(self.names)}

    @property
    def batches_left(self) -> int | None:
        """How many batches this rank reads of an epoch that is about to go on; None if none is."""
        if self.sampler is not None:
            left = self.sampler.left_to_draw
        else:
            left = 0 if self._restored is None else len(share_of_rank(self._restored.order[self._restored.consumed :]))
        batch = int(getattr(self._index_sampler, "batch_size", None) or 1)
        return -(-(left // self._whole * self._whole) // batch) or None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Planning.load_state_dict`; raises ValueError, too, if this loader is not planned."""
        if self.sampler is not None:
            if state:
                if "names" in state:
                    check_list(state, **self._list)
                self.sampler.load_state_dict(state)
            self._passes, self._may_be_look = Passes(), bool(state)
            return
        if state and (not self._publish or self._repeats):
            raise ValueError("the loader's epochs are not planned, so none can go on: begin the epoch again")
        progress = restored(state, **self._list) if state else None
        if progress is not None and self._shares and repeats(progress.order):
            raise ValueError(
                "the state has a sample more than once, so its samples cannot be exchanged: leave share out"
            )
        self._restored = progress
        self._passes, self._may_be_look = Passes(), progress is not None

    def _go_on_again(self) -> None:
        """If at most one batch was taken of the pass that went on with a state, it was a look: the next one goes on.

        That is so once for each state: a loop may take one batch of each of its passes.
        """
        look, sampled = self._current, self._current.sampled
        if not self._may_be_look or look.steps > 1 or look.is_done:
            return
        if self.sampler is None and look.progress is not None and look.taken < len(look.order):
            self._restored, self._may_be_look = look.progress, False
        elif self.sampler is not None and sampled is not None:
            self._may_be_look = not self.sampler.go_on_again(sampled)

    def epoch_over(self) -> None:
        """The training says that the epoch is over, also if it has not taken all of it."""
        now = self._passes.now
        if now is not None and now.taken:
            now.is_done = True
            if self.sampler is not None:
                self.sampler.end_epoch()

    # -- what the follower calls

    def missed(self) -> None:
        """An epoch has begun, and nothing is known of it."""
        self._epoch += 1

    def draw(self, iteration: PlannedPass, record: Callable[[Any], object]) -> Iterator[Any]:
        """The draws for this iteration; to be called when the loader makes an iterator of its index sampler.

        The iterator calls `record` with each draw that the loader gets.

        The sampler makes its own iterator now, because some draw everything then; all else waits for the first batch.
        """
        rehearsal, own = None, iter(())
        self._go_on_again()
        if self._ahead is None:
            if self._publish and self._rehearses:
                rehearsal = self.boundary.call(Rehearsal, self._index_sampler, self._dataset)
            own = iter(self._index_sampler)
        draws, replaces = self._draw(iteration, own, rehearsal), self._restored is not None or self._shares
        draws = recorded(self._replaced(iteration, draws) if replaces else draws, record)
        return StatefulDrawing(draws, self, iteration, own, rehearsal, replaces) if has_state(own) else draws

    def _replaced(self, iteration: PlannedPass, drawing: Iterator[Any]) -> Iterator[Any]:
        for drawn in drawing:
            indices = indices_of(drawn)
            if iteration.replace is None or indices is None:
                yield drawn
                continue
            batch = iteration.replace(indices.tolist())
            if not batch:
                return
            yield like(drawn, batch)
        if iteration.progress is not None and iteration.dispatched < iteration.planned:
            missing = iteration.planned - iteration.dispatched
            log.warning("%d samples of the epoch that went on are not read: give the sampler all samples", missing)

    def _draw(self, iteration: PlannedPass, drawing: Iterator[Any], rehearsal: Rehearsal | None) -> Iterator[Any]:
        if self._repeats:
            self._passes.over(self._current)
        self._current = iteration
        self._passes.begin(iteration)
        batches, self._ahead = self._ahead, None
        if not self._publish:
            yield from drawing if batches is None else batches
            return
        if batches is None:
            # Draw one batch more than its length, so that it comes to its end; an endless sampler is not planned on.
            most = len(self._index_sampler) + 1
            if rehearsal is None:
                batches = deque(itertools.islice(drawing, most))
            else:
                batches = deque(self.boundary.call(rehearsal.draw, most) or ())
        self.boundary.call(self._begin_with, batches)
        ended = self._index_sampler if rehearsal is None else rehearsal.sampler
        planned = self._as_planned(iteration, batches, ended)
        if rehearsal is None:
            yield from planned
            yield from drawing
        else:
            yield from self._as_rehearsed(iteration, drawing, planned)
        iteration.has_drawn = True

    def _as_planned(self, iteration: PlannedPass, batches: deque[Any], ended: Any) -> Iterator[Any]:
        """The batches of the plan, one by one; between them, later epochs are published.

        `ended` is the index sampler, or a copy of it, in its state at the end of this epoch.
        """
        settled = 1.0 if self.sampler is None else self.sampler.settled
        look_ahead_at = max(1, round(len(batches) * (1 - settled)))
        foreseen = False
        while batches:
            if len(batches) == look_ahead_at:
                self.boundary.call(self._look_ahead)
            yield batches.popleft()
            if not foreseen and iteration is self._current:
                # After the first batch, so that it does not wait: foreseeing a million samples takes tenths of a
                # second.
                self.boundary.call(self._next_epoch.drawn)
                self.boundary.call(self._foresee, ended)
                foreseen = True

    def _as_rehearsed(self, iteration: PlannedPass, drawing: Iterator[Any], planned: Iterator[Any]) -> Iterator[Any]:
        """The draws of the sampler; if they differ from the plan, its epochs are not planned any more."""
        for drawn in drawing:
            if self._publish and not np.array_equal(np.asarray(drawn), np.asarray(next(planned, drawn))):
                self._give_up("its sampler draws something else than a copy of it did")
                if iteration is self._current:
                    self._withdraw()
                if iteration.exchanging is not None:
                    iteration.exchanging.follow_sampler()
                if iteration.progress is None and (
                    iteration.exchanging is None or iteration.exchanging.follows_sampler
                ):
                    iteration.job_order = None
            yield drawn
        # This also publishes later epochs if the epoch has one batch only.
        if self._publish and next(planned, None) is not None:
            self._give_up("its sampler draws less than a copy of it did")

    def dispatched(self, iteration: PlannedPass, samples: int) -> None:
        """The loader hands `samples` samples of this iteration to its workers, or begins to read them itself."""
        iteration.dispatched += samples
        if self._made is not None and iteration.generations is not None:
            some = slice(iteration.dispatched - samples, iteration.dispatched)
            self._made[iteration.order[some]] = iteration.generations[some]
        if self.sampler is not None and iteration.sampled is None:
            iteration.sampled = self.sampler.current
        self._publish_progress(iteration)

    def taken(self, iteration: PlannedPass, samples: int) -> None:
        """The loop has taken a batch of `samples` samples in this iteration."""
        if self._repeats and iteration is not self._current:
            # The loader draws for its next round while the loop takes the last batches of this one.
            return
        iteration.taken += samples
        iteration.last = samples
        if iteration.exchanging is not None:
            iteration.exchanging.taken = iteration.taken
        if self.sampler is not None and iteration.sampled is not None:
            self.sampler.took(samples, iteration.sampled)
        self._passes.took(iteration)
        if iteration is not self._current and not iteration.is_look:
            self._go_back(iteration)
        self._publish_progress(iteration)
        self._settle_sampler()

    def left(self, iteration: PlannedPass, asked: bool = False) -> None:
        """This iteration has ended, or the loop has left it: the batches that it has not taken will not be read.

        `asked`: see `Passes.over`.
        """
        self._passes.over(iteration, asked)
        self._settle_sampler()
        is_unread, iteration.planned = iteration.taken < iteration.planned, 0
        now = self._passes.now
        if not self._publish or iteration is not self._current:
            return
        if now is not None and now.planned:
            self._go_back(now)
            return
        if self._rehearses and not iteration.has_drawn:
            # The later epochs were foreseen from the end of this epoch, which the sampler has not reached.
            self._foreseen.clear()
            self._foresee(self._index_sampler)
        if is_unread:
            self._withdraw()

    def _go_back(self, to: PlannedPass) -> None:
        """The pass `to` is the training's, and what began after it was a look: have the daemon follow its plan again.

        The look may have moved the sampler on, so nothing is known of later epochs.
        """
        self._current, self._epoch = to, to.epoch
        self._foreseen.clear()
        if self._publish and to.planned:
            self._send_plan(to.epoch, to, to.order, to.opened)

    def _settle_sampler(self) -> None:
        if self.sampler is not None and self._passes.now is not None:
            self.sampler.go_back(self._passes.now.sampled)

    def _publish_progress(self, iteration: PlannedPass) -> None:
        if iteration is self._current and iteration.planned:
            places = iteration.positions
            dispatched, taken = iteration.dispatched, iteration.taken
            if places is not None:
                dispatched = int(places[min(dispatched, iteration.planned)])
                taken = int(places[min(taken, iteration.planned)])
            self._client.set_progress(self.list, dispatched, taken)

    def _withdraw(self) -> None:
        """Publish an empty plan for this epoch: nothing more of it will be read."""
        self._current.planned = 0
        self._send_plan(self._epoch, PlannedPass(), np.empty(0, np.uint32))

    # -- publishing

    def _begin_with(self, batches: Iterable[Any]) -> None:
        order = _order(batches)
        if order is None or len(order) > DEFAULT_LIMITS.samples:
            self._give_up("its sampler draws more, or something else, than a list of indices")
        elif not self._has_all(order):
            self._give_up("its sampler draws indices that the list does not have")
        else:
            if self._restored is not None and (reason := why_not_replaced(batches)) is not None:
                self._restored = None
                log.warning("the epoch does not go on, but begins again: %s", reason)
            if self._shares and self._restored is None and (reason := why_not_replaced(batches, order)) is not None:
                self._shares = False
                log.warning("the loader's samples are not exchanged: %s", reason)
            self._epoch += 1
            if (grid := self._new_grid()) is not None:
                # What is published of later epochs names extents of the other grid.
                self._grid = grid
                self._foreseen.clear()
            self._current.epoch = self._epoch
            self._current.order = own = self._order_to_read(self._current, order)
            self._current.planned = len(own)
            if own is order:
                self._current.generations, self._current.opened = self._opened(order, batches)
            self._send_plan(self._epoch, self._current, own, self._current.opened)
            if not np.array_equal(self._foreseen.pop(self._epoch, order), order):
                self._mistakes += 1
                # The plans after the wrong one are wrong too, and the daemon forgets them by itself.
                self._foreseen.clear()

    def _send_plan(self, epoch: int, begun: PlannedPass | None, order: Indices, opened: Opened | None = None) -> None:
        """Publish what an epoch reads, from where `begun` is; None: the epoch has not begun.

        `opened` is whether the file of each sample is opened; None: all are.
        """
        taken = 0 if begun is None else begun.taken
        if self._grid is not None and not self._grid.paths:
            # No range is known yet.
            return
        places = None
        if opened is not None:
            places, order = first_of(opened), order[opened]
        if self._grid is not None:
            of_grid = self._grid.positions(order)
            if of_grid[-1] > DEFAULT_LIMITS.samples:
                self._give_up("its samples are more extents of files than a plan may have")
                return
            places, order = of_grid if places is None else of_grid[places], self._grid.draws(order)
        if places is not None:
            taken = int(places[taken])
            if begun is not None:
                begun.positions = places
        self._client.plan(Plan(self.list, epoch, taken, begun is not None, order))

    def _opened(
        self, order: Indices, batches: Iterable[Any]
    ) -> tuple[npt.NDArray[np.int64], Opened] | tuple[None, None]:
        """The generations that a refurbished loader draws in this order, and which of these it has not made yet."""
        if self._made is None:
            return None, None
        draws = (draw for batch in batches for draw in (batch if isinstance(batch, list | tuple) else (batch,)))
        generations = np.array([draw.generation if draw.keeps else _NOT_KEPT for draw in draws], np.int64)
        return generations, (generations == _NOT_KEPT) | (generations != self._made[order])

    def _has_all(self, order: Indices) -> bool:
        return not len(order) or int(order.max()) < self.samples

    def _order_to_read(self, iteration: PlannedPass, order: Indices) -> Indices:
        """What this rank reads in this pass: its sampler's draws, or its share of the rest of an epoch that goes on."""
        progress, self._restored = self._restored, None
        sampler_epoch = getattr(getattr(self._index_sampler, "sampler", self._index_sampler), "epoch", None)
        saved_epoch = None if progress is None else progress.sampler_epoch
        if saved_epoch is not None and saved_epoch < (sampler_epoch or 0):
            # `set_epoch` has named a later epoch than that of the state: the training has left that one. (Which number
            # an epoch has that one rank shuffled without a sampler for ranks, the state does not say.)
            progress = None
        before: Indices = np.empty(0, np.uint32)
        iteration.progress = progress
        own, drawn = order, order if progress is None else None
        if progress is not None:
            before, own = progress.order[: progress.consumed], share_of_rank(progress.order[progress.consumed :])
            own = own[: len(own) // self._whole * self._whole]
        if self.sampler is None:
            self._number = number_of_run(self.list) if self._number is None else self._number
            number = self._number, self._epoch
            iteration.job_order = JobOrder(self.list, before, own, sampler_epoch, number, exchanges=self._shares)
        if self._shares:
            assert iteration.job_order is not None
            exchanged, handed = EpochOrder(own, self.samples), iteration.job_order.handed
            partials = getattr(getattr(self._index_sampler, "sampler", None), "shared", None)
            iteration.exchanging = Exchanging(self._client, self.list, self._epoch, exchanged, drawn, handed, partials)
            iteration.replace = iteration.exchanging.batch
            return exchanged.order
        if progress is not None:
            rest = iter(own.tolist())
            iteration.replace = lambda drawn: list(itertools.islice(rest, len(drawn)))
        return own

    def _foresee(self, ended: Any) -> None:
        """Publish the later epochs that can be foreseen from the index sampler's state at the end of this one."""
        if not self._publish or self._mistakes >= _MISTAKES_MAX:
            return
        for passed in range(_FORESEEN_MAX):
            number = self._epoch + 1 + passed
            if number not in self._foreseen:
                self._publish_ahead(number, self._next_epoch.foresee(ended, passed))
            foreseen = self._foreseen.get(number)
            if foreseen is None or not repeats(foreseen):
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
            self._send_plan(number, None, order, self._opened(order, batches or ())[1])

    def _can_be_planned(self) -> bool:
        try:
            len(self._index_sampler)
        except (TypeError, NotImplementedError):
            log.warning("the loader's sampler has no length, so its epochs are not planned")
            return False
        reason = why_not(self._index_sampler, self._dataset) if self._rehearses else None
        if reason is not None:
            log.warning("the loader's epochs are not planned, for a plan must not change what is drawn: %s", reason)
        return reason is None

    def _give_up(self, reason: str) -> None:
        self._publish = False
        log.warning("the loader's epochs are not planned any more: %s", reason)


@dataclass
class StatefulDrawing:
    """The draws of a sampler whose iterator has a state, which torchdata's `StatefulDataLoader` saves.

    `own` is that iterator, which draws along, and `rehearsal` is of the sampler's copy. Where the loader gets other
    samples than the sampler draws (`replaces`), the state of `own` says nothing.
    """

    draws: Iterator[Any]
    planner: Planner
    iteration: PlannedPass
    own: Any
    rehearsal: Rehearsal | None
    replaces: bool

    def __iter__(self) -> StatefulDrawing:
        return self

    def __next__(self) -> Any:
        return next(self.draws)

    def state_dict(self) -> dict[str, Any]:
        """The state of the sampler's iterator, after what the loader has drawn; for `StatefulDataLoader`."""
        if self.replaces:
            return {_REPLACED: True}
        sampler, drawn = self.planner.sampler, self.iteration.dispatched
        return self.own.state_dict() if sampler is None else sampler.at_position(drawn, self.own.state_dict)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the sampler's iterator did; raises ValueError if what was drawn then is not known."""
        if _REPLACED in state:
            raise ValueError(
                "the state is of a loader that gave other samples than its sampler drew (share, or an epoch that had"
                " gone on before): save the state of plan or attach in its place"
            )
        self.own.load_state_dict(state)
        if self.rehearsal is not None:
            self.planner.boundary.call(self.rehearsal.go_on, state)


def epoch_sampler(loader: DataLoader[Any]) -> EpochSampler | None:
    for owner in (loader, loader.batch_sampler):
        sampler = getattr(owner, "sampler", None)
        if isinstance(sampler, EpochSampler):
            return sampler
    return None


def has_state(loader: Any) -> bool:
    """Whether a loader or an iterator has a state to save, as torchdata's `StatefulDataLoader` and its samplers."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
