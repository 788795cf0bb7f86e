"""A heap whose priorities may change, and whose keys can be read in order without emptying it.

When a key's priority changes or the key is discarded, its old entry stays in the list as a stale entry. A stale entry
is removed when it comes to the top, or when stale entries outnumber live ones. The change that made the entry stale
pays for this, so every operation takes O(log n) amortised time. Keys of equal priority come out in the order in which
their priorities were set, the oldest first; keys are never compared.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

# This many stale entries are always allowed: with fewer, small heaps would be rebuilt too often.
REBUILD_MIN = 64

# Walking the tree costs 8 us for each key, sorting all keys 1 us for each: after this share the rest is sorted.
WALKED_SHARE = 1 / 16


class Heap(Generic[K]):
    def __init__(self) -> None:
        self._entries: list[tuple[float, int, K]] = []
        self._live: dict[K, tuple[float, int, K]] = {}
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: object) -> bool:
        return key in self._live

    def set(self, key: K, priority: float) -> None:
        """Add a key, or change its priority."""
        self._sequence += 1
        entry = (priority, self._sequence, key)
        self._live[key] = entry
        heappush(self._entries, entry)
        if len(self._entries) > 2 * len(self._live) + REBUILD_MIN:
            self._rebuild()

    def discard(self, key: K) -> None:
        """Remove a key, if it is in the heap."""
        self._live.pop(key, None)
        if len(self._entries) > 2 * len(self._live) + REBUILD_MIN:
            self._rebuild()

    def priority(self, key: K) -> float:
        """The priority of a key; raises KeyError if the key is not in the heap."""
        return self._live[key][0]

    def first(self) -> K:
        """The key of lowest priority; the heap must not be empty."""
        entries, live = self._entries, self._live
        while live.get(entries[0][2]) is not entries[0]:
            heappop(entries)
        return entries[0][2]

    def refill(self, priorities: Iterable[tuple[K, float]]) -> None:
        """Replace all keys; keys of equal priority come out in the order given here."""
        self._live = {key: (priority, number, key) for number, (key, priority) in enumerate(priorities, 1)}
        self._sequence = len(self._live)
        self._rebuild()

    def ascending(self) -> Iterator[K]:
        """All keys by rising priority, the first k in O(k log k); do not read on after a change."""
        if not self._live:
            return
        # Most callers want one key: nothing is set up before they ask for a second one.
        yield self.first()
        entries, live = self._entries, self._live
        # Walk the heap's implicit tree, lowest priority first: a node always comes after its parent.
        entry, index = entries[0], 0
        frontier: list[tuple[tuple[float, int, K], int]] = []
        for _ in range(int(len(entries) * WALKED_SHARE) + 1):
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(entries):
                    heappush(frontier, (entries[child], child))
            if not frontier:
                return
            entry, index = heappop(frontier)
            if live.get(entry[2]) is entry:
                yield entry[2]
        for entry in sorted(later for later in live.values() if later > entry):
            yield entry[2]

    def below(self, priority: float) -> Iterator[K]:
        """The keys of a lower priority, by rising priority; as for `ascending`."""
        for key in self.ascending():
            if self._live[key][0] >= priority:
                return
            yield key

    def _rebuild(self) -> None:
        self._entries = list(self._live.values())
        heapify(self._entries)
