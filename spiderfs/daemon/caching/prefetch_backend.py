"""What the backends of prefetching have in common: their interface, and the event that wakes the prefetcher."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import trio

from spiderfs.core.events import FROM_THE_SOURCE
from spiderfs.core.plans.fetch_limits import FIRST_FETCHES, FIRST_OF_STORES, Concurrency
from spiderfs.core.plans.schedule import PlannedReader
from spiderfs.options.model import Options
from spiderfs.sources.open import is_url
from spiderfs.vfs.catalogue import Node

# The length of a window in seconds of reading, or in fetches if these take longer. So a reader does not notice a
# source that stops for a moment.
_AHEAD_S = 2.0
_AHEAD_LATENCIES = 8


class Admission(enum.Enum):
    """What is to be done about a sample that a reader will read: prefetch it, leave it, or stop for now."""

    PREFETCH = 1
    LEAVE = 2
    ENOUGH = 3


class PrefetchResult(NamedTuple):
    """What became of a sample.

    `where` is as in `core.events`; None if it was not prefetched. `size` is in bytes, and `took_s` how long it took to
    fetch. One that has `failed` is left to its reader for a while; one that is `placed` lies where the engine wants it.
    One that was `pushed` is in the kernel's page cache, or its reader waits for it.
    """

    where: int | None
    size: int = 0
    took_s: float = 0.0
    failed: bool = False
    placed: bool = False
    pushed: bool = False

    @property
    def fetched(self) -> bool:
        return self.where in FROM_THE_SOURCE


Done = Callable[[Node, PlannedReader, PrefetchResult], None]
"""Called with what became of a sample, and the reader for whom it was prefetched."""


class PrefetchBackend(Protocol):
    """How samples are prefetched: into the store, or into the kernel's page cache too."""

    looks_again: bool
    """Whether samples that were looked at may have to be prefetched now: they were evicted, or there is room."""

    concurrency: Concurrency
    """How many fetches at a time are worth it."""

    @property
    def under_way(self) -> int:
        """How many samples are being fetched."""

    def start(self, nursery: trio.Nursery) -> None:
        """Begin; the caller calls this once, before anything else."""

    def look(self, readers: tuple[PlannedReader, ...], again: bool, idle: bool) -> None:
        """Note how far readers are. `again`: look at all samples again. `idle`: there was nothing to prefetch."""

    def window(self, reader: PlannedReader) -> int:
        """How many positions ahead of a reader may be prefetched now."""

    def has_room(self) -> bool:
        """Whether one more sample may be prefetched now."""

    def is_resident(self, inode: int) -> bool:
        """Whether the sample is there already, or is on its way."""

    def judge(self, node: Node) -> Admission:
        """What is to be done about a sample that is not resident."""

    def prefetch(self, node: Node, reader: PlannedReader, position: int, done: Done) -> int:
        """Prefetch for a position from the next `send` on, perhaps with others; returns bytes. `done` gets each."""

    def send(self) -> None:
        """Begin with the samples to prefetch, so that they may go together."""

    def is_ready(self, inode: int) -> bool:
        """Whether a reader could read the sample now without waiting for the source."""


def first_fetches(options: Options) -> int:
    """How many files are fetched ahead at a time before it is known how many the source needs."""
    return FIRST_OF_STORES if is_url(options.source) else FIRST_FETCHES


def positions_ahead(reader: PlannedReader, concurrency: Concurrency) -> float:
    """How long a window of this reader is to be, in positions, where there is room for all of it."""
    ahead_s = max(_AHEAD_S, _AHEAD_LATENCIES * concurrency.latency_s)
    # A slow reader's window has work for all fetches at a time, too.
    return max(ahead_s / reader.pace_s, 2 * concurrency.limit)


class Wakeup:
    """Wakes the prefetcher. A component that has news of plans or readers is made before it, and rings."""

    def __init__(self) -> None:
        self._rung = trio.Event()

    def ring(self) -> None:
        self._rung.set()

    def silence(self) -> None:
        """Forget earlier rings: the next `wait` ends only at a ring that comes after this call."""
        self._rung = trio.Event()

    async def wait(self) -> None:
        await self._rung.wait()


# What may be begun at once: to begin one file at a time would wake the manager for each.
_BURST_S = 0.1


class BackgroundRate:
    """The bytes a second, as the files have them at the source, of all fetches that no reader waits for."""

    def __init__(self, bytes_per_s: int, clock: Callable[[], float] = trio.current_time) -> None:
        """No bytes a second: there is no limit."""
        self.bytes_per_s, self._clock = bytes_per_s, clock
        # When all that was begun would have come at this rate.
        self._done_s = -math.inf

    def change(self, bytes_per_s: int) -> None:
        """Follow another limit from now on."""
        if bytes_per_s != self.bytes_per_s:
            self.bytes_per_s, self._done_s = bytes_per_s, -math.inf

    def wait_s(self) -> float:
        """How long it is until the next file may be begun; 0: now."""
        return max(0.0, self._done_s - _BURST_S - self._clock()) if self.bytes_per_s else 0.0

    def begin(self, size: int) -> None:
        """Count a file of this size."""
        if self.bytes_per_s:
            self._done_s = max(self._done_s, self._clock()) + size / self.bytes_per_s

    async def turn(self, size: int) -> None:
        """Wait until a file of this size may be begun, and count it."""
        while (wait_s := self.wait_s()) > 0:
            await trio.sleep(wait_s)
        self.begin(size)
