"""The samples that trainers have pinned: a trainer reads them again and again, so the cache is to hold them.

A trainer names its pins for each list before each epoch. The pins of all trainers go to the policy, in the order in
which they were named, as far as they fit into the policy's share for them. A pin ends when its trainer leaves or names
other pins, and when the policy changes. The pins of an earlier mount end with the first epoch in which no trainer has
named them again. All state belongs to the manager's event loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt
import trio

from spiderfs.core.guided import HasPins
from spiderfs.core.teaching import Teaching
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.known_list import KnownList
from spiderfs.daemon.training.trainer import Trainer
from spiderfs.policies.parts.pins import pinned_limit
from spiderfs.vfs.catalogue import Catalogue

# So many samples are looked up between two chances for other tasks, in some milliseconds.
_AT_A_TIME = 500


class Pinboard:
    def __init__(self, catalogue: Catalogue, cache: CacheControl, teaching: Teaching) -> None:
        self._catalogue = catalogue
        self._cache = cache
        self._teaching = teaching
        self._pins: dict[tuple[Trainer, str], tuple[KnownList, list[int]]] = {}
        # The bytes of each list's pins that the policy has, by the list's digest.
        self._bytes: dict[str, int] = {}
        self._passing = trio.Lock()

    async def pin(self, trainer: Trainer, name: str, known_list: KnownList, indices: npt.NDArray[Any]) -> int:
        """Pin these samples of a trainer's list, and no others; returns how many of them the policy holds, or will."""
        inodes = [inode for inode in dict.fromkeys(known_list.inodes[indices].tolist()) if inode]
        before = self._pins.pop((trainer, name), None)
        if inodes:
            self._pins[trainer, name] = known_list, inodes
        if before is not None and before[0] is not known_list:
            await self._pass_on(before[0].course_id)
        await self._pass_on(known_list.course_id)
        policy = self._policy
        held = policy.pinned.get(known_list.digest, ()) if policy is not None else ()
        return sum(inode in held for inode in inodes)

    async def trainer_left(self, trainer: Trainer) -> None:
        """A trainer left: end its pins."""
        for owner, name in [owned for owned in self._pins if owned[0] is trainer]:
            known_list, _ = self._pins.pop((owner, name))
            await self._pass_on(known_list.course_id)

    async def epoch_ended(self) -> None:
        """End the pins that no trainer has named since the mount was made."""
        policy = self._policy
        named = {known_list.digest for known_list, _ in self._pins.values()}
        for digest in [] if policy is None else [digest for digest in policy.pinned if digest not in named]:
            await self._pass_on(digest)

    def forget(self) -> None:
        """Forget all pins, and leave the policy as it is: trainers name their pins again."""
        self._pins.clear()
        self._bytes.clear()

    async def _pass_on(self, digest: str) -> None:
        """Teach the cache a list's pins; for one list at a time."""
        async with self._passing:
            room = pinned_limit(self._cache.engine.budget_bytes)
            room -= sum(size for other, size in self._bytes.items() if other != digest)
            accepted, taken = await self._fitting(self._inodes_of(digest), room)
            self._bytes.pop(digest, None)
            if taken:
                self._bytes[digest] = taken
            for changes in self._teaching.pin(digest, accepted):
                self._cache.apply(changes)
                await trio.lowlevel.checkpoint()

    @property
    def _policy(self) -> HasPins | None:
        policy = self._cache.engine.policy
        return policy if isinstance(policy, HasPins) else None

    def _inodes_of(self, digest: str) -> Iterable[int]:
        lists = (inodes for known_list, inodes in self._pins.values() if known_list.digest == digest)
        return dict.fromkeys(inode for inodes in lists for inode in inodes)

    async def _fitting(self, inodes: Iterable[int], room: int) -> tuple[list[int], int]:
        """The first of these samples that fit into `room` bytes, and their bytes."""
        accepted, taken = [], 0
        for count, inode in enumerate(inodes):
            if count % _AT_A_TIME == 0:
                await trio.lowlevel.checkpoint()
            size = self._catalogue.size_of(inode)
            if taken + size <= room:
                accepted.append(inode)
                taken += size
        return accepted, taken
