"""Opening and reading a **provisional version**, whose bytes may still change under it (`core/settling.py`).

The kernel is told of such a version under another number than the inode, with the bit PROVISIONAL, and for no longer
than until it has settled; the next look-up then gives the inode itself. The bytes that one open reads of the version
are kept from the store, from the pages that the kernel keeps of the settled version, and from every other open: the
open's handle is a random number, and its fetched bytes lie in transit under that number. Everywhere else (events, lists
of samples, redirects) the version is its inode.
"""

from __future__ import annotations

import math
import random
import stat
import time
from collections.abc import Awaitable, Callable

from spiderfs.core.events import UNSTORED
from spiderfs.errors import SourceChanged, SourceNotFound, SourceUnavailable
from spiderfs.metrics import Counters
from spiderfs.store.store import ContentKey
from spiderfs.vfs.answer_types import Caller, Opened
from spiderfs.vfs.catalogue import PROVISIONAL, Dentry, Node, join
from spiderfs.vfs.fetcher import Fetcher
from spiderfs.vfs.large_files import LargeFiles
from spiderfs.vfs.on_demand import OnDemand
from spiderfs.vfs.pending_reads import PendingReads
from spiderfs.vfs.redirects import Redirects
from spiderfs.vfs.rules import Settings, is_provisional
from spiderfs.vfs.small_files import SmallFiles

# How often a file may change while it is looked up, and within how many seconds the open follows for which the look-up
# has read the file.
_CHANGES, _BROUGHT_S = 8, 1.0
# Handles with further bits are those of control files.
_HANDLE_BITS = 62


class ProvisionalFiles:
    """The provisional versions as one worker serves them.

    `brought` says which handle an open has to get if its look-up has read the file already.
    `settings` answers with those that hold now.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        on_demand: OnDemand,
        small_files: SmallFiles,
        large_files: LargeFiles,
        redirects: Redirects,
        brought: PendingReads,
        counters: Counters,
        settings: Callable[[], Settings],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._fetcher = fetcher
        self._on_demand = on_demand
        self._small_files = small_files
        self._large_files = large_files
        self._redirects = redirects
        self._brought = brought
        self._counters = counters
        self._now = wall_clock
        self._settings = settings

    async def bring_along(
        self, directory: bytes, found: Dentry, caller: Caller, look_again: Callable[[], Awaitable[Dentry | None]]
    ) -> Dentry | None:
        """Read a small file as part of its look-up, until what was looked up and what was read are one version.

        For a file that has just changed while it was being opened. The kernel then looks the name up and opens it once
        more, and never a third time; so if the file changed between these two, its reader would get an error.
        """
        dentry: Dentry | None = found
        for _ in range(_CHANGES):
            if dentry is None or not stat.S_ISREG(dentry.stat.mode):
                break
            if not 0 < dentry.stat.size <= self._settings().sample_max_bytes:
                break
            node = Node(dentry.inode, join(directory, dentry.name), dentry.stat, dentry.settles_at)
            young = is_provisional(node.settles_at, self._now())
            if young:
                node = _for_one_open(node, random.getrandbits(_HANDLE_BITS))
            try:
                await self._fetcher.bring(node)
                if young:
                    self._brought.put(caller.pid, node.inode, dentry.inode | PROVISIONAL, time.monotonic())
                break
            except (SourceNotFound, SourceChanged):
                dentry = await look_again()
            except SourceUnavailable:
                break  # The open will meet the same error, and report it.
        return dentry

    async def open(self, node: Node, caller: Caller) -> Opened:
        """Read the file for this open alone."""
        # The bytes that this thread's look-up has read are for this open alone, whichever worker answers it.
        brought = self._brought.take(caller.pid, node.inode | PROVISIONAL, time.monotonic() - _BROUGHT_S)
        handle = random.getrandbits(_HANDLE_BITS) if brought is None else brought
        if node.stat.size > self._settings().sample_max_bytes:
            self._large_files.open(node, caller)
            return Opened(handle, direct_io=False, keeps_pages=False)
        trainer, wanted, _ = self._redirects.reader_of(caller.pid, node.inode)
        started, asked_s = time.perf_counter(), self._now()
        if node.stat.size and self._fetcher.passing(ContentKey(handle)) is None:
            await self._on_demand.fetch(_for_one_open(node, handle))
        self._counters.add("opens")
        self._counters.observe("open_miss_seconds", time.perf_counter() - started)
        if wanted != node.inode:
            self._counters.add("redirects")
        self._small_files.note_fetched(node, caller.pid, trainer, wanted, asked_s, UNSTORED)
        return Opened(handle, direct_io=False, keeps_pages=False)

    async def read(self, node: Node, handle: int, offset: int, size: int) -> memoryview | bytes:
        """A piece of the version as one open sees it."""
        node = _for_one_open(node, handle)
        if node.stat.size > self._settings().sample_max_bytes:
            return await self._large_files.read(node, offset, size)
        payload = self._fetcher.passing(ContentKey(handle))
        if payload is None:
            return await self._small_files.read(node, offset, size)
        return memoryview(payload)[offset : offset + size]


def _for_one_open(node: Node, handle: int) -> Node:
    """A provisional version as one open of it sees it; it stays provisional for as long as that open lasts."""
    return node._replace(inode=handle, settles_at=math.inf)
