"""Keep what has a high loss, and stand in for what has a low one (ImPACT, sections III-C and III-D).

At the start of each epoch the half of the scored samples with the higher losses becomes the list of H-samples, with
their losses of that moment; all others are L-samples. An H-sample enters if there is room, or in the place of a member
of a lower loss. An L-sample enters in the place of an L-member that was read in this epoch already. In the place of an
L-sample that is not cached, readers are given an L-member of its label that was not read in this epoch yet, each of
them once; where none is left the sample is read itself. L-samples that were missed are remembered (`missed_ids`):
packages are made of these, and refill the L-part with such as were not read yet. What no batch has named, as a
validation's samples, is neither replaced nor packed.

The two parts share the room by how often H- and L-samples are read, at first 9 to 1. Nothing is evicted before there is
a list, so that the first epochs, and a mount without a trainer, have a MinIO, as the paper's warm-up has it.

A new list does not stop anything: members pass from the parts of the old list to those of the new one, some at each
event, and are victims in the order of the parts that they are in (the paper's shadow heap).

What a trainer pins (the paper's S, evaluated before each epoch) lies in a section of its own and in no part: it is
nobody's victim, stands in for nobody, and nobody stands in for it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np

from spiderfs.core.guided import Guided
from spiderfs.core.heap import Heap
from spiderfs.core.policy import SAMPLES, Key, in_saved_order, saved_keys
from spiderfs.policies.parts.importance import UNKNOWN
from spiderfs.policies.parts.pins import PINNED, Pins, pinned_limit
from spiderfs.policies.parts.single_use_stand_ins import SingleUseStandIns

# The paper leaves the length of the list open.
H_SHARE = 0.5
# The paper's start, as if so many reads had been counted. Counts are halved at each epoch, so this is soon forgotten.
FIRST_READS = {True: 900.0, False: 100.0}
# The L-part holds a package at least, but never more than this share of a small cache for that reason alone.
PACKAGE_BYTES = 1 << 20
PACKAGE_SHARE_MAX = 0.1
# Members that pass to the new list's parts at each event: a million of them in 16,000 reads.
PASSED_AT_ONCE = 64
# The latest of them.
MAX_MISSED = 1 << 16
# Longer lists, of H-samples or of pins, are not saved: each would be some 3 MB, every half a minute. The next epoch has
# new ones.
MAX_SAVED = 1 << 18


class _Parts:
    """Members by what one list of H-samples makes of them; `high` is that list, with its losses."""

    def __init__(self, high: Mapping[Key, float]) -> None:
        self.listed = high
        self.high: Heap[Key] = Heap()
        self.low: OrderedDict[Key, None] = OrderedDict()
        """The L-members, the first that entered first."""
        self.high_bytes = self.low_bytes = 0

    def __contains__(self, key: object) -> bool:
        return key in self.high or key in self.low

    def add(self, key: Key, size: int) -> None:
        if key in self.listed:
            self.high.set(key, self.listed[key])
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
        for key in self.high.ascending():
            if self.high.priority(key) >= loss:
                return
            yield key


class Impact(Guided):
    name = "impact"
    sections = (SAMPLES, PINNED)
    scoring = "loss"

    def __init__(self) -> None:
        self._losses: dict[Key, float] = {}
        self._sizes: dict[Key, int] = {}
        self._parts = _Parts({})
        # While members pass to the parts of a new list: the old ones, and who is still to pass.
        self._old = _Parts({})
        self._to_pass: deque[Key] = deque()
        # L-members that were read in this epoch, the first of them first.
        self._used: OrderedDict[Key, None] = OrderedDict()
        self._asked_for: set[Key] = set()
        self._pins = Pins()
        # Members of that section, the first that entered first.
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
        self._stand_ins.settled(key)
        if self._parts.listed and key in self._losses and self.packable(key):
            self._miss(key)

    def inserted(self, key: Key, size: int) -> None:
        self._sizes[key] = size
        self._stand_ins.settled(key)
        if key in self._pins:
            self._pinned[key] = None
        else:
            self._parts.add(key, size)
            self._place(key)

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
        if not self._parts.listed:
            return iter(())
        high_bytes, low_bytes = (self._old.high_bytes + self._parts.high_bytes, self._low_bytes())
        low_share = self._low_share(high_bytes + low_bytes)
        if key in self._parts.listed:
            higher = chain(self._old.below(self._parts.listed[key]), self._parts.below(self._parts.listed[key]))
            return chain(self._low_members(), higher) if low_bytes > low_share else higher
        if low_bytes + size <= low_share:
            return chain(self._old.high.ascending(), self._parts.high.ascending())
        return iter(self._used)

    def score(self, key: Key) -> float:
        """Its latest loss."""
        return self._losses.get(key, UNKNOWN)

    def state(self) -> dict[str, Any]:
        """A scoring that was saved too knows all losses, and the sampler what it has asked for."""
        listed = self._parts.listed if len(self._parts.listed) <= MAX_SAVED else {}
        savable = len(self._pins) <= MAX_SAVED
        return {
            "order": list(self.eviction_order()),
            "listed": list(listed),
            "losses": list(listed.values()),
            "used": list(self._used),
            "reads": [self._reads[True], self._reads[False]],
            "missed": list(self.missed_ids),
            "pins": {dataset: list(keys) for dataset, keys in self.pinned.items()} if savable else {},
        }

    def restore(self, members: Mapping[Key, int], state: Mapping[str, Any]) -> None:
        listed = dict(zip(saved_keys(state.get("listed", ())), state.get("losses", ()), strict=False))
        self._losses = listed | self._losses
        self._parts, self._old = _Parts(listed or self._parts.listed), _Parts({})
        self._to_pass.clear()
        self._reads = dict(zip((True, False), state.get("reads", FIRST_READS.values()), strict=True))
        self._asked_for.clear()
        self.missed_ids = OrderedDict.fromkeys(saved_keys(state.get("missed", ())))
        used = saved_keys(state.get("used", ()))
        self._pins = Pins({dataset: saved_keys(keys) for dataset, keys in state.get("pins", {}).items()})
        self._pinned.clear()
        outside = self._parts.listed, self._pins
        self._used = OrderedDict.fromkeys(
            key for key in used if key in members and not any(key in some for some in outside)
        )
        self._asked_for.update(self._used)
        self._stand_ins.clear()
        self._sizes = dict(members)
        for key in in_saved_order(members, state.get("order", ())):
            self.inserted(key, members[key])

    # -- as a guided one

    def scored(self, key: Key, score: float) -> None:
        if not score > UNKNOWN:
            raise ValueError(f"a score is positive, not {score}")
        self._losses[key] = score

    def listed(self, dataset: str, labels: Mapping[Key, int]) -> None:
        self._stand_ins.listed(dataset, labels)

    def forget_list(self, dataset: str, keys: Iterable[Key]) -> None:
        """The list of samples with high losses stays: it is what the cache is filled with."""
        self._stand_ins.unlisted(dataset)
        for key in keys:
            if key not in self._sizes and key not in self._parts.listed:
                self._losses.pop(key, None)

    def stand_in(self, dataset: str, key: Key) -> Key | None:
        return None if key in self._sizes else self._stand_ins.stand_in(dataset, key)

    def stood_in(self, hub: Key, wanted: Key) -> None:
        self._asked_for.add(wanted)
        self._stand_ins.settled(wanted)
        self._miss(wanted)

    def pin(self, dataset: str, keys: Collection[Key]) -> Collection[Key]:
        changed = self._pins.replace(dataset, keys)
        for key in keys:
            self._stand_ins.settled(key)
        return changed

    @property
    def pinned(self) -> Mapping[str, Collection[Key]]:
        return self._pins.by_dataset

    def packable(self, key: Key) -> bool:
        return key not in self._parts.listed and key not in self._pins

    def missed_samples(self) -> Iterable[Key]:
        return (key for key in reversed(self.missed_ids) if self.packable(key))

    def spare_bytes(self) -> int:
        if not self._parts.listed:
            return 0
        low_bytes = self._low_bytes()
        free = self._low_share(self._old.high_bytes + self._parts.high_bytes + low_bytes) - low_bytes
        return max(0, free) + sum(self._sizes[key] for key in self._used)

    def refreshes(self, key: Key) -> bool:
        return self._needs_stand_in(key)

    def redirects_changed(self) -> list[tuple[str, Key, Key | None]]:
        return self._stand_ins.drain_changes()

    def forget_told(self) -> None:
        self._stand_ins.change_all()

    def new_epoch(self) -> None:
        """A new list of H-samples; every L-member may stand in again."""
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
        """Share of the reads that are of H-samples, as of late: that of the room which is theirs."""
        return self._reads[True] / (self._reads[True] + self._reads[False])

    # -- what is behind it

    def _read(self, key: Key) -> None:
        """Any read of a sample itself, cached or not."""
        self._pass_members(PASSED_AT_ONCE)
        self._asked_for.add(key)
        if key not in self._pins:
            self._reads[key in self._parts.listed] += 1
        if key in self._parts.low:
            self._used.setdefault(key)
            self._stand_ins.discard(key)

    def _miss(self, key: Key) -> None:
        self.missed_ids[key] = None
        self.missed_ids.move_to_end(key)
        if len(self.missed_ids) > MAX_MISSED:
            self.missed_ids.popitem(last=False)

    def _place(self, key: Key) -> None:
        """Let a member of the current parts stand in, if it is an L-member that was not read yet."""
        if key not in self._parts.low:
            return
        if key in self._asked_for:
            self._used.setdefault(key)
        elif self._parts.listed:
            self._stand_ins.add(key)

    def _pass_members(self, count: int) -> None:
        for _ in range(min(count, len(self._to_pass))):
            key = self._to_pass.popleft()
            if key in self._old:
                self._old.remove(key, self._sizes[key])
                self._parts.add(key, self._sizes[key])
                self._place(key)

    def _needs_stand_in(self, key: Key) -> bool:
        outside = self._parts.listed, self._sizes, self._asked_for, self._pins
        return key in self._losses and not any(key in some for some in outside)

    def _highest(self) -> dict[Key, float]:
        """The list of H-samples, with their losses."""
        keys, count = list(self._losses), int(len(self._losses) * H_SHARE)
        if count == 0:
            return {}
        losses = np.fromiter(self._losses.values(), np.float64, len(keys))
        chosen = np.argpartition(losses, len(keys) - count)[-count:]
        return dict(zip((keys[place] for place in chosen.tolist()), losses[chosen].tolist(), strict=True))

    def _low_members(self) -> Iterator[Key]:
        """L-members, those that were read first: what is unused may yet stand in."""
        unused = (key for parts in (self._old, self._parts) for key in parts.low if key not in self._used)
        return chain(self._used, unused)

    def _low_bytes(self) -> int:
        return self._old.low_bytes + self._parts.low_bytes

    def _low_share(self, total_bytes: int) -> int:
        share = int(total_bytes * (1 - self.ratio))
        return max(share, min(PACKAGE_BYTES, int(total_bytes * PACKAGE_SHARE_MAX)))


class ICache(Impact):
    """The same cache; what ImPACT added to iCache is how its sampler learns of losses (`ImpactSampler`)."""

    name = "icache"
