"""What turns batches into one score a sample: the common part of all of them.

Which one is used is the policy's word (`Policy.scoring`, a name in the table of `scorer/__init__.py`); whoever feeds
batches knows neither policies nor scorings by name. A scoring belongs to one list of samples and to one thread at a
time. It knows samples by their place in that list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spiderfs.scorer.index import Ids, Vectors

Scores = NDArray[np.float32]

# What a sample is worth before any has been scored.
FIRST_PRIOR = 1.0


@dataclass(frozen=True, slots=True)
class ScorerOptions:
    """What users may set, and what tests and measurements may; each scoring takes what concerns it."""

    neighbours: int = 100
    """k: the nearest samples among which neighbours are counted."""
    radius: float | None = None
    """A fixed radius; None calibrates it."""
    radius_quantile: float = 0.5
    index: Literal["auto", "exact", "graph"] = "auto"
    threads: int = 1

    def __post_init__(self) -> None:
        if self.neighbours < 1 or self.threads < 1:
            raise ValueError("a scorer needs at least one neighbour and one thread")


class Hub(NamedTuple):
    """A sample and those that it can stand in for: of its label, within the radius, nearest first."""

    id: int
    neighbours: Ids
    distances: Vectors


@dataclass(frozen=True, slots=True)
class BatchScores:
    """The different samples of one batch that were scored; the arrays run in parallel."""

    ids: Ids
    scores: Scores

    def hub(self) -> Hub | None:
        """A sample of the batch that can stand in for others, where the scoring knows of one."""
        return None


class Scoring(ABC):
    def __init__(self, labels: ArrayLike, dimension: int, options: ScorerOptions | None = None) -> None:
        """`labels` has one integer per sample, in the order of the list; `dimension` is that of the embeddings."""
        self.options = options or ScorerOptions()
        self.labels = np.asarray(labels, np.int64)
        count = len(self.labels)
        if self.labels.shape != (count,) or count == 0 or dimension < 1:
            raise ValueError("a scorer needs one label per sample, and embeddings of at least one number")
        self.dimension = dimension
        self.scores: Scores = np.full(count, FIRST_PRIOR, np.float32)
        """The score of every sample; one never scored has the mean of the others at the start of the epoch."""
        self._scored = np.zeros(count, bool)

    @classmethod
    @abstractmethod
    def saved(cls, labels: ArrayLike, options: ScorerOptions, directory: Path) -> Self | None:
        """What `save` wrote for these labels, whatever the dimension was; None if nothing usable is there."""

    @abstractmethod
    def fits(self, dimension: int) -> bool:
        """Whether it can go on with embeddings of this dimension."""

    @abstractmethod
    def batch(
        self, indices: ArrayLike, embeddings: NDArray[np.floating], losses: NDArray[np.floating] | None = None
    ) -> BatchScores:
        """Score the samples of a batch by what the model made of them, one row for each index.

        The indices are those of the bytes that were really served; a repeated one counts once. A scoring that needs
        losses scores nothing where there are none. Raises ValueError for what cannot be a batch.
        """

    @abstractmethod
    def described(self) -> list[tuple[str, str]]:
        """What people may want to know of it: names and values, in order."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write everything to an existing directory, each file whole or not at all; blocks on the disk."""

    @abstractmethod
    def restore(self, directory: Path) -> bool:
        """Take over what `save` wrote for the same labels, dimension and options; whether there was such."""

    def new_epoch(self) -> None:
        """Give what was never scored the mean of the others."""
        self.scores = self.to_draw_by()

    def to_draw_by(self) -> Scores:
        """A copy of the scores as they are now, in which what was never scored has the mean of the others."""
        if not self._scored.any():
            return self.scores.copy()
        return np.where(self._scored, self.scores, self.scores[self._scored].mean())

    @property
    def sigma(self) -> float:
        """Standard deviation of the scores given so far: what SpiderCache eq. 5 watches."""
        return float(self.scores[self._scored].std()) if self._scored.any() else 0.0

    @property
    def scored_share(self) -> float:
        """Share of all samples that have been scored."""
        return int(self._scored.sum()) / len(self._scored)

    def _take(self, ids: Ids, scores: Scores) -> None:
        self.scores[ids] = scores
        self._scored[ids] = True

    def _different(self, indices: ArrayLike) -> tuple[Ids, Ids]:
        """The different samples of a batch, and the first row of each."""
        given = np.asarray(indices, np.int64)
        if given.ndim != 1 or len(given) == 0 or given.min() < 0 or given.max() >= len(self.labels):
            raise ValueError(f"a batch needs indices from 0 to {len(self.labels) - 1}")
        return np.unique(given, return_index=True)
