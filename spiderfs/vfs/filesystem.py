"""The file system, without FUSE: names become inodes, inodes become bytes.

The way of a read: `lookup` answers from the catalogue or asks the source; `open` makes a small file local; `read`
slices it out of the store. A file larger than `sample_max_bytes` is read in 1 MiB blocks with read-ahead instead. A
file handle is the inode itself, so any worker can answer any request. Nothing here waits for the manager, except for
control files.

**Provisional versions.** The bytes of a version that has not settled (`core/settling.py`) may still change under it. So
the kernel is told of it under another number, with the bit PROVISIONAL, for no longer than until it has settled; then
the next look-up gives the inode itself. What an open of the first reads is kept from the store, from the kernel's pages
of the second, and from every other open: its handle is a number drawn for it, under which what it has fetched lies in
transit. Everywhere else (events, lists of samples, redirects) the version is its inode.

A failing cache is never the reader's error: the bytes then come from the source. Only the source's own "does not exist"
makes a name vanish; while the source is unreachable, names are answered from what is known.

The module is long because each request of the kernel has its one place here, and what they share (how fresh a name is,
what counts as a hit, when a handle is stale) is only seen to agree side by side.
"""

from __future__ import annotations

import logging
import math
import os
import random
import stat
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import trio

from spiderfs.core.events import FETCHED, HIT, OPENED, UNSTORED
from spiderfs.errors import (
    AccessDenied,
    InvalidArgument,
    IsADirectory,
    NameTooLong,
    NoAttribute,
    NotADirectory,
    ReadOnly,
    SourceChanged,
    SourceError,
    SourceNotADirectory,
    SourceNotFound,
    SourceUnavailable,
    Stale,
    StoreCorrupt,
    StoreError,
)
from spiderfs.metrics import Counters
from spiderfs.shared.attached_trainers import Attached
from spiderfs.shared.bypass_terms import CLIENT_XATTR
from spiderfs.sources.client import Patience, SourceClient
from spiderfs.sources.delivery import Delivery
from spiderfs.sources.source import SourceStat
from spiderfs.store.store import BLOCK_BYTES, LANDING, Content, ContentKey, Member
from spiderfs.vfs.catalogue import PROVISIONAL, ROOT_INODE, Catalogue, Dentry, Node, join
from spiderfs.vfs.control_files import CONTROL_DIRECTORY, CONTROL_INODE, Control, ControlAttributes, is_control_handle
from spiderfs.vfs.fetcher import Fetcher
from spiderfs.vfs.lister import Lister
from spiderfs.vfs.pending_reads import PendingReads
from spiderfs.vfs.permissions import Credentials, Ownership
from spiderfs.vfs.read_ahead import ReadAhead
from spiderfs.vfs.redirects import Redirects

log = logging.getLogger(__name__)

T = TypeVar("T")

# The kernel keeps what it was told for at most this long; `ttl=inf` is a year.
FOREVER_S = 365 * 86400.0
# While the source is unreachable, the kernel asks again after this long.
STALE_TTL_S = 1.0
# NAME_MAX of limits.h; FUSE alone would let names of up to 1,024 bytes through.
NAME_MAX = 255
XATTR_PREFIX = "user.spiderfs."
# Keys of blocks have 32 bits: what could have more of them (some sparse file of 4 PiB) is not cached at all.
MOST_CACHED_BYTES = ((1 << 32) - 1) * BLOCK_BYTES
# Directories whose listing the kernel may keep; forgetting one costs a reading of its names.
_LISTINGS_KEPT = 65536
# An event for each block of 1 MiB: who opens a large file for every sample in it, or one of terabytes, must not fill
# the pipe with them.
PASSED_PAUSE_S, PASSED_BLOCKS = 1.0, 4096
_PASSED_FILES = 4096
# How often a file may change while it is looked up, and how soon the open follows for which it was read.
_CHANGES, _BROUGHT_S = 8, 1.0
# Handles with further bits are those of control files.
_HANDLE_BITS = 62
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND | os.O_CREAT


class Caller(NamedTuple):
    """Who asks for something; `pid` is the number of the thread."""

    uid: int
    gid: int
    pid: int


class Attributes(NamedTuple):
    inode: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    timeout_s: float


class Entry(NamedTuple):
    """A name's answer; inode 0 says that the name does not exist, to be believed for `timeout_s`."""

    attributes: Attributes
    timeout_s: float


