"""Which sample's bytes a trainer got for each sample that it asked for, until the batch with that sample arrives.

A batch names the samples that the trainer asked for, but its embeddings are those of the bytes that the trainer got. If
the embedding of a substitute were filed under the sample that was asked for, the two would look alike, and the redirect
would seem right. Loader workers read several batches ahead, so several reads of one sample may wait for their batches.
For each trainer and sample the reads arrive in the order in which they were served.

Some reads never reach a batch: the loop abandoned its iterator, a program copied the file, or an open was counted for
another name (`vfs/redirects.py`). Such a read would shift all later reads of its sample. So all reads of a
trainer are forgotten at the start of an epoch, and its oldest read is forgotten when too many wait.
"""

from __future__ import annotations

from collections import OrderedDict, deque
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
        """Note one read: `served` is the substitute, or `wanted` itself. The caller notes each read of a trainer
        once."""
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
