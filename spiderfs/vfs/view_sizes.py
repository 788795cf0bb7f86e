"""How long what is shown of a file is, for look-ups: a view may have to be made first (`shown_views.py`)."""

from __future__ import annotations

from collections.abc import Callable

from spiderfs.vfs.catalogue import Dentry, Node
from spiderfs.vfs.fetcher import Fetched
from spiderfs.vfs.on_demand import OnDemand
from spiderfs.vfs.shown_views import ShownViews


class ViewSizes:
    """`views`: see `Fetcher`; without them each file has the size that is known."""

    def __init__(self, views: ShownViews | None, on_demand: OnDemand, clock: Callable[[], float]) -> None:
        self._views = views
        self._on_demand = on_demand
        self._now = clock

    async def sized(self, node: Node) -> Node:
        """The file with the size of what is shown of it, for which a view may have to be made.

        The reader waits here and not in the open that follows, so that open counts as one that has waited.
        """
        if self._views is None or not self.is_unsized(node):
            return node
        fetched = await self._on_demand.look_into(node)
        return await self._views.noted(node, len(fetched.payload))

    async def sized_name(self, dentry: Dentry) -> Dentry:
        """The same for a name."""
        if self._views is None or not self.is_unsized(dentry):
            return dentry
        return dentry._replace(stat=(await self.sized(self._views.node(dentry.inode))).stat)

    async def sized_ahead(self, dentry: Dentry) -> tuple[Node, Fetched] | None:
        """The file that a name means with its size, and what was fetched for that; None if the size is known.

        No reader waits, and none opens the file next.
        """
        if self._views is None or not self.is_unsized(dentry):
            return None
        node = self._views.node(dentry.inode)
        fetched = await self._on_demand.fetch(node, is_read=False)
        return await self._views.noted(node, len(fetched.payload)), fetched

    def is_unsized(self, file: Node | Dentry) -> bool:
        """Whether the size of what is shown of a file is not known before the file was fetched once."""
        if self._views is None or not file.stat.viewed:
            return False
        return self._views.is_unknown(file.stat, file.settles_at, self._now())
