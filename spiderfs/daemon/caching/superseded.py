"""Removes superseded versions and deleted files from the cache.

A process that finds out that a name means something else notes the old inode in the catalogue's table `gone`, in the
same transaction. The manager works through this table, some inodes a second. It moves the records of an inode to the
front of landing, so that they are evicted first when room is needed; until then a reader that has the file open reads
on. When an inode has no record left, the catalogue forgets it, and a handle of it gets ESTALE, as it would from the
source.

A version that was superseded before it had settled has no records. The bytes that its readers get are in transit and
are found by the inode, so the catalogue forgets it only after a while. All names of a directory become gone first. An
inode that a name means again (the same version came back) stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.errors import SpiderfsError
from spiderfs.linux import steady_clock
from spiderfs.store.store import Content
from spiderfs.vfs.catalogue import Catalogue

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
# Where the table was empty: no one waits for what is evicted a little later.
IDLE_INTERVAL_S = 5.0
# How many inodes are looked at in one turn: 5 ms, and a transaction of a few hundred rows.
_AT_A_TIME = 200
# How long an unsettled version is remembered for readers that may have it open: longer than one sample is read. No
# version takes longer than this to settle.
_READ_WITHIN_S = 60.0


class Superseded:
    def __init__(
        self,
        catalogue: Catalogue,
        content: Content,
        cache: CacheControl,
        on_superseded: Callable[[int, bytes], None],
        clock: Callable[[], float] = steady_clock.now,
    ) -> None:
        """`on_superseded` gets each inode that is not current, and its path, before the catalogue forgets it."""
        self._catalogue = catalogue
        self._content = content
        self._cache = cache
        self._on_superseded = on_superseded
        self._now = clock
        self._after = 0

    async def run(self) -> None:
        """Work through the table for ever."""
        interval_s = INTERVAL_S
        while True:
            await trio.sleep(interval_s)
            try:
                interval_s = INTERVAL_S if await self.turn() else IDLE_INTERVAL_S
            except SpiderfsError as exc:
                log.debug("the table of gone inodes is looked at again later: %s", exc)

    async def turn(self) -> bool:
        """Look at the next inodes of the table; returns whether there were any."""
        inodes = self._catalogue.gone(self._after, _AT_A_TIME)
        self._after = inodes[-1] if len(inodes) == _AT_A_TIME else 0
        keys = {inode: self._content.keys(inode) for inode in inodes if not self._catalogue.is_current(inode)}
        for inode in keys:
            node = self._catalogue.known(inode)
            if node is not None:
                self._on_superseded(inode, node.path)
        self._cache.release([key for of_one in keys.values() for key in of_one])
        finished = [inode for inode in inodes if inode not in keys or not (keys[inode] or self._is_in_transit(inode))]
        if finished:
            await trio.to_thread.run_sync(self._catalogue.forget, finished)
        return bool(inodes)

    def _is_in_transit(self, inode: int) -> bool:
        """Whether readers may have this version open while it has no records, because it had not settled."""
        node = self._catalogue.known(inode)
        return node is not None and abs(self._now() - node.settles_at) < _READ_WITHIN_S
