"""Which sample's bytes a trainer got for each sample that it asked for, until the batch with that sample arrives.

A batch names the samples that the trainer asked for, but its embeddings are those of the bytes that the trainer got. If
the embedding of a stand-in were filed under the sample that was asked for, the two would look alike, and the redirect
would seem right. Loader workers read several batches ahead, so several reads of one sample may wait for their batches.
For each trainer and sample the reads arrive in the order in which they were served.

Some reads never reach a batch: the loop abandoned its iterator, a program copied the file, or an open was counted for
another name (`redirects.PendingReads`). Such a read would shift all later reads of its sample. So all reads of a
trainer are forgotten at the start of an epoch, and its oldest read is forgotten when too many wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

from spiderfs.core.policy import Key

# Reads of one trainer that wait for their batches: 16 loader workers, each 4 batches of 1,024 samples ahead.
MAX_ON_THE_WAY = 1 << 16


class ServedSamples:
    """The reads of all trainers; each trainer has its own reads, and its own limit on them."""

    def __init__(self, max_on_the_way: int = MAX_ON_THE_WAY) -> None:
        if max_on_the_way < 1:
            raise ValueError("max_on_the_way must be at least 1")
        self._max = max_on_the_way
        self._trainers: dict[Hashable, _Reads] = {}
        self.forgotten = 0
        """Reads that were forgotten because too many waited."""

    def record_read(self, trainer: Hashable, wanted: Key, served: Key) -> None:
        """Note one read: `served` is the stand-in, or `wanted` itself. The caller notes each read of a trainer once."""
        reads = self._trainers.setdefault(trainer, _Reads())
        reads.add(wanted, served)
        if len(reads) > self._max:
            reads.drop_oldest()
            self.forgotten += 1

    def arrived(self, trainer: Hashable, wanted: Iterable[Key]) -> list[Key]:
        """The samples that were served for those of a batch, in the same order.

        For a sample without a noted read this is the sample itself.
        """
        reads = self._trainers.get(trainer)
        return list(wanted) if reads is None else [reads.take(key) for key in wanted]

    def forget(self, trainer: Hashable) -> None:
        """Forget a trainer's reads: the trainer began an epoch, or disconnected."""
        self._trainers.pop(trainer, None)

    def on_the_way(self, trainer: Hashable) -> int:
        """The number of a trainer's reads whose batches have not arrived."""
        reads = self._trainers.get(trainer)
        return 0 if reads is None else len(reads)


class _Reads:
    """The waiting reads of one trainer: by sample, to find those that arrive, and by age, to forget the oldest."""

    def __init__(self) -> None:
        # Wanted sample -> (number of the read, served sample) of each waiting read, the oldest first.
        self._of: dict[Key, deque[tuple[int, Key]]] = {}
        # (number of the read, wanted sample), the oldest first. A read that has arrived stays here until it is at the
        # front, or until reads that have arrived outnumber the others.
        self._ages: deque[tuple[int, Key]] = deque()
        self._number = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, wanted: Key, served: Key) -> None:
        self._number += 1
        self._count += 1
        self._of.setdefault(wanted, deque()).append((self._number, served))
        self._ages.append((self._number, wanted))

    def take(self, wanted: Key) -> Key:
        waiting = self._of.get(wanted)
        if waiting is None:
            return wanted
        served = waiting.popleft()[1]
        self._count -= 1
        if not waiting:
            del self._of[wanted]
        while self._ages and not self._is_waiting(*self._ages[0]):
            self._ages.popleft()
        if len(self._ages) > 2 * self._count + 64:
            self._ages = deque(age for age in self._ages if self._is_waiting(*age))
        return served

    def drop_oldest(self) -> None:
        # `take` leaves a waiting read at the front.
        self.take(self._ages[0][1])

    def _is_waiting(self, number: int, wanted: Key) -> bool:
        # The reads of one sample leave in the order in which they came, so a read waits if its number is not below that
        # of the first one that waits.
        waiting = self._of.get(wanted)
        return waiting is not None and number >= waiting[0][0]
