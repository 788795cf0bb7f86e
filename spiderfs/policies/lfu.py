"""Evict the member that was opened least often, with dynamic ageing (LFU-DA; Arlitt et al., 1999).

The age is the priority of the last victim. A member's priority is the number of its opens plus the age at the time of
its last open. Without ageing, samples that an earlier job opened a hundred times would never leave. Opens are counted
only while a sample is a member. Members of equal priority leave in the order of their last opens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spiderfs.core.heap import Heap
from spiderfs.core.policy import Key, Policy, in_saved_order, saved_keys


class LFU(Policy):
    name = "lfu"

    def __init__(self) -> None:
        self._age = 0
        self._opens: dict[Key, int] = {}
        self._order: Heap[Key] = Heap()

    def hit(self, key: Key, size: int) -> None:
        opens = self._opens[key] + 1
        self._opens[key] = opens
        self._order.set(key, self._age + opens)

    def inserted(self, key: Key, size: int) -> None:
        self._opens[key] = 1
        self._order.set(key, self._age + 1)

    def removed(self, key: Key) -> None:
        # The age rises only when the least valuable member leaves: the user may evict any member.
        if self._order.first() == key:
            self._age = int(self._order.priority(key))
        self._order.discard(key)
        del self._opens[key]

    def eviction_order(self, section: str | None = None) -> Iterator[Key]:
        return self._order.ascending()

    def score(self, key: Key) -> float:
        """The member's priority: its opens since it was cached, plus the age at the time of the last one."""
        return float(self._order.priority(key)) if key in self._order else 0.0

    def state(self) -> dict[str, Any]:
        keys = list(self._order.ascending())
        priorities = [int(self._order.priority(key)) for key in keys]
        return {"age": self._age, "order": keys, "priorities": priorities, "opens": [self._opens[key] for key in keys]}

    def restore(self, members: Mapping[Key, int], state: Mapping[str, Any]) -> None:
        self._age = int(state.get("age", 0))
        saved = zip(state.get("priorities", ()), state.get("opens", ()), strict=False)
        ranks = dict(zip(saved_keys(state.get("order", ())), saved, strict=False))
        order = in_saved_order(members, ranks)
        newcomer = (self._age + 1, 1)
        self._opens = {key: ranks.get(key, newcomer)[1] for key in order}
        self._order.refill((key, ranks.get(key, newcomer)[0]) for key in order)
