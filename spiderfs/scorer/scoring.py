"""The interface of a scoring, which turns the batches of a list into one score per sample, and the scorings by losses.

The policy chooses the scoring: `Policy.scoring` is a name in the table of `scorer/__init__.py`. The code that passes
batches on names neither policies nor scorings. A scoring belongs to one list, and one thread at a time may use it. A
sample is named by its index in the list.

"loss" scores a sample by its latest loss, "rank" by the rank of that loss within its batch. The scale of losses changes
during the training; that of ranks stays (SHADE, eq. 6), so ranks of different batches and epochs can be compared. The
highest rank depends on the size of the batch. So the ranks of a small batch, such as the last one of an epoch, are
stretched to the largest batch that was seen; otherwise all its samples would count as easy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spiderfs.scorer.index import Ids, Vectors, check_whole, save_arrays, saved_arrays, write_whole

Scores = NDArray[np.float32]

Calibration = Literal["class", "nearest"]

# The score of every sample before any sample has been scored.
FIRST_PRIOR = 1.0


@dataclass(frozen=True, slots=True)
class ScorerOptions:
    """The settings of all scorings; each scoring uses those that concern it."""

    neighbours: int = 500
    """How many neighbours of a sample count at most, the nearest ones."""
    radius: float | Calibration = "nearest"
    """The radius, or how it is calibrated."""
    radius_share: float = 0.01
    """For "class": the share of the pairs of samples of one class that are neighbours."""
    radius_quantile: float = 0.5
    """For "nearest": the quantile of the distances to the nearest samples of the same label."""
    embeddings: Literal["unit", "raw"] = "unit"
    """Whether embeddings are scaled to length 1, or compared as the trainer sends them."""
    index: Literal["auto", "exact", "cells", "hnsw"] = "auto"
    """Which index to use; "auto" uses the exact one for short lists, and cells for longer ones."""

    def __post_init__(self) -> None:
        if self.neighbours < 1:
            raise ValueError("a scorer needs neighbours of at least 1")
        if self.embeddings == "unit" and not isinstance(self.radius, str) and self.radius > 2:
            raise ValueError(f"no radius of unit embeddings, which are 2 apart at most: {self.radius:g}")
        if self.embeddings == "raw" and self.index == "cells":
            raise ValueError("cells hold unit embeddings: choose another index for raw ones")


class FoundHub(NamedTuple):
    """A hub: a sample, with its neighbours of the same label, nearest first, and their distances."""

    id: int
    neighbours: Ids
    distances: Vectors


@dataclass(frozen=True, slots=True)
class BatchScores:
    """The samples of one batch that were scored, each once, and their scores."""

    ids: Ids
    scores: Scores

    def hubs(self) -> Iterator[FoundHub]:
        """The hubs that the batch may have, the best first; none if the scoring finds no hubs."""
        return iter(())


class Scoring(ABC):
    """The scores of one list."""

    ranks_within_batches: ClassVar[bool] = False
    """Whether a score depends on the other samples of its batch; then each batch has to be scored by itself."""

    def __init__(self, labels: ArrayLike, dimension: int, options: ScorerOptions | None = None) -> None:
        """`labels` has one integer per sample, in the order of the list; `dimension` is the width of an embedding.

        Raises ValueError for an empty list, or a dimension below 1.
        """
        self.options = options or ScorerOptions()
        self.labels = np.asarray(labels, np.int64)
        count = len(self.labels)
        if self.labels.shape != (count,) or count == 0 or dimension < 1:
            raise ValueError("a scorer needs one label per sample, at least one sample, and a dimension of at least 1")
        self.dimension = dimension
        self.scores: Scores = np.full(count, FIRST_PRIOR, np.float32)
        """The score of every sample. A sample that was never scored has the others' mean of when the epoch began."""
        self._scored = np.zeros(count, bool)

    @classmethod
    @abstractmethod
    def saved(cls, labels: ArrayLike, options: ScorerOptions, directory: Path) -> Self | None:
        """The scoring that `save` wrote for these labels, of whatever dimension; None if there is no usable one."""

    def fits(self, dimension: int) -> bool:
        """Whether this scoring can take embeddings of this dimension."""
        return dimension == self.dimension

    @abstractmethod
    def batch(
        self,
        indices: ArrayLike,
        embeddings: NDArray[np.floating],
        losses: NDArray[np.floating] | None = None,
        batches: int = 1,
    ) -> BatchScores:
        """Score the samples of a batch, or of so many `batches` together.

        `indices` (n) names the samples whose bytes were really served; a sample that comes twice counts once.
        `embeddings` (n, dimension) and `losses` (n) have one row for each index. A scoring that needs losses scores
        nothing if there are none. Raises ValueError for arrays that cannot be a batch.
        """

    def adopt(self, scored: BatchScores) -> None:
        """Take over scores that a scoring of the same list has made on another node."""
        self._take(scored.ids, scored.scores)

    @abstractmethod
    def described(self) -> list[tuple[str, str]]:
        """Names and values that describe the state of the scoring to people, in order."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the scoring to an existing directory, each file whole or not at all; blocks on the disk."""

    @abstractmethod
    def restore(self, directory: Path) -> bool:
        """Take over what `save` wrote for the same labels, dimension and options; returns False if there is nothing."""

    def new_epoch(self) -> None:
        """Give samples that were never scored the mean of the others."""
        self.scores = self.to_draw_by()

    def to_draw_by(self) -> Scores:
        """A copy of the current scores, in which samples that were never scored have the mean of the others."""
        if not self._scored.any():
            return self.scores.copy()
        return np.where(self._scored, self.scores, self.scores[self._scored].mean())

    @property
    def sigma(self) -> float:
        """The standard deviation of the scores of samples that have been scored (sigma of SpiderCache eq. 5)."""
        return float(self.scores[self._scored].std()) if self._scored.any() else 0.0

    @property
    def scored_share(self) -> float:
        """The share of the samples that have been scored."""
        return int(self._scored.sum()) / len(self._scored)

    def _take(self, ids: Ids, scores: Scores) -> None:
        self.scores[ids] = scores
        self._scored[ids] = True

    def _different(self, indices: ArrayLike) -> tuple[Ids, Ids]:
        """The samples of a batch, each once, and the first row of each; raises ValueError for an impossible index."""
        given = np.asarray(indices, np.int64)
        if given.ndim != 1 or len(given) == 0 or given.min() < 0 or given.max() >= len(self.labels):
            raise ValueError(f"a batch needs indices from 0 to {len(self.labels) - 1}")
        return np.unique(given, return_index=True)


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
