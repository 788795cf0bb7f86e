"""Fetches and evicts files because the user has named them, in `.spiderfs/warm` and `.spiderfs/evict`.

A person names paths and globs: `train/cat`, `train/*/0*.png`, `**/*.jpg`.
`*`, `?` and `[...]` match within one name (fnmatch(3)), and `**` matches any number of names. A pattern that matches a
directory means all files below it. Every byte counts, and so do blanks at the ends. A name may contain the characters
of globs. So a caller that knows the names of the source first takes a pattern as a path, and only if there is no such
name as a glob. As in a shell, where a glob's first character does not match a dot, a glob means files below
`.spiderfs/views` only if it begins with that name.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice

import trio

from spiderfs.core.events import FETCHED, WARMED
from spiderfs.errors import ConfigError, SpiderfsError, Stale
from spiderfs.linux import steady_clock
from spiderfs.store.store import BLOCK_BYTES, ContentKey, Member
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.control_files import CONTROL_DIRECTORY
from spiderfs.vfs.on_demand import Supply
from spiderfs.views.recipe import ORIGINAL
from spiderfs.views.tree import VIEWS_DIRECTORY

log = logging.getLogger(__name__)

# The most requests that may wait: more than a person writes by hand, and few enough to hold in memory.
MAX_WAITING = 1000
# How many files of one request are fetched at the same time.
_CONCURRENT = 8
# How many records are looked at between two chances for other tasks.
_AT_A_TIME = 1000

_CONTROL_NAME = os.fsdecode(CONTROL_DIRECTORY)

# Tells the cache control of a candidate, by an event: inode, size, where, pid, block.
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
