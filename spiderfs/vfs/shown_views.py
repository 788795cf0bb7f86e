"""The views of the mount for the parts that fetch: which files have one, and its size.

Where views are shown (`views/tree.py`), each regular file that is read as a whole is shown as its view, or as it is if
there is none; a view that is as long as the original is the original. Until a file was fetched once, no one knows
how long its view is. So a look-up of its name fetches it, and a listing leaves its attributes out. The length that is
noted first counts, for all processes and for later mounts.

Provisional versions and large files are shown as they are.
"""

from __future__ import annotations

from functools import partial

import trio

from spiderfs.sources.source import SourceStat
from spiderfs.vfs.catalogue import Catalogue, Node
from spiderfs.views.tree import unknown_length


class ShownViews:
    """The views of files of at most `longest_bytes`; views are no longer either."""

    def __init__(self, catalogue: Catalogue, longest_bytes: int) -> None:
        self._catalogue = catalogue
        self._longest_bytes = longest_bytes

    def is_unknown(self, found: SourceStat, settles_at: float, now: float) -> bool:
        """Whether the size of what is shown for this file is not known yet."""
        return (
            found.viewed and found.original_size is None and 0 < found.size <= self._longest_bytes and settles_at <= now
        )

    def request(self, node: Node) -> tuple[int, bool]:
        """The length to ask for a view (`views/tree.py`), and whether the view has exactly that length."""
        if node.stat.original_size is None:
            return unknown_length(self._longest_bytes), False
        return node.stat.size, True

    async def with_size(self, node: Node, size: int) -> Node:
        """The file with the size of its view: the one that was noted first, this one if there was none."""
        if node.stat.original_size is not None:
            return node
        known = self._catalogue.known(node.inode)
        if known is not None and known.stat.original_size is not None:
            return node._replace(stat=known.stat)
        size = await trio.to_thread.run_sync(partial(self._catalogue.record_view, node.inode, size))
        return node._replace(stat=node.stat._replace(size=size, original_size=node.stat.size))
