"""The schedule: the plans of all readers, and how far each reader has come in its plan.

A reader publishes the draws of an epoch before it begins, and sometimes those of later ones. From these follows when
each sample is used next, by which MIN decides (Belady, 1966). (`planned_epoch.py` has the words for positions.) Of its
positions the reader reports how many were **dispatched** to loader workers, and how many its loop has **taken**; what
lies between is **in hand**, needed at once. An open that is seen uses its position up sooner, and what is opened has
been **reached**. Where the kernel has the pages, a taken sample's open is never reported: a draw is **unseen** if its
open comes neither up to AHEAD_S before nor within UNSEEN_AFTER_S. Each draw is either seen or unseen, and never both.

A plan may be wrong (another order, other files). So an open of a sample whose next position is far beyond what is in
hand counts against it, unless it is the very next one: a short epoch may be over before any progress is reported. A
sample that is no longer pending says nothing. A plan is trusted while enough opens follow it, and not when samples are
taken and none is opened, as by a data set that keeps its files in memory, unless the kernel opens files by itself.

If a later epoch reads each sample once, only its positions within `look_ahead` count as uses. The bytes to fetch are
the same, whichever samples are cached when it begins; with those that it reads first, the source would idle at first,
and then be asked for more than it gives (benchmarks/serving/stall.py: readers wait half as long again). Samples that it
reads further ahead are **awaited**: their use has no time, but one of several ranks does better to keep them than those
that the next epoch does not read here at all (benchmarks/engine/nodes.py).

Where nodes share out the samples (`core/homes.py`), a home also knows what jobs on other nodes will read of those that
it keeps for them (`remote.py`), and compares the times of their uses; it does nothing else for them. Times are in
seconds on the caller's clock; within one reader they only give the order of the uses.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from spiderfs.core.events import Access
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.plans.remote import Paced, RemoteReaders
from spiderfs.core.policy import Key

AWAITED = math.inf
"""The time of a use that has none: a later epoch reads the sample, at a position that does not count yet."""
LOOK_AHEAD = 512
"""How many positions after those reached may be fetched ahead, until someone says otherwise."""
# An open may be reported before its dispatch, which a hook reports 20 times a second. So an open is in time
# if its position lies no further beyond what was dispatched than a reader gets in this time, or than an eighth of a
# short epoch. In a wrong order, few opens do.
SLACK_S = 0.1
SLACK_LEAST, SLACK_SHARE, SLACK_MOST = 4, 1 / 8, 1024
# A reader may also have come as far as it has opened samples since its last report of dispatch: a fast one opens
# hundreds between two messages, and its pace is not known before the first second is over. They count up to this share
# of the epoch, so that a wrong order is still noticed.
SINCE_REPORT_SHARE = 1 / 4
# The weight of one open in the share of opens that follow the plan: after 90 to 300 opens a wrong plan is not trusted.
FOLLOWED_WEIGHT = 1 / 128
# A plan is no longer trusted when that share falls below the first number, and trusted again above the second.
UNTRUSTED_BELOW, TRUSTED_ABOVE = 0.5, 0.8
# A plan is proven after this many opens of an epoch, if at least this share followed it: until then it may name
# files that no one reads.
PROVEN_OPENS, PROVEN_SHARE = 32, 0.9
UNPROVEN_SAMPLES = 64
"""How many positions from an epoch's start may be fetched before it is proven: all that a wrong plan costs."""
# A plan is not trusted after this many unseen draws with no open between them.
UNOPENED_MOST = 64
# An open of a sample that the epoch has no more of is of the next epoch, if it comes at most EARLY_S before that
# begins. Sorting a long plan takes a part of a second, and it may wait behind the batches of some seconds.
EARLY_S, EARLY_MOST = 10.0, 4096
# Plans of later epochs that are kept: our hook knows two at most, and each takes some 12 bytes a draw.
LATER_EPOCHS = 8


