"""A bare `Filesystem` as a mount has it: over a store on the disk, and with a pipe for its events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.fakes import Bare, bare_filesystem
from spiderfs.daemon.pipes import EventWriter, open_pipe
from spiderfs.fuse.kernel import Kernel
from spiderfs.metrics import SharedCounters
from spiderfs.sources.source import Source
from spiderfs.store.content import LmdbContent
from spiderfs.store.records import LmdbRecords
from spiderfs.vfs.catalogue import TABLES

CAPACITY_BYTES = 4 << 30


@asynccontextmanager
async def bare_on_disk(source: Source, place: Path, immutable: Kernel | None = None) -> AsyncIterator[Bare]:
    """Everything fits into the store, which is made in the directory `place`; `immutable`: see `bare_filesystem`."""
    for name in ("content", "names"):
        (place / name).mkdir(parents=True)
    content, records = LmdbContent(place / "content"), LmdbRecords(place / "names", TABLES)
    content.set_capacity(CAPACITY_BYTES)
    counters = SharedCounters(1).row(0)
    # No one reads the pipe: once it is full, a batch of events costs what it costs, and is dropped.
    events = EventWriter(open_pipe()[1], counters)
    async with bare_filesystem(
        source, content, records, place, events=events, counters=counters, alone=True, immutable=immutable
    ) as bare:
        yield bare
