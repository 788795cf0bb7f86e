"""What readers have said they will read, in which order, and how far they have come.

A reader publishes the draws of an epoch before it begins, sometimes those of later ones too. From that follows for
each sample when it is used next, the number by which MIN decides (Belady, 1966). Loader workers run ahead of each
other, so opens come nearly in the planned order: an open uses up the first pending place of its sample, if that lies
within a window after the furthest place reached so far. Opens whose place lies far from where the reader is by the mean
of its last ones speak against the plan (the furthest place would not do: a single stray open moves it); an open of what
is not pending any more says nothing. A reader that follows its plan too seldom is believed no longer, until it does.

Of later epochs that read each sample once, only what comes within `look_ahead` counts. Such an epoch costs the same
bytes whatever was kept before it, but if what it reads first was kept, all of it is cached at first and nothing then:
the source idles, and after that is asked for more than the average. (Half again the stall, at a source that gives 1.3
times what is needed: benchmarks/serving/stall.py.)

Times are in seconds on the caller's clock. Within one reader they only order the uses; between readers they compare
them, by how fast each has been.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from spiderfs.core.policy import Key

Places = npt.NDArray[np.uint32]

# How far behind the furthest place reached an open may still come: 16 loader workers, 4 batches of 256 each.
BEHIND = 16_384
# How far ahead of it: what such workers have in hand, or an eighth of a long epoch.
AHEAD_MIN = 512
AHEAD_SHARE = 1 / 8
# An open follows the plan if it lies so close to where the reader is. Of a reader in another random order a third do;
# of loader workers that have a quarter of an epoch in hand, nearly all. Some 300 samples are always believed.
NEAR_MIN = 128
NEAR_SHARE = 1 / 6
# An open's weight in where the reader is.
_WHERE_WEIGHT = 1 / 16
# An open's weight in the share of opens that follow the plan: a wrong plan is found out after 90 to 300 of them.
FOLLOWED_WEIGHT = 1 / 128
BELIEVED_BELOW, BELIEVED_AGAIN = 0.5, 0.8
# Until so many opens have come, nearly all of them as planned, a plan is taken for what may still turn out wrong.
PROVEN_OPENS, PROVEN_SHARE = 32, 0.9
# A reader's pace is taken over so many seconds, and what was measured before counts for half.
PACE_WINDOW_S = 1.0
FIRST_PACE_S = 0.001
# One that is so many times slower than before may be a pause of the training: it counts from the second time on.
PAUSE_FACTOR = 4


@dataclass(frozen=True, eq=False)
class PlannedEpoch:
    """One epoch's draws of one reader; making it costs a sort, and may be done in any thread."""

    number: int
    keys: Sequence[Key]
    """The file of each sample; 0 where it is not known."""
    place_of: Mapping[Key, int]
    """The sample of each file."""
    order: Places
    """The samples that are drawn, from the first of the epoch on."""
    following: Places = field(init=False)
    """Position in the order -> next position of the same sample, or the number of positions if there is none."""
    head: Places = field(init=False)
    """Sample -> its first position that is still to come, or the number of positions."""
    start: int = 0
    repeats: bool = field(init=False)
    """Whether some sample is drawn more than once."""

    def __post_init__(self) -> None:
        total = len(self.order)
        rest = self.order[self.start :]
        by_sample = (np.argsort(rest, kind="stable") + self.start).astype(np.uint32)
        sorted_samples = self.order[by_sample]
        again = sorted_samples[1:] == sorted_samples[:-1]
        following = np.full(total, total, np.uint32)
        following[by_sample[:-1][again]] = by_sample[1:][again]
        head = np.full(len(self.keys), total, np.uint32)
        if len(rest):
            first = np.concatenate(([True], ~again))
            head[sorted_samples[first]] = by_sample[first]
        object.__setattr__(self, "repeats", bool(again.any()))
        object.__setattr__(self, "following", following)
        object.__setattr__(self, "head", head)

    def __len__(self) -> int:
        return len(self.order)

    def next_position(self, key: Key) -> int | None:
        """Where the sample is read next; None if it is not any more, or not in the list."""
        sample = self.place_of.get(key)
        if sample is None:
            return None
        position = int(self.head[sample])
        return position if position < len(self.order) else None

    def pending(self, position: int) -> bool:
        return int(self.head[self.order[position]]) <= position

    def key(self, position: int) -> Key:
        return self.keys[int(self.order[position])]

    def use_up(self, position: int) -> Key:
        """The pending position, the first of its sample, has been read or passed over; returns the sample's key."""
        self.head[self.order[position]] = self.following[position]
        return self.key(position)

    def give_up(self) -> None:
        """Nothing of it is still to come."""
        self.head.fill(len(self.order))

    def same_draws(self, other: PlannedEpoch) -> bool:
        return self.number == other.number and np.array_equal(self.order, other.order)