class PlannedReader(Paced):
    """How far one reader has come in its epoch, and whether its opens follow its plan."""

    def __init__(
        self,
        epoch: PlannedEpoch,
        now_s: float,
        opens_are_reported: bool = True,
        drawn: Callable[[Draw, bool], None] = lambda draw, unseen: None,
    ) -> None:
        """`drawn` is called with each draw of a trusted plan once, when it was read, and with whether it is unseen."""
        super().__init__(now_s, epoch.start)
        self.epoch = epoch
        self._drawn = drawn
        self._opens_are_reported = opens_are_reported
        self.exchanges = False
        """Whether its samples change places with others before they are dispatched (`exchange.py`)."""
        self.later: list[PlannedEpoch] = []
        """The plans of the epochs that follow, in order, as far as they are known."""
        self.dispatched = self.taken = epoch.start
        """How many positions the loader workers have been given, and how many of them the training loop has taken."""
        # `reached` is one past the furthest position that was dispatched, or opened before its dispatch was reported.
        self.in_hand = 0
        """How many positions before `reached` are pending: the workers have them, and no one has seen the opens."""
        self.look_ahead = LOOK_AHEAD
        """How many positions from `reached` on may be fetched ahead now."""
        self._looked_at = self.reached + self.look_ahead
        self.opens = 0
        self.late = 0
        """How many of the opens waited for the source."""
        self.unseen_draws = 0
        """How many draws were taken whose opens were not reported, because memory had the bytes."""
        self.followed_share = 1.0
        """The share of opens that follow the plan, as a moving mean."""
        self.trusted = True
        self.proven = False
        """Whether enough opens have followed the epoch's plan to fetch far ahead by it."""
        self._epochs_proven = 0
        self._judged = 0
        self._unopened = 0
        self._opens_since_report = 0
        self._first_pending = epoch.start
        # What the loader workers had before the reader was known: whether it was opened, no one can say.
        self._reported_from: int | None = None
        # From here on, each open is known to be the reader's: until the first one of which that was known, workers may
        # have seen others and not known whose they were.
        self._known_from = sys.maxsize
        self._unseen = UnseenDraws()
        # Samples that were opened when this epoch had no more of them: when, and how if their draws are to be reported.
        self._early: OrderedDict[Key, tuple[float, Access | None]] = OrderedDict()

    def begin(self, epoch: PlannedEpoch, now_s: float) -> None:
        """Go on with this epoch. If its plan was published before, some of its positions may be used up already."""
        drawn_ahead = (ahead for ahead in self.later if ahead.start == epoch.start and ahead.same_draws(epoch))
        # If the epoch's number is lower than before, another training begins. If another plan was published before for
        # this epoch, the plans after that one followed from it. In both cases the later plans will not come true.
        mistaken = any(ahead.number == epoch.number and not ahead.same_draws(epoch) for ahead in self.later)
        known = [] if mistaken or epoch.number < self.epoch.number else self.later
        self.later = [ahead for ahead in known if ahead.number > epoch.number]
        if self._opens_are_reported and epoch.number != self.epoch.number:
            self.proven, self._judged = False, 0
        self.epoch = next(drawn_ahead, epoch)
        self.dispatched = self.taken = self.reached = self._first_pending = epoch.start
        self.in_hand = 0
        self._opens_since_report = 0
        self._reported_from = None if self._reported_from is None else epoch.start
        self._known_from = min(self._known_from, epoch.start if self.opens else sys.maxsize)
        self._looked_at = self.reached + self.look_ahead
        self._paced_at = None
        self._forget_early(now_s - EARLY_S)
        self.anchor(now_s)

    def end(self, number: int) -> None:
        """Epoch `number` is over: the rest of it will not be read."""
        self.later = [ahead for ahead in self.later if ahead.number > number]
        if self.epoch.number <= number:
            self.epoch.give_up()
            self.dispatched = self.taken = self.reached = self._first_pending = len(self.epoch)
            self.in_hand = 0
            self._looked_at = self.reached + self.look_ahead

    def follow_with(self, epoch: PlannedEpoch) -> None:
        """Note the plan of a later epoch, one of the next LATER_EPOCHS; it replaces an earlier plan for its number."""
        others = [ahead for ahead in self.later if ahead.number != epoch.number]
        self.later = sorted([*others, epoch], key=lambda ahead: ahead.number)[:LATER_EPOCHS]

    def progressed(self, dispatched: int, taken: int, now_s: float) -> list[Key]:
        """The reader has come so far, as far as that can be true; returns the keys whose next use has changed."""
        first = self.dispatched
        self.dispatched = max(first, min(dispatched, len(self.epoch)))
        if self._reported_from is None:
            self._reported_from = self.dispatched
        if self.opens and self._known_from == sys.maxsize:
            self._known_from = self.dispatched
        if self.dispatched > first:
            self._opens_since_report = 0
        changed = self._reach(self.dispatched) + self._opened_early(first)
        taken = min(taken, self.dispatched)
        if taken > self.taken:
            changed += self._take(taken, now_s)
            self._keep_pace(self.taken, now_s)
        return changed

    def opened(self, key: Key, now_s: float, late: bool, access: Access | None = None) -> list[Key]:
        """Note an open, with its `access` for `drawn`, `late` if it waited; returns keys whose next use changed."""
        if key not in self.epoch.index_of:
            return []
        self.opens += 1
        self._opens_since_report += 1
        self.late += late
        self._unopened = 0
        draw = self._unseen.opened(key, now_s, access)
        if draw is not None:
            self._judge(True)
            self._report(draw)
            return []
        position = self.epoch.next_position(key)
        if position is not None:
            in_time = position < self.dispatched + self._slack() or position == self._next_pending()
            self._judge(in_time)
            if not in_time:
                self._unseen.opened_ahead(key, now_s, access)
                return []
            self._report(Draw(key, now_s, self.epoch.number, access=access))
            return [*self._reach(position + 1), self._use_up(position)]
        if self.dispatched < len(self.epoch):
            self._unseen.opened_ahead(key, now_s, access)
            return []
        # Loader workers open files of the next epoch before it is known to have begun.
        if self.later:
            ahead = self.later[0].next_position(key)
            if ahead is not None and ahead < self._slack():
                self._judge(True)
                self._report(Draw(key, now_s, self.later[0].number, access=access))
                return [self.later[0].use_up(ahead)]
        self._early[key] = now_s, access
        if len(self._early) > EARLY_MOST:
            self._early.popitem(last=False)
        return []

    def opened_before(self, opens: Iterable[tuple[Key, float]]) -> None:
        """Note opens, each with its time, that were reported before the reader had a plan."""
        self._early.update((key, (at_s, None)) for key, at_s in opens)
        self._forget_early(self._anchor[0] - EARLY_S)

    def unseen(self, now_s: float) -> list[Key]:
        """The samples that were taken since the last call and whose opens were not reported, once for each draw."""
        awaited = self._unseen.take(now_s)
        found = [draw for draw in awaited if not draw.was_in_hand]
        self._unopened += len(found)
        self.unseen_draws += len(found)
        if self._opens_are_reported and self._unopened >= UNOPENED_MOST:
            self.trusted = self.proven = False
            self._judged = 0
        for draw in awaited:
            self._report(draw, unseen=not draw.was_in_hand)
        return [draw.key for draw in found]

    def _report(self, draw: Draw, unseen: bool = False) -> None:
        if self.trusted:
            self._drawn(draw, unseen)

    @property
    def fetched_to(self) -> int:
        """The first position, counted as in `coming`, that must not be fetched ahead yet, as the plan is not proven.

        The next epoch is fetched far ahead once a second one was proven: till then the data set may keep its files in
        memory.
        """
        if not self.proven:
            return self.epoch.start + UNPROVEN_SAMPLES
        if self._opens_are_reported and self._epochs_proven < 2:
            return len(self.epoch) + UNPROVEN_SAMPLES
        return sys.maxsize

    def next_use_s(self, key: Key) -> float | None:
        """When the reader will next need the file in the cache, or AWAITED; None if no plan says so."""
        before = 0
        for epoch in (self.epoch, *self.later):
            position = epoch.next_use(key)
            if position is not None:
                counts = epoch is self.epoch or epoch.repeats or before + position < self._looked_at
                return self.time_of(before + position) if counts else AWAITED
            before += len(epoch)
        return None

    def next_position(self, key: Key) -> int | None:
        """The first pending position of a file's sample, counted as in `coming`; None if no plan has one."""
        before = 0
        for epoch in (self.epoch, *self.later):
            position = epoch.next_position(key)
            if position is not None:
                return before + position
            before += len(epoch)
        return None

    def located(self, position: int) -> tuple[PlannedEpoch, int]:
        """The epoch, and the position in it, that a position of `coming` means; to be asked in the same turn."""
        for epoch in (self.epoch, *self.later):
            if position < len(epoch):
                return epoch, position
            position -= len(epoch)
        raise IndexError("no plan has this position")

    def coming(self, limit: int, start: int = 0) -> Iterator[tuple[int, Key]]:
        """The pending positions from `start` on and up to `limit` after `reached`, each with its key.

        Those before `reached` are in hand. The positions of a later epoch count on after those of the one before it.
        """
        first_pending, before = self._next_pending(), 0
        for epoch in (self.epoch, *self.later):
            first = max(first_pending - before, start - before, epoch.start)
            for position in range(first, min(self.reached + limit - before, len(epoch))):
                if epoch.pending(position):
                    yield before + position, epoch.key(position)
            before += len(epoch)

    def drift_s(self, now_s: float) -> float:
        """By how many seconds the computed times are wrong for where the reader is now."""
        return abs(self.time_of(self.reached) - now_s)

    def _next_pending(self) -> int:
        """The first pending position of the epoch; its length if there is none."""
        self._first_pending = max(self._first_pending, self.taken)
        while self._first_pending < len(self.epoch) and not self.epoch.pending(self._first_pending):
            self._first_pending += 1
        return self._first_pending

    def _slack(self) -> float:
        """So far beyond what was dispatched an open follows the plan."""
        since_report = min(self._opens_since_report, SLACK_MOST, len(self.epoch) * SINCE_REPORT_SHARE)
        # What is supposed of a pace that is not known yet would have half of a short epoch in time.
        by_pace = SLACK_S / self.pace_s if self._has_pace else 0.0
        return since_report + max(SLACK_LEAST, min(SLACK_MOST, len(self.epoch) * SLACK_SHARE), by_pace)

    def _reach(self, position: int) -> list[Key]:
        """The reader has come as far as this; returns the keys whose next use has changed."""
        if position <= self.reached:
            return []
        self.in_hand += sum(self.epoch.pending(between) for between in range(self.reached, position))
        self.reached = position
        return self._look_to(self.reached + self.look_ahead)

    def _use_up(self, position: int) -> Key:
        self.in_hand -= position < self.reached
        return self.epoch.use_up(position)

    def _opened_early(self, first: int) -> list[Key]:
        """Use up those positions from `first` on, now dispatched, that were opened before the epoch was known."""
        changed = []
        for position in range(first, self.dispatched) if self._early else ():
            key = self.epoch.key(position)
            if self.epoch.next_position(key) == position and key in self._early:
                at_s, access = self._early.pop(key)
                changed.append(self._use_up(position))
                if access is not None:
                    self._report(Draw(key, at_s, self.epoch.number, access=access))
        return changed

    def _forget_early(self, before_s: float) -> None:
        self._early = OrderedDict((key, how) for key, how in self._early.items() if how[0] >= before_s)

    def _take(self, taken: int, now_s: float) -> list[Key]:
        """Use up what the loop has taken."""
        assert self._reported_from is not None
        changed = []
        for position in range(self.taken, taken):
            if self.epoch.pending(position):
                # In a mount that reports opens, what waits outside of the cache is a partial sample: no file is opened.
                is_partial = self._opens_are_reported and self.epoch.is_served(position)
                key = self._use_up(position)
                changed.append(key)
                if not key or is_partial:
                    continue
                was_in_hand = position < self._reported_from
                known = position >= self._known_from and not was_in_hand
                draw = self._unseen.took(key, now_s, self.epoch.number, known, was_in_hand)
                if draw is not None:
                    self._report(draw)
        self.taken = taken
        return changed

    def _look_to(self, limit: int) -> list[Key]:
        """Count positions of later epochs as uses up to `limit`; returns the keys of the new ones."""
        first, self._looked_at = self._looked_at, max(limit, self._looked_at)
        before, changed = len(self.epoch), []
        for epoch in self.later:
            if self._looked_at <= before:
                break
            seen_now = range(max(first - before, 0), min(self._looked_at - before, len(epoch)))
            changed += [epoch.key(position) for position in seen_now]
            before += len(epoch)
        return changed

    def _judge(self, follows: bool) -> None:
        self.followed_share += (follows - self.followed_share) * FOLLOWED_WEIGHT
        self._judged += 1
        if self.followed_share < UNTRUSTED_BELOW:
            self.trusted = self.proven = False
        elif self.followed_share > TRUSTED_ABOVE:
            self.trusted = True
        if self._judged >= PROVEN_OPENS and self.followed_share >= PROVEN_SHARE:
            self._epochs_proven += not self.proven
            self.proven = True