class Opened(NamedTuple):
    """`fetched`: the whole content, where the open has brought it from the source.

    `large`: see `lend`.
    `keeps_pages`: the pages that the kernel has of the inode are those of the same bytes.
    """

    handle: int
    direct_io: bool
    fetched: bytes | None = None
    large: bool = False
    keeps_pages: bool = True


class OpenedDirectory(NamedTuple):
    """`keeps`: the kernel is to keep the listing; `kept`: the one that it has may be used."""

    handle: int
    keeps: bool
    kept: bool


class Settings(NamedTuple):
    """The options that requests depend on; replaced as a whole when one is changed while mounted."""

    ttl_s: float = 3600.0
    negative_ttl_s: float = 2.0
    dir_ttl_s: float = 1.0
    sample_max_bytes: int = 8 << 20
    wait_for_fetches: bool = True
    """Give no stand-in for a file that is being fetched already."""
    ownership: Ownership = Ownership()
    checks_permissions: bool = False
    """Whether readers are compared with owners and modes (allow_other)."""


class EventSink(Protocol):
    def note(
        self, inode: int, size: int, where: int, pid: int, block: int = 0, trainer: int = 0, wanted: int = 0
    ) -> None: ...


class Filesystem:
    def __init__(
        self,
        *,
        catalogue: Catalogue,
        content: Content,
        client: SourceClient,
        lister: Lister,
        fetcher: Fetcher,
        read_ahead: ReadAhead,
        redirects: Redirects,
        brought: PendingReads,
        control: Control,
        events: EventSink,
        counters: Counters,
        settings: Settings,
        wall_clock: Callable[[], float] = time.time,
        scattered: Callable[[], bool] = lambda: False,
    ) -> None:
        """`brought` notes which handle the open has to have for which a look-up has read a provisional version.

        `scattered`: whether other processes may know names that this one does not.
        """
        self._catalogue = catalogue
        self._content = content
        self._client = client
        self._lister = lister
        self._fetcher = fetcher
        self._read_ahead = read_ahead
        self._redirects = redirects
        self._control = control
        self._events = events
        self._counters = counters
        self._now = wall_clock
        self._scattered = scattered
        # Of directories: when the listing was made that the kernel may have kept.
        self._listings_kept: dict[int, float] = {}
        # Of directories on the way to stand-ins: their attributes, and when these were asked for.
        self._passed_by: dict[bytes, tuple[SourceStat, float]] = {}
        # Of large files that the kernel reads by itself: when the policies were last told so, and up to which block.
        self._passed: dict[int, tuple[float, int]] = {}
        self._brought = brought
        self._statvfs: os.statvfs_result | None = None
        self._mounted_at_ns = int(wall_clock() * 1e9)
        self.settings = settings

    @property
    def at_rest(self) -> bool:
        """Whether nothing is under way beside the requests that have yet to be answered."""
        return not (self._client.busy or self._fetcher.busy or self._read_ahead.busy)

    # -- names

    async def lookup(self, parent: int, name: bytes, caller: Caller) -> Entry:
        self._counters.add("lookups")
        if parent == CONTROL_INODE or (parent == ROOT_INODE and name == CONTROL_DIRECTORY):
            return Entry(self._control_attributes(self._control.lookup(name)), 0.0)
        if len(name) > NAME_MAX:
            raise NameTooLong(f"{len(name)} bytes")
        known = self._catalogue.find(parent, name)
        if known is not None:
            left_s = self._left_s(known)
            if left_s > 0:
                return await self._served(known, left_s, parent, caller)
            if not self._client.reachable:
                return self._stale_entry(known)
        self._counters.add("lookups_source")
        try:
            found = await self._client.shared((parent, name), lambda: self._look_up_at_source(parent, name))
        except SourceUnavailable:
            if known is None:
                raise
            return self._stale_entry(known)
        if known is not None and known.checked_at == 0 and found is not None:
            found = await self._bring_along(parent, name, found, caller)
        if found is None:
            return Entry(Attributes(0, 0, 0, 0, 0, 0, 0.0), self.settings.negative_ttl_s)
        return await self._served(found, self._left_s(found), parent, caller)

    async def _bring_along(self, parent: int, name: bytes, found: Dentry, caller: Caller) -> Dentry | None:
        """Read a small file with its look-up, for the open that follows at once, until both are of one version.

        It has just changed while it was opened. The kernel looks the name up and opens it once more, and no further
        time; so a file that changes again by then would be an error to its reader.
        """
        path = join(self._catalogue.node(parent).path, name)
        dentry: Dentry | None = found
        for _ in range(_CHANGES):
            if dentry is None or not stat.S_ISREG(dentry.stat.mode):
                break
            if not 0 < dentry.stat.size <= self.settings.sample_max_bytes:
                break
            node = Node(dentry.inode, path, dentry.stat, dentry.settles_at)
            young = node.settles_at > self._now()
            if young:
                node = _for_one_open(node, random.getrandbits(_HANDLE_BITS))
            try:
                await self._fetcher.bring(node)
                if young:
                    self._brought.put(caller.pid, node.inode, dentry.inode | PROVISIONAL, time.monotonic())
                break
            except (SourceNotFound, SourceChanged):
                dentry = await self._client.shared((parent, name), lambda: self._look_up_at_source(parent, name))
            except SourceUnavailable:
                break  # the open is told so
        return dentry

    async def _served(self, dentry: Dentry, left_s: float, parent: int, caller: Caller) -> Entry:
        """The entry for what the caller is given: the file it named, or for a trainer perhaps one that is cached.

        Substitution happens here and nowhere else, so size, bytes and page cache agree for every reader.
        """
        if not self._redirects.active or not stat.S_ISREG(dentry.stat.mode):
            return self._entry(dentry, left_s)
        trainer = self._redirects.trainer_of(caller.pid)
        given = dentry.inode if trainer is None else self._redirects.choose(dentry.inode, trainer, self._at_hand)
        if given != dentry.inode and self._fetcher.stored(ContentKey(given)):
            node = await self._readable(given, parent, caller)
            if node is not None:
                self._redirects.note(caller.pid, dentry.inode, given)
                return Entry(self._attributes(given, node.stat, FOREVER_S), 0.0)
        if trainer is not None:
            # Not to be taken for what it was given before, by a look-up that no open followed.
            self._redirects.note(caller.pid, dentry.inode, dentry.inode)
        # The next reader of this name may be given another file: the kernel has to ask for each of them.
        return self._entry(dentry, 0.0 if self._redirects.concerns(dentry.inode) else left_s)

    async def _readable(self, given: int, beside: int, caller: Caller) -> Node | None:
        """The stand-in, if the caller could open it by its own path, as far as that can be told.

        The kernel has let the caller pass the directories on the way to `beside`, and those alone.
        """
        try:
            node = self._catalogue.node(given)
            if not self.settings.checks_permissions:
                return node
            who = self._redirects.credentials_of(caller.pid, caller.uid, caller.gid)
            if who is None or not self.settings.ownership.may_read(who, node.stat):
                return None
            if who.may_read_all or self._catalogue.parent_of(node.path)[0] == beside:
                return node
            return node if await self._may_come_to(node.path, who) else None
        except (Stale, SourceError) as exc:
            log.debug("no stand-in: %s", exc)
            return None

    async def _may_come_to(self, path: bytes, who: Credentials) -> bool:
        """Whether every directory above lets this reader pass, by attributes as fresh as the kernel would have them."""
        above, now = path, self._now()
        while above:
            above = above.rpartition(b"/")[0]
            found, looked_at = self._passed_by.get(above, (None, 0.0))
            if found is None or not 0 <= now - looked_at < self.settings.dir_ttl_s:
                node = self._catalogue.node(self._catalogue.directory_inode(above))
                found = (await self._lister.refresh(node)).stat
                if len(self._passed_by) >= _LISTINGS_KEPT:
                    self._passed_by.clear()
                self._passed_by[above] = found, now
            if not self.settings.ownership.may_pass(who, found):
                return False
        return True

    def _at_hand(self, inode: int) -> bool:
        """Whether a reader of this file need not wait for a fetch that has yet to begin."""
        key = ContentKey(inode)
        return self._fetcher.stored(key) or (self.settings.wait_for_fetches and self._fetcher.under_way(key))

    async def _look_up_at_source(self, parent: int, name: bytes) -> Dentry | None:
        path = join(self._catalogue.node(parent).path, name)
        now = self._now()

        def stat_and_record() -> Dentry | None:
            # Both in one thread: a hop into one costs 0.15 ms, as much as the rest of a look-up.
            try:
                found = self._client.source.stat(path)
            except (SourceNotFound, SourceNotADirectory):
                self._catalogue.record_gone(parent, name, now)
                return None
            return self._catalogue.record(parent, name, found, now)

        return await self._client.call(stat_and_record)

    def _left_s(self, dentry: Dentry) -> float:
        """For how much longer a dentry may be believed, in seconds; not at all if the clock was set back since."""
        age_s = self._now() - dentry.checked_at
        # Not inf: a dentry that `expire` has set to the beginning of time must be expired for every TTL.
        return min(self.settings.ttl_s, FOREVER_S) - age_s if age_s >= 0 else 0.0

    def _entry(self, dentry: Dentry, left_s: float) -> Entry:
        timeout_s = min(max(left_s, 0.0), FOREVER_S)
        if dentry.settles_at and (settles_in_s := dentry.settles_at - self._now()) > 0:
            # Once it has settled the kernel is to know it under its own number.
            attributes = self._attributes(dentry.inode | PROVISIONAL, dentry.stat, FOREVER_S)
            return Entry(attributes, min(timeout_s, settles_in_s))
        if stat.S_ISDIR(dentry.stat.mode):
            # A directory's attributes change with its content, and its inode stays.
            return Entry(self._attributes(dentry.inode, dentry.stat, self.settings.dir_ttl_s), timeout_s)
        return Entry(self._attributes(dentry.inode, dentry.stat, FOREVER_S), timeout_s)

    def _stale_entry(self, dentry: Dentry) -> Entry:
        self._counters.add("lookups_stale")
        return self._entry(dentry, STALE_TTL_S)

    def _attributes(self, inode: int, found: SourceStat, timeout_s: float) -> Attributes:
        mode, uid, gid = self.settings.ownership.shown(found)
        return Attributes(inode, mode, uid, gid, found.size, found.mtime_ns, timeout_s)

    def _control_attributes(self, found: ControlAttributes) -> Attributes:
        own = self.settings.ownership
        uid = os.getuid() if own.uid is None else own.uid
        gid = os.getgid() if own.gid is None else own.gid
        return Attributes(found.inode, found.mode, uid, gid, found.size, self._mounted_at_ns, 0.0)

    async def getattr(self, inode: int) -> Attributes:
        if self._control.owns(inode):
            return self._control_attributes(self._control.getattr(inode))
        node = self._catalogue.node(inode)
        if node.is_directory:
            node = await self._lister.refresh(node)
            return self._attributes(inode, node.stat, self.settings.dir_ttl_s)
        return self._attributes(inode, node.stat, FOREVER_S)

    async def readlink(self, inode: int) -> bytes:
        node = self._catalogue.node(inode)
        if not stat.S_ISLNK(node.stat.mode):
            raise InvalidArgument("not a symbolic link")
        try:
            return await self._client.shared(("link", inode), lambda: self._client.readlink(node.path))
        except (SourceNotFound, SourceChanged) as exc:
            raise await self._stale(node) from exc

    # -- directories

    async def opendir(self, inode: int) -> OpenedDirectory:
        """Make sure that the listing is complete and fresh; the handle is the inode."""
        if inode == CONTROL_INODE:
            return OpenedDirectory(inode, keeps=False, kept=False)
        node = self._catalogue.node(inode)
        if not node.is_directory:
            raise NotADirectory(os.fsdecode(node.path))
        await self._lister.complete(node, self.settings.dir_ttl_s)
        listing = self._catalogue.listing(inode)
        scanned_at = 0.0 if listing is None else listing.scanned_at
        # What the kernel keeps was read after this worker had last made it drop what it had.
        kept = self._listings_kept.get(inode) == scanned_at
        if not kept:
            if len(self._listings_kept) >= _LISTINGS_KEPT:
                self._listings_kept.clear()
            self._listings_kept[inode] = scanned_at
        return OpenedDirectory(inode, keeps=True, kept=kept)

    async def readdir(self, inode: int, after: int, limit: int) -> list[tuple[bytes, Entry, int]]:
        """Up to `limit` entries behind position `after`: name, entry, position."""
        if inode == CONTROL_INODE:
            return [
                (name, Entry(self._control_attributes(attributes), 0.0), position)
                for name, attributes, position in self._control.readdir()
                if position > after
            ]
        if self._scattered():
            # Another worker may have answered the opendir.
            await self._lister.complete(self._catalogue.node(inode), self.settings.dir_ttl_s)
        return [
            (dentry.name, self._listed(dentry), dentry.position)
            for dentry in self._catalogue.entries(inode, after, limit)
        ]

    def _listed(self, dentry: Dentry) -> Entry:
        asks_each_time = self._redirects.active and self._redirects.concerns(dentry.inode)
        return self._entry(dentry, 0.0 if asks_each_time else self._left_s(dentry))

    # -- contents

    async def open(self, inode: int, flags: int, caller: Caller, delivery: Delivery | None = None) -> Opened:
        """Make a small file local. What reads it from the source may answer through `delivery` before this returns."""
        if self._control.owns(inode):
            # What has been read is to be seen in what is said of it.
            await self._fetcher.caught_up()
            return Opened(await self._control.open(inode, flags, caller.uid), direct_io=True)
        if flags & _WRITING:
            raise ReadOnly("spiderfs is read-only")
        node = self._catalogue.node(inode)
        if not node.is_regular:
            raise IsADirectory(os.fsdecode(node.path))
        if inode & PROVISIONAL:
            return await self._open_provisional(node, caller)
        if node.settles_at and node.settles_at > self._now():
            # The clock was set back meanwhile: the next look-up, which the kernel makes at once, tells it so.
            raise Stale(f"{os.fsdecode(node.path)} may still be written to")
        if node.stat.size <= self.settings.sample_max_bytes:
            return await self._make_local(node, caller, delivery)
        # Only READ knows which blocks are wanted; the open itself waits for nothing.
        self._note_large(node, caller)
        return Opened(inode, direct_io=False, large=True)

    def _note_large(self, node: Node, caller: Caller) -> None:
        inode = node.inode
        self._check_still_named(node)
        self._counters.add("opens")
        self._counters.add("opens_hit")
        if self._redirects.attended and (reader := self._redirects.trainer_of(caller.pid)) is not None:
            wanted = self._redirects.wanted(caller.pid, inode) or inode
            self._events.note(inode, 0, OPENED, caller.pid, trainer=reader.number, wanted=wanted)

    async def _open_provisional(self, node: Node, caller: Caller) -> Opened:
        """Its bytes may change under it: they are read anew for each open, and not kept for another one."""
        # What this thread's look-up has read is for this open, whichever worker answers it, and for no other one.
        brought = self._brought.take(caller.pid, node.inode | PROVISIONAL, time.monotonic() - _BROUGHT_S)
        handle = random.getrandbits(_HANDLE_BITS) if brought is None else brought
        if node.stat.size > self.settings.sample_max_bytes:
            self._note_large(node, caller)
            return Opened(handle, direct_io=False, keeps_pages=False)
        trainer, wanted, _ = self._reader_of(node, caller)
        started = time.perf_counter()
        if node.stat.size and self._fetcher.passing(ContentKey(handle)) is None:
            try:
                await self._fetcher.bring(_for_one_open(node, handle))
            except (SourceNotFound, SourceChanged) as exc:
                raise await self._stale(node) from exc
        took_s = time.perf_counter() - started
        self._counters.add("opens")
        self._counters.add("stall_microseconds", int(took_s * 1e6))
        self._counters.observe("open_miss_seconds", took_s)
        if wanted != node.inode:
            self._counters.add("redirects")
        self._note_fetched(node, caller.pid, trainer, wanted, UNSTORED)
        return Opened(handle, direct_io=False, keeps_pages=False)

    def lend(self, inode: int) -> int | None:
        """A descriptor of a plain file that has the bytes of this large one, if there is one; see `Content.lend`."""
        return self._ask_of_large(inode, self._content.lend)

    def whole(self, inode: int) -> bool:
        """Whether what was lent before is in the cache still."""
        return bool(self._ask_of_large(inode, self._content.whole))

    def _ask_of_large(self, inode: int, ask: Callable[[int, int], T]) -> T | None:
        """What the store answers about a file of this inode and its size; None where it, or the catalogue, cannot."""
        try:
            return ask(inode, self._catalogue.node(inode).stat.size)
        except StoreCorrupt:
            raise
        except (StoreError, Stale) as exc:
            log.debug("inode %d is not passed through: %s", inode, exc)
            return None

    def passed_through(self, inode: int) -> None:
        """Account for an open after which the kernel reads a large file without asking: as if all of it were read."""
        self._counters.add("passthrough_opens")
        now = self._now()
        told_at, told = self._passed.get(inode, (0.0, 0))
        if now - told_at < PASSED_PAUSE_S:
            return
        # Of blocks that were evicted since, and are read all the same, the policies would make room for nothing.
        size = self._ask_of_large(inode, lambda inode, size: size if self._content.whole(inode, size) else 0)
        if not size:
            return
        blocks = math.ceil(size / BLOCK_BYTES)
        until = told + min(blocks, PASSED_BLOCKS)
        for block in (number % blocks for number in range(told, until)):
            self._events.note(inode, min(BLOCK_BYTES, size - block * BLOCK_BYTES), HIT, 0, block + 1)
        if len(self._passed) >= _PASSED_FILES:
            self._passed.clear()
        self._passed[inode] = (now, until % blocks)

    def _check_still_named(self, node: Node) -> None:
        """Raises Stale for a version whose name is known to mean another one by now.

        The kernel believes a name for its whole TTL. Told by an open that it is stale, it looks the name up anew and
        opens again; an ESTALE from READ, where the change of a large file is found, goes to the reader and leaves the
        name believed.
        """
        known = self._catalogue.find(*self._catalogue.parent_of(node.path))
        if known is None or known.inode != node.inode or known.checked_at == 0:
            raise Stale(f"{os.fsdecode(node.path)} has changed at the source")

    async def _make_local(self, node: Node, caller: Caller, delivery: Delivery | None) -> Opened:
        # Now: once this open has been answered, the same caller may have looked up another name.
        trainer, wanted, believed = self._reader_of(node, caller)
        started = time.perf_counter()
        fetched = None
        key = ContentKey(node.inode)
        if node.stat.size and not self._fetcher.stored(key) and not await self._fetcher.has_come(key):
            if believed is not None:
                self._send_back(node, believed, caller)
            try:
                fetched = await self._fetcher.bring(node, delivery=delivery)
            except (SourceNotFound, SourceChanged) as exc:
                raise await self._stale(node) from exc
        took_s = time.perf_counter() - started
        self._counters.add("opens")
        if fetched is None:
            self._counters.add("opens_hit")
            self._counters.observe("open_hit_seconds", took_s)
        else:
            self._counters.add("stall_microseconds", int(took_s * 1e6))
            self._counters.observe("open_miss_seconds", took_s)
        if wanted != node.inode:
            self._counters.add("redirects")
        if fetched is None:
            self._events.note(node.inode, node.stat.size, HIT, caller.pid, trainer=trainer, wanted=wanted)
            return Opened(node.inode, direct_io=False)
        # An event says where the bytes lie, so it waits until they do.
        fetched.when_settled(partial(self._note_fetched, node, caller.pid, trainer, wanted))
        return Opened(node.inode, direct_io=False, fetched=fetched.payload)

    def _send_back(self, node: Node, trainer: Attached, caller: Caller) -> None:
        """Raises Stale if a look-up would give this trainer a stand-in for the file, and there was none.

        The kernel believes a name for its whole TTL, also once it has got a stand-in. Told by an open that what it
        believes is stale, it looks the name up and opens what it is given; so nothing has to be forgotten beforehand.
        """
        if not self._redirects.active:
            return
        given = self._redirects.choose(node.inode, trainer, self._at_hand)
        if given != node.inode and self._fetcher.stored(ContentKey(given)):
            # Once: who opens without a name (/proc/self/fd) comes back without a look-up, and gets the file itself.
            self._redirects.note(caller.pid, node.inode, node.inode)
            raise Stale(f"{os.fsdecode(node.path)} has a stand-in")

    def _reader_of(self, node: Node, caller: Caller) -> tuple[int, int, Attached | None]:
        """The number of the trainer that opens a file, or 0, and the inode that it wanted.

        And the trainer itself, if it has not just looked the file up: the kernel has believed the name.
        """
        if self._redirects.attended and (reader := self._redirects.trainer_of(caller.pid)) is not None:
            asked = self._redirects.wanted(caller.pid, node.inode)
            return reader.number, asked or node.inode, reader if asked is None else None
        return 0, node.inode, None

    def _note_fetched(self, node: Node, pid: int, trainer: int, wanted: int, where: int) -> None:
        if where != FETCHED:
            self._counters.add("opens_uncached")
        self._events.note(node.inode, node.stat.size, where, pid, trainer=trainer, wanted=wanted)

    async def read(self, handle: int, offset: int, size: int, inode: int = 0) -> memoryview | bytes:
        """Up to `size` bytes, short only at the end of the file; a view is valid until the next request.

        `inode` is what was opened, and matters for what is provisional.
        """
        if is_control_handle(handle):
            return await self._control.read(handle, offset, size)
        self._counters.add("reads")
        if inode & PROVISIONAL:
            return await self._read_provisional(_for_one_open(self._catalogue.node(inode), handle), offset, size)
        piece = self._fetcher.local(ContentKey(handle), offset, size)
        if piece is None:
            node = self._catalogue.node(handle)
            if node.stat.size > self.settings.sample_max_bytes:
                return await self._read_blocks(node, offset, size)
            piece = (await self._fetch_again(node))[offset : offset + size]
        self._counters.add("read_bytes", len(piece))
        return piece

    async def _read_provisional(self, node: Node, offset: int, size: int) -> memoryview | bytes:
        if node.stat.size > self.settings.sample_max_bytes:
            return await self._read_blocks(node, offset, size)
        payload = self._fetcher.passing(ContentKey(node.inode))
        piece = (memoryview(payload) if payload is not None else await self._fetch_again(node))[offset : offset + size]
        self._counters.add("read_bytes", len(piece))
        return piece

    async def _fetch_again(self, node: Node) -> memoryview:
        """The bytes left the store after the open; bring them once more."""
        started = time.perf_counter()
        try:
            fetched = await self._fetcher.bring(node)
        except (SourceNotFound, SourceChanged) as exc:
            raise await self._stale(node) from exc
        self._counters.add("stall_microseconds", int((time.perf_counter() - started) * 1e6))
        return memoryview(fetched.payload)

    async def _read_blocks(self, node: Node, offset: int, size: int) -> memoryview | bytes:
        end = min(offset + size, node.stat.size)
        if offset >= end:
            return b""
        if node.stat.size > MOST_CACHED_BYTES:
            return await self._read_past_cache(node, offset, end - offset)
        pieces = []
        blocks = range(offset // BLOCK_BYTES + 1, (end - 1) // BLOCK_BYTES + 2)
        # Of the whole READ, whatever it has to wait for.
        patience = self._client.patience() if len(blocks) > 1 else None
        for block in blocks:
            first = (block - 1) * BLOCK_BYTES
            start = max(offset - first, 0)
            piece = await self._block(node, block, start, min(end - first, BLOCK_BYTES) - start, patience)
            # The next block may have to be awaited, and a view does not outlive that.
            pieces.append(piece if first + BLOCK_BYTES >= end else bytes(piece))
        self._counters.add("read_bytes", end - offset)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _read_past_cache(self, node: Node, offset: int, size: int) -> bytes:
        started = time.perf_counter()
        try:
            piece = await self._client.read(node.path, offset, size, node.version)
        except (SourceNotFound, SourceChanged) as exc:
            raise await self._stale(node) from exc
        self._counters.add("origin_reads")
        self._counters.add("origin_bytes", size)
        self._counters.add("read_bytes", size)
        self._counters.add("stall_microseconds", int((time.perf_counter() - started) * 1e6))
        return piece

    async def _block(self, node: Node, block: int, offset: int, size: int, patience: Patience | None) -> memoryview:
        self._counters.add("block_reads")
        for further in self._read_ahead.wanted(node, block):
            self._read_ahead.start(node, further)
        whole = min(BLOCK_BYTES, node.stat.size - (block - 1) * BLOCK_BYTES)
        key = ContentKey(node.inode, block)
        piece = self._fetcher.local(key, offset, size)
        if piece is not None:
            self._counters.add("block_hits")
            coming = self._fetcher.on_its_way(key)
            if coming is None:
                self._note_block(node, whole, block, HIT)
            else:
                # Brought by read-ahead. Told of it before it is in the store, the manager could not keep it.
                coming.when_settled(
                    lambda where: self._note_block(node, whole, block, HIT if where == FETCHED else where)
                )
            return piece
        started = time.perf_counter()
        try:
            fetched = await self._fetcher.bring(node, block, patience=patience)
        except (SourceNotFound, SourceChanged) as exc:
            raise await self._stale(node) from exc
        self._counters.add("stall_microseconds", int((time.perf_counter() - started) * 1e6))
        fetched.when_settled(lambda where: self._note_block(node, whole, block, where))
        return memoryview(fetched.payload)[offset : offset + size]

    def _note_block(self, node: Node, size: int, block: int, where: int) -> None:
        if node.settles_at != math.inf:
            self._events.note(node.inode, size, where, 0, block)

    async def _stale(self, node: Node) -> Stale:
        """The error for a version that the source no longer has; the name is looked up anew from now on."""
        self._counters.add("stale_handles")
        parent, name = self._catalogue.parent_of(node.path)
        try:
            await trio.to_thread.run_sync(self._catalogue.expire, parent, name)
        except StoreError as exc:
            log.warning("%s: an old name may be shown until it expires", exc)
        return Stale(f"{os.fsdecode(node.path)} has changed at the source")

    async def release(self, handle: int) -> None:
        if is_control_handle(handle):
            await self._control.release(handle)

    async def write(self, handle: int, data: bytes) -> int:
        if not is_control_handle(handle):
            raise ReadOnly("spiderfs is read-only")
        return await self._control.write(handle, data)

    async def truncate(self, inode: int) -> Attributes:
        """What the shell does before it writes; only control files may be written."""
        if not self._control.owns(inode):
            raise ReadOnly("spiderfs is read-only")
        return self._control_attributes(self._control.getattr(inode))

    # -- attributes beside

    async def access(self, inode: int, mask: int, caller: Caller) -> None:
        """Raises ReadOnly or AccessDenied where `mask` (R_OK, W_OK, X_OK) is not granted; access(2)."""
        attributes = await self.getattr(inode)
        if mask & os.W_OK and not self._control.owns(inode):
            raise ReadOnly("spiderfs is read-only")
        if caller.uid == 0:
            allowed = os.R_OK | os.W_OK
            if attributes.mode & 0o111 or stat.S_ISDIR(attributes.mode):
                allowed |= os.X_OK
        elif caller.uid == attributes.uid:
            allowed = attributes.mode >> 6 & 7
        else:
            # Supplementary groups are the kernel's to judge: with allow_other it checks permissions itself.
            allowed = (
                (attributes.mode >> 3 | attributes.mode) & 7 if caller.gid == attributes.gid else attributes.mode & 7
            )
        if mask & ~allowed & 7:
            raise AccessDenied(f"mode {attributes.mode & 0o777:o} does not allow this")

    async def statfs(self) -> os.statvfs_result:
        try:
            self._statvfs = await self._client.shared("statfs", self._client.statvfs)
        except SourceUnavailable:
            # Sizes as they were once known are of more use to df(1) than an error.
            if self._statvfs is None:
                raise
        return self._statvfs

    async def listxattr(self, inode: int) -> list[str]:
        if self._control.owns(inode):
            return []
        node = self._catalogue.node(inode)
        own = [XATTR_PREFIX + name for name in _OWN_XATTRS] if node.is_regular else []
        return own + [name for name in await self._client.listxattr(node.path) if name.startswith("user.")]

    async def getxattr(self, inode: int, name: str) -> bytes:
        if name.startswith("user.") and not self._control.owns(inode):
            if inode == ROOT_INODE and name == CLIENT_XATTR:
                return os.fsencode(self._control.client_terms)
            node = self._catalogue.node(inode)
            if name.startswith(XATTR_PREFIX) and node.is_regular:
                render = _OWN_XATTRS.get(name[len(XATTR_PREFIX) :])
                if render is not None:
                    await self._fetcher.caught_up()
                    return os.fsencode(render(self, node))
            else:
                value = await self._client.getxattr(node.path, name)
                if value is not None:
                    return value
        raise NoAttribute(name)

    def _cached_blocks(self, node: Node) -> tuple[int, int]:
        """How many of the file's records are in the store, and how many it has."""
        if node.stat.size <= self.settings.sample_max_bytes:
            return int(node.stat.size == 0 or self._fetcher.stored(ContentKey(node.inode))), 1
        return self._fetcher.stored_blocks(node.inode), -(-node.stat.size // BLOCK_BYTES)

    def _xattr_state(self, node: Node) -> str:
        if node.settles_at > self._now():
            return "provisional"
        cached, blocks = self._cached_blocks(node)
        if cached == blocks:
            return "cached"
        return f"partial {cached}/{blocks}" if cached else "uncached"

    def _member(self, node: Node) -> Member | None:
        try:
            return self._content.member(ContentKey(node.inode))
        except StoreCorrupt:
            raise
        except StoreError as exc:
            log.debug("%s: taken for not cached", exc)
            return None

    def _xattr_section(self, node: Node) -> str:
        member = self._member(node)
        return member.section if member else "none"

    def _xattr_score(self, node: Node) -> str:
        member = self._member(node)
        return f"{member.score:g}" if member and member.section != LANDING else "none"

    def _xattr_served_by(self, node: Node) -> str:
        """Paths of the files that trainers may be given for this one now."""
        paths = [self._catalogue.node(inode).path for inode in self._redirects.stand_ins(node.inode)]
        return "\n".join(os.fsdecode(path) for path in paths) or "itself"

    def _xattr_inode(self, node: Node) -> str:
        return str(node.inode)

    def _xattr_version(self, node: Node) -> str:
        return f"{node.stat.size} {node.stat.mtime_ns}"


def _for_one_open(node: Node, handle: int) -> Node:
    """A provisional version as one open of it sees it, which it stays for as long as that lasts."""
    return node._replace(inode=handle, settles_at=math.inf)


_OWN_XATTRS: dict[str, Callable[[Filesystem, Node], str]] = {
    "state": Filesystem._xattr_state,
    "section": Filesystem._xattr_section,
    "score": Filesystem._xattr_score,
    "served_by": Filesystem._xattr_served_by,
    "inode": Filesystem._xattr_inode,
    "version": Filesystem._xattr_version,
}
