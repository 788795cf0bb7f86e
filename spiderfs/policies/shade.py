"""Keep what was hard to learn when it was last trained on (SHADE, the APP cache of its section 4.2.2).

A score is the rank of a sample's loss within its batch. A heap of the members follows the scores; a list of ghosts
knows the score of every sample that was ever scored, cached or not. A missed sample enters if there is room, or if it
is a ghost whose score is not below the lowest member's; what was never scored is not worth evicting a member for, so
that without a trainer this is MinIO. Nobody stands in for anybody.

The paper's ghosts also have the number of their accesses, by which nothing is decided; here they have none. The list
is bounded, and what is dropped from it are the lowest scores: such samples would not be admitted, and unknown ones are
not either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from spiderfs.core.guided import Guided
from spiderfs.core.heap import Heap
from spiderfs.core.policy import Key, in_saved_order, saved_keys
from spiderfs.policies.parts.importance import UNKNOWN

# Room for ImageNet-1k: some 300 MB, should it ever be full.
MAX_GHOSTS = 1 << 21
# What is dropped of a full list, so that finding the lowest scores is paid for by as many new ones.
DROPPED_SHARE = 1 / 8
# Ghosts that are saved, the highest scores: a megabyte. A scoring that was saved too knows all.
SAVED_GHOSTS = 1 << 16


class Shade(Guided):
    name = "shade"
    scoring = "rank"

    def __init__(self, max_ghosts: int = MAX_GHOSTS) -> None:
        if max_ghosts < 1:
            raise ValueError("a list of ghosts needs room for at least one")
        self._max_ghosts = max_ghosts
        self._ghosts: dict[Key, float] = {}
        self._members: Heap[Key] = Heap()

    @property
    def ghosts(self) -> int:
        """Samples whose scores are known, the members among them."""
        return len(self._ghosts)

    def scored(self, key: Key, score: float) -> None:
        if not score > UNKNOWN:
            raise ValueError(f"a score is positive, not {score}")
        self._ghosts[key] = score
        if key in self._members:
            self._members.set(key, score)
        if len(self._ghosts) > self._max_ghosts:
            kept = self._highest(self._max_ghosts - int(self._max_ghosts * DROPPED_SHARE))
            self._ghosts = {ghost: self._ghosts[ghost] for ghost in kept}

    def forget_list(self, dataset: str, keys: Iterable[Key]) -> None:
        for key in keys:
            if key not in self._members:
                self._ghosts.pop(key, None)

    def hit(self, key: Key, size: int) -> None:
        pass

    def missed(self, key: Key, size: int) -> None:
        pass

    def inserted(self, key: Key, size: int) -> None:
        self._members.set(key, self._ghosts.get(key, UNKNOWN))

    def removed(self, key: Key) -> None:
        self._members.discard(key)

    def eviction_order(self, section: str | None = None) -> Iterator[Key]:
        return self._members.ascending()

    def victims_for(self, key: Key, size: int, full: str | None) -> Iterator[Key]:
        if key not in self._ghosts:
            return
        score = self._ghosts[key]
        for member in self._members.ascending():
            if self._members.priority(member) > score:
                return
            yield member

    def score(self, key: Key) -> float:
        """The rank of its latest loss, SHADE eq. 6."""
        # A member whose ghost was dropped keeps the score that it has in the heap.
        return self._members.priority(key) if key in self._members else self._ghosts.get(key, UNKNOWN)

    def state(self) -> dict[str, Any]:
        order = list(self._members.ascending())
        highest = self._highest(SAVED_GHOSTS)
        return {
            "order": order,
            "scores": [self._members.priority(key) for key in order],
            "ghosts": highest,
            "ghost_scores": [self._ghosts[key] for key in highest],
        }

    def restore(self, members: Mapping[Key, int], state: Mapping[str, Any]) -> None:
        ghosts = dict(zip(saved_keys(state.get("ghosts", ())), state.get("ghost_scores", ()), strict=False))
        self._ghosts = ghosts | self._ghosts
        scores = dict(zip(saved_keys(state.get("order", ())), state.get("scores", ()), strict=False))
        order = in_saved_order(members, scores)
        self._members.refill((key, self._ghosts.get(key, scores.get(key, UNKNOWN))) for key in order)

    def _highest(self, count: int) -> list[Key]:
        """So many ghosts, those of the highest scores, in no order; 0.2 s for a million."""
        keys = list(self._ghosts)
        if len(keys) <= count:
            return keys
        scores = np.fromiter(self._ghosts.values(), np.float64, len(keys))
        return [keys[place] for place in np.argpartition(scores, len(keys) - count)[-count:].tolist()]