# A function of the module, since engines are pickled (benchmarks/training/saved_training.py).
def _uncounted(trainer: Hashable, draw: Draw, unseen: bool) -> None:
    """What a schedule does with draws that no one counts."""


class Schedule:
    """The plans of all trainers. A trainer that reads several lists is one reader for each of them."""

    def __init__(self) -> None:
        self.opens_are_reported = True
        """Whether each open is reported; in an immutable mount the kernel opens files without asking."""
        self.readers: dict[tuple[Hashable, str], PlannedReader] = {}
        """By trainer and name of the list."""
        self.drawn: Callable[[Hashable, Draw, bool], None] = _uncounted
        """Is called with the draws of each trainer, as in `PlannedReader`."""
        self._of_trainer: dict[Hashable, list[PlannedReader]] = {}
        # The progress of epochs whose plans have not begun yet: a long plan is sorted meanwhile.
        self._early_progress: dict[tuple[Hashable, str], tuple[int, int, int]] = {}
        # The last opens of trainers that have no plan yet.
        self._opened_before: deque[tuple[Hashable, Key, float]] = deque(maxlen=EARLY_MOST)
        self.trusted: tuple[PlannedReader, ...] = ()
        """The readers whose plans are trusted; a new tuple whenever that changes."""
        self.remote = RemoteReaders()

    @property
    def active(self) -> bool:
        """Whether a plan is trusted."""
        return bool(self.trusted)

    def begin(self, trainer: Hashable, name: str, epoch: PlannedEpoch, now_s: float) -> None:
        """The trainer begins this epoch of the list `name`, or goes on with it, at its start position."""
        reader = self.readers.get((trainer, name))
        if reader is None:
            drawn = partial(self.drawn, trainer)
            reader = self.readers[trainer, name] = PlannedReader(epoch, now_s, self.opens_are_reported, drawn)
            reader.opened_before((key, at_s) for owner, key, at_s in self._opened_before if owner == trainer)
        else:
            reader.begin(epoch, now_s)
        number, dispatched, taken = self._early_progress.pop((trainer, name), (-1, 0, 0))
        if number == epoch.number:
            self.readers[trainer, name].progressed(dispatched, taken, now_s)
        self._trust()

    def progressed(
        self, trainer: Hashable, name: str, number: int, dispatched: int, taken: int, now_s: float
    ) -> list[Key]:
        """Note how far a trainer is in an epoch, which may begin later; returns keys whose next use has changed."""
        reader = self.readers.get((trainer, name))
        if reader is not None and reader.epoch.number == number:
            return reader.progressed(dispatched, taken, now_s)
        self._early_progress[trainer, name] = (number, dispatched, taken)
        return []

    def unseen(self, now_s: float, of: Hashable | None = None) -> list[tuple[Hashable, Key]]:
        """What `PlannedReader.unseen` gives, with the trainer of each sample; of one trainer, or of all."""
        readers = [(trainer, reader) for (trainer, _), reader in self.readers.items() if of in (None, trainer)]
        found = [(trainer, key) for trainer, reader in readers for key in reader.unseen(now_s)]
        if any(reader.trusted != (reader in self.trusted) for _, reader in readers):
            self._trust()
        return found

    def follow_with(self, trainer: Hashable, name: str, epoch: PlannedEpoch, now_s: float) -> None:
        """The trainer will read this epoch of the list `name` later."""
        reader = self.readers.get((trainer, name))
        if reader is None:
            self.begin(trainer, name, epoch, now_s)
        else:
            reader.follow_with(epoch)

    def end(self, trainer: Hashable, number: int) -> None:
        """The trainer reads nothing more of epoch `number`."""
        for reader in self._of_trainer.get(trainer, ()):
            reader.end(number)

    def drop(self, trainer: Hashable) -> None:
        """The trainer has disconnected: forget its plans."""
        self.readers = {key: reader for key, reader in self.readers.items() if key[0] != trainer}
        self._early_progress = {key: how for key, how in self._early_progress.items() if key[0] != trainer}
        self._trust()

    def planned(self, trainer: Hashable, key: Key) -> bool:
        """Whether this trainer has a trusted plan for a list that this file is in."""
        return any(reader.trusted and key in reader.epoch.index_of for reader in self._of_trainer.get(trainer, ()))

    def opened(self, trainer: Hashable, key: Key, now_s: float, late: bool, access: Access | None = None) -> list[Key]:
        """As `PlannedReader.opened`; if `trusted` is another tuple afterwards, all next uses may have changed."""
        changed: list[Key] = []
        if trainer not in self._of_trainer:
            self._opened_before.append((trainer, key, now_s))
        for reader in self._of_trainer.get(trainer, ()):
            trusted = reader.trusted
            changed += reader.opened(key, now_s, late, access)
            if reader.trusted != trusted:
                self._trust()
        return changed

    def next_use_s(self, key: Key) -> float | None:
        """When any reader will next need the file in the cache, or AWAITED; None if no trusted plan says so."""
        soonest: float | None = self.remote.next_use_s(key) if self.remote else None
        for reader in self.trusted:
            use_s = reader.next_use_s(key)
            if use_s is not None and (soonest is None or use_s < soonest):
                soonest = use_s
        return soonest

    def is_due(self, key: Key) -> bool:
        """Whether a reader whose plan is trusted has the file in hand, or may have it fetched ahead now."""
        positions = ((reader.next_position(key), reader) for reader in self.trusted)
        return any(at is not None and at < reader.reached + reader.look_ahead for at, reader in positions)

    def anchor(self, now_s: float, tolerance_s: float) -> bool:
        """Compute all times again if one reader of several is off by more than this; whether it did so."""
        if len(self.trusted) + len(self.remote) < 2:
            return False
        self.remote.anchor(now_s, tolerance_s)
        if max((reader.drift_s(now_s) for reader in self.trusted), default=0.0) <= tolerance_s:
            return False
        for reader in self.trusted:
            reader.anchor(now_s)
        return True

    def _trust(self) -> None:
        self._of_trainer = {}
        for (trainer, _), reader in self.readers.items():
            self._of_trainer.setdefault(trainer, []).append(reader)
        self.trusted = tuple(reader for reader in self.readers.values() if reader.trusted)


