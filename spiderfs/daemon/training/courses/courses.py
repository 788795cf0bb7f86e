"""The courses that the manager has in memory: what each job learns about each list that it has declared.

A course has a number, for rows of tables and for traces. It keeps the number when it leaves memory and comes back.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from spiderfs.daemon.training.courses.course import Course
from spiderfs.daemon.training.lists.sample_list import KnownList

# The number of a course has 16 bits in traces.
_MAX_NUMBER = 0xFFFF


class Courses:
    def __init__(self) -> None:
        self._courses: dict[str, Course] = {}
        self._numbers: dict[str, int] = {}

    def __iter__(self) -> Iterator[Course]:
        """The courses there are now: others may come, or leave memory, while a caller looks at these."""
        return iter(list(self._courses.values()))

    def __len__(self) -> int:
        return len(self._courses)

    def __contains__(self, course_id: object) -> bool:
        return course_id in self._courses

    def get(self, course_id: str) -> Course | None:
        return self._courses.get(course_id)

    def of_job(self, job_id: str) -> list[Course]:
        return [course for course in self._courses.values() if course.job_id == job_id]

    def number_of(self, course_id: str) -> int:
        """The number of a course, which gets one now if it has none; the numbers in use are 1, 2, and so on."""
        number = self._numbers.get(course_id)
        if number is None:
            number = len(self._numbers) + 1
            if number > _MAX_NUMBER:
                # That of the course which got one first, of those not in memory: there are far fewer in memory.
                number = self._numbers.pop(next(known for known in self._numbers if known not in self._courses))
            self._numbers[course_id] = number
        return number

    def put(self, course: Course) -> None:
        """Have this course in memory; there is none with its id."""
        self._courses[course.course_id] = course

    def remove(self, course: Course) -> None:
        del self._courses[course.course_id]

    def known_list(self, digest: str, inodes: npt.NDArray[np.uint64]) -> KnownList | None:
        """The list with this digest and these files, if some course has it: all of them share it."""
        for course in self._courses.values():
            if course.list.digest == digest and np.array_equal(course.list.inodes, inodes):
                return course.list
        return None

    def samples_beside(self, course_id: str) -> int:
        """How many samples all other courses have together."""
        return sum(len(course.list.keys) for course in self._courses.values() if course.course_id != course_id)
