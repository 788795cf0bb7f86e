"""The baselines: policies without input from a training run, and the bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from spiderfs.core.heap import Heap
from spiderfs.core.policy import Key, Policy, in_saved_order, saved_keys


class Belady(Policy):
    """MIN with bypass: keep the samples whose next use comes soonest (Belady, 1966).

    MIN must know all opens beforehand, so it can only replay traces. If all samples have one size, no policy that
    fetches on demand has more hits. If sizes are mixed, finding the optimum is NP-hard; then this greedy rule is a
    strong yardstick and not a proven bound.
    """

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


class MinIO(Policy):
    """Fill the cache once and never evict (MinIO of CoorDL, Mohan et al., VLDB 2021).

    If an epoch reads every sample exactly once, the hit ratio of this policy is the cached fraction, whatever the order
    of the draws. No policy that does not fetch ahead does better.
    """

    name = "minio"

    def __init__(self) -> None:
        self._members: OrderedDict[Key, None] = OrderedDict()

    def inserted(self, key: Key, size: int) -> None:
        self._members[key] = None

    def removed(self, key: Key) -> None:
        del self._members[key]

    def eviction_order(self, section: str | None = None) -> Iterator[Key]:
        """The newest first. This is asked only when the budget shrinks; all members are worth the same."""
        return reversed(self._members)

    def victims_for(self, key: Key, size: int, full: str | None) -> Iterator[Key]:
        return iter(())

    def score(self, key: Key) -> float:
        return 1.0 if key in self._members else 0.0

    def restore(self, members: Mapping[Key, int], state: Mapping[str, Any]) -> None:
        self._members = OrderedDict.fromkeys(members)


class LFU(Policy):
    """Evict the member that was opened least often, with dynamic ageing (LFU-DA; Arlitt et al., 1999).

    The age is the priority of the last victim. A member's priority is the number of its opens plus the age at the time
    of its last open. Without ageing, samples that an earlier job opened a hundred times would never leave. Opens are
    counted only while a sample is a member. Members of equal priority leave in the order of their last opens.
    """

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


class LRU(Policy):
    """Evict the member whose last open is the longest ago; every candidate is admitted."""

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