# An open is reported within some 30 ms.
UNSEEN_AFTER_S = 1.0
# How many opens are remembered, and how long, for draws that the reader has not reported yet. On a busy machine its
# messages come seconds late.
AHEAD_MOST, AHEAD_S = 4096, 3.0


class Draw(NamedTuple):
    """A sample that a reader drew in an epoch, and read at this time; `access` is its open, if that was reported.

    `known` is whether workers knew the reader when the sample was dispatched: before, they may have seen the open, and
    not known whose it was. A sample that `was_in_hand` at the reader's first report may have been opened earlier.
    """

    key: Key
    at_s: float
    epoch: int = 0
    known: bool = True
    access: Access | None = None
    was_in_hand: bool = False


class UnseenDraws:
    def __init__(self) -> None:
        # The draws of each sample whose open may yet be reported, the latest one last; and all of them in order.
        self._awaited: dict[Key, list[Draw]] = {}
        self._order: deque[Draw] = deque()
        # When each sample was opened for a draw that the reader had not reported, the latest time last.
        self._ahead: OrderedDict[Key, tuple[float, Access | None]] = OrderedDict()

    def took(
        self, key: Key, now_s: float, epoch: int = 0, known: bool = True, was_in_hand: bool = False
    ) -> Draw | None:
        """The loop took a sample whose open no one knew to be of this draw; returns the draw if it is seen now."""
        opened_s, access = self._ahead.pop(key, (math.inf, None))
        if now_s - AHEAD_S < opened_s <= now_s:
            return Draw(key, opened_s, epoch, access=access)
        draw = Draw(key, now_s, epoch, known, was_in_hand=was_in_hand)
        self._awaited.setdefault(key, []).append(draw)
        self._order.append(draw)
        return None

    def opened(self, key: Key, opened_s: float, access: Access | None = None) -> Draw | None:
        """The draw of this open, if its sample was taken before the report; it is awaited no longer then."""
        for draw in self._awaited.get(key, ()):
            if opened_s <= draw.at_s:
                self._forget(draw)
                return draw._replace(at_s=opened_s, known=True, access=access)
        return None

    def opened_ahead(self, key: Key, opened_s: float, access: Access | None = None) -> None:
        """Note an open that may be of a draw far beyond those that the reader has reported."""
        self._ahead[key] = opened_s, access
        self._ahead.move_to_end(key)
        if len(self._ahead) > AHEAD_MOST:
            self._ahead.popitem(last=False)

    def take(self, now_s: float) -> list[Draw]:
        """The draws found unseen since the last call; also those of a time to come, if the clock was set back."""
        unseen = []
        while self._order and not now_s - UNSEEN_AFTER_S < self._order[0].at_s <= now_s:
            draw = self._order.popleft()
            if draw in self._awaited.get(draw.key, ()):
                self._forget(draw)
                unseen.append(draw)
        return unseen

    def _forget(self, draw: Draw) -> None:
        draws = self._awaited[draw.key]
        draws.remove(draw)
        if not draws:
            del self._awaited[draw.key]
