"""How much of the cache the important samples get, over the course of training (SpiderCache, section 4.3, eq. 5 to 8).

The spread of the scores rises while training sorts the samples out and falls once it converges. From then on the share
of the importance section goes from `start` to `end`, the slower the faster accuracy still grows.

What the paper leaves open: beta stays 1 once it was; the slope of sigma is that of a line through some observations,
for a single step is noise; u lies between 0 and 1, whatever accuracy does; and without two accuracies it is 1, as for
one that grows fast, because giving way too early costs accuracy and too late only hits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Accuracies that are remembered: Delta looks at the last few, and smoothing at some before them.
REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class ElasticOptions:
    start: float = 0.9
    """r_start, the share of the importance section at first."""
    end: float = 0.8
    """r_end, its share when training ends."""
    growth_window: int = 5
    """m of eq. 6, in epochs."""
    slope_window: int = 5
    """Observations of sigma through which the line is laid."""
    balance: float = 0.01
    """gamma of eq. 7, which the paper does not give: the growth of accuracy per epoch at which u is 1/2."""
    smoothing_window: int = 5
    smoothing_order: int = 2

    def __post_init__(self) -> None:
        if not (0 <= self.start <= 1 and 0 <= self.end <= 1):
            raise ValueError("a share of the cache lies between 0 and 1")
        if self.growth_window < 1 or self.slope_window < 2 or not self.balance > 0:
            raise ValueError("windows need at least 1 (growth) and 2 (slope) observations, the balance is positive")
        if self.smoothing_window % 2 == 0 or not 0 <= self.smoothing_order < self.smoothing_window:
            raise ValueError("a smoothing window is odd, and longer than the order of its polynomial")


class Elastic:
    """Knows sigma and accuracy epoch by epoch; accuracies are shares of 1."""

    def __init__(self, options: ElasticOptions | None = None) -> None:
        self.options = options or ElasticOptions()
        self.pinned: float | None = None
        """A share that holds whatever training does; None lets the equations decide."""
        self._sigmas: deque[float] = deque(maxlen=self.options.slope_window)
        self._accuracies: deque[float] = deque(maxlen=REMEMBERED)
        self._latched = False

    def observe_sigma(self, sigma: float) -> None:
        """Note the standard deviation of the scores, at equal distances in time: once per epoch."""
        self._sigmas.append(sigma)
        if len(self._sigmas) == self.options.slope_window and slope(self._sigmas) < 0:
            self._latched = True

    def observe_accuracy(self, accuracy: float) -> None:
        """Note the accuracy at the end of an epoch."""
        self._accuracies.append(accuracy)

    def pin(self, share: float | None) -> None:
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"a share of the cache lies between 0 and 1, not {share}")
        self.pinned = share

    @property
    def sigma(self) -> float:
        """The last that was observed."""
        return self._sigmas[-1] if self._sigmas else 0.0

    @property
    def beta(self) -> int:
        """1 once sigma has been falling, else 0 (eq. 5)."""
        return int(self._latched)

    @property
    def delta(self) -> float:
        """Mean growth of the smoothed accuracy per epoch, over the last m or as many as there are (eq. 6)."""
        smoothed = savitzky_golay(list(self._accuracies), self.options.smoothing_window, self.options.smoothing_order)
        steps = np.diff(smoothed[-self.options.growth_window - 1 :])
        return float(steps.mean()) if len(steps) else 0.0

    @property
    def u(self) -> float:
        """Delta / (gamma + Delta), no growth counting as 0 (eq. 7)."""
        if len(self._accuracies) < 2:
            return 1.0
        delta = max(0.0, self.delta)
        return delta / (self.options.balance + delta)

    def ratio(self, progress: float) -> float:
        """Share of the importance section at t/T = `progress`, from 0 to 1 (eq. 8)."""
        if self.pinned is not None:
            return self.pinned
        start, end = self.options.start, self.options.end
        return float(start - self.beta * (start - end) * min(1.0, max(0.0, progress)) ** (1 + self.u))

    def state(self) -> dict[str, Any]:
        return {
            "sigmas": list(self._sigmas),
            "accuracies": list(self._accuracies),
            "latched": self._latched,
            "pinned": self.pinned,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; an empty one begins anew."""
        self._sigmas = deque(state.get("sigmas", ()), self.options.slope_window)
        self._accuracies = deque(state.get("accuracies", ()), REMEMBERED)
        self._latched = bool(state.get("latched", False))
        self.pin(state.get("pinned"))


def slope(series: Sequence[float]) -> float:
    """Slope of the least-squares line through equally spaced values, at least two."""
    times = np.arange(len(series)) - (len(series) - 1) / 2
    return float(times @ np.asarray(series) / (times @ times))


def savitzky_golay(series: Sequence[float], window: int, order: int) -> NDArray[np.float64]:
    """Each value replaced by that of a polynomial through its window (Savitzky and Golay, 1964).

    At both ends the polynomial of the first or last full window is read off; a series shorter than the window is fitted
    as a whole, and one no longer than the polynomial's order is left as it is.
    """
    values = np.asarray(series, np.float64)
    window = min(window, len(values))
    if window <= order:
        return values
    powers = np.vander(np.arange(window), order + 1)
    # Values in a window -> values of the polynomial at each of its places.
    fit = powers @ np.linalg.pinv(powers)
    fitted = np.lib.stride_tricks.sliding_window_view(values, window) @ fit.T
    middle = window // 2
    return np.concatenate([fitted[0, :middle], fitted[:, middle], fitted[-1, middle + 1 :]])
