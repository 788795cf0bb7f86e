"""Scores from the losses of samples: the loss itself, or its rank within the batch.

A loss says how hard a sample was when it was last trained on, on the scale of that moment of the training. Its rank
among the batch says the same on a scale that stays (SHADE, eq. 6), so scores of different batches and epochs compare.
A rank is only as fine as its batch is large: ranks of a smaller one, as the last of an epoch, are stretched to the
largest that was seen, or all its samples would count as easy.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spiderfs.scorer.saved_files import check_whole, saved_arrays, write_whole
from spiderfs.scorer.scoring import BatchScores, ScorerOptions, Scores, Scoring

VERSION = 1
# b0 of SHADE eq. 6, as its authors' program has it: the hardest of a batch of 128 scores 2.1 times the easiest.
RANK_OFFSET = 10
# Scores are positive, and a sample that is learned by heart may still be drawn.
LEAST_LOSS = 1e-3


class LossScores(Scoring):
    """The latest loss of each sample."""

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
        """Embeddings do not matter."""
        return True

    def batch(
        self, indices: ArrayLike, embeddings: NDArray[np.floating], losses: NDArray[np.floating] | None = None
    ) -> BatchScores:
        ids, first = self._different(indices)
        if losses is None:
            self._without_losses += 1
            return BatchScores(ids[:0], np.empty(0, np.float32))
        if losses.shape != np.shape(indices) or not np.isfinite(losses).all():
            raise ValueError("a batch needs one finite loss for each index")
        scores = self._scores_of(losses[first].astype(np.float32))
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
        write_whole(directory / self.FILE, self._save)

    def _save(self, path: Path) -> None:
        with path.open("wb") as file:
            np.savez(
                file,
                identity=self._identity(),
                scores=self.scores,
                scored=self._scored,
                largest_batch=self._largest_batch,
            )

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
        """What has to be the same for a saved state to be of use."""
        return [VERSION, crc32(self.labels.tobytes())]


class RankScores(LossScores):
    """log(number of samples of the batch with a smaller loss + 10) (SHADE eq. 6)."""

    FILE: ClassVar[str] = "ranks.npz"

    def _scores_of(self, losses: Scores) -> Scores:
        easier = np.searchsorted(np.sort(losses), losses, side="left")
        self._largest_batch = max(self._largest_batch, len(losses))
        # A sample by itself is neither hard nor easy: it is put in the middle.
        share = easier / (len(losses) - 1) if len(losses) > 1 else np.full(1, 0.5)
        scores: Scores = np.log(share * (self._largest_batch - 1) + RANK_OFFSET).astype(np.float32)
        return scores
