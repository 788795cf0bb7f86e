"""Evict the member whose last open is the longest ago; every candidate is admitted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from spiderfs.core.policy import Key, Policy, in_saved_order


class LRU(Policy):
    name = "lru"

    def __init__(self) -> None:
        self._opens = 0
        # The number of each member's last open, the least recent first.
        self._last_use: OrderedDict[Key, int] = OrderedDict()

    def hit(self, key: Key, size: int) -> None:
        self._opens += 1
        self._last_use[key] = self._opens
        self._last_use.move_to_end(key)

    def missed(self, key: Key, size: int) -> None:
        self._opens += 1

    def inserted(self, key: Key, size: int) -> None:
        self._last_use[key] = self._opens

    def removed(self, key: Key) -> None:
        del self._last_use[key]

    def eviction_order(self, section: str | None = None) -> Iterator[Key]:
        return iter(self._last_use)

    def score(self, key: Key) -> float:
        """The number of the sample's last open, counted from the start of the mount."""
        return float(self._last_use.get(key, 0))

    def state(self) -> dict[str, Any]:
        return {"order": list(self._last_use)}

    def restore(self, members: Mapping[Key, int], state: Mapping[str, Any]) -> None:
        order = in_saved_order(members, state.get("order", ()))
        self._last_use = OrderedDict((key, number) for number, key in enumerate(order, 1))
        self._opens = len(order)
