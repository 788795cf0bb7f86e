"""The order in which samples leave: MIN (Belady, 1966) orders those that a plan names, and the policy orders the rest.

Foresight is a layer between the engine and any policy. It acts while at least one reader's plan is believed, and only
on the section `Policy.foreseen`. The members of that section leave in this order: first those that no plan names, the
lowest score of the policy first; then those that a plan names, the one whose next use is the latest first (MIN). A
candidate that a plan names gets the room of members that would leave before it. A candidate that no plan names is
admitted if the policy admits it, and only in the room of members that no plan names either. All other sections leave in
the policy's own order, and so do all sections while no plan is believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

from spiderfs.core.heap import Heap
from spiderfs.core.policy import Key, Policy
from spiderfs.core.schedule import Schedule

# For a candidate that no plan names, so many of the policy's victims are looked at to find some that no plan names
# either. Such candidates are few; while a plan names every member, none of them is admitted.
_LOOKED_AT = 64


class Foresight:
    def __init__(self, policy: Policy, schedule: Schedule) -> None:
        self._policy = policy
        self._schedule = schedule
        self._unplanned: Heap[Key] = Heap()
        self._planned: Heap[Key] = Heap()

    def inserted(self, key: Key, section: str) -> None:
        """Note a new member, after the policy has noted it."""
        if self._schedule.active and section == self._policy.foreseen:
            self._rank(key)

    def removed(self, key: Key) -> None:
        self._unplanned.discard(key)
        self._planned.discard(key)

    def changed(self, key: Key) -> None:
        """Note that the score or the next use of a key may have changed; the key need not be a member."""
        if key in self._unplanned or key in self._planned:
            self._rank(key)

    def replanned(self, members: Iterable[Key]) -> None:
        """Rank everything anew: all next uses, or all scores, may have changed.

        `members` are all members of the section `foreseen`.
        """
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
        """The order of `Policy.eviction_order`, changed by what plans say."""
        foreseen = self._policy.foreseen
        if not self._schedule.active or section not in (None, foreseen):
            return self._policy.eviction_order(section)
        samples = chain(self._unplanned.ascending(), self._planned.ascending())
        if section == foreseen:
            return samples
        others = (self._policy.eviction_order(other) for other in self._policy.sections if other != foreseen)
        return chain(samples, chain.from_iterable(others))

    def victims_for(self, key: Key, size: int, full: str | None) -> Iterator[Key]:
        """The victims of `Policy.victims_for`, changed by what plans say."""
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
