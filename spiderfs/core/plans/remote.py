"""Readers on other nodes: when they use the samples whose home is here, by the plans that this node receives.

They may be many, for each rank of a training is one, and so may be the samples: whoever asks for the next use of one
cannot ask every reader. So for each sample it is noted who uses it, and at which position, in **layers**: a reader's
use of a sample lies in the first layer in which no one else has noted one. The ranks of a training that share out the
samples take one layer together, 6 bytes a sample, and jobs that each read all samples one each. Beside that a reader
takes 4 bytes a draw, or 8 if its plan names a sample more than once; of these only the next draw is in a layer.

Which samples have another next use than before is gathered, and whoever ranks them by it takes some at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from spiderfs.core.policy import Key

Numbers = npt.NDArray[np.uint32]

_NO_READER, _MOST_READERS = 0, (1 << 16) - 1
# Draws that are noted between two chances for other tasks: a millisecond for each layer.
_AT_A_TIME = 1 << 15
# By how much of the time that its plan takes still the times of a reader's uses may be wrong: others are compared with
# it, and to rank a million samples again takes ten seconds. At its end they may be wrong by more: a pace varies.
_DRIFT_SHARE, _END_SHARE = 0.02, 0.1


# A reader's pace is measured over this time, and averaged with the pace before.
PACE_WINDOW_S = 1.0
FIRST_PACE_S = 0.001
# A pace this many times slower than before may be a pause of the training: it counts only if the next is slow too.
PAUSE_FACTOR = 4


class Paced:
    """Times are computed from an anchor, so that they change together, and only when someone asks for it."""

    def __init__(self, now_s: float, position: int) -> None:
        self.reached = position
        """One past the furthest position to which the reader has come."""
        self.pace_s = FIRST_PACE_S
        """Seconds from one position to the next."""
        # The pace is measured from the first batch on, not from the plan on: a training may begin much later.
        self._paced_at: tuple[float, int] | None = None
        self._has_pace = self._may_have_paused = False
        self.anchor(now_s)

    def time_of(self, position: int) -> float:
        """When the reader will come to a position, by its pace; the time of what is in hand is over."""
        anchored_s, anchored = self._anchor
        return anchored_s + (position - anchored) * self._anchor_pace_s

    def anchor(self, now_s: float) -> None:
        """Compute times from now and from where the reader is now; the times of all its next uses change."""
        self._anchor = (now_s, self.reached)
        self._anchor_pace_s = self.pace_s

    def _keep_pace(self, position: int, now_s: float) -> None:
        """The reader has come so far."""
        if self._paced_at is None:
            self._paced_at = (now_s, position)
        since_s, since = self._paced_at
        if now_s - since_s >= PACE_WINDOW_S and position > since:
            measured_s = (now_s - since_s) / (position - since)
            self._paced_at = (now_s, position)
            slow = self._has_pace and measured_s > PAUSE_FACTOR * self.pace_s
            self._may_have_paused = slow and not self._may_have_paused
            if not self._may_have_paused:
                self.pace_s = (self.pace_s + measured_s) / 2 if self._has_pace else measured_s
                self._has_pace = True


class HomeSamples:
    """The samples of a list whose home is here, under numbers of their own."""

    def __init__(self, keys: Sequence[Key], index_of: Mapping[Key, int], here: npt.NDArray[np.bool_]) -> None:
        """`keys` and `index_of` are the list's; `here` says of each of its samples whether its home is here."""
        self._keys, self._index_of = keys, index_of
        self._indices = np.flatnonzero(here).astype(np.uint32)
        self.number_of = np.full(len(keys), -1, np.int32)
        """Of each sample of the list; -1 of those of other homes."""
        self.number_of[self._indices] = np.arange(len(self._indices), dtype=np.int32)
        self._numbers = self.number_of.data

    def __len__(self) -> int:
        return len(self._indices)

    def number(self, key: Key) -> int:
        """The number of a file's sample; -1 if its home is not here, or if the list lacks it."""
        index = self._index_of.get(key)
        return -1 if index is None else self._numbers[index]

    def keys_of(self, numbers: npt.NDArray[np.intp]) -> list[Key]:
        return [self._keys[index] for index in self._indices[numbers].tolist()]


