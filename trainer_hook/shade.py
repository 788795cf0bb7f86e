"""A sampler that repeats cached and hard samples while the training improves (PADS of SHADE, section 4.2.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer_hook.sampler import SpiderSampler

Scores = npt.NDArray[np.float32]

# If the loss falls by more than this share in one epoch, it falls steeply: then the hard samples change too fast to be
# repeated.
STEEP_SHARE = 0.2
# The accuracy stagnates if in the last so many epochs it has not risen by so much above its best before them.
STAGNANT_EPOCHS, STAGNANT_RISE = 3, 0.001
# Repeated samples get at most this share of the draws by scores. Without a limit a training might see nothing but the
# cached samples, as in the paper's setting with half of the data cached and two repeats.
REPEATED_MAX = 0.9


class Trend:
    """Whether a training improves, by its loss and accuracy after each epoch; either may be unknown."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.accuracies: list[float] = []

    def observe(self, loss: float | None, accuracy: float | None) -> None:
        """Note the loss and the accuracy after an epoch."""
        if loss is not None:
            self.losses.append(loss)
        if accuracy is not None:
            self.accuracies.append(accuracy)

    @property
    def improves(self) -> bool:
        """Whether the loss falls, but not steeply, or the accuracy rises; False while the accuracy stagnates."""
        fallen_to = self.losses[-1] / self.losses[-2] if len(self.losses) > 1 and self.losses[-2] > 0 else 1.0
        best_before = max(self.accuracies[:-STAGNANT_EPOCHS], default=-np.inf)
        if fallen_to < 1 - STEEP_SHARE or max(self.accuracies, default=0.0) < best_before + STAGNANT_RISE:
            return False
        return fallen_to < 1 or (len(self.accuracies) > 1 and self.accuracies[-1] > self.accuracies[-2])


class ShadeSampler(SpiderSampler):
    """Draws as SpiderSampler does, but draws samples that are cached and score above the mean `repeats` times as often.

    Samples are repeated in an epoch if the training improves (`Trend`); in other epochs they are drawn by scores alone.
    The paper repeats each such draw `repeats` times. Here the chance of the sample is so many times as high, which has
    the same expectation and keeps `weights` right. An epoch with repeats has fewer different samples; `coverage` is the
    share of the draws that are uniform in any case.

    Use this sampler with `policy=shade`, whose scores are ranks of losses. The hook passes the losses and accuracies by
    which the sampler decides; in a loop without a hook, call `observe`. Rank 0 decides for all ranks.
    """

    def __init__(self, samples: int, *, repeats: float = 3.0, coverage: float = 0.1, **options: Any) -> None:
        """`options` are those of SpiderSampler."""
        super().__init__(samples, coverage=coverage, **options)
        if repeats < 1:
            raise ValueError(f"repeats={repeats}: give 1 or more")
        self._repeats = repeats
        self.trend = Trend()
        # The sum of this epoch's losses, each multiplied by its weight, and the sum of the weights.
        self._loss, self._weight = 0.0, 0.0

    @property
    def repeats(self) -> float:
        """How many times as often samples that are cached and hard are drawn in the epoch that is drawn next."""
        return self._repeats if self.trend.improves else 1.0

    def observe(self, loss: float | None = None, accuracy: float | None = None) -> None:
        """Note how an epoch ended: the mean loss of the training set, and the accuracy as a share."""
        self.trend.observe(loss, accuracy)

    def trained(self, indices: npt.NDArray[np.uint32], losses: npt.NDArray[np.floating]) -> None:
        # Hard samples are drawn more often, and in some epochs much more: there the loss would seem to rise without
        # weights.
        weights = self.weights(indices).numpy()
        self._loss += float(weights @ losses.astype(np.float32))
        self._weight += float(weights.sum())

    def epoch_end(self, accuracy: float | None) -> None:
        self.observe(self._loss / self._weight if self._weight else None, accuracy)
        self._loss = self._weight = 0.0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"losses": [*self.trend.losses], "accuracies": [*self.trend.accuracies]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.trend.losses, self.trend.accuracies = [*state["losses"]], [*state["accuracies"]]

    def _asked(self, timeout_s: float) -> Scores | None:
        scores = super()._asked(timeout_s)
        if scores is None or self.repeats == 1:
            return scores
        assert self._client is not None
        cached = self._client.cached(self._list, timeout_s)
        return scores if cached is None else repeated(scores, cached, self.repeats)


def repeated(scores: Scores, cached: npt.NDArray[np.bool_], repeats: float) -> Scores:
    """Scores by which cached samples above the mean are drawn `repeats` times as often, and all others less often."""
    shares = scores.astype(np.float64) / scores.sum(dtype=np.float64)
    hot = cached & (shares > 1 / len(shares))
    mass = float(shares[hot].sum())
    wanted = min(repeats * mass, REPEATED_MAX)
    if not 0 < mass < wanted:
        return scores
    shares[hot] *= wanted / mass
    shares[~hot] *= (1 - wanted) / (1 - mass)
    made: Scores = (shares * len(shares)).astype(np.float32)
    return made
