"""MIN with bypass: keep the samples whose next use comes soonest (Belady, 1966).

MIN must know all opens beforehand, so it can only replay traces. If all samples have one size, no policy that fetches
on demand has more hits. If sizes are mixed, finding the optimum is NP-hard; then this greedy rule is a strong yardstick
and not a proven bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from spiderfs.core.heap import Heap
from spiderfs.core.policy import Key, Policy


class Belady(Policy):
    name = "belady"
    needs_future = True

    def __init__(self, future: Sequence[Key]) -> None:
        self._position = 0
        self._never = len(future)
        # For each position the next position of the same key; and for each key its next position from now on.
        self._following = [self._never] * len(future)
        self._next_use: dict[Key, int] = {}
        for position in range(len(future) - 1, -1, -1):
            key = future[position]
            self._following[position] = self._next_use.get(key, self._never)
            self._next_use[key] = position
        self._order: Heap[Key] = Heap()

    @classmethod
    def foreseeing(cls, future: Sequence[Key]) -> Self:
        return cls(future)

    def hit(self, key: Key, size: int) -> None:
        self._advance(key)
        self._order.set(key, -self._next_use[key])

    def missed(self, key: Key, size: int) -> None:
        self._advance(key)

    def inserted(self, key: Key, size: int) -> None:
        self._order.set(key, -self._next_use[key])

    def removed(self, key: Key) -> None:
        self._order.discard(key)

    def eviction_order(self, section: str | None = None) -> Iterator[Key]:
        return self._order.ascending()

    def victims_for(self, key: Key, size: int, full: str | None) -> Iterator[Key]:
        return self._order.below(-self._next_use[key])

    def score(self, key: Key) -> float:
        """1 divided by the number of opens up to the next use; 0 if there is no next use."""
        next_use = self._next_use.get(key, self._never)
        return 0.0 if next_use == self._never else 1 / (1 + next_use - self._position)

    def restore(self, members: Mapping[Key, int], state: Mapping[str, Any]) -> None:
        self._order.refill((key, -self._next_use.get(key, self._never)) for key in members)

    def _advance(self, key: Key) -> None:
        self._next_use[key] = self._following[self._position]
        self._position += 1
