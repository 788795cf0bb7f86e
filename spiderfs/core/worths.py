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

With one course this costs one more dict entry for each sample, and no time. With several, a renewal gives every sample
of the course a new worth, at once. The same happens when a second course begins to have scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from spiderfs.core.policy import Key

# A table has at most so many quantiles: between two of them a rank is off by a thousandth at most.
QUANTILES = 1024

Worth = tuple[Key, float]
"""A sample and its new worth, a positive number."""


class Worths:
    """The scores of all courses; each method returns the worths that have changed, those that have not among them."""

    def __init__(self) -> None:
        # Only courses that have scores.
        self._courses: dict[str, _Scores] = {}

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
            return self._all_ranked()
        if len(course.of) >= 2 * course.ranked:
            course.renew()
            return self._worths(list(course.of))
        return self._worths(keys)

    def epoch_ended(self, course_id: str) -> Iterable[Worth]:
        """The job of this course has ended an epoch."""
        course = self._courses.get(course_id)
        if course is None or len(self._courses) == 1:
            return ()
        course.renew()
        return self._worths(list(course.of))

    def forget(self, course_id: str) -> Iterable[Worth]:
        """A course is over; returns the worths of the samples of which another course has scores."""
        gone = self._courses.pop(course_id, None)
        if gone is None or not self._courses:
            return ()
        if len(self._courses) == 1:
            (left,) = self._courses.values()
            left.ranked = 0
            return left.of.items()
        return self._worths([key for key in gone.of if any(key in course.of for course in self._courses.values())])

    def clear(self) -> None:
        """Forget all scores: the next ones are in another unit."""
        self._courses.clear()

    def _all_ranked(self) -> Iterable[Worth]:
        for course in self._courses.values():
            if not course.ranked or len(course.of) >= 2 * course.ranked:
                course.renew()
        keys = {key: None for course in self._courses.values() for key in course.of}
        return self._worths(list(keys))

    def _worths(self, keys: Sequence[Key]) -> Iterable[Worth]:
        """The largest rank of each of these samples, of which some course must have a score."""
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
