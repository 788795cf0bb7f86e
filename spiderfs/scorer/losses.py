"""The scorings "loss" and "rank": a sample's score is its latest loss, or the rank of that loss within its batch.

A loss says how hard a sample was when the training last used it, but the scale of losses changes during the training.
The rank of the loss within its batch says the same on a scale that stays (SHADE, eq. 6), so ranks of different batches
and epochs can be compared. The highest rank depends on the size of the batch. So the ranks of a small batch, such as
the last one of an epoch, are stretched to the largest batch that was seen; otherwise all its samples would count as
easy.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spiderfs.scorer.saved_files import check_whole, save_arrays, saved_arrays, write_whole
from spiderfs.scorer.scoring import BatchScores, ScorerOptions, Scores, Scoring

VERSION = 1
# b0 of SHADE eq. 6, with the value in its authors' program. With it the hardest sample of a batch of 128 has 2.1 times
# the score of the easiest.
RANK_OFFSET = 10
# Scores must be positive, and a sample of loss 0 may still be drawn: lower losses count as this one.
LEAST_LOSS = 1e-3


class LossScores(Scoring):
    """The scoring "loss": a sample's score is its latest loss."""

    FILE: ClassVar[str] = "losses.npz"

    def __init__(self, labels: ArrayLike, dimension: int = 1, options: ScorerOptions | None = None) -> None:
        super().__init__(labels, dimension, options)
        self._largest_batch = 0
        self._without_losses = 0

    @classmethod
    def saved(cls, labels: ArrayLike, options: ScorerOptions, directory: Path) -> Self | None:
        made = cls(labels, options=options)
        return made if made.restore(directory) else None

    def fits(self, dimension: int) -> bool:
        """True for every dimension: this scoring ignores embeddings."""
        return True

    def batch(
        self,
        indices: ArrayLike,
        embeddings: NDArray[np.floating],
        losses: NDArray[np.floating] | None = None,
        batches: int = 1,
    ) -> BatchScores:
        ids, first = self._different(indices)
        if losses is None:
            self._without_losses += 1
            return BatchScores(ids[:0], np.empty(0, np.float32))
        if losses.shape != np.shape(indices) or not np.isfinite(losses).all():
            raise ValueError("a batch needs one finite loss for each index")
        # The scores are made of all rows, and then one row of each sample counts: a row's rank is its place among all.
        scores = self._scores_of(losses.astype(np.float32))[first]
        self._take(ids, scores)
        return BatchScores(ids, scores)

    def _scores_of(self, losses: Scores) -> Scores:
        return np.maximum(losses, np.float32(LEAST_LOSS))

    def described(self) -> list[tuple[str, str]]:
        return [
            ("mean score", f"{self.scores.mean():.4g}"),
            ("scored share", f"{self.scored_share:.3f}"),
            ("sigma", f"{self.sigma:.4g}"),
            ("without losses", f"{self._without_losses}  (batches that could not be scored)"),
        ]

    # -- over a remount

    def save(self, directory: Path) -> None:
        arrays = {"identity": self._identity(), "scores": self.scores, "scored": self._scored}
        arrays |= {"largest_batch": self._largest_batch}
        write_whole(directory / self.FILE, lambda path: save_arrays(path, arrays))

    def restore(self, directory: Path) -> bool:
        try:
            check_whole(directory / self.FILE)
            state = saved_arrays(directory / self.FILE)
            if state["identity"].tolist() != self._identity():
                return False
            self.scores, self._scored = state["scores"], state["scored"]
            self._largest_batch = int(state["largest_batch"])
        except (OSError, ValueError, KeyError):
            return False
        return True

    def _identity(self) -> list[int]:
        """A saved state can be used only if its identity is equal to this one."""
        return [VERSION, crc32(self.labels.tobytes())]


class RankScores(LossScores):
    """The scoring "rank": log(number of samples of the batch with a smaller loss + 10) (SHADE eq. 6)."""

    FILE: ClassVar[str] = "ranks.npz"
    ranks_within_batches = True

    def _scores_of(self, losses: Scores) -> Scores:
        easier = np.searchsorted(np.sort(losses), losses, side="left")
        self._largest_batch = max(self._largest_batch, len(losses))
        # The only sample of a batch is neither hard nor easy: it gets the middle rank.
        share = easier / (len(losses) - 1) if len(losses) > 1 else np.full(1, 0.5)
        scores: Scores = np.log(share * (self._largest_batch - 1) + RANK_OFFSET).astype(np.float32)
        return scores
