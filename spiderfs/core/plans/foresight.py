"""The order in which samples leave: by pending draws of jobs that share a list, next uses by plans, and the policy.

Foresight is a layer between the engine and any policy. It acts on the section `Policy.foreseen` alone, while a reader's
plan is trusted or jobs exchange samples. Its members are of five kinds, and leave in this order:

1. those that neither a plan nor a sharing job names, by the policy's score, the lowest first;
2. those that are awaited: a later epoch reads them, too far ahead for the time to matter (`schedule.py`); by score too;
3. those that a plan names, and no sharing job will read: the latest next use first (MIN, Belady 1966);
4. those that are pending for sharing jobs (`exchange.py`): for the fewest ranks first, in a random order among equals;
5. those that are reserved for a rank that has not read them yet: only when the cache itself becomes smaller.

A candidate that sharing jobs will still read gets the room of the kinds 1 to 3, and of those that are pending for fewer
ranks; one that a plan names, that of members of these kinds that would leave before it; an awaited one, that of the
first kind, and of those of the second in whose place the policy admits it; any other, if the policy admits it, that of
the first kind. All else leaves in the policy's own order.

Where nodes share out the samples (`core/homes.py`), those whose home this node is are awaited, whatever is planned
here, and rank by the hash of their keys: the same ones stay, and what is fetched for a moment takes turns in the room
of a few. All others have a use only while it is near enough to fetch them ahead, for a later one is their homes' to
serve; else they are of the first kind, and no candidates. (Three ranks, a fifth cached on each, that draw by weights
with replacement: the nodes fetched .081 where a later use counted too, .072 so, and .072 without plans.)
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable, Iterator
from itertools import chain, islice

from spiderfs.core.heap import Heap
from spiderfs.core.homes import Homes
from spiderfs.core.plans.exchange import SharedList
from spiderfs.core.plans.schedule import AWAITED, Schedule
from spiderfs.core.policy import Key, Policy

# For a candidate whose use has no time, this many of the policy's victims are looked at to find some of its own kind.
# While a plan says of every member when it is used, none is admitted.
_LOOKED_AT = 64
NOT_PENDING = 0.0
RESERVED = math.inf


class PendingDraws:
    """The samples that jobs which share lists will still read, by the keys of the engine, which names the members."""

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
        """No one shares this list any more."""
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
        """Note that a file is pending or reserved for others than before."""
        self._changed[key] = None

    def taken_changes(self) -> list[Key]:
        """The files that have changed since this was asked before."""
        changed, self._changed = list(self._changed), {}
        return changed

    def wanted_by(self, key: Key) -> int:
        """How many ranks of jobs that exchange will still read a sample: it is pending or reserved for them."""
        return sum(shared.wanted_by(sample) for shared, sample in self._places(key) if shared.active)

    def rank(self, key: Key) -> float:
        """The rank by which a sample leaves, the lowest first: NOT_PENDING, how many ranks it is pending for, or
        RESERVED.

        A fraction drawn at random is added to the number of ranks, so that equals leave in a random order.
        """
        pending_ranks, fraction = 0, 0.0
        for shared, sample in self._places(key):
            if shared.active:
                if shared.reserved(sample):
                    return RESERVED
                pending_ranks += shared.pending_ranks(sample)
                fraction = shared.chance()
        return pending_ranks + fraction if pending_ranks else NOT_PENDING

    def _places(self, key: Key) -> Iterator[tuple[SharedList, int]]:
        """The lists that a file is in, and its sample there."""
        for shared in self.lists.values():
            sample = shared.index_of.get(key)
            if sample is not None:
                yield shared, sample


class Foresight:
    def __init__(
        self, policy: Policy, schedule: Schedule, exchange_pending: PendingDraws, homes: Homes | None = None
    ) -> None:
        self._policy = policy
        self._homes = homes
        self._schedule = schedule
        self._exchange_pending = exchange_pending
        self._unplanned: Heap[Key] = Heap()
        self._awaited: Heap[Key] = Heap()
        self._planned: Heap[Key] = Heap()
        self._shared: Heap[Key] = Heap()
        self._heaps = (self._unplanned, self._awaited, self._planned, self._shared)

    @property
    def _active(self) -> bool:
        return self._schedule.active or self._exchange_pending.active or self._homes is not None

    def may_enter(self, key: Key) -> bool:
        """Whether a sample may become a member, if there is room."""
        return self._homes is None or self._use_s(key) is not None or self._exchange_pending.wanted_by(key) > 0

    def inserted(self, key: Key, section: str) -> None:
        """Note a new member, after the policy has noted it."""
        if self._active and section == self._policy.foreseen:
            self._rank(key)

    def removed(self, key: Key) -> None:
        heap = self._heap_with(key)
        if heap is not None:
            heap.discard(key)

    def changed(self, key: Key) -> None:
        """Note that the score or the next use of a key may have changed; the key need not be a member."""
        heap = self._heap_with(key)
        if heap is not None:
            self._rank(key, heap)

    def replanned(self, members: Iterable[Key]) -> None:
        """Rank all `members` of the section `foreseen` again: all next uses, or all scores, may have changed."""
        self._exchange_pending.taken_changes()
        found: tuple[list[tuple[Key, float]], ...] = ([], [], [], [])
        if self._active:
            for key in members:
                kind, priority = self._kind(key)
                found[kind].append((key, priority))
        for heap, ranked in zip(self._heaps, found, strict=True):
            heap.refill(ranked)

    def eviction_order(self, section: str | None = None) -> Iterator[Key]:
        """The order of `Policy.eviction_order`, changed by what plans say."""
        foreseen = self._policy.foreseen
        self._catch_up()
        if not self._active or section not in (None, foreseen):
            return self._policy.eviction_order(section)
        samples = chain.from_iterable(heap.ascending() for heap in self._heaps)
        if section == foreseen:
            return samples
        others = (self._policy.eviction_order(other) for other in self._policy.sections if other != foreseen)
        return chain(samples, chain.from_iterable(others))

    def victims_for(self, key: Key, size: int, full: str | None) -> Iterator[Key]:
        """The victims of `Policy.victims_for`, changed by what plans say."""
        self._catch_up()
        if not self._active:
            return self._policy.victims_for(key, size, full)
        if self._policy.section_for(key) != self._policy.foreseen:
            if full is None:
                return self.eviction_order(self._policy.foreseen)
            return self._policy.victims_for(key, size, full)
        timeless = chain.from_iterable(heap.ascending() for heap in (self._unplanned, self._awaited))
        ranks = self._exchange_pending.wanted_by(key)
        if ranks:
            return chain(timeless, self._planned.ascending(), self._shared.below(ranks))
        use_s = self._use_s(key)
        if use_s is not None and use_s < AWAITED:
            return chain(timeless, self._planned.below(-use_s))
        if self._homes is not None and use_s is not None:
            return chain(self._unplanned.ascending(), self._awaited.below(self._homes.rank(key)))
        kind = self._unplanned if use_s is None else self._awaited
        victims = islice(self._policy.victims_for(key, size, full), _LOOKED_AT)
        own_kind = (victim for victim in victims if victim in kind)
        return own_kind if use_s is None else chain(self._unplanned.ascending(), own_kind)

    def _catch_up(self) -> None:
        """Rank those members again that are pending or reserved for others than before."""
        for key in self._exchange_pending.taken_changes():
            self.changed(key)

    def _rank(self, key: Key, before: Heap[Key] | None = None) -> None:
        """Put a member into its heap; `before` is the heap that has it now."""
        kind, priority = self._kind(key)
        heap = self._heaps[kind]
        if before is not None and before is not heap:
            before.discard(key)
        heap.set(key, priority)

    def _heap_with(self, key: Key) -> Heap[Key] | None:
        # The likeliest first.
        for heap in reversed(self._heaps):
            if key in heap:
                return heap
        return None

    def _kind(self, key: Key) -> tuple[int, float]:
        """Which of the heaps a member belongs to, and its priority there."""
        rank = self._exchange_pending.rank(key)
        if rank != NOT_PENDING:
            return 3, rank
        use_s = self._use_s(key)
        if use_s is not None and use_s < AWAITED:
            return 2, -use_s
        if self._homes is not None and use_s is not None:
            return 1, self._homes.rank(key)
        return int(use_s is not None), self._policy.score(key)

    def _use_s(self, key: Key) -> float | None:
        """When the cache needs a sample, or AWAITED; None if it does not."""
        use_s = self._schedule.next_use_s(key)
        if self._homes is None:
            return use_s
        if self._homes.is_remote(key):
            return use_s if use_s is not None and self._schedule.is_due(key) else None
        return AWAITED if use_s is None else use_s