class PlannedReader:
    """How far one reader has come in its epoch, and whether it does what it said."""

    def __init__(self, epoch: PlannedEpoch, now_s: float) -> None:
        self.epoch = epoch
        self.later: list[PlannedEpoch] = []
        """The epochs that follow, as far as they are known."""
        self.reached = epoch.start
        """One past the furthest position read."""
        self.look_ahead = AHEAD_MIN
        """Positions ahead of the furthest one reached that somebody may want to fetch now."""
        self._looked_at = self.reached + self.look_ahead
        self.opens = 0
        self.late = 0
        """Of the opens, those that waited for the source."""
        self.followed_share = 1.0
        self.believed = True
        self.proven = False
        """Whether it has been followed for long enough to fetch far ahead for it."""
        self._judged = 0
        self.pace_s = FIRST_PACE_S
        """Seconds from one position to the next."""
        self._where = float(epoch.start)
        """The position that opens come next to."""
        self._unseen: set[Key] = set()
        """Keys of positions that were passed over."""
        self._passed = self._first_pending = epoch.start
        # Not from the plan on: a training may take its time before it begins.
        self._paced_at: tuple[float, int] | None = None
        self._anchor = (now_s, self.reached)
        self._anchor_pace_s = self.pace_s
        self._has_pace = self._may_have_paused = False

    @property
    def finished(self) -> bool:
        return self.reached >= len(self.epoch)

    def begin(self, epoch: PlannedEpoch, now_s: float) -> None:
        """Go on with this epoch, perhaps the one that was drawn ahead, of which some may have been read already."""
        drawn_ahead = (ahead for ahead in self.later if ahead.start == epoch.start and ahead.same_draws(epoch))
        # One with a lower number begins another training, and one that was foreseen otherwise had others to follow it:
        # these will not come.
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
        """Epoch `number` is over; what was left of it is not read any more."""
        self.later = [ahead for ahead in self.later if ahead.number > number]
        if self.epoch.number <= number:
            self.epoch.give_up()
            self.reached = self._passed = self._first_pending = len(self.epoch)
            self._looked_at = self.reached + self.look_ahead

    def follow_with(self, epoch: PlannedEpoch) -> None:
        """This epoch comes after those that are known, or in place of the one of its number."""
        others = [ahead for ahead in self.later if ahead.number != epoch.number]
        self.later = sorted([*others, epoch], key=lambda ahead: ahead.number)

    def opened(self, key: Key, now_s: float, late: bool) -> list[Key]:
        """Take note of an open, `late` if it waited for the source; returns the keys whose next use has changed."""
        if key not in self.epoch.place_of:
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
        anchored_s, anchored = self._anchor
        return anchored_s + (position - anchored) * self._anchor_pace_s

    def coming(self, limit: int, start: int = 0) -> Iterator[tuple[int, Key]]:
        """Pending positions up to `limit` after the furthest one reached, and their keys; none before `start`.

        Some lie behind that one: loader workers take whole batches, and the slower ones are not done with theirs.
        Positions of the next epoch follow those of this one.
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
        """Compute times from where the reader is now; all its next uses change."""
        self._anchor = (now_s, self.reached)
        self._anchor_pace_s = self.pace_s

    def drift_s(self, now_s: float) -> float:
        """By how many seconds times are wrong for where the reader is now."""
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
        # Loader workers begin with the next epoch before the trainer's word of it has come.
        if self.later:
            ahead = self.later[0].next_position(key)
            if ahead is not None and total - self.reached + ahead <= window:
                self._judge(True)
                return [self.later[0].use_up(ahead)]
        if position is not None or key in self._unseen:
            self._judge(False)
        return []

    def _pass_over(self, limit: int) -> list[Key]:
        """Positions so far behind were read unseen, or never will be: their samples are not due any more."""
        changed = []
        while self._passed < limit:
            if self.epoch.pending(self._passed):
                changed.append(self.epoch.use_up(self._passed))
            self._passed += 1
        self._unseen.update(changed)
        return changed

    def _look_to(self, limit: int) -> list[Key]:
        """Positions of later epochs that have come into view."""
        first, self._looked_at = self._looked_at, max(limit, self._looked_at)
        before, changed = len(self.epoch), []
        for epoch in self.later:
            if self._looked_at <= before:
                break
            changed += [
                epoch.key(place) for place in range(max(first - before, 0), min(self._looked_at - before, len(epoch)))
            ]
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
    """The plans of all trainers: each reads one or several lists, and is one reader for each."""

    def __init__(self) -> None:
        self.readers: dict[tuple[Hashable, str], PlannedReader] = {}
        """By trainer and name of the list."""
        self._of_trainer: dict[Hashable, list[PlannedReader]] = {}
        self._believed: tuple[PlannedReader, ...] = ()

    @property
    def active(self) -> bool:
        """Whether anything is known of the future."""
        return bool(self._believed)

    def begin(self, trainer: Hashable, name: str, epoch: PlannedEpoch, now_s: float) -> None:
        """The trainer begins with this epoch of the list `name`, or goes on with it at its start position."""
        reader = self.readers.get((trainer, name))
        if reader is None:
            self.readers[trainer, name] = PlannedReader(epoch, now_s)
        else:
            reader.begin(epoch, now_s)
        self._believe()

    def follow_with(self, trainer: Hashable, name: str, epoch: PlannedEpoch, now_s: float) -> None:
        """The trainer will go on with this epoch after those that are known."""
        reader = self.readers.get((trainer, name))
        if reader is None:
            self.begin(trainer, name, epoch, now_s)
        else:
            reader.follow_with(epoch)

    def end(self, trainer: Hashable, number: int) -> None:
        """The trainer is done with epoch `number`."""
        for reader in self._of_trainer.get(trainer, ()):
            reader.end(number)

    def drop(self, trainer: Hashable) -> None:
        """The trainer has gone."""
        self.readers = {key: reader for key, reader in self.readers.items() if key[0] != trainer}
        self._believe()

    def planned(self, trainer: Hashable, key: Key) -> bool:
        """Whether a believed plan of this trainer is about this file."""
        return any(reader.believed and key in reader.epoch.place_of for reader in self._of_trainer.get(trainer, ()))

    def opened(self, trainer: Hashable, key: Key, now_s: float, late: bool) -> list[Key]:
        """A trainer opened a file, `late` if it waited for the source; returns the keys whose next use has changed.

        If `believed` is another one afterwards, all next uses may have changed.
        """
        changed: list[Key] = []
        for reader in self._of_trainer.get(trainer, ()):
            believed = reader.believed
            changed += reader.opened(key, now_s, late)
            if reader.believed != believed:
                self._believe()
        return changed

    def next_use_s(self, key: Key) -> float | None:
        """When anybody will open the file next; None if no plan says so."""
        soonest: float | None = None
        for reader in self._believed:
            use_s = reader.next_use_s(key)
            if use_s is not None and (soonest is None or use_s < soonest):
                soonest = use_s
        return soonest

    def anchor(self, now_s: float, tolerance_s: float) -> bool:
        """Compute times anew where several readers' have drifted apart; returns whether next uses changed."""
        if len(self._believed) < 2 or max(reader.drift_s(now_s) for reader in self._believed) <= tolerance_s:
            return False
        for reader in self._believed:
            reader.anchor(now_s)
        return True

    @property
    def believed(self) -> tuple[PlannedReader, ...]:
        """Readers that follow their plan; another tuple whenever one begins or ceases to."""
        return self._believed

    def _believe(self) -> None:
        self._of_trainer = {}
        for (trainer, _), reader in self.readers.items():
            self._of_trainer.setdefault(trainer, []).append(reader)
        self._believed = tuple(reader for reader in self.readers.values() if reader.believed)
