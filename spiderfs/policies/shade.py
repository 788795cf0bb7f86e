"""Keep the samples that were hard to learn when the training last used them (SHADE, the APP cache of section 4.2.2).

A sample's score is the rank of its loss within its batch. The members are in a heap by score. A **ghost** is the score
of a sample that was scored once, cached or not. A missed sample enters if there is room, or if it has a ghost and its
score is not below that of the lowest member. A sample that was never scored evicts no member, so without a trainer this
policy acts as MinIO does. This policy has no substitutes.

The paper's ghosts also count accesses, but the paper decides nothing by these counts; here ghosts have none. The number
of ghosts is limited. Those with the lowest scores are dropped: their samples would not be admitted anyway, and samples
without a ghost are not admitted either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from spiderfs.core.heap import Heap
from spiderfs.core.policy import UNKNOWN, Key, Policy, in_saved_order, saved_keys

# More than the samples of ImageNet-1k; these ghosts take some 300 MB.
MAX_GHOSTS = 1 << 21
# The share of the ghosts that is dropped when there are too many: the lowest scores are looked for that seldom.
DROPPED_SHARE = 1 / 8
# Ghosts that `state` has, those of the highest scores: a megabyte. The scoring saves all scores of its own.
SAVED_GHOSTS = 1 << 16


class Shade(Policy):
    name = "shade"
    scoring = "rank"
    guided = True

    def __init__(self) -> None:
        self._ghosts: dict[Key, float] = {}
        self._members: Heap[Key] = Heap()

    def scored(self, key: Key, score: float) -> None:
        if not score > UNKNOWN:
            raise ValueError(f"a score must be positive, not {score}")
        self._ghosts[key] = score
        if key in self._members:
            self._members.set(key, score)
        if len(self._ghosts) > MAX_GHOSTS:
            kept = self._highest(MAX_GHOSTS - int(MAX_GHOSTS * DROPPED_SHARE))
            self._ghosts = {ghost: self._ghosts[ghost] for ghost in kept}

    def forget_job_dataset(self, job_dataset_id: str, keys: Iterable[Key]) -> None:
        for key in keys:
            if key not in self._members:
                self._ghosts.pop(key, None)

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
        """The rank of the sample's latest loss (SHADE eq. 6)."""
        # If the ghost of a member was dropped, the heap still has the member's score.
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
        """The `count` ghosts of the highest scores, in no order; takes 0.2 s for a million ghosts."""
        keys = list(self._ghosts)
        if len(keys) <= count:
            return keys
        scores = np.fromiter(self._ghosts.values(), np.float64, len(keys))
        return [keys[index] for index in np.argpartition(scores, len(keys) - count)[-count:].tolist()]
