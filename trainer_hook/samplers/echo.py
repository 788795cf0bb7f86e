"""A sampler that draws each sample several times while it is cached (data echoing, Choi et al., arXiv:1907.05550)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainer_hook.samplers.epoch import Epoch, EpochSampler, whole_number

# The shortest distance between two draws of a sample, as a share of the longest distance.
NEAREST = 0.5


class EchoSampler(EpochSampler):
    """Draws each sample `times` times within a window, and then again only after all other samples had their turn.

    This sampler needs no scores. A **cycle** is `times` epochs, in which each sample is drawn exactly `times` times. So
    all samples are drawn equally often and losses need no weights; only the order differs from that of a shuffle.

    All draws of a sample lie within `window`: while they are made, at most this share of all samples is drawn for the
    first time. Give the share of the samples that the cache holds. On average three quarters of the samples in a window
    are drawn again later, and the cache has to keep these. With a plan it keeps just these, and the source is read
    1/`times` as often. Each draw is decoded and augmented anew.

    The draws follow from the seed and the number of the epoch. So ranks need not agree on them, and the next epoch is
    known when an epoch begins.
    """

    def __init__(self, samples: int, *, times: int = 2, window: float = 0.2, seed: int = 0) -> None:
        """`samples` is the length of the data set; an epoch has as many draws, over all ranks."""
        super().__init__(samples, seed=seed)
        if not 0 < window <= 1:
            raise ValueError(f"window={window}: give a share of the samples, above 0 and at most 1")
        self._times = whole_number("times", times, 1)
        self._window = window

    def _draw(self, number: int) -> Epoch:
        cycle, part = divmod(number, self._times)
        order = self._cycle(cycle)[part * self.samples : (part + 1) * self.samples]
        return Epoch(number, order.astype(np.uint32))

    def _cycle(self, number: int) -> npt.NDArray[np.int64]:
        """The draws of `times` epochs: first draws by a permutation, each further draw at a distance from the last."""
        rng = np.random.default_rng([self._seed, number])
        # Draws are made in the order of these times; the first draws come at 0, 1, 2, ...
        times = np.empty((self._times, self.samples))
        times[0] = np.arange(self.samples)
        if self._times > 1:
            longest = self._window * self.samples / (self._times - 1)
            distances = rng.uniform(NEAREST * longest, longest, (self._times - 1, self.samples))
            times[1:] = times[0] + np.cumsum(distances, axis=0)
        permutation = rng.permutation(self.samples)
        drawn: npt.NDArray[np.int64] = permutation[np.argsort(times, axis=None, kind="stable") % self.samples]
        return drawn
