"""The worth of a sample to the cache, when several courses have scores of it.

Each course gives a sample a score in a unit of its own. The cache ranks all samples in one order, so it needs one
number for each sample, its **worth**:

- if one course alone has scores, a sample's worth is its score, unchanged;
- if several courses have scores, a sample's worth is the largest of its **normalised ranks** in these courses. The
  normalised rank of a score is the share of the course's samples that score less, plus half of those that score the
  same: a number between 0 and 1.

So with several courses, what one of them needs most is kept, whatever the others think of it, and no course gets more
because its scores are larger numbers.

A rank is read from a table of quantiles of the course's scores. The table is renewed when the course ends an epoch, and
before that whenever the course has scored twice as many samples as when the table was made. Between two renewals the
table stays, so that a new score changes the worth of one sample and not of all. A course that ends gives back to the
others what they alone think; if one course is left, its scores count unchanged again.

With one course this costs one more dict entry for each sample, and no time. With several, a renewal changes the worth
of every sample of the course. So do the first scores of a second course, and the end of a course. Telling a million
worths takes seconds, so these are **due** at first, and the caller asks for some of them at a time (`due`). A worth is
computed when it is told, from the scores and tables of that moment, so nothing that is due undoes what was told later.

Until none is due, some samples have their new worth and others the old one, which may be in another unit. That harms
little. A worth decides which samples are kept, never which bytes a reader gets. It is asked for where a sample that is
not cached is read, and where the ratio falls. Some worths are told at each read, so while a list of n samples is told,
no more than a fraction of n samples can enter or leave at a wrong place in the order. The ratio falls when an epoch or
a course ends, before more than the first few worths are told: all others are still in the order of before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from spiderfs.core.policy import Key

# The most quantiles of a table: between two of them a rank is off by a thousandth at most.
QUANTILES = 1024

Worth = tuple[Key, float]
"""A sample and its new worth, a positive number."""


class Worths:
    """The scores of all courses. Each method returns worths that have changed, those that have not among them.

    The worths that change beside those of the samples that a method is called with are due.
    """

    def __init__(self) -> None:
        # Only courses that have scores.
        self._courses: dict[str, _Scores] = {}
        # Each sample once; the last one is told first.
        self._due: list[Key] = []

    @property
    def course_ids(self) -> Sequence[str]:
        """The courses that have scores."""
        return list(self._courses)

    def scored(self, course_id: str, keys: Sequence[Key], scores: Sequence[float]) -> Iterable[Worth]:
        """A course has new scores, one for each key; each must be positive, and keys may not repeat."""
        if not keys:
            return ()
        is_new = course_id not in self._courses
        course = self._courses.setdefault(course_id, _Scores())
        course.of.update(zip(keys, scores, strict=True))
        if len(self._courses) == 1:
            return zip(keys, scores, strict=True)
        if is_new:
            self._rank_all()
        elif len(course.of) >= 2 * course.ranked:
            course.renew()
            self._now_due(course.of)
        return self._worths(keys)

    def epoch_ended(self, course_id: str) -> None:
        """The job of this course has ended an epoch."""
        course = self._courses.get(course_id)
        if course is not None and len(self._courses) > 1:
            course.renew()
            self._now_due(course.of)

    def forget(self, course_id: str) -> None:
        """A course is over: worths are due for those of its samples that another course has scored."""
        gone = self._courses.pop(course_id, None)
        if gone is None:
            return
        if not self._courses:
            self._due.clear()
        elif len(self._courses) == 1:
            (left,) = self._courses.values()
            left.ranked = 0
            self._now_due(left.of)
        else:
            self._now_due(gone.of)

    def due(self, count: int) -> Iterable[Worth]:
        """The worths of the next `count` samples that are due, or of fewer: nobody may have a score of some."""
        if not self._due:
            return ()
        some = self._due[-count:]
        del self._due[-count:]
        known = [key for key in some if any(key in course.of for course in self._courses.values())]
        if len(self._courses) == 1:
            (alone,) = self._courses.values()
            return [(key, alone.of[key]) for key in known]
        return self._worths(known)

    def clear(self) -> None:
        """Forget all scores: the next ones are in another unit."""
        self._courses.clear()
        self._due.clear()

    def _now_due(self, keys: Mapping[Key, object]) -> None:
        """These samples are due beside those that are due already, which are told first."""
        self._due = [*keys, *(key for key in self._due if key not in keys)]

    def _rank_all(self) -> None:
        for course in self._courses.values():
            if not course.ranked or len(course.of) >= 2 * course.ranked:
                course.renew()
                self._now_due(course.of)

    def _worths(self, keys: Sequence[Key]) -> Iterable[Worth]:
        """The largest rank of each of these samples; some course must have scored each."""
        worths = np.zeros(len(keys))
        for course in self._courses.values():
            worths = np.maximum(worths, course.ranks(keys))
        return zip(keys, worths.tolist(), strict=True)


class _Scores:
    """The scores of one course, and the table by which they become ranks."""

    def __init__(self) -> None:
        self.of: dict[Key, float] = {}
        self.ranked = 0
        """How many samples had scores when the table was made; 0 if there is no table."""
        self._quantiles: NDArray[np.float64] = np.empty(0)
        self._ranks: NDArray[np.float64] = np.empty(0)

    def renew(self) -> None:
        """Make the table anew from the scores; there must be some."""
        count = len(self.of)
        values, times = np.unique(np.fromiter(self.of.values(), np.float64, count), return_counts=True)
        ranks = (np.cumsum(times) - times / 2) / count
        if len(values) > QUANTILES:
            chosen = np.linspace(0, len(values) - 1, QUANTILES).astype(np.int64)
            values, ranks = values[chosen], ranks[chosen]
        self._quantiles, self._ranks, self.ranked = values, ranks, count

    def ranks(self, keys: Sequence[Key]) -> NDArray[np.float64]:
        """The normalised rank of each key, 0 where this course has no score; lower for a lower score, or equal."""
        scores = np.array([self.of.get(key, 0.0) for key in keys], np.float64)
        return np.where(scores > 0, np.interp(scores, self._quantiles, self._ranks), 0.0)
