"""The one wiring of a `Filesystem` without daemon, manager and kernel."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from spiderfs.daemon.restarts import REFUSED_AFTER
from spiderfs.errors import TryAgain
from spiderfs.fuse.kernel import Kernel
from spiderfs.fuse.resent_requests import HeldRequests, ResentRequests
from spiderfs.fuse.session import MAX_WAITING
from spiderfs.linux import steady_clock
from spiderfs.metrics import Counters, SharedCounters
from spiderfs.shared.layout import RunLayout
from spiderfs.shared.shared_memory import SharedSlots
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.sources.source import Source
from spiderfs.store.store import Content, Records
from spiderfs.vfs.answer_types import EventSink
from spiderfs.vfs.catalogue import Catalogue
from spiderfs.vfs.control_files import Control, ControlChannel, ImmutableControl
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.fetcher import Episode, Fetcher, ShownViews
from spiderfs.vfs.filesystem import Filesystem
from spiderfs.vfs.immutable_filesystem import ImmutableFilesystem
from spiderfs.vfs.large_files import ReadAhead, Touches
from spiderfs.vfs.lister import Lister, WalkAhead
from spiderfs.vfs.on_demand import Supply
from spiderfs.vfs.redirects import PendingReads, Redirects
from spiderfs.vfs.rules import Settings
from spiderfs.vfs.unstored_bytes import UnstoredBytes
from spiderfs.views.tree import Forms

READ_AHEAD_BLOCKS = 8


@dataclass(frozen=True)
class Bare:
    """The file system, and the parts of it that tests and benchmarks look at one by one."""

    filesystem: Filesystem
    content: Content
    records: Records
    catalogue: Catalogue
    lister: Lister
    fetcher: Fetcher
    redirects: Redirects
    events: EventSink
    counters: Counters


class NoEvents:
    """An `EventSink` that drops all events."""

    def record_access(self, *args: Any, **named: Any) -> None:
        pass

    def flush(self) -> None:
        pass


class NoManager:
    """A `ControlChannel` with no one behind it; `spiderfs status` says so of such a mount, and goes on."""

    async def render(self, name: str, take: Callable[[bytes], None]) -> None:
        raise TryAgain("there is no manager")

    async def apply(self, name: str, text: bytes) -> None:
        raise TryAgain("there is no manager")


@asynccontextmanager
async def bare_filesystem(
    source: Source,
    content: Content,
    records: Records,
    directory: Path,
    *,
    settings: Settings | None = None,
    limits: SourceLimits | None = None,
    events: EventSink | None = None,
    control: ControlChannel | None = None,
    counters: Counters | None = None,
    alone: bool = False,
    immutable: Kernel | None = None,
    forms: Forms | None = None,
    pusher_threads: SharedSlots | None = None,
    clock: Callable[[], float] = steady_clock.now,
) -> AsyncIterator[Bare]:
    """The file system over these parts, which stay the caller's to close; its locks and snapshots lie in `directory`.

    `alone` has the meaning that it has for `Fetcher`. `immutable`: a kernel that opens files without asking; the file
    system is an `ImmutableFilesystem`, which `pusher_threads` ask too. `forms`: those that `source`, a `ViewSource`,
    shows. The root is known, and all that was fetched is in the store at the end.
    """
    counters, settings = counters or SharedCounters(1).row(0), settings or Settings()
    events = events or NoEvents()
    client = SourceClient(source, limits or SourceLimits(), rng=random.Random(0), on_event=counters.add)
    catalogue = Catalogue(records, forms=forms)
    views = ShownViews(catalogue, settings.sample_max_bytes)
    run = RunLayout(directory)
    fetch_lock = FetchLock(run.fetch_lock)
    unstored = UnstoredBytes()
    fetcher = Fetcher(
        client,
        content,
        fetch_lock,
        Episode(run.full_disk),
        counters,
        alone=alone,
        clock=clock,
        views=views,
        unstored=unstored,
    )
    redirects = Redirects(records, PendingReads())
    make_control: Callable[..., Control] = Control
    make_filesystem: Callable[..., Filesystem] = Filesystem
    if immutable is not None:
        make_control = partial(ImmutableControl, forget_name=immutable.forget_name)
        threads = pusher_threads or SharedSlots(1024)
        make_filesystem = partial(ImmutableFilesystem, doubt=immutable.doubt, pusher_threads=threads)
        settings = settings._replace(checked_since_s=clock())
    lister = Lister(catalogue, client, since_s=settings.checked_since_s)
    async with trio.open_nursery() as nursery:
        filesystem = make_filesystem(
            supply=Supply(content, records, client, catalogue, lister, fetcher, counters, views),
            read_ahead=ReadAhead(nursery, fetcher, counters, READ_AHEAD_BLOCKS),
            touches=Touches(),
            walk_ahead=WalkAhead(nursery, client, catalogue, lister),
            redirects=redirects,
            unstored=unstored,
            control=make_control(control or NoManager(), run, os.getuid(), worker=0),
            events=events,
            settings=settings,
            clock=clock,
        )
        try:
            await lister.root()
            yield Bare(filesystem, content, records, catalogue, lister, fetcher, redirects, events, counters)
            await fetcher.drain()
        finally:
            fetch_lock.close()
            nursery.cancel_scope.cancel()


def notes_of_sole_worker(counters: Counters) -> HeldRequests:
    """The notes of a worker without a supervisor, whose death no one counts."""
    return ResentRequests(1, MAX_WAITING, REFUSED_AFTER).of_worker(0, counters)
