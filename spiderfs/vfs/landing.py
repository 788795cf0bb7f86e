"""Putting fetched bytes into the store, after the reply and several records at a time.

A transaction of the store costs as much as a record of 100 kB in it, and all processes that write wait for each other.
So records that are fetched while one transaction runs are collected, and the next transaction takes them all. Their
readers have the bytes long before. The records that wait are limited in bytes; a fetch that brings more waits for room,
and is still in flight meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import trio

from spiderfs.core.memory import MemoryBounds
from spiderfs.errors import StoreCorrupt, StoreError
from spiderfs.linux.worker_threads import WorkerThreads
from spiderfs.sources.in_flight import InFlight
from spiderfs.store.store import Content, ContentKey

# Bytes that a payload in a dictionary takes beside its own: for its object, its key, its entry. Measured: 255.
ENTRY_BYTES = 256
# The most that goes into one transaction, for which other processes wait: 8 MiB take some 10 ms.
BATCH_BYTES = 8 << 20
# How long records are collected: at 1,500 files a second that makes three records a transaction. With 8 ms, twelve, a
# first epoch 5 ms away took a quarter more time, as what is fetched is known to have landed so much later.
GATHER_S = 0.002

Outcome = bool | StoreError | StoreCorrupt
"""Whether the record is in landing (False: it cannot fit), or why the store failed."""


class _Waiting(NamedTuple):
    key: ContentKey
    payload: bytes
    on_landed: Callable[[Outcome], None]


class Landing:
    """One process's way into landing, within one trio run; call `drain` before that run ends."""

    def __init__(
        self,
        content: Content,
        gather_s: float,
        most_bytes: int = MemoryBounds().landing,
        in_flight: InFlight | None = None,
    ) -> None:
        self._content = content
        self._most_bytes, self._in_flight = most_bytes, in_flight or InFlight()
        self._thread = WorkerThreads(1)
        self._gather_s = gather_s
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._running = False
        self._freed = trio.Event()

    async def put(self, key: ContentKey, payload: bytes, on_landed: Callable[[Outcome], None]) -> None:
        """Have a record landed; waits only for room. `on_landed` is called with the outcome, on the loop's thread."""
        if self._bytes > self._most_bytes:
            self._in_flight.add(len(payload))
            try:
                while self._bytes > self._most_bytes:
                    await self._freed.wait()
            finally:
                self._in_flight.remove(len(payload))
        self._waiting.append(_Waiting(key, payload, on_landed))
        self._bytes += len(payload) + ENTRY_BYTES
        if not self._running:
            self._running = True
            # Not in the reader's nursery, which ends with the request: the record is to land whatever becomes of that.
            trio.lowlevel.spawn_system_task(self._run)

    async def drain(self) -> None:
        """Return when nothing waits any more."""
        while self._running:
            await self._freed.wait()

    async def _run(self) -> None:
        while self._waiting:
            if self._bytes < BATCH_BYTES:
                await trio.sleep(self._gather_s)
            batch: list[_Waiting] = []
            size = 0
            while self._waiting and (not batch or size + len(self._waiting[0].payload) <= BATCH_BYTES):
                batch.append(self._waiting.popleft())
                size += len(batch[-1].payload) + ENTRY_BYTES
            try:
                outcomes = await self._thread.run(self._land, batch)
            except StoreCorrupt as exc:
                # This task belongs to no one, so it has to report to those whose processes are to end.
                outcomes = [exc] * len(batch)
            self._bytes -= size
            self._running = bool(self._waiting)
            self._freed.set()
            self._freed = trio.Event()
            for waiting, outcome in zip(batch, outcomes, strict=True):
                waiting.on_landed(outcome)

    def _land(self, batch: list[_Waiting]) -> list[Outcome]:
        try:
            return list(self._content.land_all([(waiting.key, waiting.payload) for waiting in batch]))
        except StoreError as exc:
            if len(batch) == 1:
                return [exc]
        # One record that no longer fits on the disk must not keep the others out.
        return [outcome for waiting in batch for outcome in self._land([waiting])]
