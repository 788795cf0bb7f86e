"""A `Filesystem` over a source and a store of its own, without daemon, manager and kernel."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from spiderfs.daemon.pipes.event_pipe import EventWriter, open_pipe
from spiderfs.errors import TryAgain
from spiderfs.metrics import Counters, SharedCounters
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.sources.source import Source
from spiderfs.store.content import LmdbContent
from spiderfs.store.records import LmdbRecords
from spiderfs.vfs.catalogue import TABLES, Catalogue
from spiderfs.vfs.control_files import Control
from spiderfs.vfs.fetcher import Episode, Fetcher, Interlock
from spiderfs.vfs.filesystem import Filesystem, Settings
from spiderfs.vfs.lister import Lister
from spiderfs.vfs.pending_reads import PendingReads
from spiderfs.vfs.read_ahead import ReadAhead
from spiderfs.vfs.redirects import Redirects

CAPACITY_BYTES = 4 << 30


@dataclass(frozen=True)
class Bare:
    """The file system, and those of its parts that are measured one by one."""

    filesystem: Filesystem
    content: LmdbContent
    catalogue: Catalogue
    lister: Lister
    fetcher: Fetcher
    redirects: Redirects
    events: EventWriter
    counters: Counters


@asynccontextmanager
async def bare_filesystem(source: Source, place: Path) -> AsyncIterator[Bare]:
    """Everything fits into the store, which is made in the directory `place`."""
    for name in ("content", "names"):
        (place / name).mkdir(parents=True)
    counters = SharedCounters(1).row(0)
    content, records = LmdbContent(place / "content"), LmdbRecords(place / "names", TABLES)
    content.set_capacity(CAPACITY_BYTES)
    client = SourceClient(source, SourceLimits(), rng=random.Random(0), on_event=counters.add)
    catalogue = Catalogue(records)
    lister = Lister(catalogue, client)
    fetcher = Fetcher(client, content, Interlock(place / "lock"), Episode(place / "full"), counters, alone=True)
    # Nobody reads the pipe: once it is full a batch costs what it costs, and is dropped.
    events = EventWriter(open_pipe()[1], counters)
    redirects = Redirects(records, PendingReads())
    async with trio.open_nursery() as nursery:
        filesystem = Filesystem(
            catalogue=catalogue,
            content=content,
            client=client,
            lister=lister,
            fetcher=fetcher,
            read_ahead=ReadAhead(nursery, fetcher, counters, 8),
            redirects=redirects,
            brought=PendingReads(),
            control=Control(_NoManager(), place, os.getuid()),
            events=events,
            counters=counters,
            settings=Settings(),
        )
        await lister.root()
        yield Bare(filesystem, content, catalogue, lister, fetcher, redirects, events, counters)
        await fetcher.drain()
        nursery.cancel_scope.cancel()


class _NoManager:
    """Whoever asks all mounts how they are, as `spiderfs status` does, finds this one too."""

    async def render(self, name: str, take: Callable[[bytes], None]) -> None:
        raise TryAgain("there is no manager")

    async def apply(self, name: str, text: bytes) -> None:
        raise TryAgain("there is no manager")
