"""What was really served for each sample that a trainer read, until its batch comes back.

A batch names the samples that the trainer asked for; their embeddings are those of the bytes that it got. Filed under
the wrong sample, a substitute's embedding would make the two look alike, and substitution confirm itself. Loader
workers read several batches ahead, so the same sample may be on its way more than once: of each (trainer, wanted) the
first served is the first to arrive.

A read that never reaches a batch (an abandoned iterator, a copy of the file, an open that was taken for one of another
name, see `vfs/pending_reads.py`) would shift all later ones of its sample.
So a trainer's entries are forgotten at the start of an epoch, and the oldest when there are too many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

from spiderfs.core.policy import Key

# 16 loader workers, 4 batches of 1,024 ahead each.
MAX_ON_THE_WAY = 1 << 16


class ServedSamples:
    """Trainers are named by anything hashable; each has its own entries, and its own limit of them."""

    def __init__(self, max_on_the_way: int = MAX_ON_THE_WAY) -> None:
        if max_on_the_way < 1:
            raise ValueError("served samples need room for at least one entry")
        self._max = max_on_the_way
        self._trainers: dict[Hashable, _Reads] = {}
        self.forgotten = 0
        """Entries given up because there were too many."""

    def note(self, trainer: Hashable, wanted: Key, served: Key) -> None:
        """Note one read: `served` is the substitute, or `wanted` itself. Each read of a trainer is to be noted once."""
        reads = self._trainers.setdefault(trainer, _Reads())
        reads.add(wanted, served)
        if len(reads) > self._max:
            reads.drop_oldest()
            self.forgotten += 1

    def arrived(self, trainer: Hashable, wanted: Iterable[Key]) -> list[Key]:
        """What was served for the samples of a batch, in their order; one that was never noted was served itself."""
        reads = self._trainers.get(trainer)
        return list(wanted) if reads is None else [reads.take(key) for key in wanted]

    def forget(self, trainer: Hashable) -> None:
        """Let go of a trainer's reads: it began an epoch, or left."""
        self._trainers.pop(trainer, None)

    def on_the_way(self, trainer: Hashable) -> int:
        """Reads of a trainer that have not come back in a batch."""
        reads = self._trainers.get(trainer)
        return 0 if reads is None else len(reads)


class _Reads:
    """The reads of one trainer: by sample for those that arrive, by age for those that never do."""

    def __init__(self) -> None:
        self._of: dict[Key, deque[tuple[int, Key]]] = {}
        # (number of the read, wanted), the oldest first; those that have arrived stay until they are at the front, or
        # outnumber the others.
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
        # `take` and this one leave a waiting read at the front.
        self.take(self._ages[0][1])

    def _is_waiting(self, number: int, wanted: Key) -> bool:
        # Reads of one sample leave first in first out: what is numbered from its first on is still there.
        waiting = self._of.get(wanted)
        return waiting is not None and number >= waiting[0][0]
