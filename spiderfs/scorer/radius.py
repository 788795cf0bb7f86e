"""The radius: the distance below which two samples are neighbours. The radius is calibrated while the training runs.

SpiderCache defines the radius as -ln(alpha)/lambda, and gives neither number. A bad radius makes all scores equal. A
good radius follows the embeddings: here it is a quantile of the distances from a sample to those of its k nearest
samples that have its label. The radius is computed from the latest of these distances when an epoch begins, and stays
for the epoch, so that all scores of the epoch can be compared. During the first epoch it is computed anew after every
batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spiderfs.scorer.index import Vectors

# So many distances are remembered, those of some 40 batches: they take 256 KiB, and their quantile takes 1 ms.
REMEMBERED = 1 << 16


class Radius:
    """The radius; `fixed` is a radius that the user has set, and None calibrates it."""

    def __init__(self, fixed: float | None = None, quantile: float = 0.5, remembered: int = REMEMBERED) -> None:
        if fixed is not None and not fixed > 0:
            raise ValueError(f"the radius must be positive, not {fixed}")
        if not 0 < quantile < 1:
            raise ValueError(f"the quantile of the radius must lie between 0 and 1, not {quantile}")
        self.fixed = fixed
        self.quantile = quantile
        self._calibrated = 0.0
        self._frozen = False
        self._distances = np.zeros(remembered, np.float32)
        self._seen = 0

    @property
    def value(self) -> float:
        """The current radius; 0 while no distance has been observed."""
        return self._calibrated if self.fixed is None else self.fixed

    def observe(self, distances: Vectors) -> None:
        """Remember distances between samples of the same label and, in the first epoch, compute the radius anew."""
        room = len(self._distances)
        latest = distances[-room:]
        self._distances[(self._seen + np.arange(len(latest))) % room] = latest
        self._seen += len(latest)
        if not self._frozen:
            self._calibrate()

    def new_epoch(self) -> None:
        """Compute the radius from the latest distances; it stays until the next epoch."""
        self._calibrate()
        self._frozen = self._seen > 0

    def state(self) -> dict[str, Any]:
        """All that `restore` needs, as numbers and arrays."""
        return {
            "radius": self._calibrated,
            "frozen": self._frozen,
            "distances": self._distances[: min(self._seen, len(self._distances))],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._seen = 0
        self._frozen = True
        self.observe(np.asarray(state["distances"], np.float32))
        self._calibrated = float(state["radius"])
        self._frozen = bool(state["frozen"])

    def _calibrate(self) -> None:
        if self._seen:
            self._calibrated = float(np.quantile(self._distances[: self._seen], self.quantile))
