"""The ratio while a training goes on: the share of the room for important samples (SpiderCache 4.3, eq. 5 to 8).

Sigma is the standard deviation of the scores. It rises while the training sorts the samples out, and falls when the
training converges. When sigma falls, the ratio begins to go from `start` to `end`; it goes the more slowly, the faster
the accuracy still grows.

The paper leaves some things open. Here beta stays 1 once it was 1. The slope of sigma is that of a line through several
observations, because a single step is noise. u lies between 0 and 1 whatever the accuracy does. While less than two
accuracies are known u is 1, as if the accuracy grew fast: lowering the ratio too early costs accuracy, but lowering it
too late costs only hits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Accuracies that are remembered: Delta needs the last few, and smoothing needs some before them.
REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class ElasticOptions:
    """The constants of the equations; raises ValueError for values that make no sense."""

    start: float = 0.9
    """r_start of eq. 8: the ratio when the training begins."""
    end: float = 0.8
    """r_end of eq. 8: the ratio when the training ends."""
    growth_window: int = 5
    """m of eq. 6, in epochs."""
    slope_window: int = 5
    """The number of observations of sigma through which the line is fitted."""
    half_growth: float = 0.01
    """gamma of eq. 7: the growth of accuracy per epoch at which u is 1/2. The paper does not give it."""
    smoothing_window: int = 5
    smoothing_order: int = 2

    def __post_init__(self) -> None:
        if not (0 <= self.start <= 1 and 0 <= self.end <= 1):
            raise ValueError(f"start and end must lie between 0 and 1, not {self.start} and {self.end}")
        if self.growth_window < 1 or self.slope_window < 2 or not self.half_growth > 0:
            raise ValueError("growth_window must be at least 1, slope_window at least 2, and half_growth above 0")
        if self.smoothing_window % 2 == 0 or not 0 <= self.smoothing_order < self.smoothing_window:
            raise ValueError("smoothing_window must be odd, and larger than smoothing_order")


class Elastic:
    """The ratio that one job asks for, from its sigma and its accuracy after each epoch (a share from 0 to 1)."""

    def __init__(self, options: ElasticOptions | None = None) -> None:
        self.options = options or ElasticOptions()
        self._sigmas: deque[float] = deque(maxlen=self.options.slope_window)
        self._accuracies: deque[float] = deque(maxlen=REMEMBERED)
        self._latched = False

    def observe_sigma(self, sigma: float) -> None:
        """Note sigma, the standard deviation of the scores; to be called once per epoch."""
        self._sigmas.append(sigma)
        if len(self._sigmas) == self.options.slope_window and slope(self._sigmas) < 0:
            self._latched = True

    def observe_accuracy(self, accuracy: float) -> None:
        """Note the accuracy at the end of an epoch."""
        self._accuracies.append(accuracy)

    @property
    def sigma(self) -> float:
        """The sigma that was observed last; 0 if none was."""
        return self._sigmas[-1] if self._sigmas else 0.0

    @property
    def beta(self) -> int:
        """1 since sigma first fell, and 0 before (eq. 5)."""
        return int(self._latched)

    @property
    def delta(self) -> float:
        """The mean growth of the smoothed accuracy per epoch, over the last m epochs, or over all if fewer (eq. 6)."""
        smoothed = savitzky_golay(list(self._accuracies), self.options.smoothing_window, self.options.smoothing_order)
        steps = np.diff(smoothed[-self.options.growth_window - 1 :])
        return float(steps.mean()) if len(steps) else 0.0

    @property
    def u(self) -> float:
        """Delta / (gamma + Delta), where a negative Delta counts as 0 (eq. 7)."""
        if len(self._accuracies) < 2:
            return 1.0
        delta = max(0.0, self.delta)
        return delta / (self.options.half_growth + delta)

    def ratio(self, progress: float) -> float:
        """The ratio when the share `progress` (t/T of eq. 8) of the training is done."""
        start, end = self.options.start, self.options.end
        return float(start - self.beta * (start - end) * min(1.0, max(0.0, progress)) ** (1 + self.u))

    def state(self) -> dict[str, Any]:
        return {
            "sigmas": list(self._sigmas),
            "accuracies": list(self._accuracies),
            "latched": self._latched,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; an empty state begins anew."""
        self._sigmas = deque(state.get("sigmas", ()), self.options.slope_window)
        self._accuracies = deque(state.get("accuracies", ()), REMEMBERED)
        self._latched = bool(state.get("latched", False))


def slope(series: Sequence[float]) -> float:
    """The slope of the least-squares line through equally spaced values; there must be at least two."""
    times = np.arange(len(series)) - (len(series) - 1) / 2
    return float(times @ np.asarray(series) / (times @ times))


def savitzky_golay(series: Sequence[float], window: int, order: int) -> NDArray[np.float64]:
    """The series, smoothed: each value becomes that of a polynomial fitted to its window (Savitzky and Golay, 1964).

    The values at each end come from the polynomial of the first or last full window. If the series is shorter than the
    window, one polynomial is fitted to all of it; a series with at most `order` values is returned unchanged.
    """
    values = np.asarray(series, np.float64)
    window = min(window, len(values))
    if window <= order:
        return values
    powers = np.vander(np.arange(window), order + 1)
    # This matrix turns the values in a window into the values of the fitted polynomial at the same points.
    fit = powers @ np.linalg.pinv(powers)
    fitted = np.lib.stride_tricks.sliding_window_view(values, window) @ fit.T
    middle = window // 2
    return np.concatenate([fitted[0, :middle], fitted[:, middle], fitted[-1, middle + 1 :]])
