"""Directories: keeping the catalogue's listings complete and fresh, and walking them.

A directory that has the mtime of its last listing has the names of then, as a rule: where a program sets the mtime back
(`tar -x`), or a server leaves it alone, names come and go unseen. So no mount trusts the listing of an earlier one,
and no listing is trusted for 0 seconds: then the names alone are read again, and attributes are asked for of new ones.

An undated directory (`Source.undated_directories`) has no mtime that could say that its names are still the same. So
its attributes are never asked for, and its listing is made again whenever it is older than the caller allows.

Trainers name samples by paths, whose symbolic links are followed as the kernel does; one that leads out of the mount
has no file.
"""

from __future__ import annotations

import logging
import os
import stat
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TypeVar, TypeVarTuple

import trio

from spiderfs.errors import SourceError, SourceNotFound, SourceUnavailable, SpiderfsError, Stale
from spiderfs.linux import steady_clock
from spiderfs.sources.client import SourceClient
from spiderfs.sources.single_flight import SingleFlight
from spiderfs.sources.source import UNKNOWN, SourceStat
from spiderfs.vfs.catalogue import ROOT_INODE, VIEWS_INODE, Catalogue, Dentry, Node, join
from spiderfs.vfs.rules import is_provisional, left_s

log = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")

# Names taken from the catalogue at a time by a walk.
_CHUNK = 1000
MOST_LINKS = 40
"""How many links are followed for one path: as many as Linux follows (MAXSYMLINKS of namei.h)."""
# Links that one thread reads in a row: in a millisecond from a local disk.
_LINKS_IN_A_ROW = 64

NotRead = Callable[[bytes, SourceError], object]
"""Called with a directory that could not be read, and the error."""


