"""For a reader that walks a tree, lists the next directories in parallel, before it asks for them.

A reader that lists one directory after another waits for the source each time. Programs walk the entries of a
directory in one of two orders: in that of readdir, as os.walk does, or by name, as ImageFolder and `ls -R` do. So when
a reader lists the first directory of its parent in one of these orders, or the next one after its last, those that
follow are listed ahead: a few dozen, and one more for each that the reader has come to. They are fewer for a
slow reader, since a listing is trusted for a second only. A walk that stops leaves the rest alone, and so does a
reader that lists single directories. Where the source answers at once, or a listing is trusted for hardly longer than
the source takes, nothing is gained, and nothing is listed ahead.

A reader that wants one name of an undated directory waits a moment for a listing of all of it (`listed`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from operator import attrgetter
from typing import TypeVarTuple

import trio

from spiderfs.errors import SpiderfsError
from spiderfs.sources.client import SourceClient
from spiderfs.vfs.catalogue import Catalogue, Node, join
from spiderfs.vfs.lister import Lister

Ts = TypeVarTuple("Ts")

# A directory of tens of thousands of names is not listed sooner; its readers ask for single names meanwhile.
MOMENT_S = 1.0

log = logging.getLogger(__name__)

# How many directories are listed ahead of the one that a reader has asked for: at most, and for the slowest reader.
AHEAD, LEAST_AHEAD = 64, 4
# The share of the latest interval in the mean of the intervals between a reader's questions.
_LATEST = 0.3
# A reader that leaves out some names, or sorts them in the order of its language, goes on within so many.
_NEAR = 4
# Directories within which readers walk, and how many entries of one are looked at: of a directory with more, only the
# first are listed ahead.
_WALKS = 8
_ENTRIES = 20_000
# The first directory within another is looked for among so many entries, and within that so many times.
_FIRST_ENTRIES, _DEPTH = 8, 4
# A source that answers in less time need not be asked ahead; and a listing must be trusted for so many times as long
# as an answer takes.
_SLOW_S, _LASTING = 0.005, 8


class _Walk:
    """The directories within a directory, in both orders, as its listing of `listed_at` has them."""

    def __init__(self, listed_at: float, directories: list[Node]) -> None:
        self.listed_at = listed_at
        self._interval_s: float | None = None
        self._asked_at_s: float | None = None
        self._orders = [_Order(directories), _Order(sorted(directories, key=attrgetter("path")))]

    def following(self, inode: int, ttl_s: float) -> list[Node]:
        """The directories to list now that a reader has come to this one, each once."""
        ahead = self._ahead(inode, ttl_s)
        found = [node for order in self._orders for node in order.following(inode, ahead)]
        return list({node.inode: node for node in found if node.inode != inode}.values())

    def _ahead(self, inode: int, ttl_s: float) -> int:
        """How many directories a reader of this pace comes to while a listing is trusted, with room to spare."""
        now = trio.current_time()
        asked_at_s, self._asked_at_s = self._asked_at_s, now
        if asked_at_s is None or any(order.place_of.get(inode) == 0 for order in self._orders):
            self._interval_s = None
        else:
            passed_s = min(now - asked_at_s, 2 * ttl_s)
            mean_s = passed_s if self._interval_s is None else self._interval_s
            self._interval_s = mean_s + _LATEST * (passed_s - mean_s)
        if self._interval_s is None or ttl_s / 2 >= AHEAD * self._interval_s:
            return AHEAD
        return max(LEAST_AHEAD, int(ttl_s / 2 / self._interval_s))


class _Order:
    """One order of the directories, and how far a reader has come in it."""

    def __init__(self, directories: list[Node]) -> None:
        self._directories = directories
        self.place_of = {node.inode: place for place, node in enumerate(directories)}
        self._last = self._end = 0

    def following(self, inode: int, ahead: int) -> list[Node]:
        place = self.place_of.get(inode)
        if place is None:
            return []
        last, self._last = self._last, place
        if place == 0:
            # A walk begins, perhaps not the first one: what an earlier one found may be too old.
            self._end = 0
        if not (place <= self._end or last < place <= last + _NEAR):
            return []
        if self._end > place + 1 + 2 * ahead:
            # The reader has become slower: what was listed will be too old when it gets there.
            self._end = place + 1
        start, self._end = max(self._end, place + 1), max(self._end, place + 1 + ahead)
        return self._directories[start : self._end]


class WalkAhead:
    def __init__(self, nursery: trio.Nursery, client: SourceClient, catalogue: Catalogue, lister: Lister) -> None:
        self._nursery = nursery
        self._client = client
        self._catalogue = catalogue
        self._lister = lister
        self._slots = trio.CapacityLimiter(lister.at_once)
        self._walks: OrderedDict[int, _Walk] = OrderedDict()
        self._under_way = 0
        # The directories that are being listed for readers of names: until when these wait, and the end of the listing.
        self._named: dict[int, tuple[float, trio.Event]] = {}

    @property
    def busy(self) -> bool:
        """Whether anything is being listed ahead."""
        return self._under_way > 0

    def asked(self, directory: Node, ttl_s: float) -> None:
        """A reader lists this directory: list those ahead that it is likely to list next.

        A listing that is younger than `ttl_s` will do.
        """
        latency_s = self._client.stat_latency_s
        if not directory.path or latency_s is None or latency_s < _SLOW_S or ttl_s < _LASTING * latency_s:
            return
        parent, _ = self._catalogue.parent_of(directory.path)
        listing = self._catalogue.listing(parent)
        if listing is None:
            return
        walk = self._walks.get(parent)
        if walk is None or walk.listed_at != listing.scanned_at:
            self._start(self._begin, parent, listing.scanned_at, directory.inode, ttl_s)
        else:
            self._walks.move_to_end(parent)
            self._go_on(walk, directory.inode, ttl_s)

    async def listed(self, directory: Node, ttl_s: float) -> bool:
        """List a directory of which a reader wants a name, unless a listing that is younger than `ttl_s` is there.

        Waits for a moment, and goes on in the background. Returns whether such a listing is there.
        """
        if directory.inode not in self._named:
            self._named[directory.inode] = trio.current_time() + MOMENT_S, trio.Event()
            self._start(self._list_named, directory, ttl_s)
        until, ended = self._named[directory.inode]
        with trio.move_on_at(until):
            await ended.wait()
        return self._lister.is_fresh(directory, ttl_s)

    async def _list_named(self, directory: Node, ttl_s: float) -> None:
        try:
            await self._lister.complete(directory, ttl_s)
        finally:
            self._named.pop(directory.inode)[1].set()

    def _start(self, work: Callable[[*Ts], Awaitable[None]], *args: *Ts) -> None:
        async def run() -> None:
            try:
                await work(*args)
            except SpiderfsError as exc:
                # The reader that lists the directory asks again, and gets the error then.
                log.debug("listing ahead: %s", exc)
            finally:
                self._under_way -= 1

        self._under_way += 1
        self._nursery.start_soon(run)

    async def _begin(self, parent: int, listed_at: float, asked: int, ttl_s: float) -> None:
        directories = await trio.to_thread.run_sync(self._directories_in, parent, _ENTRIES)
        walk = self._walks[parent] = _Walk(listed_at, directories)
        if len(self._walks) > _WALKS:
            self._walks.popitem(last=False)
        self._go_on(walk, asked, ttl_s)

    def _go_on(self, walk: _Walk, asked: int, ttl_s: float) -> None:
        for node in walk.following(asked, ttl_s):
            self._start(self._list, node, ttl_s)

    def _directories_in(self, parent: int, most: int) -> list[Node]:
        """The directories among the first entries of a directory, in the order of readdir."""
        path = self._catalogue.node(parent).path
        found = self._catalogue.entries(parent, 0, most)
        nodes = [Node(entry.inode, join(path, entry.name), entry.stat) for entry in found]
        return [node for node in nodes if node.is_directory]

    async def _list(self, node: Node, ttl_s: float) -> None:
        """List a directory, and the first one within, which a reader that goes down asks for next."""
        for _ in range(_DEPTH):
            if self._lister.is_fresh(node, ttl_s):
                return
            async with self._slots:
                await self._lister.complete(node, ttl_s, ahead=True)
            within = self._directories_in(node.inode, _FIRST_ENTRIES)
            if not within:
                return
            node = within[0]
