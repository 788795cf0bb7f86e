"""What the source has no more leaves the cache: versions that were superseded, and names that are gone.

Whoever learns that a name means something else notes its inode in the catalogue's table `gone`, in the same
transaction. The manager works that off, some inodes a second. The records of a file become the first in landing: they
are the next to go when room is needed, and until then whoever has the file open reads on. Once there are none the inode
is forgotten, and a handle of it gets ESTALE, as it would from the source. A version that was superseded before it had
settled never has records: what its readers have is in transit, and is found as long as the inode is known. So that is
for a while. Of a directory all names go first, which are gone then too. An inode that a name means again (a version
that came back) is left as it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import trio

from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.errors import SpiderfsError, Stale
from spiderfs.store.environment import exit_if_corrupt
from spiderfs.store.store import Content
from spiderfs.vfs.catalogue import Catalogue

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
# Inodes looked at in one turn: 5 ms, and a transaction of a few hundred rows.
_AT_A_TIME = 200
# For how long a version is remembered that its readers may have opened before it had settled: longer than one sample is
# read. More than this lies no settling ahead.
_READ_WITHIN_S = 60.0


class Superseded:
    def __init__(
        self, catalogue: Catalogue, content: Content, cache: CacheControl, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._catalogue = catalogue
        self._content = content
        self._cache = cache
        self._now = wall_clock
        self._after = 0

    async def run(self) -> None:
        """For ever."""
        while True:
            await trio.sleep(INTERVAL_S)
            try:
                with exit_if_corrupt():
                    await self.turn()
            except SpiderfsError as exc:
                log.debug("what is gone is looked at again later: %s", exc)

    async def turn(self) -> None:
        """Look at some, and begin again behind the last one."""
        inodes = self._catalogue.gone(self._after, _AT_A_TIME)
        self._after = inodes[-1] if len(inodes) == _AT_A_TIME else 0
        keys = {inode: self._content.keys(inode) for inode in inodes if not self._catalogue.is_current(inode)}
        self._cache.release([key for of_one in keys.values() for key in of_one])
        finished = [inode for inode in inodes if inode not in keys or not (keys[inode] or self._is_in_transit(inode))]
        if finished:
            await trio.to_thread.run_sync(self._catalogue.forget, finished)

    def _is_in_transit(self, inode: int) -> bool:
        """Whether readers may have it open whose bytes lie in no record, as it had not settled."""
        try:
            return abs(self._now() - self._catalogue.node(inode).settles_at) < _READ_WITHIN_S
        except Stale:
            return False
