"""Fetches, pins and evicts files because the user has named them, in `.spiderfs/warm`, `pin`, `unpin` and `evict`.

To pin a file is to fetch it, and to have the engine keep it (`core/rooms.py`). A file for which pins have no room is
not fetched. A version that the source has since then is another file, which is not pinned.

A person names paths and globs: `train/cat`, `train/*/0*.png`, `**/*.jpg`. `*`, `?` and `[...]` match within one name
(fnmatch(3)), and `**` matches any number of names. A pattern that matches a directory means all files below it. Every
byte counts. A name may contain the characters of globs, so a pattern is a path if there is such a name, and only else a
glob. A glob means files below `.spiderfs/views` only if it begins with that name.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import AsyncGenerator, Callable, Container, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import islice

import trio

from spiderfs.core.events import FETCHED, UNSTORED, WARMED
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.caching.prefetch_backend import BackgroundRate
from spiderfs.errors import ConfigError, SourceError, SpiderfsError
from spiderfs.linux import steady_clock
from spiderfs.protocol.extents import file_of
from spiderfs.shared.warming import Warming
from spiderfs.store.store import BLOCK_BYTES, ContentKey, Member
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.control_files import CONTROL_DIRECTORY
from spiderfs.vfs.lister import NotRead
from spiderfs.vfs.on_demand import Supply
from spiderfs.views.recipe import ORIGINAL
from spiderfs.views.tree import VIEWS_DIRECTORY

log = logging.getLogger(__name__)

# The most requests that may wait: more than a person writes by hand, and few enough to hold in memory.
MAX_WAITING = 1000
# How many files are found, at most, before they are fetched: 40 MB of memory.
_MOST_FOUND = 1 << 20
# How many records are looked at between two chances for other tasks.
_AT_A_TIME = 1000

_CONTROL_NAME = os.fsdecode(CONTROL_DIRECTORY)

# Reports a candidate to the cache control, by an event: inode, size, where, pid, block.
Note = Callable[[int, int, int, int, int], None]


class Pattern:
    """`text` is relative to the mount's root, or begins with the mount point; raises ConfigError for any other path.

    `linked` is the name in `.spiderfs/views` that is a link to the root: the files below it are those of the root.
    """

    def __init__(self, text: bytes, mountpoint: bytes, linked: str = ORIGINAL) -> None:
        path = text
        if path == mountpoint or path.startswith(mountpoint.rstrip(b"/") + b"/"):
            path = path[len(mountpoint) :]
        elif path.startswith(b"/") and path.strip(b"/"):
            here = f"{os.fsdecode(text)} lies outside of the mount at {os.fsdecode(mountpoint)}"
            raise ConfigError(f"{here}: write paths below it, or relative to it")
        parts = [part for part in path.split(b"/") if part not in (b"", b".")]
        root = [*VIEWS_DIRECTORY.split(b"/"), os.fsencode(linked)]
        if parts[: len(root)] == root:
            parts = parts[len(root) :]
        self.path = b"/".join(parts)
        """The path that the text is, taken as a path."""
        self.is_glob = any(character in self.path for character in (b"*", b"?", b"["))
        # fnmatch takes strings, and surrogateescape keeps every byte.
        self._parts = [part.decode(errors="surrogateescape") for part in parts]

    @property
    def means_views(self) -> bool:
        """Whether the pattern means files below the directory of views, and none beside it."""
        return self._parts[:1] == [_CONTROL_NAME]

    def matches(self, path: bytes) -> bool:
        """Whether the pattern, taken as a glob, matches this file or one of the directories above it."""
        if path.startswith(VIEWS_DIRECTORY) and not self.means_views:
            return False
        return any(len(self._parts) in followed for followed in self._followed(path))

    def may_match_below(self, directory: bytes) -> bool:
        """Whether any file below this directory could match; False prunes a walk."""
        if directory.startswith(VIEWS_DIRECTORY) and not self.means_views:
            return False
        *_, followed = self._followed(directory)
        return bool(followed) or self.matches(directory)

    def _followed(self, path: bytes) -> Iterator[set[int]]:
        """After none, one, two... names of the path: how many parts of the pattern they may have matched."""
        followed = self._with_empty({0})
        yield followed
        for name in path.decode(errors="surrogateescape").split("/") if path else ():
            followed = self._with_empty(
                count if self._parts[count] == "**" else count + 1
                for count in followed
                if count < len(self._parts) and (self._parts[count] == "**" or fnmatchcase(name, self._parts[count]))
            )
            yield followed

    def _with_empty(self, counts: Iterable[int]) -> set[int]:
        """These counts, and those that follow because `**` may match no name at all."""
        found = set()
        for count in counts:
            found.add(count)
            while count < len(self._parts) and self._parts[count] == "**":
                count += 1
                found.add(count)
        return found


class Selection:
    """All files that the lines of one request mean: those at and below some paths, and those that match some globs."""

    def __init__(self, paths: Iterable[bytes], globs: Sequence[Pattern]) -> None:
        self._paths = frozenset(paths)
        self._on_the_way = frozenset(above for path in self._paths for above in _with_directories(path))
        self._globs = globs

    def __contains__(self, path: bytes) -> bool:
        return any(part in self._paths for part in _with_directories(path)) or any(
            glob.matches(path) for glob in self._globs
        )

    def may_have_below(self, directory: bytes) -> bool:
        """Whether the request may mean a file below this directory; False prunes a walk."""
        return (
            directory in self._on_the_way
            or directory in self
            or any(glob.may_match_below(directory) for glob in self._globs)
        )


def _with_directories(path: bytes) -> Iterator[bytes]:
    """A path and all directories above it, with the root (an empty path) as the last.

    The root does not stand for what lies below the directory of views: these are its files in other forms.
    """
    yield path
    while path and path != CONTROL_DIRECTORY:
        path = path.rpartition(b"/")[0]
        yield path


class Warmer:
    """Fetches the files that requests name, and knows how far it is.

    One task finds the files, in the order of the requests, and is as far ahead as it gets, so that a person sees what
    is left. Others fetch them, as many at a time as directories are listed ahead: readers have threads of their own.
    """

    def __init__(self, supply: Supply, sample_max_bytes: int, note: Note, rate: BackgroundRate) -> None:
        self._catalogue, self._lister = supply.catalogue, supply.lister
        self._fetcher, self._content = supply.fetcher, supply.content
        self._counters, self._sample_max_bytes, self._note = supply.counters, sample_max_bytes, note
        self._rate = rate
        self._send, self._receive = trio.open_memory_channel[tuple[Sequence[Pattern], CacheControl | None]](MAX_WAITING)
        self._work = trio.CancelScope()
        self._warming = Warming()
        self._was_seen = False
        self._looked_in: bytes | None = None
        self.last_evicted = 0
        """How many records the last request to evict files has dropped."""
        self.last_unpinned = 0
        """How many files the last request to unpin files has unpinned."""

    def status(self) -> Warming:
        """How far it is. Once this says that nothing is being done, the next request is counted again."""
        self._was_seen = not self._warming.working
        return replace(self._warming)

    def warm(self, patterns: Sequence[Pattern], pins: CacheControl | None = None) -> None:
        """Take a request to fetch files, and to have `pins` pin each before; raises ConfigError if too many wait."""
        try:
            self._send.send_nowait((patterns, pins))
        except trio.WouldBlock:
            raise ConfigError(
                f"{MAX_WAITING} requests wait already: write again once .spiderfs/warm reads idle"
            ) from None
        if self._was_seen or self._warming.ended:
            self._warming, self._was_seen = Warming(), False
        self._warming.searching = True

    def stop(self) -> None:
        """End what is being done, and forget all requests."""
        self._warming.ended = self._warming.working
        with contextlib.suppress(trio.WouldBlock):
            while True:
                self._receive.receive_nowait()
        self._work.cancel()

    async def run(self) -> None:
        while True:
            found, to_prefetch = trio.open_memory_channel[int](_MOST_FOUND)
            self._work = trio.CancelScope()
            with self._work:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._find_all, found)
                    for _ in range(self._lister.at_once):
                        nursery.start_soon(self._fetch_all, to_prefetch)

    async def _find_all(self, found: trio.MemorySendChannel[int]) -> None:
        async for patterns, pins in self._receive:
            warming, self._looked_in = self._warming, None
            try:
                async with aclosing(self._wanted(patterns, warming)) as wanted:
                    async for node in wanted:
                        warming.found += 1
                        if pins is not None and not await self._pin(pins, node):
                            warming.roomless += 1
                            continue
                        warming.left += 1
                        warming.left_bytes += node.stat.size
                        await found.send(node.inode)
            except SpiderfsError as exc:
                # The root cannot be read, or the store.
                warming.failed += 1
                log.warning("warming: %s", exc)
            warming.searching = self._receive.statistics().current_buffer_used > 0

    async def _pin(self, cache: CacheControl, node: Node) -> bool:
        """Pin a file if pins have room for it, of which earlier versions get none (`Superseded` is later)."""
        pinned, directory = cache.pin(node.inode, node.stat.size), node.path.rpartition(b"/")[0]
        # All names of a directory were listed before its first file was found.
        if pinned or self._looked_in == directory:
            return pinned
        self._looked_in, gone = directory, [0]
        while gone := self._catalogue.gone(gone[-1], _AT_A_TIME):
            cache.unpin([old for old in gone if old in cache.engine.pins and not self._catalogue.is_current(old)])
            await trio.lowlevel.checkpoint()
        return cache.pin(node.inode, node.stat.size)

    async def _wanted(self, patterns: Sequence[Pattern], warming: Warming) -> AsyncGenerator[Node]:
        """The files that the patterns mean, each once."""
        files: set[bytes] = set()
        directories: list[bytes] = []
        globs: list[Pattern] = []

        def not_read(path: bytes, exc: SourceError) -> None:
            warming.failed += 1
            log.warning("warming /%s: %s", os.fsdecode(path), exc)

        def not_there(pattern: Pattern) -> None:
            warming.missing += 1
            warming.unknown = warming.unknown or os.fsdecode(pattern.path)

        async with aclosing(self._named(patterns, not_read)) as named:
            async for pattern, node in named:
                if node is None and pattern.is_glob:
                    globs.append(pattern)
                elif node is None:
                    not_there(pattern)
                elif node.is_directory:
                    directories.append(node.path)
                elif node.is_regular and node.path not in files:
                    files.add(node.path)
                    yield node
        if not directories and not globs:
            return
        selection, unmatched = Selection(directories, globs), globs
        # A view is walked only if a line names it, or a glob begins with the directory of views.
        roots = [root for root in self._catalogue.forms.roots if selection.may_have_below(root)]
        walk = self._lister.walk(selection.may_have_below, ttl_s=1.0, roots=roots, not_read=not_read)
        async with aclosing(walk):
            async for nodes in walk:
                for node in nodes:
                    if node.path in selection:
                        unmatched = [glob for glob in unmatched if not glob.matches(node.path)]
                        if node.path not in files:
                            yield node
        for glob in unmatched:
            not_there(glob)

    async def _named(
        self, patterns: Sequence[Pattern], not_read: NotRead
    ) -> AsyncGenerator[tuple[Pattern, Node | None]]:
        """What each pattern means as a path: None if there is no such file. `not_read` gets what is not known."""
        starts = [await self._lister.start(pattern.path) for pattern in patterns]
        above = {
            pattern.path.rpartition(b"/")[0] for pattern, (_, names) in zip(patterns, starts, strict=True) if names
        }
        failures: dict[bytes, SourceError] = {}
        listed = await self._lister.directories(above, ttl_s=1.0, not_read=failures.__setitem__)
        for pattern, (start, names) in zip(patterns, starts, strict=True):
            parent, _, name = pattern.path.rpartition(b"/")
            entry = self._catalogue.find(listed[parent].inode, name) if names and parent in listed else None
            if names and parent in failures:
                not_read(pattern.path, failures[parent])
            elif names:
                yield pattern, entry and Node(entry.inode, pattern.path, entry.stat, entry.settles_at)
            else:
                yield pattern, start
            await trio.lowlevel.checkpoint()

    async def _fetch_all(self, to_prefetch: trio.MemoryReceiveChannel[int]) -> None:
        async for inode in to_prefetch:
            warming = self._warming
            if (node := self._catalogue.known(inode)) is None:
                # Another version of the file was found meanwhile.
                warming.failed += 1
            else:
                await self._fetch(node, warming)
                # The size of a view is known only when it is made.
                warming.left_bytes = max(0, warming.left_bytes - node.stat.size)
            warming.left -= 1
            if not warming.left:
                warming.left_bytes = 0

    async def _fetch(self, node: Node, warming: Warming) -> None:
        large = node.stat.size > self._sample_max_bytes
        blocks = range(1, math.ceil(node.stat.size / BLOCK_BYTES) + 1) if large else range(1)
        fetched, kept = False, True
        try:
            # A version that has not settled would not be kept. The files of a directory settle at about the same time.
            await trio.sleep(max(0.0, node.settles_at - steady_clock.now()))
            for block in blocks:
                key = ContentKey(node.inode, block)
                if node.stat.size == 0 or self._fetcher.stored(key):
                    continue
                await self._rate.turn(min(BLOCK_BYTES, node.stat.size) if large else node.stat.size)
                payload, where = await self._fetcher.fetch(node, block)
                fetched, kept = True, kept and where != UNSTORED
                warming.fetched_bytes += len(payload)
                if where == FETCHED:
                    self._note(node.inode, len(payload), WARMED, 0, block)
        except SpiderfsError as exc:
            warming.failed += 1
            log.warning("warming %s: %s", os.fsdecode(node.path), exc)
        else:
            warming.fetched += fetched and kept
            warming.unkept += not kept
            warming.present += not fetched
            self._counters.add("warmed", int(fetched))
        finally:
            self._content.end_read()

    async def evict(self, patterns: Sequence[Pattern], drop: Callable[[Sequence[ContentKey]], int]) -> None:
        """Have `drop` evict the records of all cached files that the patterns mean, some at a time."""
        self.last_evicted = 0
        # A pattern may be the path of a file that is gone from the source and still cached.
        cached = await trio.to_thread.run_sync(self._cached_of, {pattern.path for pattern in patterns})
        selection = self._selection(patterns, cached)
        members = self._content.each_member()
        while some := await trio.to_thread.run_sync(self._some, members):
            going = [key for key, path in some if path in selection]
            if going:
                self.last_evicted += drop(going)

    async def unpin(self, patterns: Sequence[Pattern], cache: CacheControl) -> None:
        """Have `cache` unpin all pinned files that the patterns mean, some at a time."""
        self.last_unpinned = 0
        selection = self._selection(patterns, ())
        left = [inode for inode in cache.engine.pins if isinstance(inode, int)]
        while left:
            some, left = left[:_AT_A_TIME], left[_AT_A_TIME:]
            paths = await trio.to_thread.run_sync(self._catalogue.paths, some)
            going = [inode for inode, path in zip(some, paths, strict=True) if path in selection]
            cache.unpin(going)
            self.last_unpinned += len(going)

    def _selection(self, patterns: Sequence[Pattern], known: Container[bytes]) -> Selection:
        """The files that the patterns mean; one that could be a glob is a path if that is `known`, or a name."""
        exact = [
            pattern.path
            for pattern in patterns
            if not pattern.is_glob or pattern.path in known or self._catalogue.knows(pattern.path)
        ]
        return Selection(exact, [pattern for pattern in patterns if pattern.path not in exact])

    def _cached_of(self, wanted: set[bytes]) -> set[bytes]:
        """The paths, of those that could also be globs, that have a record in the cache. In a thread."""
        globs = {path for path in wanted if Pattern(path, b"/").is_glob}
        found: set[bytes] = set()
        members = self._content.each_member() if globs else iter(())
        while some := self._some(members):
            found |= globs.intersection(path for _, path in some)
        return found

    def _some(self, members: Iterator[Member]) -> list[tuple[ContentKey, bytes]]:
        """The next records and the paths of their files. In a thread."""
        keys = [member.key for member in islice(members, _AT_A_TIME)]
        return list(zip(keys, map(file_of, self._catalogue.paths(key.inode for key in keys)), strict=True))
