"""A sampler that draws samples by the daemon's scores, so that important samples come more often."""

from __future__ import annotations

import contextlib
import logging
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer_hook.ranks import from_first_rank, rank_and_world, share_of_rank, shared_store
from trainer_hook.samplers.epoch import EpochSampler, SampledEpoch, Scores

log = logging.getLogger("trainer_hook")


# How long the sampler waits for scores in the middle of an epoch, where the training should not wait for a slow daemon.
_MEANWHILE_S = 0.25
# How long another rank waits for rank 0, which asks the daemon: ranks come to the same batch at about the same time.
_FIRST_RANK_S = 2 * _MEANWHILE_S
_NO_SCORES = np.empty(0, np.float32)


# Of several ranks, rank 0 leaves the scores in the store of torch.distributed when it comes to that batch, and the
# others find them there; none waits for the slowest. When the epoch begins all draw it once more by what rank 0 says
# then, so that they agree whatever each of them found.
class SpiderSampler(EpochSampler):
    """Draws samples with replacement, in proportion to their scores; `attach` connects the sampler to the daemon.

    While there are no scores, an epoch is a random permutation. `coverage` is the share of the draws that are uniform,
    whatever the scores are. Multiply the losses by `hook.weights(clip=4.0)`, too: with both, short trainings lost 1.1
    points of accuracy (docs/results/README.md).

    All ranks make the same draws, by the scores that rank 0 has got, and each rank takes every world_size-th of them.
    The next epoch is drawn when the share `settled` of the batches of the current one has been handed to the loader,
    or with its last batch if it was drawn without scores. The sooner, the better the daemon knows what to keep; the
    later, the newer are the scores (docs/results/README.md has the cost in bytes). If `settled` is 1, or if the mount
    follows no plans, an epoch is drawn when it begins.
    """

    def __init__(
        self,
        samples: int,
        *,
        draws: int | None = None,
        seed: int = 0,
        coverage: float = 0.3,
        settled: float = 0.25,
        scores_timeout_s: float = 5.0,
    ) -> None:
        """`samples` is the length of the data set; `draws` is that of an epoch over all ranks (default: `samples`)."""
        super().__init__(samples, draws=draws, seed=seed)
        if not 0 <= coverage <= 1:
            raise ValueError(f"coverage={coverage}: give a share between 0 and 1")
        if not 0 <= settled <= 1:
            raise ValueError(f"settled={settled}: give a share between 0 and 1")
        self._coverage = coverage
        self._settled = settled
        self._scores_timeout_s = scores_timeout_s
        # Rank 0's, if there are others: the number of the epoch that it has drawn ahead, and the scores of that moment.
        self._scores_ahead: tuple[int, Scores | None] | None = None

    @property
    def _scores(self) -> Scores | None:
        """Those by which the current epoch was drawn."""
        return None if self.current is None else self.current.scores

    @property
    def settled(self) -> float:
        """The share of an epoch after which the next one is drawn."""
        return 1.0 if self._scores is None else self._settled

    def draw_ahead(self) -> list[int] | None:
        """Draw the next epoch now; None if it is to be drawn when it begins, or if the scores do not come at once."""
        if self._settled == 1:
            return None
        rank, world_size = rank_and_world()
        follows = self._client is None or self._client.follows_plans
        if world_size > 1 and rank:
            return self._drawn_ahead_by_first() if follows else None
        timeout_s = min(self._scores_timeout_s, _MEANWHILE_S)
        scores = None if self._client is None else self._daemon_scores(timeout_s)
        if not follows or (scores is None and self._scores is not None):
            return None
        ahead = self._draw_by(scores, self.epoch + 1)
        if world_size == 1:
            self._ahead = ahead
        else:
            self._scores_ahead = ahead.number, scores
            # If that fails, the others draw the epoch when it begins.
            with contextlib.suppress(RuntimeError):
                shared_store().set(self._key_of(ahead.number), (_NO_SCORES if scores is None else scores).tobytes())
        share: list[int] = share_of_rank(ahead.order).tolist()
        return share

    def _drawn_ahead_by_first(self) -> list[int] | None:
        """This rank's share of the epoch that rank 0 draws ahead; None if rank 0 does not say what by."""
        store, key = shared_store(), self._key_of(self.epoch + 1)
        try:
            store.wait([key], timedelta(seconds=_FIRST_RANK_S))
            scores = np.frombuffer(store.get(key), np.float32)
        except RuntimeError:
            return None
        share: list[int] = share_of_rank(self._draw_by(scores if len(scores) else None, self.epoch + 1).order).tolist()
        return share

    def _key_of(self, number: int) -> str:
        """Where rank 0 leaves the scores by which it draws this epoch ahead, until the epoch begins."""
        return f"spiderfs scores {self._list} {number}"

    def weights(self, indices: npt.ArrayLike, clip: float | None = None) -> Tensor:
        probabilities = self.probabilities()[np.asarray(indices, dtype=np.int64)]
        weights = torch.from_numpy((1 / (self.samples * probabilities)).astype(np.float32))
        return weights if clip is None else weights.clamp(max=clip)

    def probabilities(self) -> npt.NDArray[np.float64]:
        now = self.current
        if now is None or now.scores is None:
            return super().probabilities()
        if now.probabilities is None:
            now.probabilities = self._chances(now.scores)
        return now.probabilities

    def state_dict(self) -> dict[str, Any]:
        scores = self._scores
        return super().state_dict() | {"scores": None if scores is None else torch.from_numpy(scores.copy())}

    def _restore(self, state: dict[str, Any]) -> None:
        scores = None if state["scores"] is None else np.asarray(state["scores"]).astype(np.float32)
        if scores is not None and scores.shape != (self.samples,):
            raise ValueError(f"the state is of another list: it has {len(scores)} scores for {self.samples} samples")
        super()._restore(state)
        self._scores_ahead = None
        if self.current is not None:
            self.current.scores = scores

    # -- drawing

    def _draw(self, number: int) -> SampledEpoch:
        ahead, self._scores_ahead = self._scores_ahead, None
        if ahead is not None:
            # Before this rank goes on with the others: what they find later is of a later epoch.
            with contextlib.suppress(RuntimeError):
                shared_store().delete_key(self._key_of(ahead[0]))
        is_ahead = from_first_rank(ahead is not None and ahead[0] == number)
        if not is_ahead:
            return self._draw_by(self._shared_scores(self._scores_timeout_s), number)
        scores: Scores | None = from_first_rank(None if ahead is None else ahead[1])
        return self._draw_by(scores, number)

    def _draw_by(self, scores: Scores | None, number: int) -> SampledEpoch:
        rng = np.random.default_rng([self._seed, number])
        if scores is None:
            rounds = -(-self._draws // self.samples)
            order = np.concatenate([rng.permutation(self.samples) for _ in range(rounds)])[: self._draws]
        else:
            order = self._pick(scores, rng)
        return SampledEpoch(number, order.astype(np.uint32), scores)

    def _pick(self, scores: Scores, rng: np.random.Generator) -> npt.NDArray[np.signedinteger[Any]]:
        edges = np.cumsum(self._chances(scores))
        drawn = np.searchsorted(edges, rng.random(self._draws) * edges[-1], side="right")
        picked: npt.NDArray[np.signedinteger[Any]] = np.minimum(drawn, self.samples - 1)
        return picked

    def _shared_scores(self, timeout_s: float) -> Scores | None:
        """The scores by which all ranks draw, which rank 0 asks for; None: without scores. All ranks must call this."""
        asks = self._client is not None and rank_and_world()[0] == 0
        shared: Scores | None = from_first_rank(self._daemon_scores(timeout_s) if asks else None)
        return shared

    def _daemon_scores(self, timeout_s: float) -> Scores | None:
        """The daemon's scores, to which the chances of the samples are in proportion; None if they are of no use."""
        assert self._client is not None
        scores = self._client.scores(self._list, timeout_s)
        if scores is not None and (len(scores) != self.samples or not scores.sum() > 0):
            log.warning("%d scores for %d samples: drawing without them", len(scores), self.samples)
            return None
        return scores

    def _chances(self, scores: Scores) -> npt.NDArray[np.float64]:
        """The chance of each sample at each draw."""
        shares = scores.astype(np.float64)
        chances: npt.NDArray[np.float64] = (1 - self._coverage) * shares / shares.sum() + self._coverage / self.samples
        return chances
