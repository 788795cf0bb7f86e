"""The interface of a scoring, which turns the batches of a list into one score per sample.

The policy chooses the scoring: `Policy.scoring` is a name in the table of `scorer/__init__.py`. The code that passes
batches on names neither policies nor scorings. A scoring belongs to one list, and one thread at a time may use it. A
sample is named by its index in the list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spiderfs.scorer.index import Ids, Vectors

Scores = NDArray[np.float32]

# The score of every sample before any sample has been scored.
FIRST_PRIOR = 1.0


@dataclass(frozen=True, slots=True)
class ScorerOptions:
    """The settings of all scorings; each scoring uses those that concern it."""

    neighbours: int = 500
    """How many neighbours of a sample count at most, the nearest ones."""
    radius: float | None = None
    """A fixed radius; None calibrates it."""
    radius_quantile: float = 0.5
    """The quantile of distances by which the radius is calibrated."""
    index: Literal["auto", "exact", "cells", "graph"] = "auto"
    """Which index to use; "auto" uses the exact one for short lists, and cells for longer ones."""
    threads: int = 1
    """The number of threads of the graph index."""

    def __post_init__(self) -> None:
        if self.neighbours < 1 or self.threads < 1:
            raise ValueError("a scorer needs neighbours and threads of at least 1")


class Hub(NamedTuple):
    """A hub: a sample, with its neighbours of the same label, nearest first, and their distances."""

    id: int
    neighbours: Ids
    distances: Vectors


@dataclass(frozen=True, slots=True)
class BatchScores:
    """The samples of one batch that were scored, each once, and their scores."""

    ids: Ids
    scores: Scores

    def hubs(self) -> Iterator[Hub]:
        """The hubs that the batch may have, the best first; none if the scoring finds no hubs."""
        return iter(())

    def hub(self, skip: Callable[[int], bool] = lambda sample: False) -> Hub | None:
        """The best hub of the batch for whose sample `skip` is False; None if there is none."""
        return next((hub for hub in self.hubs() if not skip(hub.id)), None)


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
