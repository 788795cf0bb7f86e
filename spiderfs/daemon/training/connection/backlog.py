"""The messages of one trainer that wait to be acted on, in their order and within bounds.

Batches that come one after another and are alike in shape wait as one run, because the sink takes them together. While
runs take more bytes than they may, half of their rows leave: which ones, the sink decides. No batch is refused because
scoring is slow, so a trainer never waits for it; every other message waits for room.

A run of which no row may leave yet, since its list is being declared or one of its indices is wrong, has to wait too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from spiderfs.protocol import Batch, Message

Run = list[Batch]

# What the objects of a batch take beside its numbers.
_BATCH_BYTES = 1000


class Backlog:
    def __init__(self, items: int, batch_bytes: int, thinned: Callable[[Run], Run]) -> None:
        """`thinned` returns a run without half of its rows, or all of it if none may leave; at least one row stays."""
        self._limit = items
        self._limit_bytes = batch_bytes
        self._thinned = thinned
        self._items: deque[Message | Run] = deque()
        self._held_bytes = 0
        self._closed = False
        self._changed = trio.Event()

    async def put(self, message: Message) -> None:
        """Add a message; waits for room, if it has to."""
        if isinstance(message, Batch):
            last = self._items[-1] if self._items else None
            if isinstance(last, list) and _alike(last[0], message):
                last.append(message)
            else:
                await self._room()
                self._items.append([message])
            self._held_bytes += _bytes_of([message])
            self._tell()
            while self._held_bytes > self._limit_bytes and not self._thin():
                await self._changed.wait()
        else:
            await self._room()
            self._items.append(message)
            self._tell()

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

    def _thin(self) -> bool:
        """Make all runs smaller; returns whether any of them is."""
        before, self._held_bytes = self._held_bytes, 0
        for place, item in enumerate(self._items):
            if isinstance(item, list):
                smaller = self._items[place] = self._thinned(item)
                self._held_bytes += _bytes_of(smaller)
        return self._held_bytes < before

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
