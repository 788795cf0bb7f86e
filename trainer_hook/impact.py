"""A sampler that trains on the harder part of the samples, and fetches only that (ImPACT, section III-B)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer_hook.sampler import SpiderSampler

log = logging.getLogger("trainer_hook")

Losses = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Evaluate = Callable[[Indices], Losses | None]

# S: those whose rank varies most, as many as fill this share of the cache; and when two such sets are the same one.
UNSTABLE_SHARE, SAME_OVERLAP = 0.25, 0.8
# Of all samples, where nobody says what the cache holds.
UNSTABLE_WITHOUT_CACHE = 0.05


class WarmUp:
    """The first epochs, on all samples: which losses change their rank most, until that is known for sure."""

    def __init__(self, samples: int, most_epochs: int) -> None:
        self._most_epochs = most_epochs
        self.epochs = 0
        # Welford's sums over the ranks of each sample.
        self._mean = np.zeros(samples)
        self._squares = np.zeros(samples)
        self.unstable: Indices = np.empty(0, np.int64)
        self.over = most_epochs == 0

    def observe(self, losses: Losses, count: int) -> None:
        """The losses after an epoch; `count` is how many samples S is to have."""
        ranks = np.empty(len(losses))
        ranks[np.argsort(losses, kind="stable")] = np.arange(len(losses))
        self.epochs += 1
        difference = ranks - self._mean
        self._mean += difference / self.epochs
        self._squares += difference * (ranks - self._mean)
        before = self.unstable
        if self.epochs > 1:
            # A sum of squares is a variance times the number of epochs, which is the same for all.
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
    """Each epoch a subset without repetition: of a sample with a loss above that of a share p of all, p ** `sharpness`.

    That is half of the samples with the default, and a third with 2. The first epochs train on all of them, until it
    is known whose rank varies most (`WarmUp`), `warm_up` epochs at most. From then on before each epoch those are
    evaluated by the model as it is, if somebody offers to (the hook does); for all others the latest loss counts. The
    daemon is told which they are and holds them, so that from their second evaluation on they are read from the cache.
    With `hybrid=False` (iCache) nothing is evaluated, and there is no warm-up but the first epoch. `coverage` is the
    share of the draws that are uniform.

    Meant for `policy=impact`, whose scores are losses. An epoch is drawn when it begins, so its plan is known no
    earlier. Its length differs: `len` is that of the current epoch. Rank 0 decides for all.
    """

    def __init__(
        self,
        samples: int,
        *,
        sharpness: float = 1.0,
        warm_up: int = 10,
        hybrid: bool = True,
        coverage: float = 0.0,
        **options: Any,
    ) -> None:
        """`options` are those of SpiderSampler but `draws` and `settled`."""
        super().__init__(samples, coverage=coverage, **options)
        if sharpness <= 0 or warm_up < 0:
            raise ValueError(f"sharpness={sharpness}, warm_up={warm_up}: more than 0, and 0 or more")
        self._sharpness = sharpness
        self._hybrid = hybrid
        self.warm_up = WarmUp(samples, warm_up if hybrid else 0)
        self._evaluate: Evaluate | None = None
        self.evaluated = 0
        """Samples that were evaluated beside those that were trained on."""

    def __len__(self) -> int:
        return super().__len__() if self._order is None else self._drawn()

    def offer(self, evaluate: Evaluate) -> None:
        """`evaluate` gives the losses of samples by the model as it is, or None if it cannot."""
        self._evaluate = evaluate

    def draw_ahead(self) -> list[int] | None:
        """Nothing is drawn before the model has come so far."""
        return None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"warm_up": self.warm_up.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.warm_up.restore(state["warm_up"])

    # -- drawing

    def _asked(self, timeout_s: float) -> Losses | None:
        """The chance of each sample to be in the subset; None while all are to be trained on."""
        losses = super()._asked(timeout_s)
        if losses is None:
            return None
        if not self.warm_up.over:
            self.warm_up.observe(losses, self._unstable_count(timeout_s))
            if not self.warm_up.over:
                return None
            log.info("warm-up is over after %d epochs", self.warm_up.epochs)
        return chances_of(self._reevaluated(losses, timeout_s), self._sharpness, self._coverage)

    def _reevaluated(self, losses: Losses, timeout_s: float) -> Losses:
        unstable = self.warm_up.unstable
        if not self._hybrid or self._evaluate is None or not len(unstable):
            return losses
        # Each time, for a daemon or a policy that has come since was not told. The answer is waited for, since what is
        # read before the daemon knows may not be kept, or be another sample.
        assert self._client is not None
        self._client.pin(self._list, unstable, timeout_s)
        found = self._evaluate(unstable)
        if found is not None:
            self.evaluated += len(unstable)
            losses = losses.copy()
            losses[unstable] = found
        return losses

    def _unstable_count(self, timeout_s: float) -> int:
        assert self._client is not None
        cached = self._client.cached(self._list, timeout_s)
        if cached is None or not cached.any():
            return max(1, int(self._samples * UNSTABLE_WITHOUT_CACHE))
        return max(1, int(int(cached.sum()) * UNSTABLE_SHARE))

    def _pick(self, scores: Losses, draws: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Each sample with its chance, and as many as these make together: a systematic draw from a random order."""
        order = rng.permutation(self._samples)
        edges = np.cumsum(scores[order].astype(np.float64))
        count = max(1, round(float(edges[-1])))
        places = np.searchsorted(edges, (np.arange(count) + rng.random()) * (edges[-1] / count), side="right")
        picked: npt.NDArray[np.int64] = rng.permutation(order[np.minimum(places, self._samples - 1)])
        return picked

    def _chances(self, scores: Losses | None) -> npt.NDArray[np.float64]:
        if scores is None:
            return np.full(self._samples, 1 / self._samples)
        shares = scores.astype(np.float64)
        chances: npt.NDArray[np.float64] = shares / shares.sum()
        return chances


def chances_of(losses: Losses, sharpness: float, coverage: float) -> Losses:
    """Of each sample the share of all whose loss is lower, to that power, mixed with their mean; in all at least 1."""
    ranks = np.empty(len(losses))
    ranks[np.argsort(losses, kind="stable")] = np.arange(len(losses)) + 0.5
    chances = (ranks / len(losses)) ** sharpness
    chances = (1 - coverage) * chances + coverage * chances.mean()
    made: Losses = (chances * max(1.0, 1 / chances.sum())).astype(np.float32)
    return made
