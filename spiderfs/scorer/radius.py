"""The distance below which two samples are neighbours, found while training runs.

The paper gives neither lambda nor alpha; only the radius -ln(alpha)/lambda matters, and a bad one makes all scores
equal. A good one follows the embeddings: a quantile of the distances from a sample to those of its own class among its
k nearest. It is taken from the latest of such distances at the start of an epoch and then stays, so that all scores of
an epoch compare. In the first epoch there is nothing to compare with yet, and it follows every batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spiderfs.scorer.index import Vectors

# Distances that are remembered: those of some 40 batches, 256 KiB, a quantile of which takes 1 ms.
REMEMBERED = 1 << 16


class Radius:
    def __init__(self, fixed: float | None = None, quantile: float = 0.5, remembered: int = REMEMBERED) -> None:
        if fixed is not None and not fixed > 0:
            raise ValueError(f"a radius must be positive, not {fixed}")
        if not 0 < quantile < 1:
            raise ValueError(f"the radius' quantile must lie between 0 and 1, not {quantile}")
        self.fixed = fixed
        self.quantile = quantile
        self._calibrated = 0.0
        self._frozen = False
        self._distances = np.zeros(remembered, np.float32)
        self._seen = 0

    @property
    def value(self) -> float:
        """The radius now in force; 0 while nothing has been observed."""
        return self._calibrated if self.fixed is None else self.fixed

    def observe(self, distances: Vectors) -> None:
        """Remember distances between samples of the same class."""
        room = len(self._distances)
        latest = distances[-room:]
        self._distances[(self._seen + np.arange(len(latest))) % room] = latest
        self._seen += len(latest)
        if not self._frozen:
            self._calibrate()

    def new_epoch(self) -> None:
        """Take the radius from what was observed lately, and keep it until the next epoch."""
        self._calibrate()
        self._frozen = self._seen > 0

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as numbers and arrays."""
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