class Lister:
    def __init__(
        self,
        catalogue: Catalogue,
        client: SourceClient,
        clock: Callable[[], float] = steady_clock.now,
        since_s: float = 0.0,
        mountpoint: bytes = b"/",
    ) -> None:
        """No listing from before `since_s` is trusted. `mountpoint` is absolute: links may lead there."""
        self._catalogue, self._client = catalogue, client
        self._flights = SingleFlight(client.timeouts)
        self._now = clock
        self.undated = client.source.undated_directories
        self._since_s = since_s
        self._mountpoint = [name for name in mountpoint.split(b"/") if name]
        self._forms: dict[str, Dentry] = {}
        self.at_once = max(1, client.max_concurrent * 3 // 4)
        """How many directories may be listed at a time for no one who waits: readers have the other threads."""

    @property
    def busy(self) -> bool:
        return self._flights.busy

    async def root(self, timeout_s: float | None = None) -> Node:
        """The root of the source, which is recorded when it is met first; `timeout_s` as in `SourceClient.call`."""
        if (known := self._catalogue.known(ROOT_INODE)) is None or self._catalogue.known(VIEWS_INODE) is None:
            found = await self._client.stat(b"", timeout_s) if known is None else known.stat
            await trio.to_thread.run_sync(self._catalogue.record_root, found)
        return self._catalogue.node(ROOT_INODE)

    async def form(self, name: bytes) -> Dentry | None:
        """What this mount has in its directory of views under a name; the source is not asked."""
        if name not in self._catalogue.forms.names:
            return None
        form = os.fsdecode(name)
        if form not in self._forms:
            self._forms[form] = await trio.to_thread.run_sync(self._catalogue.record_form, form)
        return self._forms[form]

    async def start(self, path: bytes) -> tuple[Node, list[bytes]]:
        """The root of the mount, or of the form, below which a path lies, and the names that follow from there."""
        place = self._catalogue.forms.place(path)
        names = place.path.split(b"/") if place.path else []
        if not place.root:
            return await self.root(), names
        dentry = await self.form(os.fsencode(place.form))
        assert dentry is not None
        return Node(dentry.inode, place.root, dentry.stat), names

    async def directory(self, path: bytes, links: int = MOST_LINKS) -> Node:
        """The directory that a path leads to, by at most so many links.

        This lists each directory above it, so that their names are in the catalogue. Raises Stale if there is no
        directory, SourceError if the source fails.
        """
        node, names = await self.start(path)
        for number, name in enumerate(names):
            if name in (b"", b"."):
                continue
            await self.complete(node, ttl_s=1.0)
            entry = None if name == b".." else self._catalogue.find(node.inode, name)
            if entry is not None and stat.S_ISDIR(entry.stat.mode):
                node = entry.below(node)
                continue
            if name == b"..":
                target = self._led_to(node.path, name)
            elif entry is not None and stat.S_ISLNK(entry.stat.mode):
                (target,) = await self.targets([entry.below(node)])
            else:
                target = None
            if target is None or not links:
                raise Stale(f"{os.fsdecode(path)} leads to no directory")
            return await self.directory(b"/".join([target, *names[number + 1 :]]), links - 1)
        return node

    async def targets(self, links: Sequence[Node]) -> list[bytes | None]:
        """The path below the mount that each link leads to, perhaps by further links; None if there is none."""
        texts = self._catalogue.link_texts(link.inode for link in links)
        unread = [link for link in links if link.inode not in texts]

        async def some(first: int) -> dict[int, bytes]:
            return await self._client.call(self._read_links, unread[first : first + _LINKS_IN_A_ROW])

        firsts = range(0, len(unread), _LINKS_IN_A_ROW)
        for read in (await self._side_by_side(firsts, some, lambda first, exc: None)).values():
            texts |= read
        return [
            self._led_to(link.path.rpartition(b"/")[0], texts[link.inode]) if link.inode in texts else None
            for link in links
        ]

    def _read_links(self, links: Iterable[Node]) -> dict[int, bytes]:
        """The texts of those links that are still there, recorded if they cannot change. In a thread."""
        texts = {}
        for link in links:
            try:
                texts[link.inode] = self._client.source.readlink(link.path)
            except SourceUnavailable:
                raise
            except SourceError:
                continue
        now = self._now()
        settled = [link.inode for link in links if link.inode in texts and not is_provisional(link.settles_at, now)]
        self._catalogue.record_link_texts((inode, texts[inode]) for inode in settled)
        return texts

    def _led_to(self, directory: bytes, target: bytes) -> bytes | None:
        """A link's target below the mount, seen from its directory, which has no links above; None if outside."""
        root = self._mountpoint
        at = [] if target.startswith(b"/") else [*root, *directory.split(b"/")] if directory else [*root]
        left = deque(target.split(b"/"))
        while left and (left[0] in (b"", b".", b"..") or at[: len(root)] != root):
            name = left.popleft()
            if name == b"..":
                del at[-1:]
            elif name not in (b"", b"."):
                at.append(name)
        return b"/".join([*at[len(root) :], *left]) if at[: len(root)] == root else None

    async def directories(
        self, paths: Iterable[bytes], ttl_s: float, not_read: NotRead = lambda path, exc: None
    ) -> dict[bytes, Node]:
        """The directories of paths whose names are known, as of `ttl_s` ago; `not_read` gets those that may be."""

        async def one(path: bytes) -> Node:
            node = await self.directory(path)
            await self.complete(node, ttl_s)
            return node

        return await self._side_by_side(paths, one, not_read)

    async def _side_by_side(
        self, wanted: Iterable[K], ask: Callable[[K], Awaitable[V]], not_read: Callable[[K, SourceError], object]
    ) -> dict[K, V]:
        """What `ask` finds for each of these, `at_once` at a time; what it cannot find is left out."""
        found: dict[K, V] = {}
        left = iter(wanted)

        async def some() -> None:
            for each in left:
                try:
                    with suppress(Stale):
                        found[each] = await ask(each)
                except SourceError as exc:
                    not_read(each, exc)

        async with trio.open_nursery() as nursery:
            for _ in range(self.at_once):
                nursery.start_soon(some)
        return found

    async def refresh(self, node: Node) -> Node:
        """The directory with present attributes, if the source answers; raises Stale if it is none, SourceDenied."""
        if self.undated or not self._client.reachable:
            return node
        try:
            found = await self._flights.run(("stat", node.inode), lambda: self._client.stat(node.path))
        except SourceUnavailable:
            return node
        except SourceNotFound as exc:
            raise await self._gone(node) from exc
        if not stat.S_ISDIR(found.mode):
            raise await self._gone(node)
        return Node(node.inode, node.path, found)

    def looked_up(self, node: Node, ttl_s: float) -> tuple[SourceStat, float] | None:
        """A directory's attributes, if its name was looked up less than `ttl_s` ago, and how much of that is left."""
        name = self._catalogue.find(*self._catalogue.parent_of(node.path)) if self._has_name(node) else None
        if name is None or name.inode != node.inode:
            return None
        left = left_s(name.checked_at, self._now(), ttl_s)
        return (name.stat, left) if left > 0 else None

    def is_fresh(self, node: Node, ttl_s: float) -> bool:
        """Whether all names are known as of `ttl_s` ago: by a scan, or a look-up with the mtime of the last scan."""
        if (listing := self._catalogue.listing(node.inode)) is None:
            return False
        if listing.scanned_at < self._since_s:
            return False
        if left_s(listing.scanned_at, self._now(), ttl_s) > 0:
            return True
        known = None if self.undated else self.looked_up(node, ttl_s)
        return known is not None and listing.is_settled and known[0].mtime_ns == listing.mtime_ns

    async def complete(self, node: Node, ttl_s: float, ahead: bool = False) -> None:
        """Make sure that all names of a directory are known, as of at most `ttl_s` ago or by an unchanged mtime.

        `ahead`: a reader will ask for the directory, and is to find its own name looked up as well. While the source
        is unreachable an old listing must do; raises SourceUnavailable if there is none.
        """
        listing = self._catalogue.listing(node.inode)
        unchanged = False
        if listing is not None:
            if self.is_fresh(node, ttl_s) or not self._client.reachable:
                return
            asked_at, known = self._now(), node
            node = await self.refresh(node)
            unchanged = not self.undated and node.stat.mtime_ns == listing.mtime_ns and listing.is_settled
            # A reader that has just waited in vain for the attributes need not wait for a scan as well.
            if not self._client.reachable:
                return
            if unchanged and ttl_s > 0 and listing.scanned_at >= self._since_s:
                if ahead and node is not known:
                    await trio.to_thread.run_sync(self._record_name, node, asked_at)
                return
        try:
            await self._flights.run(("scan", node.inode), lambda: self._scan(node, ahead, unchanged))
        except SourceUnavailable:
            if listing is None:
                raise
        except SourceNotFound as exc:
            raise await self._gone(node) from exc

    async def _gone(self, node: Node) -> Stale:
        """The error for a directory that is none any more; the next look-up of its path asks the source."""
        await trio.to_thread.run_sync(self._catalogue.expire, node.path, True)
        return Stale(f"{os.fsdecode(node.path)} is no longer a directory")

    async def _scan(self, node: Node, ahead: bool, names_alone: bool) -> None:
        now = self._now()
        known = await trio.to_thread.run_sync(self._catalogue.names_of, node.inode) if names_alone else ()
        own, names = await self._client.scan(node.path, known)

        def record() -> None:
            # The mtime is from before the scan: a change during the scan makes it differ the next time.
            self._catalogue.record_listing(node.inode, names, own.mtime_ns, now)
            if ahead:
                self._record_name(node._replace(stat=own), now)

        await trio.to_thread.run_sync(record)

    def _record_name(self, node: Node, asked_at: float) -> None:
        """Note that the name of a directory was found to mean it. In a thread."""
        if self._has_name(node):
            parent, name = self._catalogue.parent_of(node.path)
            # Another look-up may have found meanwhile that the name is gone.
            if self._catalogue.find(parent, name) is not None:
                self._catalogue.record(parent, name, node.stat, asked_at)

    def _has_name(self, node: Node) -> bool:
        """Whether a directory is one of the source's names, and not the root of the source or of a form."""
        return bool(self._catalogue.forms.place(node.path).path)

    async def walk(
        self,
        wanted: Callable[[bytes], bool],
        ttl_s: float,
        roots: Iterable[bytes] = (b"",),
        not_read: NotRead = lambda path, exc: None,
    ) -> AsyncGenerator[list[Node], None]:
        """All regular files, some at a time, of every directory at and below `roots` whose path is `wanted`.

        `roots` are those of the mount or of forms. A directory that vanishes meanwhile is left out, and so is one that
        cannot be read, or a name whose attributes cannot; `not_read` is called for these two.
        """

        async def complete(directory: Node) -> Node:
            await self.complete(directory, ttl_s)
            return directory

        waiting = [(await self.start(root))[0] for root in roots]
        while waiting:
            some = [directory for directory in waiting[-self.at_once :] if wanted(directory.path)]
            del waiting[-self.at_once :]
            for directory in await self._side_by_side(some, complete, lambda node, exc: not_read(node.path, exc)):
                after = 0
                while entries := self._catalogue.entries(directory.inode, after, _CHUNK):
                    after = entries[-1].position
                    nodes = [entry.below(directory) for entry in entries]
                    waiting += [node for node in nodes if node.is_directory]
                    for node in nodes:
                        if node.stat == UNKNOWN and wanted(node.path):
                            not_read(node.path, SourceUnavailable("the source does not give its attributes"))
                    yield [node for node in nodes if node.is_regular]
                    await trio.lowlevel.checkpoint()


Ts = TypeVarTuple("Ts")

# A directory of tens of thousands of names is not listed sooner; its readers ask for single names meanwhile.
MOMENT_S = 1.0

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
        if (place := self.place_of.get(inode)) is None:
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
    """Lists the next directories for a reader that walks a tree, before it asks for them.

    Programs walk in the order of readdir (os.walk) or by name (ImageFolder, `ls -R`). When a reader lists the first
    directory of its parent in one of these orders, or the next one after its last, a few dozen that follow are listed
    ahead, and one more for each that it comes to; fewer for a slow reader, whose listings would expire. Nothing is
    listed ahead where the source answers at once, or a listing is trusted hardly longer than the source takes.
    """

    def __init__(self, nursery: trio.Nursery, client: SourceClient, catalogue: Catalogue, lister: Lister) -> None:
        self._nursery, self._client, self._catalogue = nursery, client, catalogue
        self._lister = lister
        self._slots = trio.CapacityLimiter(lister.at_once)
        self._walks: OrderedDict[int, _Walk] = OrderedDict()
        self._under_way = 0
        # The directories that are being listed for readers of names: until when these wait, and the end of the listing.
        self._named: dict[int, tuple[float, trio.Event]] = {}

    @property
    def busy(self) -> bool:
        return self._under_way > 0

    def asked(self, directory: Node, ttl_s: float) -> None:
        """A reader lists this directory: list ahead those that are likely next, unless younger than `ttl_s`."""
        latency_s = self._client.stat_latency_s
        if not directory.path or latency_s is None or latency_s < _SLOW_S or ttl_s < _LASTING * latency_s:
            return
        parent, _ = self._catalogue.parent_of(directory.path)
        if (listing := self._catalogue.listing(parent)) is None:
            return
        if (walk := self._walks.get(parent)) is None or walk.listed_at != listing.scanned_at:
            self._start(self._begin, parent, listing.scanned_at, directory.inode, ttl_s)
        else:
            self._walks.move_to_end(parent)
            self._go_on(walk, directory.inode, ttl_s)

    async def listed(self, directory: Node, ttl_s: float) -> bool:
        """List a directory for a reader of one name, who waits a moment; whether a listing as of `ttl_s` is there."""
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
            if not (within := self._directories_in(node.inode, _FIRST_ENTRIES)):
                return
            node = within[0]
