"""Synthetic embeddings like those of a network in training: for the benchmarks of the scorer.

A class has three clusters, and ten classes lie near each other. Most samples are easy: they lie in a cluster of their
own class. The harder a sample is, the nearer it lies to a cluster of another class, mostly of one that is near. The
numbers of an embedding vary less and less from the first to the last, so 64 of them are worth some 14 that vary alike.
While the training goes on, classes become tighter, and every embedding moves a little each time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CLUSTERS = 3
NEAR_CLASSES = 10
# Standard deviations, where that of the groups is 1: of classes in a group, of clusters in a class, of samples in
# a cluster, and of one sample from one time to the next.
CLASS, CLUSTER, SAMPLE, MOVE = 0.7, 0.4, 0.6, 0.18


class Embeddings:
    """The embeddings of a list; a million samples of 64 numbers take 160 MB."""

    def __init__(self, samples: int, dimension: int, classes: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        scale = np.arange(1, dimension + 1) ** -0.5
        self._scale = (scale * np.sqrt(dimension / np.sum(scale**2))).astype(np.float32)
        groups = max(2, classes // NEAR_CLASSES)
        group_centres = rng.normal(size=(groups, dimension))
        class_centres = group_centres[np.arange(classes) % groups] + CLASS * rng.normal(size=(classes, dimension))
        clusters = class_centres[:, None] + CLUSTER * rng.normal(size=(classes, CLUSTERS, dimension))
        self._clusters = (clusters * self._scale).astype(np.float32).reshape(classes * CLUSTERS, dimension)
        self.labels = rng.integers(0, classes, samples)
        self._own = self.labels * CLUSTERS + rng.integers(0, CLUSTERS, samples)
        # Two of three samples lean towards a class of their group, the others towards any.
        near = (self.labels + groups * rng.integers(1, 3, samples)) % classes
        other = np.where(rng.random(samples) < 2 / 3, near, rng.integers(0, classes, samples))
        self._other = other * CLUSTERS + rng.integers(0, CLUSTERS, samples)
        self._hardness = (0.9 * rng.random(samples) ** 4).astype(np.float32)
        self._offset = rng.standard_normal((samples, dimension), dtype=np.float32).astype(np.float16)
        self._rng = rng

    def of(self, ids: NDArray[np.integer], epochs: float = 0.0) -> NDArray[np.float32]:
        """(ids, dimension) the embeddings of these samples, so many epochs after the first."""
        hardness = self._hardness[ids, None] * max(0.5, 1.15 - 0.05 * epochs)
        centre = (1 + 0.1 * epochs) * (
            self._clusters[self._own[ids]] * (1 - hardness) + self._clusters[self._other[ids]] * hardness
        )
        moved = MOVE * self._rng.standard_normal((len(ids), self._scale.size), dtype=np.float32)
        around = (SAMPLE * self._offset[ids].astype(np.float32) + moved) * self._scale / (1 + 0.15 * epochs)
        embeddings: NDArray[np.float32] = (centre + around).astype(np.float32)
        return embeddings
