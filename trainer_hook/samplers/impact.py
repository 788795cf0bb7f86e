"""A sampler that trains on the harder part of the samples, and fetches only that (ImPACT, section III-B)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer_hook.ranks import from_all_ranks, from_first_rank, rank_and_world
from trainer_hook.samplers.epoch import whole_number
from trainer_hook.samplers.spider import SpiderSampler

log = logging.getLogger("trainer_hook")

Losses = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Evaluate = Callable[[Indices], Losses | None]

# The paper's S has as many samples as fill this share of the cache.
UNSTABLE_SHARE = 0.25
# If the number of cached samples is not known, S has this share of all samples.
UNSTABLE_WITHOUT_CACHE = 0.05
# The warm-up is over when S shares more than this part of its samples with the S of the epoch before.
SAME_OVERLAP = 0.8


class ImpactWarmUp:
    """The first epochs, which train on all samples, and find the samples whose losses change their rank most (S)."""

    def __init__(self, samples: int, most_epochs: int) -> None:
        self._most_epochs = most_epochs
        self.epochs = 0
        # The mean of each sample's ranks, and the sum of the squares of their differences from it (Welford, 1962).
        self._mean = np.zeros(samples)
        self._squares = np.zeros(samples)
        self.unstable: Indices = np.empty(0, np.int64)
        self.over = most_epochs == 0

    def observe(self, losses: Losses, count: int) -> None:
        """Learn from the losses after an epoch; S gets `count` samples."""
        ranks = np.empty(len(losses))
        ranks[np.argsort(losses, kind="stable")] = np.arange(len(losses))
        self.epochs += 1
        difference = ranks - self._mean
        self._mean += difference / self.epochs
        self._squares += difference * (ranks - self._mean)
        before = self.unstable
        if self.epochs > 1:
            # The sums order the samples as their variances do: the number of epochs is the same for all.
            self.unstable = np.sort(np.argsort(-self._squares, kind="stable")[:count])
        shared = len(np.intersect1d(before, self.unstable))
        settled = len(before) > 0 and shared > SAME_OVERLAP * max(len(before), len(self.unstable))
        self.over = settled or self.epochs >= self._most_epochs

    def state(self) -> dict[str, Any]:
        return {
            "epochs": self.epochs,
            "mean": torch.from_numpy(self._mean.copy()),
            "squares": torch.from_numpy(self._squares.copy()),
            "unstable": torch.from_numpy(self.unstable.copy()),
            "over": self.over,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.epochs, self.over = state["epochs"], state["over"]
        self._mean, self._squares = state["mean"].numpy().copy(), state["squares"].numpy().copy()
        self.unstable = state["unstable"].numpy().copy()


class ImpactSampler(SpiderSampler):
    """Draws a subset of the samples in each epoch; samples of higher loss are drawn more often.

    A sample whose loss is above the losses of a share p of all samples is drawn with the chance p ** `sharpness`. So an
    epoch has half of the samples with the default sharpness of 1, and a third with 2 (in the style of Jiang et al.,
    "Accelerating Deep Learning by Focusing on the Biggest Losers", 2019). `coverage` is the share of the draws that are
    uniform.

    With `irreducible` the reducible part of a loss takes the place of the loss: the loss less what a small model that
    was trained on held-out data loses with the sample (Mindermann et al., "Prioritized Training on Points that are
    Learnable, Worth Learning, and Not Yet Learnt", 2022, which the paper names). Then samples with wrong labels, that
    no model can learn, are not drawn more often than others.

    The first epochs train on all samples until it is known which samples' losses change their rank most
    (`ImpactWarmUp`), for at most `warm_up` epochs. From then on the current model evaluates these samples before each
    epoch, if the sampler was offered an evaluation (the hook offers one); for all other samples the latest loss counts.
    The sampler pins these samples, so that from the second evaluation on they are read from the cache. While the
    warm-up goes on, the daemon is notified, and keeps what the cache has. With `hybrid=False` (iCache) nothing is
    evaluated, and only the first epoch trains on all samples.

    Use this sampler with `policy=impact`, whose scores are losses. An epoch is drawn when it begins, so its plan is not
    known before. Epochs differ in length: `len` is the length of the current one. With several ranks, rank 0 decides
    for all of them, and each evaluates and pins its own part of the samples.
    """

    def __init__(
        self,
        samples: int,
        *,
        sharpness: float = 1.0,
        warm_up: int = 10,
        hybrid: bool = True,
        coverage: float = 0.0,
        irreducible: npt.ArrayLike | None = None,
        **options: Any,
    ) -> None:
        """`irreducible` has one finite loss for each sample (`samples`).

        `options` are those of SpiderSampler, except `draws` and `settled`. Raises ValueError for impossible options.
        """
        super().__init__(samples, coverage=coverage, **options)
        if sharpness <= 0:
            raise ValueError(f"sharpness={sharpness}: give more than 0")
        warm_up = whole_number("warm_up", warm_up, 0)
        self._irreducible = (
            np.zeros(samples, np.float32) if irreducible is None else np.asarray(irreducible, np.float32)
        )
        if self._irreducible.shape != (samples,) or not np.isfinite(self._irreducible).all():
            raise ValueError(f"irreducible needs one finite loss for each of the {samples} samples")
        self._sharpness = sharpness
        self._hybrid = hybrid
        self.warm_up = ImpactWarmUp(samples, warm_up if hybrid else 0)
        self._evaluate: Evaluate | None = None
        self._has_said_warm_up = False
        self.evaluated = 0
        """How many samples this rank evaluated between epochs, in all."""

    def __len__(self) -> int:
        return super().__len__() if self.current is None else self.current.own_draws

    def offer(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate

    def draw_ahead(self) -> list[int] | None:
        """None: an epoch is drawn by the losses of the moment at which it begins."""
        return None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"warm_up": self.warm_up.state()}

    def _restore(self, state: dict[str, Any]) -> None:
        self.warm_up.restore(state["warm_up"])
        super()._restore(state)

    # -- drawing

    def _shared_scores(self, timeout_s: float) -> Losses | None:
        """The chance of each sample to be drawn; None while epochs train on all samples. All ranks must call this."""
        rank, world_size = rank_and_world()
        losses = self._known_losses(timeout_s) if rank == 0 and self._client is not None else None
        evaluates = losses is not None and self._hybrid
        to_evaluate = self.warm_up.unstable if evaluates else np.empty(0, np.int64)
        warms_up, unstable = from_first_rank((not self.warm_up.over, to_evaluate))
        # The daemon may be a new one, so each epoch of the warm-up says so.
        if self._client is not None and (warms_up or self._has_said_warm_up):
            self._client.warm_up(self._list, warms_up)
            self._has_said_warm_up = warms_up
        found: list[Losses | None] = []
        if len(unstable):
            found = from_all_ranks(self._evaluated(unstable[rank::world_size], timeout_s))
        chances = None
        if losses is not None:
            losses = losses.copy()
            for part, known in enumerate(found):
                if known is not None:
                    losses[unstable[part::world_size]] = known
            chances = chances_of(losses - self._irreducible, self._sharpness, self._coverage)
        shared: Losses | None = from_first_rank(chances)
        return shared

    def _known_losses(self, timeout_s: float) -> Losses | None:
        """The daemon's losses, which the warm-up observes; None while epochs train on all samples."""
        losses = self._daemon_scores(timeout_s)
        if losses is None or self.warm_up.over:
            return losses
        assert self._client is not None
        cached = self._client.cached(self._list, timeout_s)
        count = self.samples * UNSTABLE_WITHOUT_CACHE
        if cached is not None and cached.any():
            count = int(cached.sum()) * UNSTABLE_SHARE
        self.warm_up.observe(losses, max(1, int(count)))
        if not self.warm_up.over:
            return None
        log.info("warm-up is over after %d epochs", self.warm_up.epochs)
        return losses

    def _evaluated(self, samples: Indices, timeout_s: float) -> Losses | None:
        """The losses of these samples by the current model; None if this rank cannot compute them."""
        if self._client is None or self._evaluate is None or not len(samples):
            return None
        # The samples are pinned before each epoch, because the daemon or its policy may be a new one. The sampler waits
        # for the answer: a sample that is read before it is pinned may leave the cache, or be a substitute.
        self._client.pin(self._list, samples, timeout_s)
        found = self._evaluate(samples)
        if found is not None:
            self.evaluated += len(samples)
        return found

    def _pick(self, scores: Losses, rng: np.random.Generator) -> Indices:
        """Draw each sample with its chance: a systematic sample of a random order, as many as the chances sum up to."""
        order = rng.permutation(self.samples)
        edges = np.cumsum(scores[order].astype(np.float64))
        count = max(1, round(float(edges[-1])))
        hits = np.searchsorted(edges, (np.arange(count) + rng.random()) * (edges[-1] / count), side="right")
        picked: Indices = rng.permutation(order[np.minimum(hits, self.samples - 1)])
        return picked

    def _chances(self, scores: Losses) -> npt.NDArray[np.float64]:
        shares = scores.astype(np.float64)
        chances: npt.NDArray[np.float64] = shares / shares.sum()
        return chances


def chances_of(losses: Losses, sharpness: float, coverage: float) -> Losses:
    """The chance of each sample: the share of samples of lower loss, to the power `sharpness`, mixed with the mean.

    The chances are scaled up if they add up to less than 1.
    """
    ranks = np.empty(len(losses))
    ranks[np.argsort(losses, kind="stable")] = np.arange(len(losses)) + 0.5
    chances = (ranks / len(losses)) ** sharpness
    chances = (1 - coverage) * chances + coverage * chances.mean()
    made: Losses = (chances * max(1.0, 1 / chances.sum())).astype(np.float32)
    return made
