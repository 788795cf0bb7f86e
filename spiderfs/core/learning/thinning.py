"""The choice of rows to score when there is no time for all: those of the samples with the oldest scores.

A training may be faster than its scoring. Then batches wait, and of all rows that wait some are left out, row by row. A
sample whose score is old comes before one that was scored lately. So a sample that is offered once in every epoch is
scored every n-th epoch, or one epoch later, where there is time for one of n rows.

The clock is the number of rows that were offered. So ages need no announced epochs: in a list of N samples, a score is
one epoch old when N rows have been offered since.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_NEVER = -1


@dataclass(frozen=True, slots=True)
class ScoreAges:
    """How old the scores of a list are, in epochs; 0 while nothing was scored."""

    median: float
    oldest: float


class Thinning:
    """When each of the samples of a list was last scored, and how many rows were left out."""

    def __init__(self, samples: int) -> None:
        self.rows_scored = 0
        self.rows_left_out = 0
        # The number of rows that had been offered when the sample was last scored.
        self._scored_at = np.full(samples, _NEVER, np.int64)

    @property
    def left_out_share(self) -> float:
        """The share of all rows that were offered and not scored."""
        return self.rows_left_out / max(1, self.rows_left_out + self.rows_scored)

    def oldest(self, indices: Indices, limit: int) -> Indices:
        """The rows, `limit` at most and in order, of the samples `indices` whose scores are the oldest.

        If there are more rows than `limit`, only the last row of each sample is one of them: it has the newest
        embedding.
        """
        rows = np.arange(len(indices))
        if len(rows) <= limit:
            return rows
        rows = np.sort(len(rows) - 1 - np.unique(indices[::-1], return_index=True)[1])
        order = np.argsort(self._scored_at[indices[rows]], kind="stable")
        return np.sort(rows[order[:limit]])

    def take(self, indices: Indices, limit: int) -> Indices:
        """The rows to score of a batch of these samples, which count as scored from now on; the others are left out."""
        rows = self.oldest(indices, limit)
        self.rows_scored += len(rows)
        self.rows_left_out += len(indices) - len(rows)
        self._scored_at[indices[rows]] = self.rows_scored + self.rows_left_out
        return rows

    def leave_out(self, rows: int) -> None:
        """Count rows that were offered, and dropped before anybody could score them."""
        self.rows_left_out += rows

    def ages(self) -> ScoreAges:
        scored = self._scored_at[self._scored_at != _NEVER]
        if not len(scored):
            return ScoreAges(0.0, 0.0)
        ages = (self.rows_scored + self.rows_left_out - scored) / len(self._scored_at)
        return ScoreAges(float(np.median(ages)), float(ages.max()))
