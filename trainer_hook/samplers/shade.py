"""A sampler that repeats cached and hard samples, and draws what is cached first (PADS of SHADE, section 4.2.1)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer_hook.ranks import from_all_ranks, from_first_rank, rank_and_world
from trainer_hook.samplers.epoch import SampledEpoch, Scores
from trainer_hook.samplers.spider import SpiderSampler

# If the loss falls by more than this share in one epoch, it falls steeply: then the hard samples change too fast to be
# repeated.
STEEP_SHARE = 0.2
# The accuracy stagnates if in the last three epochs it has not risen by 0.001 above its best before them.
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
        if loss is not None:
            self.losses.append(loss)
        if accuracy is not None:
            self.accuracies.append(accuracy)

    @property
    def improves(self) -> bool:
        """Whether the loss falls or the accuracy rises; False if the loss falls steeply, or the accuracy stagnates."""
        fallen_to = self.losses[-1] / self.losses[-2] if len(self.losses) > 1 and self.losses[-2] > 0 else 1.0
        best_before = max(self.accuracies[:-STAGNANT_EPOCHS], default=-np.inf)
        if fallen_to < 1 - STEEP_SHARE or max(self.accuracies, default=0.0) < best_before + STAGNANT_RISE:
            return False
        return fallen_to < 1 or (len(self.accuracies) > 1 and self.accuracies[-1] > self.accuracies[-2])


class Ended(NamedTuple):
    """What one rank knows of an epoch: the sum of its losses by their weights, and the sum of these weights.

    If `over` is false, the loop of this rank has not said that the epoch is over.
    """

    over: bool
    loss: float
    weight: float
    accuracy: float | None


class ShadeSampler(SpiderSampler):
    """Draws as SpiderSampler does, but draws samples that are cached and score above the mean `repeats` times as often.

    The paper repeats each such draw `repeats` times. Here the sample's chance is `repeats` times as high, which has the
    same expectation and keeps `weights` right. An epoch with repeats has fewer different samples; `coverage` is the
    share of the draws that are uniform in any case. The paper has no such floor: `coverage=0` is its way.

    As in the released program, samples are repeated in every epoch, and with `cached_first` all draws of samples that
    are cached when the epoch is drawn come before all others. With `while_improving` samples are repeated only in
    epochs before which the training improves (`Trend`), which is closer to the paper's text; in other epochs they are
    drawn by scores alone.

    Use this sampler with `policy=shade`, whose scores are ranks of losses. The hook passes the losses and accuracies by
    which `while_improving` decides; in a loop without a hook, call `observe`. When an epoch begins, the sampler decides
    whether to repeat, by the mean loss over all ranks, and draws the epoch. With a smaller `settled` it does both
    earlier, as SpiderSampler explains, so that the plan is known before; then it decides without the epoch that still
    runs.
    """

    def __init__(
        self,
        samples: int,
        *,
        repeats: float = 3.0,
        cached_first: bool = True,
        while_improving: bool = False,
        coverage: float = 0.1,
        settled: float = 1.0,
        **options: Any,
    ) -> None:
        """`options` are those of SpiderSampler."""
        super().__init__(samples, coverage=coverage, settled=settled, **options)
        if repeats < 1:
            raise ValueError(f"repeats={repeats}: give 1 or more")
        self._repeats, self._cached_first, self._while_improving = repeats, cached_first, while_improving
        # What was cached when this rank asked for scores last; None if that is not known.
        self._cached: npt.NDArray[np.bool_] | None = None
        self.trend = Trend()
        # The sum of this epoch's losses, each multiplied by its weight, and the sum of the weights.
        self._loss, self._weight = 0.0, 0.0
        # The last epoch end that the trend does not know yet, because ranks have not shared it.
        self._ended: Ended | None = None

    @property
    def repeats(self) -> float:
        """How many times as often samples that are cached and hard are drawn in the epoch that is drawn next."""
        return self._repeats if self.trend.improves or not self._while_improving else 1.0

    def observe(self, loss: float | None = None, accuracy: float | None = None) -> None:
        """Report how an epoch ended: the mean loss of the training set, and the accuracy as a share.

        With several ranks, each reports that of its own samples, and the sampler uses it when the next epoch is drawn.
        """
        self._end(0.0 if loss is None else loss, 0.0 if loss is None else 1.0, accuracy)

    def trained(self, indices: npt.NDArray[np.uint32], losses: npt.NDArray[np.floating]) -> None:
        # Hard samples are drawn more often, and in some epochs much more: there the loss would seem to rise without
        # weights.
        weights = self.weights(indices).numpy()
        self._loss += float(weights @ losses.astype(np.float32))
        self._weight += float(weights.sum())

    def epoch_end(self, accuracy: float | None) -> None:
        self._end(self._loss, self._weight, accuracy)
        self._loss = self._weight = 0.0

    def state_dict(self) -> dict[str, Any]:
        ended = None if self._ended is None else [*self._ended]
        trend = {"losses": [*self.trend.losses], "accuracies": [*self.trend.accuracies], "ended": ended}
        return super().state_dict() | trend

    def _restore(self, state: dict[str, Any]) -> None:
        losses, accuracies = [*state["losses"]], [*state["accuracies"]]
        ended = None if state["ended"] is None else Ended(*state["ended"])
        super()._restore(state)
        self.trend.losses, self.trend.accuracies, self._ended = losses, accuracies, ended

    def _end(self, loss: float, weight: float, accuracy: float | None) -> None:
        self._ended = Ended(True, loss, weight, accuracy)
        if rank_and_world()[1] == 1:
            self._share_end()

    def _share_end(self) -> None:
        """Add to the trend how the epoch ended for all ranks together; all ranks must call this.

        A rank whose loop has not said that the epoch is over gives what it has learned since the last one.
        """
        mine = self._ended or Ended(False, self._loss, self._weight, None)
        ends: list[Ended] = from_all_ranks(mine)
        self._ended = None
        if not any(end.over for end in ends):
            return
        if not mine.over:
            self._loss = self._weight = 0.0
        weight = sum(end.weight for end in ends)
        known = [end.accuracy for end in ends if end.accuracy is not None]
        self.trend.observe(sum(end.loss for end in ends) / weight if weight else None, known[0] if known else None)

    def draw_ahead(self) -> list[int] | None:
        # With several ranks it draws by what all of them say when the epoch begins.
        return super().draw_ahead() if rank_and_world()[1] == 1 else None

    def _shared_scores(self, timeout_s: float) -> Scores | None:
        # All ranks call this when an epoch begins, and wait for each other anyway.
        if rank_and_world()[1] > 1:
            self._share_end()
        return super()._shared_scores(timeout_s)

    def _daemon_scores(self, timeout_s: float) -> Scores | None:
        self._cached = None
        scores = super()._daemon_scores(timeout_s)
        if scores is None or (self.repeats == 1 and not self._cached_first):
            return scores
        assert self._client is not None
        self._cached = self._client.cached(self._list, timeout_s)
        return scores if self._cached is None else repeated(scores, self._cached, self.repeats)

    def _draw_by(self, scores: Scores | None, number: int) -> SampledEpoch:
        epoch = super()._draw_by(scores, number)
        # With several ranks nothing is drawn ahead, so that all of them come here.
        cached = from_first_rank(self._cached) if self._cached_first else None
        if scores is not None and cached is not None:
            epoch.order = epoch.order[np.argsort(~cached[epoch.order], kind="stable")]
        return epoch


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
