"""Read-ahead for large files: for a reader that reads blocks in order, the next ones are fetched in parallel."""

from __future__ import annotations

import logging
from collections import OrderedDict

import trio

from spiderfs.errors import SourceError
from spiderfs.metrics import Counters
from spiderfs.store.store import BLOCK_BYTES, ContentKey
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.fetcher import Fetcher

log = logging.getLogger(__name__)

# Files whose reading position is remembered; forgetting one costs a restart of its read-ahead.
_FILES = 1024


class ReadAhead:
    """Sequential readers are recognised by file: several readers in one file share one window."""

    def __init__(self, nursery: trio.Nursery, fetcher: Fetcher, counters: Counters, depth_blocks: int) -> None:
        self._nursery = nursery
        self._fetcher = fetcher
        self._counters = counters
        self._depth_blocks = depth_blocks
        # inode -> the block read last, and the last block already asked for
        self._positions: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._started = 0

    @property
    def busy(self) -> bool:
        return self._started > 0

    def wanted(self, node: Node, block: int) -> range:
        """Note that `block` is read now; the blocks that should be fetched ahead of their turn."""
        previous, asked = self._positions.pop(node.inode, (0, 0))
        if block not in (previous, previous + 1):
            asked = block  # a jump, or a first read elsewhere than at the start
            further = range(0)
        else:
            last = min(block + self._depth_blocks, -(-node.stat.size // BLOCK_BYTES))
            further = range(max(asked, block) + 1, last + 1)
            asked = max(asked, last)
        self._positions[node.inode] = (block, asked)
        if len(self._positions) > _FILES:
            self._positions.popitem(last=False)
        return further

    def start(self, node: Node, block: int) -> None:
        if not self._fetcher.stored(ContentKey(node.inode, block)):
            self._counters.add("readahead_blocks")
            self._started += 1
            self._nursery.start_soon(self._fetch, node, block)

    async def _fetch(self, node: Node, block: int) -> None:
        try:
            await self._fetcher.fetch(node, block)
        except SourceError as exc:
            # The reader of the block will ask for it again, and get the error then.
            log.debug("read-ahead of block %d: %s", block, exc)
        finally:
            self._started -= 1
