"""Opening and reading a **provisional version**, whose bytes may still change under it (`vfs/rules.py`).

The kernel gets such a version under another number than the inode, with the bit PROVISIONAL, and for no longer
than until it has settled; the next look-up then gives the inode itself. What one open reads of the version no one else
gets, the store and the kernel's pages included: the open's handle is a random number, by which all workers find its
bytes (`unstored_bytes.py`). Everywhere else (events, lists, redirects) the version is its inode.
"""

from __future__ import annotations

import logging
import math
import stat
import time
from collections.abc import Awaitable, Callable

from spiderfs.core.events import UNSTORED
from spiderfs.errors import SourceChanged, SourceNotFound, SourceUnavailable
from spiderfs.store.store import ContentKey
from spiderfs.vfs.answer_types import Caller, Opened
from spiderfs.vfs.catalogue import PROVISIONAL, Dentry, Node, join
from spiderfs.vfs.large_files import LargeFiles
from spiderfs.vfs.on_demand import OnDemand, Part, Shared
from spiderfs.vfs.rules import WINDOW_S, is_provisional
from spiderfs.vfs.small_files import SmallFiles

log = logging.getLogger(__name__)

# How often a file may change while it is looked up.
_CHANGES = 8


class ProvisionalFiles(Part):
    """The provisional versions as one worker serves them."""

    def __init__(self, shared: Shared, on_demand: OnDemand, small_files: SmallFiles, large_files: LargeFiles) -> None:
        super().__init__(shared)
        self._on_demand, self._small_files, self._large_files = on_demand, small_files, large_files
        self._said = False

    def note_open(self) -> None:
        """Count an open that leaves nothing in the cache, and say so in the log, once."""
        self._counters.add("opens_young")
        if not self._said:
            self._said = True
            log.info(
                "files that were written less than %g s ago may still change: they are served, but not cached yet",
                WINDOW_S,
            )

    async def bring_along(
        self,
        directory: bytes,
        found: Dentry,
        caller: Caller,
        read_present: Callable[[], Awaitable[tuple[Dentry | None, bytes | None]]],
    ) -> Dentry | None:
        """Read a small file as part of its look-up; what was looked up, and what was read, are one version.

        For a file that has just changed while it was being opened (`unstored_bytes.py`). `read_present` looks the name
        up and reads what it means then.
        """
        dentry: Dentry | None = found
        for _ in range(_CHANGES):
            if dentry is None or not stat.S_ISREG(dentry.stat.mode):
                break
            if not 0 < dentry.stat.size <= self._settings().sample_max_bytes:
                break
            if self._unstored.has_unused_read(caller.pid, dentry.inode):
                break  # by the first of two look-ups
            node = Node(dentry.inode, join(directory, dentry.name), dentry.stat, dentry.settles_at)
            handle = self._unstored.new_handle()
            if is_provisional(node.settles_at, self._now()):
                node = _for_one_open(node, handle)
            content: bytes | None
            try:
                content, kept = (await self._fetcher.fetch_bytes(node)).payload, node.inode == handle
            except (SourceNotFound, SourceChanged):
                # Changed between the look and the read, which are one step now. Of a view they cannot be.
                (dentry, content), kept = await read_present(), False
                if (
                    dentry is None
                    or content is None
                    or (dentry.stat.viewed and not is_provisional(dentry.settles_at, self._now()))
                ):
                    continue
            except SourceUnavailable:
                break  # The open will meet the same error, and report it.
            if kept or self._unstored.keep(ContentKey(handle), content):
                self._unstored.remember_read(caller.pid, dentry.inode, handle)
            break
        return dentry

    def open_unstored(self, inode: int, caller: Caller) -> Opened | None:
        """An open of what the thread's look-up has read of this version, if the bytes are still there."""
        handle = self._unstored.take(caller, inode & ~PROVISIONAL)
        if handle is None or self._fetcher.passing(ContentKey(handle), 0, 1) is None:
            return None
        self._counters.add("opens")
        self.note_open()
        # A version that was superseded long ago may have been forgotten meanwhile.
        if (node := self._catalogue.known(inode)) is not None:
            trainer, wanted, _ = self._redirects.reader_of(caller.pid, node.inode)
            self._small_files.note_fetched(node, caller.pid, trainer, wanted, self._now(), 0.0, UNSTORED)
        return Opened(handle, direct_io=False, keeps_pages=False)

    async def open(self, node: Node, caller: Caller, once_more: bool) -> Opened:
        """Read the file for this open alone; `once_more` as for `LargeFiles.open`."""
        self.note_open()
        handle = self._unstored.new_handle()
        if node.stat.size > self._settings().sample_max_bytes:
            await self._large_files.open(node, caller, once_more)
            return Opened(handle, direct_io=False, keeps_pages=False)
        trainer, wanted, _ = self._redirects.reader_of(caller.pid, node.inode)
        started, asked_s = time.perf_counter(), self._now()
        if node.stat.size:
            await self._on_demand.fetch(_for_one_open(node, handle))
        if self._unstored.has_unused_read(caller.pid, node.inode) and (
            unused := self._unstored.take(caller, node.inode, handle)
        ):
            self._unstored.close(unused)
        self._counters.add("opens")
        waited_s = time.perf_counter() - started
        self._counters.observe("open_miss_seconds", waited_s)
        if wanted != node.inode:
            self._counters.add("redirects")
        self._small_files.note_fetched(node, caller.pid, trainer, wanted, asked_s, waited_s, UNSTORED)
        return Opened(handle, direct_io=False, keeps_pages=False)

    async def read(self, inode: int, handle: int, offset: int, size: int) -> memoryview | bytes:
        """A piece of the version as one open sees it; `inode` is that of the version, or as the kernel knows it."""
        # Asked first: the catalogue may have forgotten the version.
        if (piece := self._fetcher.passing(ContentKey(handle), offset, size)) is not None:
            return piece
        node = _for_one_open(self._catalogue.node(inode), handle)
        files = self._large_files if node.stat.size > self._settings().sample_max_bytes else self._small_files
        return await files.read(node, offset, size)


def _for_one_open(node: Node, handle: int) -> Node:
    """A provisional version as one open of it sees it; it stays provisional for as long as that open lasts."""
    return node._replace(inode=handle, settles_at=math.inf)
