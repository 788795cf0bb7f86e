"""What the jobs that share lists still owe, over all lists, in the keys of the engine.

The engine tells this which samples are members. `foresight.py` asks it for the rank by which a member leaves.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterator

from spiderfs.core.plans.exchange import SharedList
from spiderfs.core.policy import Key

NOT_OWED = 0.0
PROMISED = math.inf


class Owed:
    def __init__(self) -> None:
        self.lists: dict[Hashable, SharedList] = {}
        self._changed: dict[Key, None] = {}

    @property
    def active(self) -> bool:
        """Whether samples of some list are exchanged."""
        return any(shared.active for shared in self.lists.values())

    def add(self, name: Hashable, shared: SharedList, members: Container[Key]) -> None:
        """Jobs may exchange samples of this list from now on."""
        self.lists[name] = shared
        for sample, key in enumerate(shared.keys):
            if key in members:
                shared.entered(sample)

    def remove(self, name: Hashable) -> None:
        """Nobody shares this list any more."""
        self.lists.pop(name, None)

    def entered(self, key: Key) -> None:
        """A sample is a member from now on."""
        for shared, sample in self._places(key):
            shared.entered(sample)

    def left(self, key: Key) -> None:
        """A sample is a member no longer."""
        for shared, sample in self._places(key):
            shared.left(sample)

    def not_kept(self, key: Key) -> None:
        """A sample that was fetched ahead has come and was not kept, or has not come."""
        for shared, sample in self._places(key):
            shared.not_kept(sample)

    def changed(self, key: Key) -> None:
        """Note that a file is owed or promised to others than before."""
        self._changed[key] = None

    def taken_changes(self) -> list[Key]:
        """The files that have changed since this was asked before."""
        changed, self._changed = list(self._changed), {}
        return changed

    def wanted_by(self, key: Key) -> int:
        """How many ranks of jobs that exchange will still read a sample: it is owed or promised to them."""
        return sum(shared.wanted_by(sample) for shared, sample in self._places(key) if shared.active)

    def rank(self, key: Key) -> float:
        """By what a sample leaves, the lowest first: NOT_OWED; or to how many ranks it is owed; or PROMISED.

        A fraction drawn at random is added to the number of ranks, so that equals leave in a random order.
        """
        owing, fraction = 0, 0.0
        for shared, sample in self._places(key):
            if shared.active:
                if shared.promised(sample):
                    return PROMISED
                owing += shared.owing(sample)
                fraction = shared.chance()
        return owing + fraction if owing else NOT_OWED

    def _places(self, key: Key) -> Iterator[tuple[SharedList, int]]:
        """The lists that a file is in, and its sample there."""
        for shared in self.lists.values():
            sample = shared.index_of.get(key)
            if sample is not None:
                yield shared, sample
