"""Stand-ins for one use: members that each stand in once for a sample of the same label (ImPACT's L-cache).

A redirect is read from a table when a name is looked up, and the table is written before that. So this class decides
beforehand for which samples a member would stand in: a few samples that are not cached and that no reader has asked for
in this epoch. The first of these samples that a reader asks for uses the member up. Each of the others then gets
another stand-in, or is read itself.

A member is in one of three states until it is used:
- waiting: it has not been offered yet;
- offered: there are redirects from some samples to it;
- idle: when it was to be offered, no sample of its label needed a stand-in.

Labels belong to a list, so a member stands in for samples of one list at a time. `drain_changes` names the redirects
that have to be published.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from spiderfs.core.policy import Key

# A member is offered to so many samples. With fewer, more members would stay unused because no reader asks for their
# samples; with more, more rows of the table would be written in vain.
SAMPLES_EACH = 8
# So many members are offered at a time, which keeps the table of redirects small; others follow as these are used.
MAX_OFFERED = 8192
# To find samples that need a stand-in, so many samples of a label are looked at.
_LOOKED_AT = 8 * SAMPLES_EACH

Change = tuple[str, Key, Key | None]


class SingleUseStandIns:
    """The members that may stand in, and the samples that they are offered to.

    `needs(key)` says whether a sample needs a stand-in.
    """

    def __init__(
        self, needs: Callable[[Key], bool], samples_each: int = SAMPLES_EACH, max_offered: int = MAX_OFFERED
    ) -> None:
        self._needs = needs
        self._samples_each = samples_each
        self._max_offered = max_offered
        self._labels: dict[str, Mapping[Key, int]] = {}
        # For each list and label: its samples, and the index at which the next search for one in need begins.
        self._alike: dict[tuple[str, int], list[Key]] = {}
        self._next: dict[tuple[str, int], int] = {}
        # The members that are not used yet, by state: those that wait; those that are offered, with the samples (list
        # and key) that they are offered to; and those that are idle, in one set and by list and label.
        self._waiting: OrderedDict[Key, None] = OrderedDict()
        self._offered: dict[Key, list[tuple[str, Key]]] = {}
        self._idle: dict[Key, None] = {}
        self._idle_in: dict[tuple[str, int], OrderedDict[Key, None]] = {}
        # The stand-in of each sample, by list.
        self._stand_ins_of: dict[Key, dict[str, Key]] = {}
        self._changes: dict[tuple[str, Key], Key | None] = {}

    def __len__(self) -> int:
        """The number of members that are not used yet."""
        return len(self._waiting) + len(self._offered) + len(self._idle)

    def __contains__(self, key: object) -> bool:
        return key in self._waiting or key in self._offered or key in self._idle

    def listed(self, course_id: str, labels: Mapping[Key, int]) -> None:
        """Note the labels of a list; they replace its earlier labels."""
        members = self._withdrawn()
        self._forget(course_id)
        for key, label in labels.items():
            self._alike.setdefault((course_id, label), []).append(key)
        self._labels[course_id] = labels
        self._waiting.update(dict.fromkeys(members))

    def unlisted(self, course_id: str) -> None:
        """Forget a list."""
        members = self._withdrawn()
        self._forget(course_id)
        self._labels.pop(course_id, None)
        self._waiting.update(dict.fromkeys(members))

    def _withdrawn(self) -> list[Key]:
        """Remove the members that are offered or idle, and return them."""
        members = [*self._offered, *self._idle]
        for key in members:
            self.discard(key)
        return members

    def _forget(self, course_id: str) -> None:
        for group in [group for group in self._alike if group[0] == course_id]:
            del self._alike[group]
            self._next.pop(group, None)
            self._idle_in.pop(group, None)

    def add(self, key: Key) -> None:
        """Add a member that was not used yet."""
        if key not in self:
            self._waiting[key] = None

    def discard(self, key: Key) -> None:
        """Remove a member: it was used, or it left the cache."""
        self._waiting.pop(key, None)
        self._wake(key)
        for course_id, wanted in self._offered.pop(key, ()):
            stand_ins = self._stand_ins_of[wanted]
            del stand_ins[course_id]
            if not stand_ins:
                del self._stand_ins_of[wanted]
            self._changes[course_id, wanted] = None
            idle = self._idle_in.get((course_id, self._labels[course_id][wanted]))
            if idle:
                other = next(iter(idle))
                self._wake(other)
                self._waiting[other] = None

    def take_back(self, key: Key) -> None:
        """Take back the redirects of a sample: it entered the cache, or was read, and needs no stand-in any more."""
        for course_id, stand_in in self._stand_ins_of.pop(key, {}).items():
            rows = self._offered[stand_in]
            rows.remove((course_id, key))
            self._changes[course_id, key] = None
            if not rows:
                del self._offered[stand_in]
                self._waiting[stand_in] = None

    def clear(self) -> None:
        """Remove all members."""
        self._idle.clear()
        self._idle_in.clear()
        for key in list(self._offered):
            self.discard(key)
        self._waiting.clear()

    def stand_in(self, course_id: str, key: Key) -> Key | None:
        """The member that stands in for a sample of a list; None if there is none."""
        self._offer()
        return self._stand_ins_of.get(key, {}).get(course_id)

    def drain_changes(self) -> list[Change]:
        """The redirects that have changed since the last call: list, sample, and stand-in (None if it has none)."""
        self._offer()
        changes = [(course_id, key, stand_in) for (course_id, key), stand_in in self._changes.items()]
        self._changes.clear()
        return changes

    def change_all(self) -> None:
        """Make the next `drain_changes` return every redirect."""
        for key, stand_ins in self._stand_ins_of.items():
            self._changes.update({(course_id, key): stand_in for course_id, stand_in in stand_ins.items()})

    def _offer(self) -> None:
        """Offer members that wait, in the order in which they came, until MAX_OFFERED are offered."""
        while self._waiting and len(self._offered) < self._max_offered:
            key, _ = self._waiting.popitem(last=False)
            groups = [(course_id, labels[key]) for course_id, labels in self._labels.items() if key in labels]
            rows = next(filter(None, (self._in_need(*group) for group in groups)), None)
            if rows is None:
                self._idle[key] = None
                for group in groups:
                    self._idle_in.setdefault(group, OrderedDict())[key] = None
                continue
            self._offered[key] = rows
            for course_id, wanted in rows:
                self._stand_ins_of.setdefault(wanted, {})[course_id] = key
                self._changes[course_id, wanted] = key

    def _in_need(self, course_id: str, label: int) -> list[tuple[str, Key]]:
        """Up to `samples_each` samples of a list and label that need a stand-in and have none."""
        alike, found = self._alike[course_id, label], []
        begin = self._next.get((course_id, label), 0)
        for step in range(min(_LOOKED_AT, len(alike))):
            key = alike[(begin + step) % len(alike)]
            if course_id not in self._stand_ins_of.get(key, ()) and self._needs(key):
                found.append((course_id, key))
                if len(found) == self._samples_each:
                    break
        self._next[course_id, label] = (begin + step + 1) % len(alike)
        return found

    def _wake(self, key: Key) -> None:
        """Make a member no longer idle, if it was."""
        if key in self._idle:
            del self._idle[key]
            for course_id, labels in self._labels.items():
                if key in labels:
                    self._idle_in[course_id, labels[key]].pop(key, None)
