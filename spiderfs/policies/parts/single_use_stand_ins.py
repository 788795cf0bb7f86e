"""Stand-ins for one use: members that each stand in once for a sample of the same label (ImPACT's L-cache).

A redirect is read from a table when a name is looked up, and the table is written before that. So this class decides
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
from collections.abc import Callable, Mapping

from spiderfs.core.policy import Key

# A member is offered to so many samples. With fewer, more members would stay unused because no reader asks for their
# samples; with more, more rows of the table would be written in vain.
SAMPLES_EACH = 8
# So many members are offered at a time, which keeps the table of redirects small; others follow as these are used.
MAX_OFFERED = 8192
# To find samples that need a stand-in, so many samples of a label are looked at.
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
