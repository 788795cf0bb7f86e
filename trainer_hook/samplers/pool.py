"""A sampler that draws neighbours of the list shortly after each other, so that a few requests bring many samples."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from trainer_hook.samplers.epoch import Epoch, EpochSampler, whole_number


class PoolSampler(EpochSampler):
    """Draws each sample once in an epoch, from a pool that random blocks of neighbours fill.

    This is a weaker shuffle, for data sets in archives at a source where each request takes long. Neighbours are
    samples side by side in the list of the data set, and so side by side in an archive that was packed in this order.
    An epoch cuts the list into blocks of `block` samples, at other places each time, and takes them in a random order.
    Where the pool has room for a block, all of it enters; each draw is one of the samples in the pool, all with the
    same chance. A block of 4 costs about as many requests as a larger one, and far less accuracy if neighbours are of
    one class (docs/results/pool_sampler.json).

    `pool` is a share of the samples. Give the share that the cache holds: with a plan the cache then keeps what is in
    the pool, and a block comes from an archive with a few requests. Two neighbours lie about so far apart: 0.17 of an
    epoch with a pool of 0.2, and 0.33 with a uniform shuffle.

    The draws follow from the seed and the number of the epoch. So ranks need not agree on them, and the next epoch is
    known when an epoch begins. Losses need no weights.
    """

    def __init__(self, samples: int, *, block: int = 4, pool: float = 0.2, seed: int = 0) -> None:
        """`samples` is the length of the data set; an epoch has as many draws, over all ranks."""
        super().__init__(samples, seed=seed)
        if not 0 < pool <= 1:
            raise ValueError(f"pool={pool}: give a share of the samples, above 0 and at most 1")
        self._block = min(whole_number("block", block, 1), samples)
        self._room = max(self._block, round(pool * samples))

    def _draw(self, number: int) -> Epoch:
        rng = np.random.default_rng([self._seed, number])
        cuts = np.arange(rng.integers(self._block), self.samples, self._block)
        blocks = np.split(np.arange(self.samples, dtype=np.uint32), cuts)
        return Epoch(number, through_pool((blocks[at] for at in rng.permutation(len(blocks))), self._room, rng))


def through_pool(
    blocks: Iterable[npt.NDArray[np.uint32]], room: int, rng: np.random.Generator
) -> npt.NDArray[np.uint32]:
    """The samples of all blocks in the order in which they leave a pool of `room` samples; no block has more."""
    pool: list[int] = []
    drawn: list[int] = []
    for block in blocks:
        for chance in rng.random(max(0, len(pool) + len(block) - room)).tolist():
            at = int(chance * len(pool))
            pool[at], pool[-1] = pool[-1], pool[at]
            drawn.append(pool.pop())
        pool += block.tolist()
    return np.concatenate([np.array(drawn, np.uint32), rng.permutation(np.array(pool, np.uint32))])
