"""Members that each stand in once for a sample of their label, until they are used up (ImPACT, its L-cache).

Readers are given stand-ins at a look-up, from a table that is written before, so it is settled beforehand for which
samples a member would stand in: a few that are not cached and were not asked for in this epoch yet. The first of them
that is asked for uses the member up, and the others have to find another one or be read themselves.

A dataset (the list of samples that a trainer declared) alone says who has the same label: a member stands in for
samples of one dataset at a time. Whoever publishes the redirects asks for those that `drain_changes` names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from spiderfs.core.policy import Key

# Samples that a member would stand in for. Were there fewer of them, members would stay unused that nobody happens to
# need; for each more of them a row is written in vain whenever a member is used.
SAMPLES_EACH = 8
# Members that wait with their samples at a time; others follow as these are used. The table of redirects stays small.
MAX_OFFERED = 8192
# Of the samples of a label, so many are looked at for those that need a stand-in.
_LOOKED_AT = 8 * SAMPLES_EACH

Change = tuple[str, Key, Key | None]


class SingleUseStandIns:
    """`needs(key)` says of a sample whether it is one to stand in for."""

    def __init__(
        self, needs: Callable[[Key], bool], samples_each: int = SAMPLES_EACH, max_offered: int = MAX_OFFERED
    ) -> None:
        self._needs = needs
        self._samples_each = samples_each
        self._max_offered = max_offered
        self._labels: dict[str, Mapping[Key, int]] = {}
        # Of each dataset and label: its samples, and where the next look for one in need begins.
        self._alike: dict[tuple[str, int], list[Key]] = {}
        self._next: dict[tuple[str, int], int] = {}
        # Members that are not used yet: those that wait to be offered, those that are, with whom they would help, and
        # those that found nobody in need, by dataset and label.
        self._waiting: OrderedDict[Key, None] = OrderedDict()
        self._offered: dict[Key, list[tuple[str, Key]]] = {}
        self._idle: dict[Key, None] = {}
        self._idle_in: dict[tuple[str, int], OrderedDict[Key, None]] = {}
        self._stand_ins_of: dict[Key, dict[str, Key]] = {}
        self._changes: dict[tuple[str, Key], Key | None] = {}

    def __len__(self) -> int:
        """Members that are not used yet."""
        return len(self._waiting) + len(self._offered) + len(self._idle)

    def __contains__(self, key: object) -> bool:
        return key in self._waiting or key in self._offered or key in self._idle

    def listed(self, dataset: str, labels: Mapping[Key, int]) -> None:
        """Know a dataset, or know it anew."""
        members = self._withdrawn()
        self._forget(dataset)
        for key, label in labels.items():
            self._alike.setdefault((dataset, label), []).append(key)
        self._labels[dataset] = labels
        self._waiting.update(dict.fromkeys(members))

    def unlisted(self, dataset: str) -> None:
        """Know a dataset no longer."""
        members = self._withdrawn()
        self._forget(dataset)
        self._labels.pop(dataset, None)
        self._waiting.update(dict.fromkeys(members))

    def _withdrawn(self) -> list[Key]:
        """The members that stood in for somebody, or found nobody; they do neither now."""
        members = [*self._offered, *self._idle]
        for key in members:
            self.discard(key)
        return members

    def _forget(self, dataset: str) -> None:
        for group in [group for group in self._alike if group[0] == dataset]:
            del self._alike[group]
            self._next.pop(group, None)
            self._idle_in.pop(group, None)

    def add(self, key: Key) -> None:
        """A member that was not used yet."""
        if key not in self:
            self._waiting[key] = None

    def discard(self, key: Key) -> None:
        """It was used, or is not one any more."""
        self._waiting.pop(key, None)
        self._wake(key)
        for dataset, wanted in self._offered.pop(key, ()):
            stand_ins = self._stand_ins_of[wanted]
            del stand_ins[dataset]
            if not stand_ins:
                del self._stand_ins_of[wanted]
            self._changes[dataset, wanted] = None
            idle = self._idle_in.get((dataset, self._labels[dataset][wanted]))
            if idle:
                other = next(iter(idle))
                self._wake(other)
                self._waiting[other] = None

    def settled(self, key: Key) -> None:
        """This sample needs nobody any more: it came into the cache, or was read."""
        for dataset, stand_in in self._stand_ins_of.pop(key, {}).items():
            rows = self._offered[stand_in]
            rows.remove((dataset, key))
            self._changes[dataset, key] = None
            if not rows:
                del self._offered[stand_in]
                self._waiting[stand_in] = None

    def clear(self) -> None:
        """Forget all members."""
        self._idle.clear()
        self._idle_in.clear()
        for key in list(self._offered):
            self.discard(key)
        self._waiting.clear()

    def stand_in(self, dataset: str, key: Key) -> Key | None:
        self._offer()
        return self._stand_ins_of.get(key, {}).get(dataset)

    def drain_changes(self) -> list[Change]:
        """Dataset, sample and stand-in (None: no longer any) that have changed since the last call."""
        self._offer()
        changes = [(dataset, key, stand_in) for (dataset, key), stand_in in self._changes.items()]
        self._changes.clear()
        return changes

    def change_all(self) -> None:
        """Let the next `drain_changes` name all."""
        for key, stand_ins in self._stand_ins_of.items():
            self._changes.update({(dataset, key): stand_in for dataset, stand_in in stand_ins.items()})

    def _offer(self) -> None:
        """Offer those that wait, the first in first, as many as there is room for."""
        while self._waiting and len(self._offered) < self._max_offered:
            key, _ = self._waiting.popitem(last=False)
            groups = [(dataset, labels[key]) for dataset, labels in self._labels.items() if key in labels]
            rows = next(filter(None, (self._in_need(*group) for group in groups)), None)
            if rows is None:
                self._idle[key] = None
                for group in groups:
                    self._idle_in.setdefault(group, OrderedDict())[key] = None
                continue
            self._offered[key] = rows
            for dataset, wanted in rows:
                self._stand_ins_of.setdefault(wanted, {})[dataset] = key
                self._changes[dataset, wanted] = key

    def _in_need(self, dataset: str, label: int) -> list[tuple[str, Key]]:
        alike, found = self._alike[dataset, label], []
        begin = self._next.get((dataset, label), 0)
        for step in range(min(_LOOKED_AT, len(alike))):
            key = alike[(begin + step) % len(alike)]
            if dataset not in self._stand_ins_of.get(key, ()) and self._needs(key):
                found.append((dataset, key))
                if len(found) == self._samples_each:
                    break
        self._next[dataset, label] = (begin + step + 1) % len(alike)
        return found

    def _wake(self, key: Key) -> None:
        """Let it be idle no longer, if it was."""
        if key in self._idle:
            del self._idle[key]
            for dataset, labels in self._labels.items():
                if key in labels:
                    self._idle_in[dataset, labels[key]].pop(key, None)
