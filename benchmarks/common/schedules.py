"""Schedules of partly augmented samples without Revamper's two features, to show what each of these is worth."""

from __future__ import annotations

import numpy as np

from trainer_hook.refurbishing.generations import Generations, Indices


class UnspreadGenerations(Generations):
    """With balanced eviction, but a random order in place of the cache-aware shuffle."""

    def order(self, epoch: int, rank: int = 0, world_size: int = 1) -> Indices:
        rng = np.random.default_rng([*self._order_seed, epoch])
        shuffled: Indices = rng.permutation(self.samples)[: self.samples // world_size * world_size]
        return shuffled[rank::world_size]


class NaiveGenerations(UnspreadGenerations):
    """Renews all samples in the same epochs, as counting references does, in an order that does not ask which are."""

    def __init__(self, samples: int, reuse: int, kept: int, seed: int, order: int = 0) -> None:
        super().__init__(samples, reuse, kept, seed, order)
        self._shift = np.zeros(samples, np.int64)
