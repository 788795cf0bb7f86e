"""What a few seeds can say of a difference: 95 % intervals.

Two systems are compared seed by seed: runs of a seed begin with the same weights, so the differences vary less than the
figures themselves. The interval of their mean is Student's, with one degree of freedom less than there are seeds. It is
right for differences that are spread normally; with three seeds it is wide, and that is as it should be.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
# By so many points of top-1 a system may be worse and still count as equivalent.
MARGIN_POINTS = 0.5


@dataclass(frozen=True)
class Interval:
    """The mean of paired differences, and how far the interval reaches to either side of it."""

    mean: float
    half_width: float
    """Infinite if there is one seed only."""
    seeds: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def interval_of(differences: Sequence[float]) -> Interval:
    """The 95 % interval of the mean of these differences; raises ValueError if there are none."""
    if not differences:
        raise ValueError("an interval needs at least one difference")
    count, mean = len(differences), statistics.fmean(differences)
    if count == 1:
        return Interval(mean, math.inf, 1)
    return Interval(mean, _quantile(count) * statistics.stdev(differences) / math.sqrt(count), count)


def is_equivalent(found: Interval) -> bool:
    """Whether the whole interval lies above -MARGIN_POINTS: at most so many points lower can be claimed."""
    return found.low > -MARGIN_POINTS


def shown(differences: Sequence[float], form: str = "+.1f") -> str:
    """The mean and the interval, as "-0.7 [-1.4, +0.1]"; the mean alone if there is one seed only."""
    if not differences:
        return ""
    found = interval_of(differences)
    text = format(found.mean, form)
    return text if found.seeds == 1 else f"{text} [{format(found.low, form)}, {format(found.high, form)}]"


def _quantile(count: int) -> float:
    from scipy import stats  # imported here: it takes a second, and most benchmarks print no interval

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