class PlanPart:
    """Those draws of an epoch that name samples whose home is here. Making this object may cost a sort, in any thread.

    `order` has the samples by their numbers; the reader begins at the position `start`. If draws were left out,
    `in_plan` has the positions of the others in the whole plan, by which the reader's node counts, also at the start.
    """

    def __init__(
        self, samples: HomeSamples, epoch: int, order: Numbers, start: int = 0, in_plan: Numbers | None = None
    ) -> None:
        self.samples, self.epoch, self.order, self._in_plan = samples, epoch, order, in_plan
        self.start = start = self.position(start)
        rest, total = order[start:], len(order)
        self.firsts: Numbers = np.arange(start, total, dtype=np.uint32)
        """The first position of each sample; none any more once they are noted."""
        self.following: Numbers | None = None
        """For each position the next one of the same sample, or their number; None if no sample is named again."""
        named = np.zeros(len(samples), np.bool_)
        named[rest] = True
        if named.sum() < len(rest):
            by_sample = (np.argsort(rest, kind="stable") + start).astype(np.uint32)
            again = order[by_sample[1:]] == order[by_sample[:-1]]
            self.following = np.full(total, total, np.uint32)
            self.following[by_sample[:-1][again]] = by_sample[1:][again]
            self.firsts = by_sample[np.concatenate(([True], ~again))]

    def position(self, planned: int) -> int:
        """The position here of one in the whole plan, by which the reader's node counts."""
        return planned if self._in_plan is None else int(np.searchsorted(self._in_plan, planned))


class _Reader(Paced):
    def __init__(self, number: int, part: PlanPart, now_s: float) -> None:
        super().__init__(now_s, part.start)
        self.number = number
        self.begin(part, now_s)

    def begin(self, part: PlanPart, now_s: float) -> None:
        self.part, self.reached, self._paced_at = part, part.start, None
        self.anchor(now_s)

    def come(self, position: int, now_s: float) -> None:
        self.reached = max(self.reached, position)
        self._keep_pace(self.reached, now_s)

    def has_drifted(self, now_s: float, tolerance_s: float) -> bool:
        end = len(self.part.order)
        left_s = (end - self.reached) * self.pace_s
        # One that is at the end has no more uses.
        return self.reached < end and (
            abs(self.time_of(self.reached) - now_s) > max(tolerance_s, _DRIFT_SHARE * left_s)
            or abs(self.time_of(end) - (now_s + left_s)) > max(tolerance_s, _END_SHARE * left_s)
        )


class _Layer:
    def __init__(self, samples: int) -> None:
        self.readers, self.positions = np.zeros(samples, np.uint16), np.zeros(samples, np.uint32)
        # One number of an array takes three times as long.
        self.reader_of, self.position_of = self.readers.data, self.positions.data


class _Uses:
    """Who uses which samples, of one list."""

    def __init__(self, samples: HomeSamples) -> None:
        self.samples = samples
        self.layers: list[_Layer] = []
        self._is_changed = np.zeros(len(samples), np.bool_)
        self.changed: deque[npt.NDArray[np.intp]] = deque()

    def note(self, reader: _Reader, positions: Numbers) -> None:
        """Note that a reader comes to these positions, each of another sample."""
        samples, rest = reader.part.order[positions].astype(np.intp), positions
        self.change(samples)
        number = 0
        while len(rest):
            if number == len(self.layers):
                self.layers.append(_Layer(len(self.samples)))
            layer = self.layers[number]
            free = layer.readers[samples] == _NO_READER
            layer.readers[samples[free]] = reader.number
            layer.positions[samples[free]] = rest[free]
            samples, rest = samples[~free], rest[~free]
            number += 1

    def use_up(self, reader: _Reader, first: int, end: int) -> None:
        """A reader has come from one position to another."""
        order, following = reader.part.order, reader.part.following
        found, index = np.unique(order[first:end][::-1], return_index=True)
        samples = found.astype(np.intp)
        nexts = np.full(len(samples), len(order)) if following is None else following[end - 1 - index]
        for layer in self.layers:
            its = layer.readers[samples] == reader.number
            layer.positions[samples[its]] = nexts[its]
            layer.readers[samples[its & (nexts >= len(order))]] = _NO_READER
        self.change(samples)

    def forget(self, reader: _Reader) -> None:
        for layer in self.layers:
            its = np.flatnonzero(layer.readers == reader.number)
            layer.readers[its] = _NO_READER
            self.change(its)
        while self.layers and not self.layers[-1].readers.any():
            self.layers.pop()

    def retime(self) -> None:
        """The times of all uses are others."""
        for layer in self.layers:
            self.change(np.flatnonzero(layer.readers))

    def change(self, samples: npt.NDArray[np.intp]) -> None:
        new = samples[~self._is_changed[samples]]
        if len(new):
            self._is_changed[new] = True
            self.changed.append(new)

    def taken_changes(self, limit: int) -> list[Key]:
        if not self.changed:
            return []
        some = self.changed.popleft()
        if len(some) > limit:
            self.changed.appendleft(some[limit:])
        self._is_changed[some[:limit]] = False
        return self.samples.keys_of(some[:limit])


