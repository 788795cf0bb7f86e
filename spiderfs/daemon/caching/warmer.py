"""Fetches and evicts files because the user has named them, in `.spiderfs/warm` and `.spiderfs/evict`."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import islice

import trio

from spiderfs.core.events import FETCHED, WARMED
from spiderfs.daemon.caching.patterns import Pattern, Selection
from spiderfs.errors import ConfigError, SpiderfsError, Stale
from spiderfs.linux import steady_clock
from spiderfs.store.store import BLOCK_BYTES, ContentKey, Member
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.on_demand import Supply

log = logging.getLogger(__name__)

# The most requests that may wait: more than a person writes by hand, and few enough to hold in memory.
MAX_WAITING = 1000
# How many files of one request are fetched at the same time.
_CONCURRENT = 8
# How many records are looked at between two chances for other tasks.
_AT_A_TIME = 1000

# Tells the cache control of a candidate, by an event: inode, size, where, pid, block.
Note = Callable[[int, int, int, int, int], None]


@dataclass
class WarmerStatus:
    """How far the last request to warm files is, and how many records the last request to evict files dropped.

    `unknown` is the first path or glob of that request that means no file; it is empty if there is none.
    """

    working: bool = False
    found: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    present: int = 0
    failed: int = 0
    unknown: str = ""
    last_evicted: int = 0


class Warmer:
    """Fetches the files that patterns mean, one request at a time, and knows how far it is."""

    def __init__(self, supply: Supply, sample_max_bytes: int, note: Note) -> None:
        self._catalogue = supply.catalogue
        self._lister = supply.lister
        self._fetcher = supply.fetcher
        self._content = supply.content
        self._counters = supply.counters
        self._sample_max_bytes = sample_max_bytes
        self._note = note
        self._send, self._receive = trio.open_memory_channel[Sequence[Pattern]](MAX_WAITING)
        self._status = WarmerStatus()

    def status(self) -> WarmerStatus:
        return replace(self._status)

    def warm(self, patterns: Sequence[Pattern]) -> None:
        """Take a request to fetch files; raises ConfigError if too many requests wait already."""
        try:
            self._send.send_nowait(patterns)
        except trio.WouldBlock:
            raise ConfigError(
                f"{MAX_WAITING} requests wait already: write again when .spiderfs/warm says idle"
            ) from None

    async def run(self) -> None:
        """Work through requests for ever."""
        async for patterns in self._receive:
            self._status = WarmerStatus(working=True, last_evicted=self._status.last_evicted)
            slots = trio.CapacityLimiter(_CONCURRENT)
            async with trio.open_nursery() as nursery, aclosing(self._wanted(patterns)) as wanted:
                async for node in wanted:
                    self._status.found += 1
                    await slots.acquire_on_behalf_of(node)
                    nursery.start_soon(self._bring, node, slots)
            self._status.working = False

    async def _wanted(self, patterns: Sequence[Pattern]) -> AsyncGenerator[Node]:
        """The files that the patterns mean, each once."""
        files: set[bytes] = set()
        directories: list[bytes] = []
        globs: list[Pattern] = []
        for pattern in patterns:
            try:
                node = await self._named(pattern.path)
            except SpiderfsError as exc:
                self._not_looked_up(pattern.path, exc)
                continue
            if node is None and pattern.is_glob:
                globs.append(pattern)
            elif node is None:
                self._status.unknown = self._status.unknown or os.fsdecode(pattern.path)
            elif node is not None and node.is_directory:
                directories.append(node.path)
            elif node is not None and node.is_regular and node.path not in files:
                files.add(node.path)
                yield node
        if not directories and not globs:
            return
        selection, unmatched = Selection(directories, globs), globs
        # A view is walked only if a line names it, or a glob begins with the directory of views.
        roots = [root for root in self._catalogue.forms.roots if selection.may_have_below(root)]
        try:
            async with aclosing(self._lister.walk(selection.may_have_below, ttl_s=1.0, roots=roots)) as walk:
                async for nodes in walk:
                    for node in nodes:
                        if node.path in selection:
                            unmatched = [glob for glob in unmatched if not glob.matches(node.path)]
                            if node.path not in files:
                                yield node
        except SpiderfsError as exc:
            self._not_looked_up(b"", exc)
        else:
            self._status.unknown = self._status.unknown or next((os.fsdecode(glob.path) for glob in unmatched), "")

    async def _named(self, path: bytes) -> Node | None:
        """The file of this path; None if the source has none. Raises SpiderfsError if that cannot be found out."""
        start, names = await self._lister.start(path)
        if not names:
            return start
        parent, _, name = path.rpartition(b"/")
        try:
            directory = await self._lister.directory(parent)
            await self._lister.complete(directory, ttl_s=1.0)
        except Stale:
            return None
        entry = self._catalogue.find(directory.inode, name)
        return None if entry is None else Node(entry.inode, path, entry.stat, entry.settles_at)

    def _not_looked_up(self, path: bytes, exc: SpiderfsError) -> None:
        self._status.failed += 1
        log.warning("warming /%s: %s", os.fsdecode(path), exc)

    async def _bring(self, node: Node, slots: trio.CapacityLimiter) -> None:
        large = node.stat.size > self._sample_max_bytes
        blocks = range(1, math.ceil(node.stat.size / BLOCK_BYTES) + 1) if large else range(1)
        fetched = False
        try:
            # A version that has not settled would not be kept. The files of a directory settle at about the same time.
            await trio.sleep(max(0.0, node.settles_at - steady_clock.now()))
            for block in blocks:
                key = ContentKey(node.inode, block)
                if node.stat.size == 0 or self._fetcher.stored(key):
                    continue
                payload, where = await self._fetcher.fetch(node, block)
                fetched = True
                self._status.fetched_bytes += len(payload)
                if where == FETCHED:
                    self._note(node.inode, len(payload), WARMED, 0, block)
        except SpiderfsError as exc:
            self._status.failed += 1
            log.warning("warming %s: %s", os.fsdecode(node.path), exc)
        else:
            self._status.fetched += fetched
            self._status.present += not fetched
            self._counters.add("warmed", int(fetched))
        finally:
            self._content.end_read()
            slots.release_on_behalf_of(node)

    async def evict(self, patterns: Sequence[Pattern], drop: Callable[[Sequence[ContentKey]], int]) -> None:
        """Have `drop` evict the records of all cached files that the patterns mean, some at a time."""
        self._status.last_evicted = 0
        # A pattern may be the path of a file that is gone from the source and still cached.
        cached = await trio.to_thread.run_sync(self._cached_of, {pattern.path for pattern in patterns})
        exact = [
            pattern.path
            for pattern in patterns
            if not pattern.is_glob or pattern.path in cached or self._catalogue.knows(pattern.path)
        ]
        selection = Selection(exact, [pattern for pattern in patterns if pattern.path not in exact])
        members = self._content.each_member()
        while some := await trio.to_thread.run_sync(self._some, members):
            going = [key for key, path in some if path in selection]
            if going:
                self._status.last_evicted += drop(going)

    def _cached_of(self, wanted: set[bytes]) -> set[bytes]:
        """The paths, of those that could also be globs, that have a record in the cache. In a thread."""
        globs = {path for path in wanted if Pattern(path, b"/").is_glob}
        found: set[bytes] = set()
        members = self._content.each_member() if globs else iter(())
        while some := self._some(members):
            found |= globs.intersection(path for _, path in some)
        return found

    def _some(self, members: Iterator[Member]) -> list[tuple[ContentKey, bytes]]:
        """The next records and their paths. In a thread."""
        keys = [member.key for member in islice(members, _AT_A_TIME)]
        return list(zip(keys, self._catalogue.paths(key.inode for key in keys), strict=True))
