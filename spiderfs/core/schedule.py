"""The schedule: the plans of all readers, and how far each reader has come in its plan.

A reader publishes the draws of an epoch before the epoch begins, and sometimes those of later epochs too. From the
plans follows when each sample is used next; MIN decides by that time (Belady, 1966). (`planned_epoch.py` has the
words for positions.)

Loader workers run ahead of each other, so opens come nearly in the planned order. An open uses up the first pending
position of its sample, if that position lies within a window after the furthest position reached so far. The schedule
also tracks where the reader is, by a moving mean of the positions that its last opens used up. An open of a position
far from there counts against the plan. (The furthest position would not do instead of the mean: one stray open moves
it.) An open of a sample that is no longer pending says nothing. When too few opens follow the plan, the plan is no
longer believed; it is believed again when enough opens follow it.

If a later epoch reads each sample once, only its positions within `look_ahead` count as uses. Such an epoch fetches the
same number of bytes whatever the cache holds when it begins. But if the cache held the samples that the epoch reads
first, every sample would be cached at first and none afterwards: the source would idle, and then be asked for more than
the average. (At a source that gives 1.3 times the bytes needed, readers then wait half as long again:
benchmarks/serving/stall.py.)

Times are in seconds on the caller's clock. Within one reader they only give the order of the uses; between readers they
compare uses, by how fast each reader has been.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from spiderfs.core.planned_epoch import PlannedEpoch
from spiderfs.core.policy import Key

# An open may use up a position so far behind the furthest one reached: 16 loader workers, 4 batches of 256 each.
BEHIND = 16_384
# An open may also use up a position so far ahead of the furthest one: the samples that such workers have in hand, or
# an eighth of a long epoch.
AHEAD_MIN = 512
AHEAD_SHARE = 1 / 8
# An open follows the plan if its position lies so close to where the reader is. If a reader reads in another random
# order, a third of its opens do; if its loader workers have a quarter of an epoch in hand, nearly all do. The plan of
# an epoch of up to some 300 samples is always believed.
NEAR_MIN = 128
NEAR_SHARE = 1 / 6
# The weight of one open in the moving mean of where the reader is.
_WHERE_WEIGHT = 1 / 16
# The weight of one open in the share of opens that follow the plan: after 90 to 300 opens a wrong plan is not believed.
FOLLOWED_WEIGHT = 1 / 128
# A plan is no longer believed when that share falls below the first number, and again when it exceeds the second.
BELIEVED_BELOW, BELIEVED_AGAIN = 0.5, 0.8
# A plan is proven after so many opens, if at least so large a share of them followed it.
PROVEN_OPENS, PROVEN_SHARE = 32, 0.9
# The plans of so many later epochs are kept: our hook knows two at most, and each takes some 12 bytes a draw.
LATER_EPOCHS = 8
# A reader's pace is measured over so many seconds, and averaged with the pace before.
PACE_WINDOW_S = 1.0
FIRST_PACE_S = 0.001
# A pace so many times slower than before may be a pause of the training: it counts only if the next one is slow too.
PAUSE_FACTOR = 4


class PlannedReader:
    """How far one reader has come in its epoch, and whether its opens follow its plan."""

    def __init__(self, epoch: PlannedEpoch, now_s: float) -> None:
        self.epoch = epoch
        self.later: list[PlannedEpoch] = []
        """The plans of the epochs that follow, in order, as far as they are known."""
        self.reached = epoch.start
        """One past the furthest position that an open has used up."""
        self.look_ahead = AHEAD_MIN
        """How many positions from `reached` on may be fetched ahead now."""
        self._looked_at = self.reached + self.look_ahead
        self.opens = 0
        self.late = 0
        """How many of the opens waited for the source."""
        self.followed_share = 1.0
        """The share of opens that follow the plan, as a moving mean."""
        self.believed = True
        self.proven = False
        """Whether enough opens have followed the plan to fetch far ahead by it."""
        self._judged = 0
        self.pace_s = FIRST_PACE_S
        """Seconds from one position to the next."""
        self._where = float(epoch.start)
        """Where the reader is: a moving mean of the positions that opens use up."""
        self._unseen: set[Key] = set()
        """Keys of positions that were passed over without an open."""
        self._passed = self._first_pending = epoch.start
        # The pace is measured from the first open on, not from the plan on: a training may begin much later.
        self._paced_at: tuple[float, int] | None = None
        self._anchor = (now_s, self.reached)
        self._anchor_pace_s = self.pace_s
        self._has_pace = self._may_have_paused = False

    @property
    def finished(self) -> bool:
        return self.reached >= len(self.epoch)

    def begin(self, epoch: PlannedEpoch, now_s: float) -> None:
        """Go on with this epoch. If its plan was published before, some of its positions may be used up already."""
        drawn_ahead = (ahead for ahead in self.later if ahead.start == epoch.start and ahead.same_draws(epoch))
        # If the epoch's number is lower than before, another training begins. If another plan was published before for
        # this epoch, the plans after that one followed from it. In both cases the later plans will not come true.
        mistaken = any(ahead.number == epoch.number and not ahead.same_draws(epoch) for ahead in self.later)
        known = [] if mistaken or epoch.number < self.epoch.number else self.later
        self.later = [ahead for ahead in known if ahead.number > epoch.number]
        self.epoch = next(drawn_ahead, epoch)
        self.reached = self._passed = self._first_pending = epoch.start
        self._where = float(epoch.start)
        self._unseen.clear()
        self._looked_at = self.reached + self.look_ahead
        self._paced_at = None
        self.anchor(now_s)

    def end(self, number: int) -> None:
        """Epoch `number` is over: the rest of it will not be read."""
        self.later = [ahead for ahead in self.later if ahead.number > number]
        if self.epoch.number <= number:
            self.epoch.give_up()
            self.reached = self._passed = self._first_pending = len(self.epoch)
            self._looked_at = self.reached + self.look_ahead

    def follow_with(self, epoch: PlannedEpoch) -> None:
        """Note the plan of a later epoch, one of the next LATER_EPOCHS; it replaces an earlier plan for its number."""
        others = [ahead for ahead in self.later if ahead.number != epoch.number]
        self.later = sorted([*others, epoch], key=lambda ahead: ahead.number)[:LATER_EPOCHS]

    def opened(self, key: Key, now_s: float, late: bool) -> list[Key]:
        """Note an open, `late` if it waited for the source; returns the keys whose next use has changed."""
        if key not in self.epoch.index_of:
            return []
        self.opens += 1
        self.late += late
        changed = self._use_up(key)
        if changed:
            self._keep_pace(now_s)
        return changed

    def next_use_s(self, key: Key) -> float | None:
        """When the reader will open the file next; None if no plan says so."""
        before = 0
        for epoch in (self.epoch, *self.later):
            position = epoch.next_position(key)
            if position is not None:
                counts = epoch is self.epoch or epoch.repeats or before + position < self._looked_at
                return self.time_of(before + position) if counts else None
            before += len(epoch)
        return None

    def time_of(self, position: int) -> float:
        """When the reader will come to a position, by its pace."""
        anchored_s, anchored = self._anchor
        return anchored_s + (position - anchored) * self._anchor_pace_s

    def coming(self, limit: int, start: int = 0) -> Iterator[tuple[int, Key]]:
        """The pending positions from `start` on and up to `limit` after `reached`, each with its key.

        Some lie before `reached`: loader workers read whole batches, and a slow worker is still at an earlier batch.
        The positions of a later epoch count on after those of the epoch before it.
        """
        while self._first_pending < len(self.epoch) and not self.epoch.pending(self._first_pending):
            self._first_pending += 1
        before = 0
        for epoch in (self.epoch, *self.later):
            first = max(self._first_pending - before, start - before, epoch.start)
            for position in range(first, min(self.reached + limit - before, len(epoch))):
                if epoch.pending(position):
                    yield before + position, epoch.key(position)
            before += len(epoch)

    def anchor(self, now_s: float) -> None:
        """Compute times from now and from where the reader is now; the times of all its next uses change."""
        self._anchor = (now_s, self.reached)
        self._anchor_pace_s = self.pace_s

    def drift_s(self, now_s: float) -> float:
        """By how many seconds the computed times are wrong for where the reader is now."""
        return abs(self.time_of(self.reached) - now_s)

    def _use_up(self, key: Key) -> list[Key]:
        position = self.epoch.next_position(key)
        total = len(self.epoch)
        window = max(AHEAD_MIN, int(total * AHEAD_SHARE))
        if position is not None and position <= self.reached + window:
            self._judge(abs(position - self._where) <= max(NEAR_MIN, total * NEAR_SHARE))
            self._where += 1 + (position - self._where) * _WHERE_WEIGHT
            changed = [self.epoch.use_up(position)]
            if position >= self.reached:
                self.reached = position + 1
                changed += self._pass_over(self.reached - BEHIND)
                changed += self._look_to(self.reached + self.look_ahead)
            return changed
        # Loader workers open files of the next epoch before the trainer has said that it begins.
        if self.later:
            ahead = self.later[0].next_position(key)
            if ahead is not None and total - self.reached + ahead <= window:
                self._judge(True)
                return [self.later[0].use_up(ahead)]
        if position is not None or key in self._unseen:
            self._judge(False)
        return []

    def _pass_over(self, limit: int) -> list[Key]:
        """Use up the pending positions before `limit`: their opens went unnoticed, or will never come."""
        changed = []
        while self._passed < limit:
            if self.epoch.pending(self._passed):
                changed.append(self.epoch.use_up(self._passed))
            self._passed += 1
        self._unseen.update(changed)
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
        if self.followed_share < BELIEVED_BELOW:
            self.believed = self.proven = False
        elif self.followed_share > BELIEVED_AGAIN:
            self.believed = True
        if self._judged >= PROVEN_OPENS and self.followed_share >= PROVEN_SHARE:
            self.proven = True

    def _keep_pace(self, now_s: float) -> None:
        if self._paced_at is None:
            self._paced_at = (now_s, self.reached)
        since_s, since = self._paced_at
        if now_s - since_s >= PACE_WINDOW_S and self.reached > since:
            measured_s = (now_s - since_s) / (self.reached - since)
            self._paced_at = (now_s, self.reached)
            slow = self._has_pace and measured_s > PAUSE_FACTOR * self.pace_s
            self._may_have_paused = slow and not self._may_have_paused
            if not self._may_have_paused:
                self.pace_s = (self.pace_s + measured_s) / 2 if self._has_pace else measured_s
                self._has_pace = True


class Schedule:
    """The plans of all trainers. A trainer that reads several lists is one reader for each of them."""

    def __init__(self) -> None:
        self.readers: dict[tuple[Hashable, str], PlannedReader] = {}
        """By trainer and name of the list."""
        self._of_trainer: dict[Hashable, list[PlannedReader]] = {}
        self._believed: tuple[PlannedReader, ...] = ()

    @property
    def active(self) -> bool:
        """Whether a plan is believed."""
        return bool(self._believed)

    def begin(self, trainer: Hashable, name: str, epoch: PlannedEpoch, now_s: float) -> None:
        """The trainer begins this epoch of the list `name`, or goes on with it, at its start position."""
        reader = self.readers.get((trainer, name))
        if reader is None:
            self.readers[trainer, name] = PlannedReader(epoch, now_s)
        else:
            reader.begin(epoch, now_s)
        self._believe()

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
        self._believe()

    def planned(self, trainer: Hashable, key: Key) -> bool:
        """Whether this trainer has a believed plan for a list that this file is in."""
        return any(reader.believed and key in reader.epoch.index_of for reader in self._of_trainer.get(trainer, ()))

    def opened(self, trainer: Hashable, key: Key, now_s: float, late: bool) -> list[Key]:
        """Note that a trainer opened a file, `late` if it waited; returns the keys whose next use has changed.

        If `believed` is another tuple afterwards, all next uses may have changed.
        """
        changed: list[Key] = []
        for reader in self._of_trainer.get(trainer, ()):
            believed = reader.believed
            changed += reader.opened(key, now_s, late)
            if reader.believed != believed:
                self._believe()
        return changed

    def next_use_s(self, key: Key) -> float | None:
        """When any reader will open the file next; None if no believed plan says so."""
        soonest: float | None = None
        for reader in self._believed:
            use_s = reader.next_use_s(key)
            if use_s is not None and (soonest is None or use_s < soonest):
                soonest = use_s
        return soonest

    def anchor(self, now_s: float, tolerance_s: float) -> bool:
        """Compute all times anew if the time of one reader is off by more than this; returns whether it did so.

        With less than two believed plans there is nothing to compare.
        """
        if len(self._believed) < 2 or max(reader.drift_s(now_s) for reader in self._believed) <= tolerance_s:
            return False
        for reader in self._believed:
            reader.anchor(now_s)
        return True

    @property
    def believed(self) -> tuple[PlannedReader, ...]:
        """The readers whose plans are believed; a new tuple whenever that changes."""
        return self._believed

    def _believe(self) -> None:
        self._of_trainer = {}
        for (trainer, _), reader in self.readers.items():
            self._of_trainer.setdefault(trainer, []).append(reader)
        self._believed = tuple(reader for reader in self.readers.values() if reader.believed)
