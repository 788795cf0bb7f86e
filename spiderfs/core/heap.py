"""A heap whose priorities may change and that can be read in order without being emptied.

A changed or discarded entry stays in the list as a stale one until it comes to the top or until stale entries
outnumber live ones; both are paid for by the change that made them stale, so every operation is O(log n) amortised.
Equal priorities come out in the order in which they were set, the oldest first; keys are never compared.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

# Below this many entries a rebuild would come so often that its constant cost shows.
REBUILD_MIN = 64

# Walking the tree costs 8 us a key, sorting everything 1 us a key: past this share of the keys the rest is sorted.
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
        """Take a key out; one that is not there is no error."""
        self._live.pop(key, None)
        if len(self._entries) > 2 * len(self._live) + REBUILD_MIN:
            self._rebuild()

    def priority(self, key: K) -> float:
        """Priority of a key that is there."""
        return self._live[key][0]

    def first(self) -> K:
        """The key of lowest priority; there must be one."""
        entries, live = self._entries, self._live
        while live.get(entries[0][2]) is not entries[0]:
            heappop(entries)
        return entries[0][2]

    def refill(self, priorities: Iterable[tuple[K, float]]) -> None:
        """Replace everything; equal priorities come out in the order given here."""
        self._live = {key: (priority, number, key) for number, (key, priority) in enumerate(priorities, 1)}
        self._sequence = len(self._live)
        self._rebuild()

    def ascending(self) -> Iterator[K]:
        """Keys by rising priority; the first few cost O(k log k). Must not be read on after a change."""
        if not self._live:
            return
        # Most readers want one key: nothing is set up before they ask for a second.
        yield self.first()
        entries, live = self._entries, self._live
        # Best first through the implicit tree: a node can only come after its parent.
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

    def _rebuild(self) -> None:
        self._entries = list(self._live.values())
        heapify(self._entries)
