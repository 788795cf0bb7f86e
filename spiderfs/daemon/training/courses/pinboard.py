"""The samples that trainers have pinned: a trainer reads them again and again, so the cache is to hold them.

A trainer names its pins for each list before each epoch. The pins of all trainers go to the policy, in the order in
which they were named, as far as they fit into the policy's share for them. A pin ends when its trainer leaves or names
other pins, and when the policy changes. The pins of an earlier mount end with the first epoch of their job in
which no trainer has named them again. All state belongs to the manager's event loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy.typing as npt
import trio

from spiderfs.core.learning.teaching import Teaching
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.courses.courses import Course, Courses
from spiderfs.daemon.training.trainer import Trainer
from spiderfs.policies.pins import pinned_limit
from spiderfs.vfs.catalogue import Catalogue

# Samples that are looked up between two chances for other tasks, in some milliseconds.
_AT_A_TIME = 500


class Pinboard:
    def __init__(self, catalogue: Catalogue, cache: CacheControl, teaching: Teaching, courses: Courses) -> None:
        self._catalogue = catalogue
        self._courses = courses
        self._cache = cache
        self._teaching = teaching
        self._pins: dict[tuple[Trainer, str], tuple[Course, list[int]]] = {}
        # The bytes of each course's pins that the policy has.
        self._bytes: dict[str, int] = {}
        self._passing = trio.Lock()

    async def pin(self, trainer: Trainer, name: str, course: Course, indices: npt.NDArray[Any]) -> int:
        """Pin these samples of a trainer's list, and no others; returns how many of them the policy holds, or will."""
        inodes = [inode for inode in dict.fromkeys(course.list.inodes[indices].tolist()) if inode]
        before = self._pins.pop((trainer, name), None)
        if inodes:
            self._pins[trainer, name] = course, inodes
        if before is not None and before[0] is not course:
            await self._pass_on(before[0].course_id)
        await self._pass_on(course.course_id)
        held = self._teaching.pinned.get(course.course_id, ())
        return sum(inode in held for inode in inodes)

    async def trainer_left(self, trainer: Trainer) -> None:
        """A trainer left: end its pins."""
        # All at once: the server gives this call a few seconds, and what is not unpinned by then is at an epoch's end.
        courses = [self._pins.pop(owned)[0] for owned in list(self._pins) if owned[0] is trainer]
        for course_id in dict.fromkeys(course.course_id for course in courses):
            await self._pass_on(course_id)

    async def epoch_ended(self, job_id: str) -> None:
        """End the pins of an earlier mount that no trainer has named since: this job's, and those of jobs not here."""
        kept = {course.course_id for course, _ in self._pins.values()}
        kept |= {course.course_id for course in self._courses if course.job_id != job_id}
        for course_id in [pinned for pinned in self._teaching.pinned if pinned not in kept]:
            await self._pass_on(course_id)

    def forget(self) -> None:
        """Forget all pins, and leave the policy as it is: trainers name their pins again."""
        self._pins.clear()
        self._bytes.clear()

    async def _pass_on(self, course_id: str) -> None:
        """Teach the cache a course's pins; for one course at a time."""
        async with self._passing:
            room = pinned_limit(self._cache.engine.budget_bytes)
            room -= sum(size for other, size in self._bytes.items() if other != course_id)
            lists = (inodes for course, inodes in self._pins.values() if course.course_id == course_id)
            accepted, taken = await self._fitting(dict.fromkeys(chain.from_iterable(lists)), room)
            self._bytes.pop(course_id, None)
            if taken:
                self._bytes[course_id] = taken
            for changes in self._teaching.pin(course_id, accepted):
                self._cache.apply(changes)
                await trio.lowlevel.checkpoint()

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
