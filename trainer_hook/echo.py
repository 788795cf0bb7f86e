"""A sampler that uses each sample several times while it is cached (data echoing, Choi et al., arXiv:1907.05550)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer_hook.ranks import rank_and_world
from trainer_hook.sampler import Epoch, SpiderSampler

# The shortest way between two uses of a sample, as a share of the longest.
NEAREST = 0.5


class EchoSampler(SpiderSampler):
    """Draws each sample `times` times within a stretch of `window`, and then not before all others had their turn.

    It needs no scores. A **cycle** is `times` epochs, in which each sample is drawn exactly `times` times. So in the
    end all were trained on equally often, and there are no weights: nothing but the order differs from a shuffle.
    `window` is the longest stretch, in which so great a share of all samples is drawn for the first time: give the
    share that the cache holds. On average three quarters of it are drawn again later on, which is what a cache has to
    keep; with a plan it keeps just those, and the source is read 1/`times` as often. Each use is decoded and augmented
    anew.

    All of this follows from seed and epoch: ranks agree without a word, and the next epoch is known as this one begins.
    """

    def __init__(self, samples: int, *, times: int = 2, window: float = 0.2, seed: int = 0) -> None:
        """`samples` is the length of the data set, and of an epoch over all ranks."""
        super().__init__(samples, seed=seed)
        if times < 1:
            raise ValueError(f"times={times}: at least one use of each sample")
        if not 0 < window <= 1:
            raise ValueError(f"window={window}: a share of the samples above 0, and at most 1")
        self._times = times
        self._window = window

    @property
    def settled(self) -> float:
        """The next epoch is known from the first batch on."""
        return 0.0

    def draw_ahead(self) -> list[int]:
        self._ahead = self._draw(self.epoch + 1, None)
        rank, world_size = rank_and_world()
        mine: list[int] = self._ahead.order[rank::world_size].tolist()
        return mine

    def _ask(self, timeout_s: float) -> None:
        """It goes by no scores."""

    def _draw(self, number: int, scores: Any) -> Epoch:
        cycle, part = divmod(number, self._times)
        order = self._cycle(cycle)[part * self._samples : (part + 1) * self._samples]
        # As many for each rank: the first ones are drawn once more.
        order = np.resize(order, len(self) * rank_and_world()[1])
        return Epoch(number, None, order.astype(np.uint32))

    def _cycle(self, number: int) -> npt.NDArray[np.int64]:
        """The draws of `times` epochs: place of the first use by a permutation, each further one a way behind."""
        rng = np.random.default_rng([self._seed, number])
        places = np.empty((self._times, self._samples))
        places[0] = np.arange(self._samples)
        if self._times > 1:
            longest = self._window * self._samples / (self._times - 1)
            ways = rng.uniform(NEAREST * longest, longest, (self._times - 1, self._samples))
            places[1:] = places[0] + np.cumsum(ways, axis=0)
        permutation = rng.permutation(self._samples)
        drawn: npt.NDArray[np.int64] = permutation[np.argsort(places, axis=None, kind="stable") % self._samples]
        return drawn