class RemoteReaders:
    def __init__(self) -> None:
        self._readers: dict[Hashable, _Reader] = {}
        self._by_number: dict[int, _Reader] = {}
        self._uses: dict[int, _Uses] = {}
        """By the identity of a list's samples, which each use holds."""

    def __len__(self) -> int:
        return len(self._readers)

    def plan(self, reader: Hashable, part: PlanPart, now_s: float) -> Iterator[None]:
        """A reader begins an epoch: note it, with chances for other tasks, until it gets another plan or has none."""
        known = self._readers.get(reader)
        if known is None:
            number = next((free for free in range(1, _MOST_READERS) if free not in self._by_number), None)
            if number is None:
                return
            known = self._readers[reader] = self._by_number[number] = _Reader(number, part, now_s)
        else:
            self._uses[id(known.part.samples)].forget(known)
            known.begin(part, now_s)
        uses = self._uses.setdefault(id(part.samples), _Uses(part.samples))
        for first in range(0, len(part.firsts), _AT_A_TIME):
            if self._readers.get(reader) is not known or known.part is not part:
                return
            uses.note(known, part.firsts[first : first + _AT_A_TIME])
            yield
        part.firsts = part.firsts[:0].copy()

    def progressed(self, reader: Hashable, epoch: int, position: int, now_s: float) -> bool:
        """A reader has come so far in an epoch; whether it is the one that its plan is for."""
        known = self._readers.get(reader)
        if known is None or known.part.epoch != epoch:
            return False
        first, end = known.reached, min(known.part.position(position), len(known.part.order))
        if end > first:
            self._uses[id(known.part.samples)].use_up(known, first, end)
        known.come(end, now_s)
        return True

    def drop(self, reader: Hashable) -> None:
        """A reader has no plan any more."""
        known = self._readers.pop(reader, None)
        if known is not None:
            del self._by_number[known.number]
            self._uses[id(known.part.samples)].forget(known)

    def next_use_s(self, key: Key) -> float | None:
        """When any reader will next use a sample."""
        soonest: float | None = None
        for uses in self._uses.values():
            sample = uses.samples.number(key)
            if sample < 0:
                continue
            for layer in uses.layers:
                number = layer.reader_of[sample]
                if number:
                    use_s = self._by_number[number].time_of(layer.position_of[sample])
                    if soonest is None or use_s < soonest:
                        soonest = use_s
        return soonest

    def anchor(self, now_s: float, tolerance_s: float) -> None:
        """Compute times again if those of a reader are far off, and what has changed before has been ranked."""
        if not any(uses.changed for uses in self._uses.values()) and any(
            reader.has_drifted(now_s, tolerance_s) for reader in self._readers.values()
        ):
            for reader in self._readers.values():
                reader.anchor(now_s)
            for uses in self._uses.values():
                uses.retime()

    def taken_changes(self, limit: int) -> list[Key]:
        """Some samples whose next use is another one than when this was asked before; none if there are no more."""
        for uses in list(self._uses.values()):
            found = uses.taken_changes(limit)
            if found:
                return found
            if not any(reader.part.samples is uses.samples for reader in self._readers.values()):
                # Homes have changed, or no one reads the list any more.
                del self._uses[id(uses.samples)]
        return []
