"""How courses come into memory when trainers declare their lists, and leave it when no trainer uses them any more.

All ranks of a job share a course, for a list is known by its content; two jobs that declare one list have one each.
A course stays in memory for a while after its last trainer has left, so that a job that comes back finds it as it was.
When it leaves, its scores are saved, the policy forgets its labels and the scores of its samples, and its redirects are
withdrawn. All state belongs to the manager's event loop.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import trio

from spiderfs.core.learning.teaching import Teaching
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.courses.courses import Course, Courses, course_id_of, directory_of
from spiderfs.daemon.training.courses.redirect_publisher import RedirectPublisher
from spiderfs.daemon.training.courses.scoring import BatchScoring
from spiderfs.daemon.training.courses.trainers import Trainers
from spiderfs.daemon.training.trainer import (
    Declared,
    KnownList,
    SampleList,
    Trainer,
    digest_of,
    inodes_of,
    leave_out_contradictions,
)
from spiderfs.errors import ProtocolError
from spiderfs.protocol import Hello
from spiderfs.vfs.on_demand import Supply

log = logging.getLogger(__name__)

# How long a course stays in memory without a trainer. A list takes 15 MB for 100,000 samples, and what a course learns
# about it some 150 bytes a sample.
GRACE_S = 60.0
# Files that were not there are looked for again after so long, unless more of the list's files have changed.
FOLLOW_AGAIN_S = 30.0
# The most samples of the lists of all courses together; each takes the manager 150 bytes before it is scored.
MAX_SAMPLES = 32_000_000
# All ranks of a job share its courses, so the trainers of 256 connections, with 8 lists each, seldom have half as many;
# the others are about to leave.
MAX_COURSES = 1024
# How many samples are forgotten, or looked at, between two chances for other tasks, in some milliseconds.
_AT_A_TIME = 10_000


class DeclaredLists:
    def __init__(
        self,
        supply: Supply,
        cache: CacheControl,
        teaching: Teaching,
        courses: Courses,
        trainers: Trainers,
        scoring: BatchScoring,
        redirects: RedirectPublisher,
        scores_directory: Path,
    ) -> None:
        self._supply = supply
        self._cache = cache
        self._teaching = teaching
        self._courses = courses
        self._trainers = trainers
        self._scoring = scoring
        self._redirects = redirects
        self._scores_directory = scores_directory
        # The time at which each course was first found without a trainer. One that is being declared counts as used.
        self._unused_since: dict[str, float] = {}
        self._declared_now: list[str] = []
        # One list at a time begins: a rank waits until another rank of its job has begun their course with its scores,
        # and no two lists take the same room.
        self._beginning = trio.Lock()

    # -- lists come

    async def declare(self, trainer: Trainer, samples: SampleList) -> Declared:
        """Take a list that a trainer declares: its job's course of this list begins, or goes on.

        Raises ProtocolError if all courses together would have more than MAX_SAMPLES.
        """
        digest = digest_of(samples)
        course_id = course_id_of(trainer.job_id, digest)
        warnings: list[str] = []
        with self._declaring(course_id):
            paths = samples.paths
            inodes = await inodes_of(paths, self._supply.catalogue, self._supply.lister)
            # What has no path lies outside of the mount, which has been said.
            unknown = int((inodes == 0).sum()) - paths.count(b"")
            del paths
            leave_out_contradictions(inodes, samples.labels)
            async with self._beginning:
                await self._make_room(course_id, len(samples))
                known_list = self._courses.known_list(digest, inodes) or KnownList(digest, samples, inodes)
                course = self._courses.get(course_id)
                if course is None:
                    number = self._courses.number_of(course_id)
                    course = Course(number, trainer.job_id, known_list, self._scores_directory)
                    self._courses.put(course)
                    warnings += await self._begin(course, trainer.hello)
                elif course.list is not known_list or not self._is_going_on(course):
                    # Its scores are by index, so they hold for other files too.
                    course.list = known_list
                    warnings += await self._begin(course, trainer.hello)
            self._trainers.declare(trainer, samples.name, course, samples.teaches)
        return Declared(unknown, tuple(warnings))

    def _is_going_on(self, course: Course) -> bool:
        """Whether nothing is to be told to, or asked of, a job that declares the list of this course again."""
        return self._scoring.of(course) is not None or self._trainers.any_uses(course.course_id)

    async def _begin(self, course: Course, hello: Hello) -> list[str]:
        """Begin a course with the scores that its job, or the job that it names, has; returns what is missing."""
        warnings = []
        if hello.scores_from is not None and not course.directory.exists():
            try:
                await self._take_over(course, hello.scores_from)
            except OSError as exc:
                warnings.append(f"the scores of job {hello.scores_from} cannot be copied ({exc.strerror})")
        await self._scoring.introduce(course)
        if self._scoring.of(course) is None and not warnings:
            if hello.scores_from is not None:
                warnings.append(f"the mount has no scores of job {hello.scores_from} to start from")
            if hello.resume:
                warnings.append(f"the mount has no scores of job {hello.job}, so it starts afresh")
        return warnings

    async def _take_over(self, course: Course, job_id: str) -> None:
        other = self._courses.get(course_id_of(job_id, course.list.digest))
        if other is not None:
            await self._scoring.save_course(other)
        await self._scoring.take_over(course, directory_of(self._scores_directory, job_id, course.list.digest))

    @contextlib.contextmanager
    def _declaring(self, course_id: str) -> Iterator[None]:
        """This course does not leave memory meanwhile."""
        self._declared_now.append(course_id)
        try:
            yield
        finally:
            self._declared_now.remove(course_id)

    async def _make_room(self, course_id: str, samples: int) -> None:
        if self._is_full(course_id, samples):
            await self.let_go(0.0)
        if self._is_full(course_id, samples):
            raise ProtocolError(
                f"a list of {samples} samples: all jobs of this mount together have {MAX_SAMPLES} in "
                f"{MAX_COURSES} lists at most; close the hooks of trainings that are over",
                "too-large",
            )

    def _is_full(self, course_id: str, samples: int) -> bool:
        if self._courses.samples_beside(course_id) + samples > MAX_SAMPLES:
            return True
        return course_id not in self._courses and len(self._courses) >= MAX_COURSES

    # -- files change

    def superseded(self, inode: int, path: bytes) -> None:
        """Note that the file at a path has another version than this one."""
        for course in self._courses:
            if inode in course.list.index_of:
                course.list.superseded[inode] = path
                course.list.followed_s = -math.inf

    async def follow(self, course: Course) -> bool:
        """Have the samples of a list be the present versions of their files; returns whether that changes any.

        As when the list is declared again, its scores hold for the files that there are now. All files are looked at
        of each directory, such as an archive, in which one was superseded.
        """
        known = course.list
        if not known.superseded or trio.current_time() < known.followed_s + FOLLOW_AGAIN_S:
            return False
        # What is not there now may come back.
        known.followed_s = trio.current_time()
        noted = dict(known.superseded)
        directories = {path.rpartition(b"/")[0] for path in noted.values()}
        places, paths = [], []
        for first in range(0, len(known.keys), _AT_A_TIME):
            inodes = known.keys[first : first + _AT_A_TIME]
            for place, path in enumerate(self._supply.catalogue.paths(inodes), first):
                path = noted.get(known.keys[place], path)
                if known.keys[place] and path.rpartition(b"/")[0] in directories:
                    places.append(place)
                    paths.append(path)
            await trio.lowlevel.checkpoint()
        found = await inodes_of(paths, self._supply.catalogue, self._supply.lister)
        now = known.inodes.copy()
        now[places] = np.where(found, found, now[places])
        # The source may have taken long, and nobody attaches while this is held.
        async with self._beginning:
            if course.list is not known or np.array_equal(now, known.inodes):
                return course.list is not known
            followed = self._courses.known_list(known.digest, now) or known.with_files(now)
            for other in self._courses:
                if other.list is known:
                    other.list = followed
                    await self._scoring.introduce(other)
        return True

    # -- lists leave

    async def let_go(self, grace_s: float = GRACE_S) -> None:
        """Let courses leave memory that no trainer has used for `grace_s`; their scores are saved first."""
        now = trio.current_time()
        self._unused_since = {
            course.course_id: self._unused_since.get(course.course_id, now)
            for course in self._courses
            if not self._is_used(course.course_id)
        }
        for course_id, since in list(self._unused_since.items()):
            course = self._courses.get(course_id)
            if course is None or now - since < grace_s:
                continue
            try:
                await self._scoring.save_course(course)
            except OSError as exc:
                log.warning(
                    "cannot save the scores of an unused list (%s): it stays in memory until the cache's disk has room",
                    exc.strerror,
                )
                continue
            # A trainer may have declared the list while its scores were saved.
            if self._courses.get(course_id) is course and not self._is_used(course_id):
                await self._forget(course)

    def _is_used(self, course_id: str) -> bool:
        return course_id in self._declared_now or self._trainers.any_uses(course_id)

    async def _forget(self, course: Course) -> None:
        self._courses.remove(course)
        log.info("job %s is over: what it learned about %s leaves memory", course.job_id, course.list.name)
        inodes = list(course.list.index_of)
        for first in range(0, max(1, len(inodes)), _AT_A_TIME):
            # Another job may have declared a list with these files since the last slice.
            others = [other.list.index_of for other in self._courses]
            some = inodes[first : first + _AT_A_TIME]
            lonely = [inode for inode in some if not any(inode in other for other in others)]
            self._cache.apply(self._teaching.end(course.course_id, lonely))
            await trio.lowlevel.checkpoint()
            if course.course_id in self._courses:
                # The list was declared anew, and with it its scores and redirects.
                return
        await self._redirects.withdraw(course)
