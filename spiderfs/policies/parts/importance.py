"""The section of the most important samples: a heap of the members by score, and the scores of all samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spiderfs.core.heap import Heap
from spiderfs.core.policy import Key

# The score of a sample that was never scored. All scores are higher, so such a sample evicts no scored member.
UNKNOWN = 0.0


class Importance:
    def __init__(self) -> None:
        self._scores: dict[Key, float] = {}
        self._order: Heap[Key] = Heap()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def score(self, key: Key) -> float:
        """The score of any sample, cached or not; UNKNOWN if it was never scored."""
        return self._scores.get(key, UNKNOWN)

    def set_score(self, key: Key, score: float) -> None:
        """Change the score of any sample, cached or not; the score must be positive."""
        self._scores[key] = score
        if key in self._order:
            self._order.set(key, score)

    def forget(self, key: Key) -> None:
        """Forget the score of a sample, unless the sample is a member."""
        if key not in self._order:
            self._scores.pop(key, None)

    def add(self, key: Key) -> None:
        self._order.set(key, self.score(key))

    def discard(self, key: Key) -> None:
        self._order.discard(key)

    def ascending(self) -> Iterator[Key]:
        """All members, the least important first."""
        return self._order.ascending()

    def below(self, score: float) -> Iterator[Key]:
        """Members of a lower score, the least important first."""
        for key in self._order.ascending():
            if self._order.priority(key) >= score:
                return
            yield key

    def refill(self, scored: Iterable[tuple[Key, float]]) -> None:
        """Replace all members; of members of equal score, the first one given here leaves first."""
        members = list(scored)
        self._scores.update((key, score) for key, score in members if score != UNKNOWN)
        self._order.refill(members)
