"""Publishes the policy's redirects: writes them to the table that workers read at each look-up.

The policy names the redirects that have changed since it was asked last, so each change is drawn from it once. Two
callers that draw one after the other must write in the same order: all that is written goes through one lock. A row
names its course by the course's number, and only courses that are in memory have rows.

The kernel is told nothing: it believes a name for the rest of its time. A reader that opens a file which has a stand-in
by now is sent back to look the name up again (`StandIns.send_back` of `vfs/stand_ins.py`).
"""

from __future__ import annotations

import trio

from spiderfs.core.learning.teaching import Teaching
from spiderfs.daemon.training.courses.courses import Course, Courses
from spiderfs.store.store import Records
from spiderfs.vfs.redirects import redirect_row, redirect_rows


class RedirectPublisher:
    def __init__(self, teaching: Teaching, records: Records, courses: Courses) -> None:
        self._teaching = teaching
        self._records = records
        self._courses = courses
        self._publishing = trio.Lock()

    def begin(self) -> None:
        """Empty the table: the stand-ins that an earlier manager has published may no longer be cached."""
        self._records.put(redirect_row(number, wanted, None) for wanted, number, _ in redirect_rows(self._records))

    async def publish(self) -> None:
        """Write the redirects that have changed since the last time."""
        async with self._publishing:
            changes = self._teaching.redirects_changed()
            if not changes:
                return
            rows = []
            for course_id, wanted, stand_in in changes:
                assert isinstance(wanted, int)
                assert stand_in is None or isinstance(stand_in, int)
                course = self._courses.get(course_id)
                if course is not None:
                    rows.append(redirect_row(course.number, wanted, stand_in))
            await trio.to_thread.run_sync(self._records.put, rows)

    async def publish_all(self) -> None:
        """Write every redirect anew: a hub of an earlier mount may belong to a course that has only now begun."""
        async with self._publishing:
            self.begin()
            self._teaching.forget_told()
        await self.publish()

    async def withdraw(self, course: Course) -> None:
        """Remove all redirects of a course that leaves memory."""
        async with self._publishing:
            wanted = [row[0] for row in redirect_rows(self._records) if row[1] == course.number]
            self._records.put(redirect_row(course.number, inode, None) for inode in wanted)

    def has_stand_in(self, inode: int) -> bool:
        """Whether readers of some course get another file for this one while it is not cached."""
        return any(self._teaching.stand_in(course.course_id, inode) is not None for course in self._courses)
