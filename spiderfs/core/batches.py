"""Batches on their way to the scorer: which rows are scored, and of which samples' bytes they are.

**Thinning.** Where scoring is slower than training, some of the rows that wait are left out, those first whose samples
were scored lately. So where there is time for one of n rows, a sample that is offered in every epoch is scored every
n-th, or one later. The clock is the number of rows that were offered: in a list of N samples, a score is one epoch old
when N rows have been offered since.

**Served samples.** A batch names the samples that the trainer asked for, but its embeddings are those of the bytes that
it got; a substitute's must not be filed under the sample that was asked for. Loader workers read batches ahead, so
several reads of one sample may wait for their batches, in the order in which they were served. Some never reach one:
the loop abandoned its iterator, a program copied the file, or an open was counted for another name
(`vfs/redirects.py`). So that these do not shift later ones, all reads of a trainer are forgotten at the start of an
epoch, and its oldest when too many wait.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spiderfs.core.policy import Key

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


# Reads of one trainer that wait for their batches: 16 loader workers, each 4 batches of 1,024 samples ahead.
MAX_ON_THE_WAY = 1 << 16


class ServedSamples:
    """The reads of all trainers; each trainer has its own reads, and its own limit on them."""

    def __init__(self, max_on_the_way: int = MAX_ON_THE_WAY) -> None:
        self._max = max_on_the_way
        self._trainers: dict[Hashable, _Reads] = {}
        self.forgotten = 0
        """Reads that were forgotten because too many waited."""

    def record_read(self, trainer: Hashable, wanted: Key, served: Key) -> None:
        """Note one read: `served` is the substitute, or `wanted` itself. The caller notes each read of a trainer
        once."""
        reads = self._trainers.setdefault(trainer, _Reads())
        reads.add(wanted, served)
        if len(reads) > self._max:
            reads.drop_oldest()
            self.forgotten += 1

    def arrived(self, trainer: Hashable, wanted: Iterable[Key]) -> list[Key]:
        """What was served for each sample of a batch, in its order; without a noted read, the sample itself."""
        reads = self._trainers.get(trainer)
        return list(wanted) if reads is None else [reads.take(key) for key in wanted]

    def forget(self, trainer: Hashable) -> None:
        """Forget a trainer's reads: the trainer began an epoch, or disconnected."""
        self._trainers.pop(trainer, None)


class _Reads:
    """The waiting reads of one trainer."""

    def __init__(self) -> None:
        self._number = 0
        # The wanted and the served sample of each read by its number, the oldest first.
        self._reads: OrderedDict[int, tuple[Key, Key]] = OrderedDict()
        # The numbers of each wanted sample's reads, the oldest first.
        self._of: dict[Key, deque[int]] = {}

    def __len__(self) -> int:
        return len(self._reads)

    def add(self, wanted: Key, served: Key) -> None:
        self._number += 1
        self._reads[self._number] = wanted, served
        self._of.setdefault(wanted, deque()).append(self._number)

    def take(self, wanted: Key) -> Key:
        waiting = self._of.get(wanted)
        if waiting is None:
            return wanted
        served = self._reads.pop(waiting.popleft())[1]
        if not waiting:
            del self._of[wanted]
        return served

    def drop_oldest(self) -> None:
        wanted, _ = next(iter(self._reads.values()))
        self.take(wanted)
