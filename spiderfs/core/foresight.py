"""MIN where the future is known, the policy where it is not: the order in which samples leave.

A layer between the engine and any policy. While some reader's plan is believed, the members of the policy's section of
samples (`Policy.foreseen`) leave in this order: first those that no plan names, by the policy's score; then the others,
the one used last first (MIN; Belady, 1966). A candidate gets the room of members that leave before it would; one that
no plan names is the policy's to admit, among members that no plan names either. Other sections are the policy's own.
While no plan is believed this is the policy, at no cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

from spiderfs.core.heap import Heap
from spiderfs.core.policy import Key, Policy
from spiderfs.core.schedule import Schedule

# Of the policy's victims for a candidate that no plan names, so many are looked at for some that no plan names either.
# Such candidates are few, and while all members are planned none of them is to be admitted.
_LOOKED_AT = 64


class Foresight:
    def __init__(self, policy: Policy, schedule: Schedule) -> None:
        self._policy = policy
        self._schedule = schedule
        self._unplanned: Heap[Key] = Heap()
        self._planned: Heap[Key] = Heap()

    def inserted(self, key: Key, section: str) -> None:
        """The policy has been told of a new member."""
        if self._schedule.active and section == self._policy.foreseen:
            self._rank(key)

    def removed(self, key: Key) -> None:
        self._unplanned.discard(key)
        self._planned.discard(key)

    def changed(self, key: Key) -> None:
        """The key's score or next use may have changed; it need not be a member."""
        if key in self._unplanned or key in self._planned:
            self._rank(key)

    def replanned(self, members: Iterable[Key]) -> None:
        """All next uses may have changed, or the policy's scores; `members` are all of the section `foreseen`."""
        self._unplanned.refill(())
        self._planned.refill(())
        if not self._schedule.active:
            return
        unplanned, planned = [], []
        for key in members:
            use_s = self._schedule.next_use_s(key)
            if use_s is None:
                unplanned.append((key, self._policy.score(key)))
            else:
                planned.append((key, -use_s))
        self._unplanned.refill(unplanned)
        self._planned.refill(planned)

    def eviction_order(self, section: str | None = None) -> Iterator[Key]:
        """As `Policy.eviction_order`."""
        foreseen = self._policy.foreseen
        if not self._schedule.active or section not in (None, foreseen):
            return self._policy.eviction_order(section)
        samples = chain(self._unplanned.ascending(), self._planned.ascending())
        if section == foreseen:
            return samples
        others = (self._policy.eviction_order(other) for other in self._policy.sections if other != foreseen)
        return chain(samples, chain.from_iterable(others))

    def victims_for(self, key: Key, size: int, full: str | None) -> Iterator[Key]:
        """As `Policy.victims_for`."""
        if not self._schedule.active:
            return self._policy.victims_for(key, size, full)
        if self._policy.section_for(key) != self._policy.foreseen:
            if full is None:
                return self.eviction_order(self._policy.foreseen)
            return self._policy.victims_for(key, size, full)
        use_s = self._schedule.next_use_s(key)
        if use_s is None:
            victims = islice(self._policy.victims_for(key, size, full), _LOOKED_AT)
            return (victim for victim in victims if victim in self._unplanned)
        return chain(self._unplanned.ascending(), self._used_after(use_s))

    def _used_after(self, use_s: float) -> Iterator[Key]:
        for victim in self._planned.ascending():
            if -self._planned.priority(victim) <= use_s:
                return
            yield victim

    def _rank(self, key: Key) -> None:
        use_s = self._schedule.next_use_s(key)
        if use_s is None:
            self._planned.discard(key)
            self._unplanned.set(key, self._policy.score(key))
        else:
            self._unplanned.discard(key)
            self._planned.set(key, -use_s)
