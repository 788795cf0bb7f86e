"""What a few seeds can say of a difference: 95 % intervals, and how many seeds it takes.

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
# More seeds than this are not worth naming: an experiment of that size is not one that anybody runs.
MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Interval:
    """The mean of paired differences, and how far the interval reaches to either side of it."""

    mean: float
    half_width: float
    """Infinite if there is one seed only."""
    seeds: int
    deviation: float
    """The standard deviation of the differences; 0 if there is one seed only."""

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
        return Interval(mean, math.inf, 1, 0.0)
    deviation = statistics.stdev(differences)
    return Interval(mean, _quantile(count) * deviation / math.sqrt(count), count, deviation)


def seeds_needed(deviation: float, half_width: float = MARGIN_POINTS) -> int | None:
    """The least number of seeds whose interval reaches at most `half_width` to either side, for this deviation.

    None if it takes more than MOST_SEEDS. The deviation is itself measured: that of three seeds may be half of the true
    one, or twice it.
    """
    return next(
        (count for count in range(2, MOST_SEEDS + 1) if _quantile(count) * deviation / math.sqrt(count) <= half_width),
        None,
    )


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


def verdict(differences: Sequence[float]) -> str:
    """What may be claimed of these differences in points, and how many seeds it takes where it is open."""
    if not differences:
        return ""
    found = interval_of(differences)
    if found.seeds == 1:
        return "one seed"
    if all(difference == 0 for difference in differences):
        return "the same training"
    if is_equivalent(found):
        return f"at most {MARGIN_POINTS:g} lower"
    if found.high < -MARGIN_POINTS:
        return "lower"
    needed = seeds_needed(found.deviation)
    return "open" if needed is None or needed <= found.seeds else f"open: {needed} seeds for ±{MARGIN_POINTS:g}"


def _quantile(count: int) -> float:
    from scipy import stats  # imported here: it takes a second, and most benchmarks print no interval

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
