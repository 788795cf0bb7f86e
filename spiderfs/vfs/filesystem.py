"""The file system, independent of FUSE: names become inodes, inodes become bytes.

The way of a read, one method each: `lookup` answers from the catalogue, or asks the source; `open` makes a small file
local; `read` takes its bytes out of the store. Other modules hold what these three need: who gets a substitute
(`substitutes.py`), fetches that readers wait for (`on_demand.py`), files that are read as a whole (`small_files.py`)
and in blocks (`large_files.py`), files that may still be written to (`provisional_files.py`), fetching (`fetcher.py`),
and control files (`control_files.py`).

A file handle is the inode itself, so any worker can answer any request. Only control files wait for the manager. A
failing cache is never the reader's error: the bytes then come from the source. A name vanishes only when the source
itself says "does not exist"; while the source is unreachable, names are answered from what is known.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from functools import partial

from spiderfs import errors
from spiderfs.linux import steady_clock
from spiderfs.shared.shared_memory import SharedSlots
from spiderfs.sources.members import key_at
from spiderfs.sources.peers import asked_version
from spiderfs.sources.single_flight import SingleFlight
from spiderfs.sources.source import UNKNOWN, Delivery, SourceStat
from spiderfs.store.store import ContentKey
from spiderfs.vfs.answer_types import Attributes, Caller, Entry, EventSink, Opened, OpenedDirectory
from spiderfs.vfs.catalogue import NEVER, PROVISIONAL, ROOT_INODE, VIEWS_INODE, Dentry, Node, join
from spiderfs.vfs.control_files import CONTROL_DIRECTORY, CONTROL_INODE, Control, ControlAttributes, is_control_handle
from spiderfs.vfs.large_files import LargeFiles, ReadAhead, Touches
from spiderfs.vfs.lister import WalkAhead
from spiderfs.vfs.on_demand import OnDemand, Part, Shared, Supply
from spiderfs.vfs.provisional_files import ProvisionalFiles
from spiderfs.vfs.redirects import Redirects
from spiderfs.vfs.rules import FOREVER_S, Settings, is_provisional, left_s
from spiderfs.vfs.small_files import Push, RangeReader, SmallFiles
from spiderfs.vfs.substitutes import Substitutes
from spiderfs.vfs.unstored_bytes import UnstoredBytes
from spiderfs.vfs.xattrs import Xattrs
from spiderfs.views.tree import ROOT_LINK, VIEWS_DIRECTORY

# While the source is unreachable, the kernel asks again after this long.
STALE_TTL_S = 1.0
# NAME_MAX of limits.h; FUSE alone would let names of up to 1,024 bytes through.
NAME_MAX = 255
# A listing is read in pieces, for which it is not made again each time.
_OPENED_S = 1.0
# For a name that is trusted for a shorter time its directory is not listed.
_LISTED_FOR_S = 60.0
# Directories whose listing the kernel may keep; forgetting one costs a reading of its names.
_LISTINGS_KEPT = 65536
_WRITE_BITS = 0o222
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND | os.O_CREAT
# The directories that are no names of the source: `.spiderfs`, and in it `views` with a directory for each form of the
# files (`views/tree.py`). What lies below one of those are names of the source, like those below the root.
_OWN_DIRECTORIES = (CONTROL_INODE, VIEWS_INODE)
_VIEWS = VIEWS_DIRECTORY.rpartition(b"/")[2]


# Where no one can say whose READ it is.
_NO_ONE = Caller(0, 0, 0)


class Filesystem(Part):
    def __init__(
        self,
        *,
        supply: Supply,
        read_ahead: ReadAhead,
        touches: Touches,
        walk_ahead: WalkAhead,
        redirects: Redirects,
        unstored: UnstoredBytes,
        control: Control,
        events: EventSink,
        settings: Settings,
        clock: Callable[[], float] = steady_clock.now,
        scattered: Callable[[], bool] = lambda: False,
        asked_by_peers: SharedSlots | None = None,
        source_salt: int = 0,
        push: Push = lambda inode, content, offset: None,
    ) -> None:
        """`unstored`: the fetcher has the same. `scattered`: as in `Shared`.

        `asked_by_peers`: which stripes other nodes have asked for; None where there are none. `source_salt`: see
        `sources.members.salt_of`. `push`: see `Kernel`.
        """
        shared = Shared(supply, redirects, events, unstored, lambda: self.settings, scattered, clock)
        super().__init__(shared)
        self._asked_by_peers, self._source_salt = asked_by_peers, source_salt
        self._flights = SingleFlight(supply.client.timeouts)
        self._read_ahead, self._walk_ahead, self._control = read_ahead, walk_ahead, control
        self.settings = settings  # replaced as a whole when an option changes
        # By directory: when the listing was made that the kernel may have kept.
        self._listings_kept: dict[int, float] = {}
        self._statvfs: os.statvfs_result | None = None
        self._mounted_at_ns = int(clock() * 1e9)
        self._on_demand, self._substitutes = OnDemand(shared), Substitutes(shared)
        self._small_files = SmallFiles(shared, self._on_demand, self._substitutes)
        asked = () if asked_by_peers is None else asked_by_peers
        self.large_files = LargeFiles(shared, self._on_demand, read_ahead, touches, asked)
        self._ranges = RangeReader(shared, self._small_files, push)
        self._provisional_files = ProvisionalFiles(shared, self._on_demand, self._small_files, self.large_files)
        self._xattrs = Xattrs(shared, control.client_terms)

    @property
    def at_rest(self) -> bool:
        """Whether nothing is under way beside the requests that have yet to be answered."""
        working = (self._flights, self._lister, self._fetcher, self._read_ahead, self._walk_ahead)
        return not any(part.busy for part in working)

    # -- names

    async def lookup(self, parent: int, name: bytes, caller: Caller) -> Entry:
        self._counters.add("lookups")
        if parent in _OWN_DIRECTORIES or (parent == ROOT_INODE and name == CONTROL_DIRECTORY):
            return await self._lookup_own(parent, name)
        if len(name) > NAME_MAX:
            raise errors.NameTooLong(f"{len(name)} bytes")
        if self._asked_by_peers is not None and (asked := asked_version(name)) is not None:
            return await self._lookup_for_peer(parent, *asked, caller)
        known = self._catalogue.find(parent, name)
        again = self._unstored.opens_again(caller.pid)
        if known is not None and not again:
            left = self._left_s(known)
            if left > 0:
                return await self._answer(known, left, parent, caller)
            if not self._client.reachable:
                return self._stale_entry(known)
        self._counters.add("lookups_source")
        try:
            found, _ = await self._look_up_at_source(parent, name)
        except errors.SourceUnavailable:
            if known is None:
                raise
            return self._stale_entry(known)
        if found is not None and (again or (known is not None and known.checked_at == NEVER)):
            directory = self._catalogue.node(parent).path
            read = partial(self._look_up_at_source, parent, name, reads=True)
            found = await self._provisional_files.bring_along(directory, found, caller, read)
        if found is None:
            return _no_entry(self.settings.negative_ttl_s)
        return await self._answer(found, self._left_s(found), parent, caller)

    async def _lookup_for_peer(self, parent: int, name: bytes, version: int, stripe: int, caller: Caller) -> Entry:
        """The entry for a node that reads a version at `stripe` (`sources/peers.py`); none if it is another one."""
        assert self._asked_by_peers is not None
        entry = await self.lookup(parent, name, caller)
        if entry.attributes.inode != version ^ self._source_salt:
            return _no_entry(0.0)
        self._asked_by_peers.put(key_at(entry.attributes.inode, stripe))
        return entry._replace(timeout_s=0.0)

    async def _lookup_own(self, parent: int, name: bytes) -> Entry:
        """The entry of a name in `.spiderfs`, in `views` there, or of `.spiderfs` in the root; raises NotFound."""
        if parent == ROOT_INODE:
            # Whoever opens a file below `views` passes the directory, which stays the same.
            return Entry(self._control_attributes(self._control.getattr(CONTROL_INODE)), FOREVER_S)
        if parent == CONTROL_INODE:
            if name == _VIEWS and self._catalogue.forms.names:
                return self._views_entry()
            return Entry(self._control_attributes(self._control.lookup(name)), 0.0)
        dentry = await self._lister.form(name)
        return _no_entry(FOREVER_S) if dentry is None else self._entry(dentry, FOREVER_S)

    def _views_entry(self) -> Entry:
        # Mode and owner are those of the root: the kernel may let readers pass by them.
        return Entry(self._attributes(VIEWS_INODE, self._catalogue.node(VIEWS_INODE).stat, FOREVER_S), FOREVER_S)

    def _left_s(self, name: Dentry) -> float:
        """How many more seconds a name is trusted; 0 or less: ask the source."""
        settings = self.settings
        return left_s(name.checked_at, self._now(), settings.ttl_s, settings.checked_since_s, name.settles_at)

    async def _answer(self, dentry: Dentry, left: float, parent: int, caller: Caller) -> Entry:
        """The entry of what the caller is given for a name: the file itself, or for a trainer perhaps a substitute."""
        if self._redirects.active and stat.S_ISREG(dentry.stat.mode):
            if (substitute := await self._substitutes.given(dentry, parent, caller)) is not None:
                substitute = await self._on_demand.sized(substitute)
                return Entry(self._attributes(substitute.inode, substitute.stat, FOREVER_S), 0.0)
            if self._redirects.concerns(dentry.inode):
                # The next reader of this name may be given another file, so the kernel has to ask for each of them.
                left = 0.0
        return self._entry(await self._on_demand.sized_name(dentry), left)

    async def _look_up_at_source(
        self, parent: int, name: bytes, reads: bool = False
    ) -> tuple[Dentry | None, bytes | None]:
        """What a name means now; `reads`: with the bytes of that version, if it is a small file."""
        directory = self._catalogue.node(parent)
        path = join(directory.path, name)
        if self._lister.undated and not reads and await self._is_listed(directory, name):
            known = self._catalogue.find(parent, name)
            if known is not None or not self._catalogue.is_name_alone(parent, name):
                return known, None
        now = self._now()

        def look_and_record() -> tuple[Dentry | None, bytes | None]:
            # Both in one thread: a hop into one costs 0.15 ms, as much as the rest of a look-up.
            found = content = None
            try:
                if reads:
                    with contextlib.suppress(errors.SourceChanged):
                        found, content = self._client.source.read_present(path, self.settings.sample_max_bytes)
                found = found or self._client.source.stat(path)
            except errors.SourceNotADirectory as exc:
                # The kernel looks the whole path up again, and finds what has come in the directory's place.
                self._catalogue.expire(path, whole=True)
                raise errors.Stale(f"{os.fsdecode(path)} has no directory any more") from exc
            except errors.SourceNotFound:
                self._catalogue.record_gone(parent, name, now)
                return None, None
            return self._catalogue.record(parent, name, found, now, exactly=reads), content

        return await self._flights.run((parent, name, reads), lambda: self._client.call(look_and_record))

    async def _is_listed(self, directory: Node, name: bytes) -> bool:
        """Whether a listing of an undated directory says what a name means now, or that it does not exist.

        A page of names costs an object store no more than one name, and whoever wants one wants others too. So a
        directory is listed if its listing is as old as the name, and then trusted for some time.
        """
        settings, is_known = self.settings, self._catalogue.find(directory.inode, name) is not None
        ttl_s = settings.ttl_s if is_known else settings.dir_ttl_s
        if ttl_s < _LISTED_FOR_S:
            return False
        if self._lister.is_fresh(directory, ttl_s):
            # A known name was found to have changed since, and an unknown one may have come.
            return not is_known and self._lister.is_fresh(directory, settings.negative_ttl_s)
        return await self._walk_ahead.listed(directory, ttl_s)

    def _entry(self, dentry: Dentry, left: float) -> Entry:
        timeout_s = left if left > 0.0 else 0.0
        if dentry.settles_at and is_provisional(dentry.settles_at, now := self._now()):
            # Once the version has settled, the kernel is to know it under its own number. Until then the file itself is
            # shown, also if its view was made before the clock was set back.
            original = dentry.stat._replace(size=dentry.stat.version.size)
            attributes = self._attributes(dentry.inode | PROVISIONAL, original, FOREVER_S)
            return Entry(attributes, min(timeout_s, dentry.settles_at - now))
        ttl_s = self._directory_attributes_ttl_s if stat.S_ISDIR(dentry.stat.mode) else FOREVER_S
        return Entry(self._attributes(dentry.inode, dentry.stat, ttl_s), timeout_s)

    def _stale_entry(self, dentry: Dentry) -> Entry:
        if self._on_demand.is_unsized(dentry):
            raise errors.SourceUnavailable(
                f"{os.fsdecode(dentry.name)}: its view was not made yet, and the source is away"
            )
        self._counters.add("lookups_stale")
        return self._entry(dentry, STALE_TTL_S)

    @property
    def _directory_attributes_ttl_s(self) -> float:
        # They change with its content, while its inode stays.
        return self.settings.dir_ttl_s

    def _attributes(self, inode: int, found: SourceStat, timeout_s: float) -> Attributes:
        mode, uid, gid = self.settings.ownership.shown(found)
        if self.settings.checks_permissions and not stat.S_ISLNK(mode):
            # The kernel answers access(2) by the mode alone, and in an immutable mount opens files to write.
            mode &= ~_WRITE_BITS
        return Attributes(inode, mode, uid, gid, found.size, found.mtime_ns, timeout_s)

    def _control_attributes(self, found: ControlAttributes) -> Attributes:
        own = self.settings.ownership
        uid = os.getuid() if own.uid is None else own.uid
        gid = os.getgid() if own.gid is None else own.gid
        timeout_s = FOREVER_S if found.inode == CONTROL_INODE else 0.0
        return Attributes(found.inode, found.mode, uid, gid, found.size, self._mounted_at_ns, timeout_s)

    async def getattr(self, inode: int) -> Attributes:
        if self._control.owns(inode):
            return self._control_attributes(self._control.getattr(inode))
        node = await self._on_demand.sized(self._catalogue.node(inode))
        if node.is_directory:
            return self._attributes(inode, *await self._directory(node))
        return self._attributes(inode, node.stat, FOREVER_S)

    async def _directory(self, node: Node) -> tuple[SourceStat, float]:
        """The present attributes of a directory, and for how many seconds they may be trusted."""
        ttl_s = self.settings.dir_ttl_s
        return self._lister.looked_up(node, ttl_s) or ((await self._lister.refresh(node)).stat, ttl_s)

    async def readlink(self, inode: int) -> bytes:
        node = self._catalogue.node(inode)
        if not stat.S_ISLNK(node.stat.mode):
            raise errors.InvalidArgument("not a symbolic link")
        if node.path.rpartition(b"/")[0] == VIEWS_DIRECTORY:
            return ROOT_LINK
        try:
            read = partial(self._client.call, self._client.source.readlink, node.path)
            return await self._flights.run(("link", inode), read)
        except (errors.SourceNotFound, errors.SourceChanged) as exc:
            raise await self._on_demand.stale(node, exc) from exc

    # -- directories

    async def opendir(self, inode: int) -> OpenedDirectory:
        """Make sure that the listing is complete and fresh; the handle is the inode."""
        if inode in _OWN_DIRECTORIES:
            return OpenedDirectory(inode, keeps=False, kept=False)
        node = self._catalogue.node(inode)
        if not node.is_directory:
            raise errors.NotADirectory(os.fsdecode(node.path))
        self._walk_ahead.asked(node, self.settings.dir_ttl_s)
        await self._lister.complete(node, self.settings.dir_ttl_s)
        listing = self._catalogue.listing(inode)
        scanned_at = 0.0 if listing is None else listing.scanned_at
        # The listing that the kernel keeps was read after this worker had last made the kernel drop an older one.
        if not (kept := self._listings_kept.get(inode) == scanned_at):
            if len(self._listings_kept) >= _LISTINGS_KEPT:
                self._listings_kept.clear()
            self._listings_kept[inode] = scanned_at
        # The kernel drops what it keeps page by page, and an empty listing has no page: it would be kept for good.
        return OpenedDirectory(inode, keeps=bool(self._catalogue.entries(inode, 0, 1)), kept=kept)

    async def readdir(self, inode: int, after: int, limit: int) -> list[tuple[bytes, Entry, int]]:
        """Up to `limit` entries behind position `after`: name, entry, position."""
        if inode in _OWN_DIRECTORIES:
            listed = enumerate(self._list_own(inode), 1)
            return [(name, entry, position) for position, (name, entry) in listed if position > after]
        if self._scattered():
            # Another worker may have answered the opendir, or the readdir before this one.
            ttl_s = max(self.settings.dir_ttl_s, _OPENED_S if after else 0.0)
            await self._lister.complete(self._catalogue.node(inode), ttl_s)
        return [
            (dentry.name, self._listed(dentry), dentry.position)
            for dentry in self._catalogue.entries(inode, after, limit)
        ]

    def _list_own(self, inode: int) -> list[tuple[bytes, Entry]]:
        """Names and entries of `.spiderfs`, or of `views` in it, always in one order."""
        if inode == VIEWS_INODE:
            # The inodes of these depend on what makers make, which takes a tenth of a second to find out.
            found = self._catalogue.node(VIEWS_INODE).stat
            names = enumerate(self._catalogue.forms.names, 1)
            return [(name, _without_inode(self._attributes(0, found, 0.0), position)) for position, name in names]
        listed = [(name, Entry(self._control_attributes(found), 0.0)) for name, found in self._control.readdir()]
        return [*listed, (_VIEWS, self._views_entry())] if self._catalogue.forms.names else listed

    def _listed(self, dentry: Dentry) -> Entry:
        if dentry.stat == UNKNOWN or self._on_demand.is_unsized(dentry):
            return _without_inode(self._attributes(0, dentry.stat, 0.0), dentry.inode)
        if self._redirects.active and self._redirects.concerns(dentry.inode):
            return self._entry(dentry, 0.0)
        return self._entry(dentry, self._left_s(dentry))

    # -- contents

    async def open(self, inode: int, flags: int, caller: Caller, delivery: Delivery | None = None) -> Opened:
        """Make a small file local. The process that reads it may answer through `delivery` before this returns."""
        if self._control.owns(inode):
            # The text of the control file must count every read until now.
            await self._fetcher.caught_up()
            return Opened(await self._control.open(inode, flags, caller.uid), direct_io=True)
        if flags & _WRITING:
            raise errors.ReadOnly("spiderfs is read-only")
        # Asked now: another worker may be asked the same, and must not undo what has been noted since.
        once_more = self._unstored.opens_again(caller.pid)
        try:
            node = self._catalogue.node(inode)
            opened = await self._open_file(node, inode, caller, delivery, once_more)
        except errors.Stale:
            if (read_at_lookup := self._provisional_files.open_unstored(inode, caller)) is None:
                self._unstored.open_failed(caller.pid)
                raise
            opened = read_at_lookup
        if once_more:
            self._unstored.open_succeeded(caller.pid)
        return opened

    async def _open_file(
        self, node: Node, inode: int, caller: Caller, delivery: Delivery | None, once_more: bool
    ) -> Opened:
        if not node.is_regular:
            raise errors.IsADirectory(os.fsdecode(node.path))
        if inode & PROVISIONAL:
            return await self._provisional_files.open(node, caller, once_more)
        if node.settles_at and is_provisional(node.settles_at, self._now()):
            # The clock was set back before this mount. The look-up that the kernel makes at once says so to the kernel.
            raise errors.Stale(f"{os.fsdecode(node.path)} may still be written to")
        if node.stat.size <= self.settings.sample_max_bytes:
            return await self._small_files.open(node, caller, delivery)
        await self.large_files.open(node, caller, once_more)
        return Opened(inode, direct_io=False, large=True)

    async def read(
        self, handle: int, offset: int, size: int, inode: int = 0, caller: Caller = _NO_ONE
    ) -> memoryview | bytes:
        """Up to `size` bytes, short only at the end; a view is valid until the next request. `inode`: the kernel's."""
        if is_control_handle(handle):
            return await self._control.read(handle, offset, size)
        self._counters.add("reads")
        if self._read_log.is_kept(now_s := self._now()):
            process = self._redirects.process_of(caller.pid)
            self._read_log.note(now_s, handle, offset, offset + size, process, caller.pid)
        piece: memoryview | bytes | None
        if inode & PROVISIONAL:
            piece = await self._provisional_files.read(inode, handle, offset, size)
        else:
            if (piece := self._ranges.read_again(handle, offset, size, caller)) is None:
                piece = self._fetcher.local(ContentKey(handle), offset, size)
            if piece is None:
                node = self._catalogue.node(handle)
                if node.stat.size > self.settings.sample_max_bytes:
                    if (piece := await self._ranges.read(node, offset, size, caller)) is None:
                        piece = await self.large_files.read(node, offset, size)
                else:
                    piece = await self._small_files.read(node, offset, size)
        self._counters.add("read_bytes", len(piece))
        return piece

    async def release(self, handle: int, inode: int = 0) -> None:
        """`inode` as for `read`."""
        if is_control_handle(handle):
            await self._control.release(handle)
        elif inode & PROVISIONAL:
            self._unstored.close(handle)

    async def write(self, handle: int, data: bytes) -> int:
        if not is_control_handle(handle):
            raise errors.ReadOnly("spiderfs is read-only")
        return await self._control.write(handle, data)

    async def truncate(self, inode: int) -> Attributes:
        """Change nothing: the shell asks for this before it writes. Raises ReadOnly for all but control files."""
        if not self._control.owns(inode):
            raise errors.ReadOnly("spiderfs is read-only")
        return self._control_attributes(self._control.getattr(inode))

    # -- attributes beside

    async def access(self, inode: int, mask: int, caller: Caller) -> None:
        """Raises ReadOnly or AccessDenied where `mask` (R_OK, W_OK, X_OK) is not granted; access(2)."""
        attributes = await self.getattr(inode)
        if mask & os.W_OK and not self._control.owns(inode):
            raise errors.ReadOnly("spiderfs is read-only")
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
            raise errors.AccessDenied(f"mode {attributes.mode & 0o777:o} does not allow this")

    async def statfs(self) -> os.statvfs_result:
        try:
            self._statvfs = await self._flights.run("statfs", partial(self._client.call, self._client.source.statvfs))
        except errors.SourceUnavailable:
            # Sizes as they were once known are of more use to df(1) than an error.
            if self._statvfs is None:
                raise
        return self._statvfs

    async def listxattr(self, inode: int) -> list[str]:
        return [] if self._control.owns(inode) else await self._xattrs.names(inode)

    async def getxattr(self, inode: int, name: str, caller: Caller = _NO_ONE) -> bytes:
        if self._control.owns(inode):
            raise errors.NoAttribute(name)
        return await self._xattrs.value(inode, name, caller)


def _no_entry(timeout_s: float) -> Entry:
    return Entry(Attributes(0, 0, 0, 0, 0, 0, 0.0), timeout_s)


def _without_inode(attributes: Attributes, shown: int) -> Entry:
    """An entry of a listing: the kernel takes only the name of it, and asks for the rest when it needs that."""
    return Entry(attributes._replace(inode=0, shown=shown), 0.0)
