"""Which generation of each partly augmented sample an epoch uses, and in which order: Revamper's schedule.

Revamper ("Refurbish Your Training Data", section 5) uses each cached sample `reuse` times. By its **balanced
eviction** the same number of samples is renewed in each epoch, in an order that is fixed for the whole training. By
its **cache-aware shuffle** each batch has the same share of samples that are renewed.

A **generation** of a sample is one partly augmented form of it. Here the generation that an epoch uses follows from
the sample's place in one fixed permutation and from the number of the epoch. So there is nothing to be remembered: a
training that resumes, a rank, and a process that has lost the cache all agree. A sample's first generation is used
for fewer epochs than `reuse`, by its place; each later one exactly `reuse` times.

If only a part of the samples is kept, it is always the same part; each of the others is renewed in each epoch.

This module is pure: numpy alone, and no state but its arguments.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
# What a random generator is for; each has numbers of its own.
_PLACES, _ORDER = 0, 1


class Generations:
    """The schedule of `samples` samples; `kept` of them are used `reuse` times each, and `seed` decides all else."""

    def __init__(self, samples: int, reuse: int, kept: int, seed: int, order: int = 0) -> None:
        """Schedules that differ in `order` alone draw the same generations in another order."""
        self.samples = samples
        self._reuse = reuse
        self._order_seed = [seed, _ORDER] if order == 0 else [seed, _ORDER, order]
        places = np.random.default_rng([seed, _PLACES]).permutation(samples)
        self.kept: npt.NDArray[np.bool_] = places < kept
        """For each sample, whether later epochs use what an epoch makes of it."""
        # Neighbouring places are renewed in different epochs, so each epoch renews a `reuse`-th of any part.
        self._shift: Indices = places % reuse

    def of_epoch(self, epoch: int) -> Indices:
        """The generation of each sample in an epoch."""
        return np.where(self.kept, (epoch + self._shift) // self._reuse, epoch)

    def renewed(self, epoch: int) -> npt.NDArray[np.bool_]:
        """Whether each sample is made again in an epoch: all of them in the first one."""
        if epoch == 0:
            return np.ones(self.samples, bool)
        renewed: npt.NDArray[np.bool_] = ~self.kept | ((epoch + self._shift) % self._reuse == 0)
        return renewed

    def order(self, epoch: int, rank: int = 0, world_size: int = 1) -> Indices:
        """The samples that a rank draws in an epoch: each once over all ranks, and renewed ones evenly spread.

        Of any n draws in a row, the share that is renewed is that of the epoch, give or take one draw; those that are
        renewed for later epochs, and those that are never kept, are evenly spread among them. The order is random
        within each of these kinds. All ranks have equally many draws; if the samples cannot be dealt out so, as few as
        possible, drawn at random, are left out of this epoch.
        """
        rng = np.random.default_rng([*self._order_seed, epoch])
        shuffled = rng.permutation(self.samples)[: self.samples // world_size * world_size]
        renewed, kept = self.renewed(epoch)[shuffled], self.kept[shuffled]
        kinds = (shuffled[renewed & kept], shuffled[renewed & ~kept], shuffled[~renewed])
        # Dealt out one kind after the other, each kind is equally many samples for each rank, give or take one.
        ends = np.cumsum([0, *map(len, kinds)])
        dealt = np.concatenate(kinds)
        due, unkept, others = (
            dealt[begin + (rank - begin) % world_size : end : world_size] for begin, end in itertools.pairwise(ends)
        )
        return spread(spread(due, unkept), others)


def spread(some: Indices, others: Indices) -> Indices:
    """Both in one order, in which each is evenly spread."""
    total = len(some) + len(others)
    marks = np.arange(total + 1) * len(some) // max(total, 1)
    is_some = marks[1:] > marks[:-1]
    order = np.empty(total, np.int64)
    order[is_some], order[~is_some] = some, others
    return order
