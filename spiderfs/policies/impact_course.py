"""What ImPACT's cache knows of one course, and the two parts of its members.

Of a course it knows the losses, the H-list, what readers got in this epoch, and the stand-ins.

The half of the course's samples with the higher losses are its **H-samples**, and all other samples are its
**L-samples**: an L-sample of one course may be an H-sample of another. A member can stand in for a course if it is one
of its L-samples, and if no reader of this course got it in this epoch, under whatever name.

**Stand-ins for one use** (ImPACT's L-cache) are members that each stand in once for a sample of the same label. A
redirect is read from a table when a name is looked up, and the table is written before that. So it is decided
beforehand for which samples a member would stand in: a few samples that are not cached and that no reader has asked for
in this epoch. The first of these samples that a reader asks for uses the member up. Each of the others then gets
another stand-in, or is read itself.

A member is in one of three states until it is used:
- waiting: it has not been offered yet;
- offered: there are redirects from some samples to it;
- idle: when it was to be offered, no sample of its label needed a stand-in.

`drain_changes` names the redirects that have to be published.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np

from spiderfs.core.heap import Heap
from spiderfs.core.policy import Key, saved_keys

# A member is offered to this many samples. With fewer, more members would stay unused because no reader asks for their
# samples; with more, more rows of the table would be written in vain.
SAMPLES_EACH = 8
# This many members are offered at a time, which keeps the table of redirects small; others follow as these are used.
MAX_OFFERED = 8192
# To find samples that need a stand-in, this many samples of a label are looked at.
_LOOKED_AT = 8 * SAMPLES_EACH


class SingleUseStandIns:
    """The members that may stand in for one course, and the samples that they are offered to.

    `needs(key)` says whether a sample needs a stand-in.
    """

    def __init__(
        self, needs: Callable[[Key], bool], samples_each: int = SAMPLES_EACH, max_offered: int = MAX_OFFERED
    ) -> None:
        self._needs = needs
        self._samples_each = samples_each
        self._max_offered = max_offered
        self._labels: Mapping[Key, int] = {}
        # For each label: its samples, and the index at which the next search for one in need begins.
        self._alike: dict[int, list[Key]] = {}
        self._next: dict[int, int] = {}
        # The members that are not used yet, by state: those that wait; those that are offered, with the samples that
        # they are offered to; and those that are idle, by label (None: they have none).
        self._waiting: OrderedDict[Key, None] = OrderedDict()
        self._offered: dict[Key, list[Key]] = {}
        self._idle: dict[int | None, OrderedDict[Key, None]] = {}
        # The stand-in of each sample.
        self._stand_in_of: dict[Key, Key] = {}
        self._changes: dict[Key, Key | None] = {}

    def __len__(self) -> int:
        """The number of members that are not used yet."""
        return len(self._waiting) + len(self._offered) + sum(map(len, self._idle.values()))

    def listed(self, labels: Mapping[Key, int]) -> None:
        """Note the labels; they replace earlier ones."""
        members = [*self._offered, *(key for idle in self._idle.values() for key in idle)]
        for key in members:
            self.discard(key)
        self._alike.clear()
        self._next.clear()
        for key, label in labels.items():
            self._alike.setdefault(label, []).append(key)
        self._labels = labels
        self._waiting.update(dict.fromkeys(members))

    def add(self, key: Key) -> None:
        """Add a member that was not used yet."""
        if key not in self._offered and key not in self._idle.get(self._labels.get(key), ()):
            self._waiting.setdefault(key)

    def discard(self, key: Key) -> None:
        """Remove a member: it was used, or it left the cache."""
        self._waiting.pop(key, None)
        label = self._labels.get(key)
        idle = self._idle.get(label, OrderedDict())
        idle.pop(key, None)
        rows = self._offered.pop(key, ())
        for wanted in rows:
            del self._stand_in_of[wanted]
            self._changes[wanted] = None
        for _ in range(min(len(rows), len(idle))):
            self._waiting[idle.popitem(last=False)[0]] = None

    def take_back(self, key: Key) -> None:
        """Take back the redirect of a sample: it entered the cache, or was read, and needs no stand-in any more."""
        stand_in = self._stand_in_of.pop(key, None)
        if stand_in is None:
            return
        rows = self._offered[stand_in]
        rows.remove(key)
        self._changes[key] = None
        if not rows:
            del self._offered[stand_in]
            self._waiting[stand_in] = None

    def clear(self) -> None:
        """Remove all members."""
        self._idle.clear()
        for key in list(self._offered):
            self.discard(key)
        self._waiting.clear()

    def stand_in(self, key: Key) -> Key | None:
        """The member that stands in for a sample; None if there is none."""
        self._offer()
        return self._stand_in_of.get(key)

    def drain_changes(self) -> list[tuple[Key, Key | None]]:
        """The redirects that have changed since the last call: sample, and stand-in (None if it has none)."""
        self._offer()
        changes = list(self._changes.items())
        self._changes.clear()
        return changes

    def change_all(self) -> None:
        """Make the next `drain_changes` return every redirect."""
        self._changes.update(self._stand_in_of)

    def _offer(self) -> None:
        """Offer members that wait, in the order in which they came, until MAX_OFFERED are offered."""
        while self._waiting and len(self._offered) < self._max_offered:
            key, _ = self._waiting.popitem(last=False)
            label = self._labels.get(key)
            rows = [] if label is None else self._in_need(label)
            if not rows:
                self._idle.setdefault(label, OrderedDict())[key] = None
                continue
            self._offered[key] = rows
            for wanted in rows:
                self._stand_in_of[wanted] = key
                self._changes[wanted] = key

    def _in_need(self, label: int) -> list[Key]:
        """Up to `samples_each` samples of a label that need a stand-in and have none."""
        alike, found = self._alike[label], []
        begin = self._next.get(label, 0)
        for step in range(min(_LOOKED_AT, len(alike))):
            key = alike[(begin + step) % len(alike)]
            if key not in self._stand_in_of and self._needs(key):
                found.append(key)
                if len(found) == self._samples_each:
                    break
        self._next[label] = (begin + step + 1) % len(alike)
        return found


# The share of the scored samples that are H-samples; the paper leaves it open.
H_SHARE = 0.5
# Reads of H-samples and of L-samples counted at the start: the paper's 9 to 1. Counts are halved at each epoch, so
# these soon weigh little.
FIRST_HIGH_READS, FIRST_LOW_READS = 900.0, 100.0
# The H-list is made anew after as many reads as this share of the scored samples, which is four times in an epoch of
# half of them. Made once in an epoch, it is an epoch old when the sampler draws by newer losses: of 3,000 images with a
# fifth cached, 29 % of the reads were hits, and 31 % with the newer lists (benchmarks/training/missing_hits.py).
LISTED_AFTER_SHARE = 1 / 8
# The fewest reads between two lists.
LISTED_AFTER_READS = 256


class ImpactCourse:
    """`is_away(key)` says whether a sample is neither cached nor pinned."""

    def __init__(self, is_away: Callable[[Key], bool]) -> None:
        self._is_away = is_away
        self.labels: Mapping[Key, int] = {}
        self.losses: dict[Key, float] = {}
        self.high: frozenset[Key] = frozenset()
        """The H-list."""
        self.asked_for: set[Key] = set()
        """All samples that readers asked for in this epoch."""
        self.used: set[Key] = set()
        """The L-members that readers got in this epoch, under whatever name."""
        self.stand_ins = SingleUseStandIns(self.needs_stand_in)
        self.warms_up = False
        self.is_back = True
        """False after a remount, until something is heard of the course."""
        self.high_reads, self.low_reads = FIRST_HIGH_READS, FIRST_LOW_READS
        self._reads_since_list = 0
        # Whether an epoch has ended, and whether the last one had no reads.
        self._has_begun = self._is_idle = False

    def wants(self, key: Key) -> bool:
        """Whether a member is one of the samples that this course reads in its epochs."""
        return not self._is_idle and (key in self.losses or key in self.labels)

    def needs_stand_in(self, key: Key) -> bool:
        """Whether readers of this sample need a stand-in; what no batch has named may be a validation's."""
        return key in self.losses and key not in self.high and key not in self.asked_for and self._is_away(key)

    def read(self, key: Key, counts: bool) -> None:
        """A reader got these bytes under the sample's own name; the read moves the ratio if it `counts`."""
        self.asked_for.add(key)
        self._is_idle = False
        self._reads_since_list += 1
        # Before there is a list nobody knows which samples are L-samples.
        if counts and self.high:
            if key in self.high:
                self.high_reads += 1
            else:
                self.low_reads += 1

    def use(self, key: Key) -> None:
        """A member was read: it stands in for this course no more, if it is one of its L-samples."""
        if key not in self.high:
            self.used.add(key)
            self.stand_ins.discard(key)

    def offer(self, key: Key) -> None:
        """A member may stand in, if it is one of the course's L-samples and was not read in this epoch."""
        if key in self.high:
            return
        if key in self.asked_for:
            self.used.add(key)
        elif self.high and key not in self.used:
            self.stand_ins.add(key)

    def new_epoch(self) -> None:
        """Begin an epoch: every L-member may stand in again."""
        self.high_reads, self.low_reads = self.high_reads / 2, self.low_reads / 2
        self._is_idle = self._has_begun and not self.asked_for
        self._has_begun = True
        self.forget_reads()

    def forget_reads(self) -> None:
        self.asked_for.clear()
        self.used.clear()
        self.stand_ins.clear()

    @property
    def list_is_old(self) -> bool:
        """Whether there is a list, and enough reads have come since for a new one."""
        enough = max(LISTED_AFTER_READS, len(self.losses) * LISTED_AFTER_SHARE)
        return bool(self.high) and self._reads_since_list >= enough

    def list_anew(self) -> None:
        """Choose the H-samples by the losses of now; there are none while the course warms up."""
        self._reads_since_list = 0
        # Members are offered anew by the new list.
        self.stand_ins.clear()
        keys, count = list(self.losses), int(len(self.losses) * H_SHARE)
        if count == 0 or self.warms_up:
            self.high = frozenset()
            return
        losses = np.fromiter(self.losses.values(), np.float64, len(keys))
        chosen = np.argpartition(losses, len(keys) - count)[-count:]
        self.high = frozenset(keys[index] for index in chosen.tolist())

    def state(self) -> dict[str, Any]:
        return {"high": list(self.high), "used": list(self.used), "reads": [self.high_reads, self.low_reads]}

    def restore(self, state: Mapping[str, Any], members: Container[Key]) -> None:
        """Go on from what `state` returned; of the samples that readers asked for it has the used members."""
        self.high = frozenset(saved_keys(state["high"]))
        self.high_reads, self.low_reads = state["reads"]
        self.used.update(key for key in saved_keys(state["used"]) if key in members)
        self.asked_for.update(self.used)


class HighAndLow:
    """The two parts of the cache (section III-C); `worths` has the worth of every H-sample, cached or not."""

    def __init__(self, worths: Mapping[Key, float]) -> None:
        self.worths = worths
        self.high: Heap[Key] = Heap()
        """The H-members, by worth."""
        self.low: OrderedDict[Key, None] = OrderedDict()
        """The L-members, in the order in which they entered."""
        self.high_bytes = self.low_bytes = 0

    def __contains__(self, key: object) -> bool:
        return key in self.high or key in self.low

    def add(self, key: Key, size: int) -> None:
        if key in self.worths:
            self.high.set(key, self.worths[key])
            self.high_bytes += size
        else:
            self.low[key] = None
            self.low_bytes += size

    def remove(self, key: Key, size: int) -> None:
        if key in self.high:
            self.high.discard(key)
            self.high_bytes -= size
        else:
            del self.low[key]
            self.low_bytes -= size
