"""Keep samples of high loss, and let other samples stand in for those of low loss (ImPACT, sections III-C and III-D).

At the start of each epoch the half of the scored samples with the higher losses become the **H-samples**, with the
losses that they have then; all other samples are **L-samples**. H-samples that are cached are the H-part of the
members, and L-samples that are cached are the L-part.

- An H-sample enters if there is room, or evicts a member of lower loss.
- An L-sample enters if it can evict an L-member that was already read in this epoch.
- A reader that asks for an L-sample that is not cached gets a stand-in: an L-member of the same label that was not yet
  read in this epoch. Each member stands in once. If no such member is left, the reader gets the sample itself.
- Whoever can bring many L-samples at a time restocks the L-part with samples that were not yet read
  (`core/restocked.py`). For that the policy remembers the L-samples that were missed (`missed_ids`).
- A sample that no batch has named, such as a sample of a validation set, gets no stand-in and is not remembered so.

The two parts share the room by how often H-samples and L-samples are read, at first 9 to 1. Before there are H-samples
nothing is evicted. So during the first epochs, and on a mount without a trainer, this policy acts as MinIO does; the
paper's warm-up does the same.

When a new epoch names new H-samples, members pass from the old parts to the new ones, a few at each event, so that no
event takes long. A member is a victim in the order of the part that it is in (the paper's shadow heap).

Samples that a trainer pins (the paper's S, which it evaluates before each epoch) are in a section of their own and in
no part. They are no victims of other samples, stand in for no sample, and no sample stands in for them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np

from spiderfs.core.guided import Divided, Guided, HasPins, HasStandIns
from spiderfs.core.heap import Heap
from spiderfs.core.policy import SAMPLES, Key, in_saved_order, saved_keys
from spiderfs.core.restocked import Restocked
from spiderfs.policies.parts.importance import UNKNOWN
from spiderfs.policies.parts.pins import PINNED, Pins, pinned_limit
from spiderfs.policies.parts.single_use_stand_ins import SingleUseStandIns

# The share of the scored samples that are H-samples; the paper leaves it open.
H_SHARE = 0.5
# Reads of H-samples (True) and of L-samples (False) counted at the start: the paper's 9 to 1. Counts are halved at each
# epoch, so these soon weigh little.
FIRST_READS = {True: 900.0, False: 100.0}
# The L-part may hold so much at least, which is what restocking brings at a time in the paper; but in a small cache it
# gets no more than this share for that reason.
LOW_LEAST_BYTES = 1 << 20
LOW_LEAST_SHARE = 0.1
# So many members pass from the old parts to the new ones at each event: a million members in 16,000 reads.
PASSED_AT_ONCE = 64
# So many of the L-samples that were missed last are remembered.
MAX_MISSED = 1 << 16
# If there are more H-samples, or more pins, than this, `state` leaves them out: they would be some 3 MB, saved every
# half a minute, and the next epoch brings new ones.
MAX_SAVED = 1 << 18


class _Parts:
    """The H-part and the L-part of the members; `losses` has the loss of every H-sample, cached or not."""

    def __init__(self, losses: Mapping[Key, float]) -> None:
        self.losses = losses
        self.high: Heap[Key] = Heap()
        """The H-members, by loss."""
        self.low: OrderedDict[Key, None] = OrderedDict()
        """The L-members, in the order in which they entered."""
        self.high_bytes = self.low_bytes = 0

    def __contains__(self, key: object) -> bool:
        return key in self.high or key in self.low

    def add(self, key: Key, size: int) -> None:
        if key in self.losses:
            self.high.set(key, self.losses[key])
            self.high_bytes += size
        else:
            self.low[key] = None
            self.low_bytes += size

    def remove(self, key: Key, size: int) -> None:
        if key in self.high:
            self.high.discard(key)
            self.high_bytes -= size
        else:
            del self.low[key]
            self.low_bytes -= size

    def below(self, loss: float) -> Iterator[Key]:
        """H-members of a lower loss, the lowest first."""
        for key in self.high.ascending():
            if self.high.priority(key) >= loss:
                return
            yield key


class Impact(Guided, HasStandIns, HasPins, Divided, Restocked):
    name = "impact"
    sections = (SAMPLES, PINNED)
    scoring = "loss"

    def __init__(self) -> None:
        self._losses: dict[Key, float] = {}
        self._sizes: dict[Key, int] = {}
        self._parts = _Parts({})
        # While members pass to new parts: the old parts, and the members that have not passed yet.
        self._old = _Parts({})
        self._to_pass: deque[Key] = deque()
        # L-members that were read in this epoch, in the order of their first reads.
        self._used: OrderedDict[Key, None] = OrderedDict()
        # All samples that readers asked for in this epoch.
        self._asked_for: set[Key] = set()
        self._pins = Pins()
        # Members of the section of pinned samples, in the order in which they entered.
        self._pinned: dict[Key, None] = {}
        self._stand_ins = SingleUseStandIns(self._needs_stand_in)
        self._reads = dict(FIRST_READS)
        self.missed_ids: OrderedDict[Key, None] = OrderedDict()

    # -- as every policy

    def limit(self, section: str, share_bytes: int, held_bytes: Mapping[str, int]) -> int:
        return pinned_limit(share_bytes) if section == PINNED else share_bytes

    def section_for(self, key: Key) -> str:
        return PINNED if key in self._pins else SAMPLES

    def hit(self, key: Key, size: int) -> None:
        self._read(key)

    def missed(self, key: Key, size: int) -> None:
        self._read(key)
        self._stand_ins.take_back(key)
        if self._parts.losses and key in self._losses and self.ranks_low(key):
            self._miss(key)

    def inserted(self, key: Key, size: int) -> None:
        self._sizes[key] = size
        self._stand_ins.take_back(key)
        if key in self._pins:
            self._pinned[key] = None
        else:
            self._parts.add(key, size)
            self._offer_member(key)

    def removed(self, key: Key) -> None:
        size = self._sizes.pop(key)
        if key in self._pinned:
            del self._pinned[key]
        else:
            (self._parts if key in self._parts else self._old).remove(key, size)
        self._stand_ins.discard(key)
        self._used.pop(key, None)

    def eviction_order(self, section: str | None = None) -> Iterator[Key]:
        if section == PINNED:
            return iter(self._pinned)
        samples = chain(self._low_members(), self._old.high.ascending(), self._parts.high.ascending())
        return samples if section == SAMPLES else chain(samples, self._pinned)

    def victims_for(self, key: Key, size: int, full: str | None) -> Iterator[Key]:
        if self.section_for(key) == PINNED:
            return iter(()) if full == PINNED else self.eviction_order(SAMPLES)
        if not self._parts.losses:
            return iter(())
        high_bytes, low_bytes = (self._old.high_bytes + self._parts.high_bytes, self._low_bytes())
        low_share = self._low_share(high_bytes + low_bytes)
        if key in self._parts.losses:
            higher = chain(self._old.below(self._parts.losses[key]), self._parts.below(self._parts.losses[key]))
            return chain(self._low_members(), higher) if low_bytes > low_share else higher
        if low_bytes + size <= low_share:
            return chain(self._old.high.ascending(), self._parts.high.ascending())
        return iter(self._used)

    def score(self, key: Key) -> float:
        """The sample's latest loss."""
        return self._losses.get(key, UNKNOWN)

    def state(self) -> dict[str, Any]:
        """The losses of L-samples are not in it, for the scoring saves all losses; `_asked_for` is in it in part."""
        high = self._parts.losses if len(self._parts.losses) <= MAX_SAVED else {}
        savable = len(self._pins) <= MAX_SAVED
        return {
            "order": list(self.eviction_order()),
            "listed": list(high),
            "losses": list(high.values()),
            "used": list(self._used),
            "reads": [self._reads[True], self._reads[False]],
            "missed": list(self.missed_ids),
            "pins": {course_id: list(keys) for course_id, keys in self.pinned.items()} if savable else {},
        }

    def restore(self, members: Mapping[Key, int], state: Mapping[str, Any]) -> None:
        high = dict(zip(saved_keys(state.get("listed", ())), state.get("losses", ()), strict=False))
        self._losses = high | self._losses
        self._parts, self._old = _Parts(high or self._parts.losses), _Parts({})
        self._to_pass.clear()
        self._reads = dict(zip((True, False), state.get("reads", FIRST_READS.values()), strict=True))
        self._asked_for.clear()
        self.missed_ids = OrderedDict.fromkeys(saved_keys(state.get("missed", ())))
        used = saved_keys(state.get("used", ()))
        self._pins = Pins({course_id: saved_keys(keys) for course_id, keys in state.get("pins", {}).items()})
        self._pinned.clear()
        outside = self._parts.losses, self._pins
        self._used = OrderedDict.fromkeys(
            key for key in used if key in members and not any(key in some for some in outside)
        )
        self._asked_for.update(self._used)
        self._stand_ins.clear()
        self._sizes = dict(members)
        for key in in_saved_order(members, state.get("order", ())):
            self.inserted(key, members[key])

    # -- as every guided policy

    def scored(self, key: Key, score: float) -> None:
        if not score > UNKNOWN:
            raise ValueError(f"a score must be positive, not {score}")
        self._losses[key] = score

    def listed(self, course_id: str, labels: Mapping[Key, int]) -> None:
        self._stand_ins.listed(course_id, labels)

    def forget_course(self, course_id: str, keys: Iterable[Key]) -> None:
        """The H-samples stay: the cache is filled with them."""
        self._stand_ins.unlisted(course_id)
        for key in keys:
            if key not in self._sizes and key not in self._parts.losses:
                self._losses.pop(key, None)

    def stand_in(self, course_id: str, key: Key) -> Key | None:
        return None if key in self._sizes else self._stand_ins.stand_in(course_id, key)

    def stood_in(self, course_id: str, stand_in: Key, wanted: Key) -> None:
        self._asked_for.add(wanted)
        self._stand_ins.take_back(wanted)
        self._miss(wanted)

    def pin(self, course_id: str, keys: Collection[Key]) -> Collection[Key]:
        changed = self._pins.replace(course_id, keys)
        for key in keys:
            self._stand_ins.take_back(key)
        return changed

    @property
    def pinned(self) -> Mapping[str, Collection[Key]]:
        return self._pins.by_list

    def redirects_changed(self) -> list[tuple[str, Key, Key | None]]:
        return self._stand_ins.drain_changes()

    def forget_told(self) -> None:
        self._stand_ins.change_all()

    def new_epoch(self, course_id: str) -> None:
        """Choose the H-samples anew; every L-member may stand in again."""
        self._pass_members(len(self._to_pass))
        self._reads = {high: reads / 2 for high, reads in self._reads.items()}
        self._used.clear()
        self._asked_for.clear()
        self._stand_ins.clear()
        self._old, self._parts = self._parts, _Parts(self._highest())
        self._to_pass.extend(self._sizes)
        self._pass_members(PASSED_AT_ONCE)

    @property
    def ratio(self) -> float:
        """The share of late reads that were of H-samples; their part has the same share of the room."""
        return self._reads[True] / (self._reads[True] + self._reads[False])

    # -- as every restocked policy

    def ranks_low(self, key: Key) -> bool:
        return key not in self._parts.losses and key not in self._pins

    def missed_low(self) -> Iterable[Key]:
        return (key for key in reversed(self.missed_ids) if self.ranks_low(key))

    def room_for_unread_bytes(self) -> int:
        if not self._parts.losses:
            return 0
        low_bytes = self._low_bytes()
        free = self._low_share(self._old.high_bytes + self._parts.high_bytes + low_bytes) - low_bytes
        return max(0, free) + sum(self._sizes[key] for key in self._used)

    def wants_unread(self, key: Key) -> bool:
        return self._needs_stand_in(key)

    # -- inside

    def _read(self, key: Key) -> None:
        """Note a read that got the bytes of the sample itself, cached or not."""
        self._pass_members(PASSED_AT_ONCE)
        self._asked_for.add(key)
        if key not in self._pins:
            self._reads[key in self._parts.losses] += 1
        if key in self._parts.low:
            self._used.setdefault(key)
            self._stand_ins.discard(key)

    def _miss(self, key: Key) -> None:
        self.missed_ids[key] = None
        self.missed_ids.move_to_end(key)
        if len(self.missed_ids) > MAX_MISSED:
            self.missed_ids.popitem(last=False)

    def _offer_member(self, key: Key) -> None:
        """Offer a member of the new parts as a stand-in, if it is an L-member that was not read in this epoch."""
        if key not in self._parts.low:
            return
        if key in self._asked_for:
            self._used.setdefault(key)
        elif self._parts.losses:
            self._stand_ins.add(key)

    def _pass_members(self, count: int) -> None:
        for _ in range(min(count, len(self._to_pass))):
            key = self._to_pass.popleft()
            if key in self._old:
                self._old.remove(key, self._sizes[key])
                self._parts.add(key, self._sizes[key])
                self._offer_member(key)

    def _needs_stand_in(self, key: Key) -> bool:
        outside = self._parts.losses, self._sizes, self._asked_for, self._pins
        return key in self._losses and not any(key in some for some in outside)

    def _highest(self) -> dict[Key, float]:
        """The H-samples, with their losses."""
        keys, count = list(self._losses), int(len(self._losses) * H_SHARE)
        if count == 0:
            return {}
        losses = np.fromiter(self._losses.values(), np.float64, len(keys))
        chosen = np.argpartition(losses, len(keys) - count)[-count:]
        return dict(zip((keys[index] for index in chosen.tolist()), losses[chosen].tolist(), strict=True))

    def _low_members(self) -> Iterator[Key]:
        """All L-members; those that were read in this epoch come first, for the others may still stand in."""
        unused = (key for parts in (self._old, self._parts) for key in parts.low if key not in self._used)
        return chain(self._used, unused)

    def _low_bytes(self) -> int:
        return self._old.low_bytes + self._parts.low_bytes

    def _low_share(self, total_bytes: int) -> int:
        """The bytes that the L-part may hold, when both parts together hold `total_bytes`."""
        share = int(total_bytes * (1 - self.ratio))
        return max(share, min(LOW_LEAST_BYTES, int(total_bytes * LOW_LEAST_SHARE)))


class ICache(Impact):
    """iCache has the same cache as ImPACT; ImPACT's sampler learns of losses in another way (`ImpactSampler`)."""

    name = "icache"
