"""The messages of one trainer that wait to be acted on, in their order and within bounds.

Batches that come one after another and are alike in shape wait as one run, because the sink takes them together. While
runs take more bytes than they may, half of their rows leave: which ones, each list has said when it was declared. No
batch is refused because scoring is slow, so a trainer never waits for it; every other message waits for room.

A run also has to wait if its rows may not leave yet, since its list is being declared or one of its indices is wrong.
A list that is declared anew may have other samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import trio

from spiderfs.daemon.training.trainer import Oldest
from spiderfs.protocol import Batch, Message

Run = list[Batch]

# What the objects of a batch take beside its numbers.
_BATCH_BYTES = 1000


class Backlog:
    def __init__(
        self, items: int, batch_bytes: int, oldest: Mapping[str, Oldest | None], declaring: Container[str]
    ) -> None:
        """`oldest` has, by its list's name, what chooses rows that stay; lists in `declaring` are being declared."""
        self._limit = items
        self._limit_bytes = batch_bytes
        self._oldest = oldest
        self._declaring = declaring
        self._items: deque[Message | Run] = deque()
        self._held_bytes = 0
        self._closed = False
        self._changed = trio.Event()

    async def put(self, message: Message) -> int:
        """Add a message; waits for room, if it has to. Returns of how many batches that waited no row is left."""
        gone = 0
        if isinstance(message, Batch):
            last = self._items[-1] if self._items else None
            if isinstance(last, list) and _alike(last[0], message):
                last.append(message)
            else:
                await self._room()
                self._items.append([message])
            self._held_bytes += _bytes_of([message])
            self._tell()
            while (before := self._held_bytes) > self._limit_bytes:
                gone += self._thin()
                if self._held_bytes < before:
                    break
                await self._changed.wait()
        else:
            await self._room()
            self._items.append(message)
            self._tell()
        return gone

    async def take(self) -> Message | Run | None:
        """The next message, or all batches of the next run; None when the backlog is empty and closed."""
        while not self._items:
            if self._closed:
                return None
            await self._changed.wait()
        item = self._items.popleft()
        if isinstance(item, list):
            self._held_bytes -= _bytes_of(item)
        self._tell()
        return item

    def close(self) -> None:
        """No message comes any more."""
        self._closed = True
        self._tell()

    async def _room(self) -> None:
        while len(self._items) >= self._limit:
            await self._changed.wait()

    def _thin(self) -> int:
        """Make all runs smaller that can be; returns of how many batches no row is left."""
        gone, self._held_bytes = 0, 0
        for place, item in enumerate(self._items):
            if isinstance(item, list):
                smaller = self._items[place] = self._thinned(item)
                gone += len(item) - len(smaller)
                self._held_bytes += _bytes_of(smaller)
        return gone

    def _thinned(self, run: Run) -> Run:
        """These batches without half of their rows, and without the batches that have none then."""
        name, indices = run[0].list, np.concatenate([batch.indices for batch in run])
        oldest = None if name in self._declaring else self._oldest.get(name)
        # The larger half: a run of one row stays, for a run without rows is none.
        chosen = None if oldest is None else oldest(indices, (len(indices) + 1) // 2)
        if chosen is None:
            return run
        kept = np.zeros(len(indices), bool)
        kept[chosen] = True
        ends = np.cumsum([len(batch.indices) for batch in run])
        smaller = [_rows_of(batch, rows) for batch, rows in zip(run, np.split(kept, ends), strict=False)]
        return [batch for batch in smaller if len(batch.indices)]

    def _tell(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()


def _bytes_of(run: Run) -> int:
    arrays = [array for batch in run for array in (batch.indices, batch.embeddings, batch.losses, batch.labels)]
    return len(run) * _BATCH_BYTES + sum(array.nbytes for array in arrays if array is not None)


def _alike(one: Batch, other: Batch) -> bool:
    """Whether two batches can be scored as one."""
    return (one.list, one.embeddings.shape[1], one.losses is None) == (
        other.list,
        other.embeddings.shape[1],
        other.losses is None,
    )


def _rows_of(batch: Batch, rows: npt.NDArray[np.bool_]) -> Batch:
    """Some rows of a batch, as copies: the message that they came in leaves memory."""
    losses = None if batch.losses is None else batch.losses[rows]
    labels = None if batch.labels is None else batch.labels[rows]
    return replace(batch, indices=batch.indices[rows], embeddings=batch.embeddings[rows], losses=losses, labels=labels)
