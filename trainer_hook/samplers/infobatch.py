"""A sampler that leaves out a random part of the easy samples of an epoch (InfoBatch, Qin et al., ICLR 2024)."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer_hook.ranks import from_all_ranks, rank_and_world
from trainer_hook.samplers.epoch import Draws, EchoSampler, SampledEpoch, Scores, whole_number

log = logging.getLogger("trainer_hook")

# The next cycle is drawn after this share of the epoch before it. The sooner, the better the cache knows what to keep;
# the later, the newer are the losses. SpiderSampler has the same default, for the same reason.
SETTLED = 0.25


class InfoBatchSampler(EchoSampler):
    """Leaves out of each epoch the share `prune`, chosen at random, of the samples whose loss is below the mean.

    The kept samples of these weigh 1/(1 - `prune`), and all others 1. Multiply the losses by `hook.weights()`: then the
    sum of an epoch's gradients has the expectation of an epoch with all samples. An epoch leaves nothing out if it is
    one of the last `anneal` share of the `epochs`, or if no losses are known, as in the first one. A sample whose loss
    is not known is kept. The loss of a sample is that of the last time it was trained on.

    A kept sample is drawn `times` times within the share `window` of all samples, as EchoSampler does; the samples to
    leave out are then chosen again after `times` epochs.

    The hook passes the losses; in a loop without a hook, call `trained` after each batch and use `weights`. The next
    epoch is drawn after a quarter of the current one, by the losses until then, so that the cache knows the plan in
    time; the second epoch is drawn at the end of the first. With several ranks, all ranks share their losses when an
    epoch begins, and draw the epoch after that one by them. Epochs differ in length: `len` is the length of the current
    one.
    """

    def __init__(
        self,
        samples: int,
        *,
        epochs: int,
        prune: float = 0.5,
        anneal: float = 0.125,
        times: int = 1,
        window: float = 0.2,
        seed: int = 0,
    ) -> None:
        """`samples` is the length of the data set; `epochs` is the number of epochs of the whole training."""
        super().__init__(samples, times=times, window=window, seed=seed)
        if not 0 <= prune < 1:
            raise ValueError(f"prune={prune}: give a share of the samples below the mean loss, from 0 to less than 1")
        if not 0 <= anneal <= 1:
            raise ValueError(f"anneal={anneal}: give a share of the epochs, between 0 and 1")
        self._whole_from = (1 - anneal) * whole_number("epochs", epochs, 1)
        self._prune = prune
        self._losses = np.full(samples, np.nan, np.float32)
        # Losses of this rank that are not in `_losses` yet, which is the same on all ranks.
        self._news: deque[tuple[Draws, npt.NDArray[np.floating]]] = deque()
        # For the current cycle and its neighbours: the chance of each sample to be kept, or None if all are.
        self._decided: dict[int, Scores | None] = {}
        self._has_warned = False

    def __len__(self) -> int:
        return super().__len__() if self.current is None else self.current.own_draws

    @property
    def settled(self) -> float:
        cycle = self.epoch // self._times
        if (self.epoch + 1) // self._times == cycle:
            return 0.0
        return SETTLED if cycle else 1.0

    def trained(self, indices: Draws, losses: npt.NDArray[np.floating]) -> None:
        self._news.append((indices, losses))

    def weights(self, indices: npt.ArrayLike, clip: float | None = None) -> Tensor:
        """The weights of these samples in the current epoch: 1/(1 - `prune`) below the mean loss, and otherwise 1."""
        if self.current is None or self.current.scores is None:
            return super().weights(indices, clip)
        weights = torch.from_numpy(1 / self.current.scores[np.asarray(indices, np.int64)])
        return weights if clip is None else weights.clamp(max=clip)

    def probabilities(self) -> npt.NDArray[np.float64]:
        if self.current is None or self.current.scores is None:
            return super().probabilities()
        chances = self.current.scores.astype(np.float64)
        shares: npt.NDArray[np.float64] = chances / chances.sum()
        return shares

    def state_dict(self) -> dict[str, Any]:
        self._share_if_alone()
        chances = None if self.current is None else self.current.scores
        return super().state_dict() | {
            "losses": torch.from_numpy(self._losses.copy()),
            "chances": None if chances is None else torch.from_numpy(chances.copy()),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        losses = state["losses"].numpy().astype(np.float32)
        chances = None if state["chances"] is None else state["chances"].numpy().astype(np.float32)
        if any(of is not None and of.shape != (self.samples,) for of in (losses, chances)):
            raise ValueError(f"the state is of another list: it has {len(losses)} losses for {self.samples} samples")
        super()._restore(state)
        self._losses = losses
        self._news.clear()
        self._decided.clear()
        if self.current is not None:
            self.current.scores = self._decided[self.epoch // self._times] = chances

    # -- drawing

    def _begin(self) -> None:
        super()._begin()
        # Only now: what was drawn ahead and what is drawn now follow from the same losses on all ranks.
        if rank_and_world()[1] > 1:
            self._share()

    def _draw(self, number: int) -> SampledEpoch:
        epoch = super()._draw(number)
        epoch.scores = self._decided[number // self._times]
        return epoch

    def _kept(self, cycle: int) -> npt.NDArray[np.int64]:
        if cycle not in self._decided:
            recent = {of: chances for of, chances in self._decided.items() if abs(of - cycle) == 1}
            self._decided = recent | {cycle: self._chances(cycle)}
        chances = self._decided[cycle]
        if chances is None:
            return super()._kept(cycle)
        rng = np.random.default_rng([self._seed, cycle, 1])
        easy = np.flatnonzero(chances < 1)
        # Rounded up or down at random, so that the chance of each sample is exact.
        stays = rng.choice(easy, int((1 - self._prune) * len(easy) + rng.random()), replace=False)
        return np.concatenate([np.flatnonzero(chances == 1), stays])

    def _chances(self, cycle: int) -> Scores | None:
        """The chance of each sample to be kept in this cycle; None if all are."""
        self._share_if_alone()
        if (cycle + 1) * self._times > self._whole_from:
            return None
        known = ~np.isnan(self._losses)
        if not known.any():
            if cycle > 1 and not self._has_warned:
                self._has_warned = True
                log.warning("InfoBatchSampler leaves nothing out without losses: attach a hook, or call trained()")
            return None
        # Losses that are all equal have exactly this mean, so that at least one sample is not below it.
        mean = self._losses[known].mean(dtype=np.float64)
        return np.where(self._losses < mean, 1 - self._prune, 1).astype(np.float32)

    def _share_if_alone(self) -> None:
        if rank_and_world()[1] == 1:
            self._share()

    def _share(self) -> None:
        """Note the losses of all ranks; if there are several, all of them must call this."""
        # The sending thread appends meanwhile.
        mine = [self._news.popleft() for _ in range(len(self._news))]
        for of_rank in from_all_ranks(mine):
            for indices, losses in of_rank:
                self._losses[indices] = losses
