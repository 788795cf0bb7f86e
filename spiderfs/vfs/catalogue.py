"""All names of the source that spiderfs has seen: which inode each name means, and what each inode means.

An inode stands for one version of one file, and a version never changes: the number is a 63-bit hash of its path, size
and mtime or tag, for a directory of its path alone. So whatever is kept under an inode (pages of the kernel, open
handles, cached bytes) never mixes two versions. The catalogue asks the source nothing; it records what others have
found there, and for each version the time at which it settles (`rules.py`). Tables:

    inode   inode                      -> attributes, path          what a file handle means, for every worker
    dentry  directory inode, name hash -> inode, attributes, name   what a name means, and when that was checked
    listing directory inode            -> when the directory was scanned, its mtime then, and when that has settled
    gone    inode                      -> nothing                   what a name meant, and does not mean any more
    form    inode                      -> size                      how long the view is that is shown of a file
    link    inode                      -> text                      what a symbolic link says that a list has led to
    extents inode                      -> inodes                    the extents of a large file that lists have named
    facts   name                       -> value                     what is known of the source, the policy's state

Where a view is shown (`views/tree.py`), an inode stands for one view of one version: the hash is of the path at the
source and of the view's fingerprint, also that of each directory in `.spiderfs/views`, because a mount with another
recipe must look up the names below it again. Rows have the original's attributes; the size of a view is shown once it
was made. readdir gives the kernel the hash of a name as its position, so a listing goes on at the right place whatever
has come or gone. The `record` calls wait for LMDB's writer lock: call them in threads.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from spiderfs.errors import Stale
from spiderfs.linux import steady_clock
from spiderfs.protocol.extents import Extent, extent_of
from spiderfs.sources.ranges import stat_of
from spiderfs.sources.source import FIRST_INODE, HASH_MASK, UNKNOWN, SourceStat, Version, joined_time, split_time
from spiderfs.sources.source import version_hash as _version_hash
from spiderfs.store.store import Records, Row
from spiderfs.vfs.rules import MOST_BEHIND_S, behind_s, may_look_old, settles_at
from spiderfs.views.recipe import ORIGINAL
from spiderfs.views.tree import ROOT_LINK, VIEWS_DIRECTORY, Forms

TABLES = ("inode", "dentry", "listing", "facts", "redirect", "gone", "form", "link", "extents")
ROOT_INODE = 1
# Set in the number by which the kernel knows a provisional version (`provisional_files.py`).
PROVISIONAL = 1 << 63
# When a name was checked that is to be checked at its next look-up.
NEVER = -math.inf

_INODE_KEY = struct.Struct(">Q")
_INODES = np.dtype("<u8")
_DENTRY_KEY = struct.Struct(">QQ")
# Mode, uid, gid, size; mtime in seconds and nanoseconds, because 64 bits of nanoseconds end in 2262; the time of
# settling; the tag.
_STAT = struct.Struct("<IIIQqIdQ")
# In the mode of a row: a view of the file is shown, if there is one.
_VIEWED = 1 << 31
_DENTRY = struct.Struct("<Qd")  # inode, time of the last check in seconds since the epoch
_LISTING = struct.Struct("<dqId")
_BEHIND = struct.Struct("<dd")  # how many seconds the source's clock is behind, and the time when that was found out
_BEHIND_FACT = "clock behind"
_FORM = struct.Struct("<Q")
# The fact by which the processes of a mount share a view's fingerprint: the time of the mount comes first.
_FINGERPRINT_FACT, _MOUNTED_AT = "fingerprint of ", struct.Struct("<d")
# A batch of rows is one transaction, and other writers wait for it: 2,000 names take about 10 ms.
_BATCH_NAMES = 2000
# A name whose position is taken lies at the next free one, at most this far behind. Not even two names of one directory
# with the same hash of 63 bits are ever seen in practice.
_PROBES = 64


class Node(NamedTuple):
    """The meaning of an inode: one version of a file, or a directory."""

    inode: int
    path: bytes
    stat: SourceStat
    settles_at: float = 0.0
    """Before this time it is provisional (`rules.py`)."""

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.stat.mode)

    @property
    def is_regular(self) -> bool:
        return stat.S_ISREG(self.stat.mode)

    @property
    def version(self) -> Version:
        return self.stat.version


class Dentry(NamedTuple):
    """The meaning of a name when it was last checked; `position` is where the name lies in the directory's order."""

    name: bytes
    inode: int
    stat: SourceStat
    checked_at: float
    position: int
    settles_at: float = 0.0

    def below(self, directory: Node) -> Node:
        """What the name means, which lies in this directory."""
        return Node(self.inode, join(directory.path, self.name), self.stat, self.settles_at)


class Listing(NamedTuple):
    scanned_at: float
    mtime_ns: int
    settles_at: float

    @property
    def is_settled(self) -> bool:
        """Whether the directory has the same names as long as it has the same mtime."""
        return self.scanned_at >= self.settles_at


class _Rows:
    """The rows to write of a directory, once the source has answered a question about it."""

    def __init__(self, parent: Node, asked_at: float, clock: Callable[[], float]) -> None:
        self.parent, self.asked_at, self.answered_at, self._now = parent, asked_at, clock(), clock
        self.rows: list[Row] = []
        # Positions (under their directory) and inodes (under 0) that the rows here take, which are yet to be written.
        self.taken: dict[tuple[int, int], bytes] = {}

    def remove(self, known: Dentry) -> None:
        self.rows.append(("dentry", _DENTRY_KEY.pack(self.parent.inode, known.position), None))
        self.rows.append(("gone", _INODE_KEY.pack(known.inode), b""))

    def write(self, records: Records) -> None:
        records.put(self.rows, ("dentry", self._is_newer))
        self.rows, self.taken = [], {}

    def _is_newer(self, row: bytes) -> bool:
        """Whether the source was asked about this dentry later, and not in the future, by a clock since set back."""
        checked_at: float = _DENTRY.unpack_from(row)[1]
        return self.asked_at < checked_at <= self._now()


def join(parent: bytes, name: bytes) -> bytes:
    return parent + b"/" + name if parent else name


class Catalogue:
    def __init__(
        self, records: Records, clock: Callable[[], float] = steady_clock.now, forms: Forms | None = None
    ) -> None:
        """`forms`: what the mount shows; originals alone by default."""
        self._records = records
        self.forms = forms or Forms()
        self._now = clock

    # -- what is known

    def node(self, inode: int) -> Node:
        """The row of an inode that the kernel names; raises Stale if there is none."""
        if (node := self.known(inode)) is None:
            raise Stale(f"inode {inode & ~PROVISIONAL} is not known (any more)")
        return node

    def known(self, inode: int) -> Node | None:
        """The row of an inode, if there is one; the number of a provisional version means the version.

        Under that number the file itself is shown, also when the version has settled and its view was made: those who
        have it open go on with it.
        """
        version = inode & ~PROVISIONAL
        if (row := self._records.get("inode", _INODE_KEY.pack(version))) is None:
            return None
        found, settles_at = _stat_of(row, 0)
        shown = self._shown(inode, found) if inode == version else found._replace(viewed=False)
        return Node(version, row[_STAT.size :], shown, settles_at)

    def _shown(self, inode: int, found: SourceStat) -> SourceStat:
        """The attributes of the file's view, if one is shown and was made."""
        size = self._form_size(inode) if found.viewed else None
        return found if size is None else found._replace(size=size, original_size=found.size)

    def _form_size(self, inode: int) -> int | None:
        row = self._records.get("form", _INODE_KEY.pack(inode))
        return None if row is None else int(_FORM.unpack(row)[0])

    def size_of(self, inode: int) -> int:
        """The size of a file, 0 if nothing is recorded of it."""
        node = self.known(inode)
        return 0 if node is None else node.stat.size

    def path_of(self, inode: int) -> bytes:
        """The path of an inode, `?` if nothing is recorded of it."""
        return self.paths([inode])[0]

    def paths(self, inodes: Iterable[int]) -> list[bytes]:
        """The paths of many inodes; `?` where nothing is recorded of an inode."""
        rows = self._records.get_many("inode", [_INODE_KEY.pack(inode) for inode in inodes])
        return [b"?" if row is None else row[_STAT.size :] for row in rows]

    def link_texts(self, inodes: Iterable[int]) -> dict[int, bytes]:
        """The texts of those of these links that are recorded."""
        wanted = list(inodes)
        rows = self._records.get_many("link", [_INODE_KEY.pack(inode) for inode in wanted])
        return {inode: row for inode, row in zip(wanted, rows, strict=True) if row is not None}

    def is_shown_as_view(self, inode: Any) -> bool | None:
        """Whether the root shows a view of this file; None if nothing is recorded of the inode."""
        if (row := self._records.get("inode", _INODE_KEY.pack(inode))) is None:
            return None
        place = self.forms.place(row[_STAT.size :])
        return not place.root and place.form != ORIGINAL

    def find(self, parent: int, name: bytes) -> Dentry | None:
        """What a name means, as far as is known; None also for a name that was listed without attributes."""
        dentry = self._named(parent, name)
        return dentry if dentry is not None and dentry.stat.mode else None

    def is_name_alone(self, parent: int, name: bytes) -> bool:
        """Whether a name was listed without attributes."""
        dentry = self._named(parent, name)
        return dentry is not None and not dentry.stat.mode

    def _named(self, parent: int, name: bytes) -> Dentry | None:
        hashed = _name_hash(name)
        if (row := self._records.get("dentry", _DENTRY_KEY.pack(parent, hashed))) is not None:
            dentry = self._dentry(hashed, row)
            if dentry.name == name:
                return dentry
        # Another name may have this position, or may have had it before it vanished; then `_add_name` went on to the
        # next.
        start = hashed
        while rows := self._records.scan("dentry", _DENTRY_KEY.pack(parent, start), 1):
            (key, value), *_ = rows
            directory, position = _DENTRY_KEY.unpack(key)
            if directory != parent or position > hashed + _PROBES:
                break
            dentry = self._dentry(position, value)
            if dentry.name == name:
                return dentry
            start = position + 1
        return None

    def _dentry(self, position: int, row: bytes) -> Dentry:
        dentry = _dentry(position, row)
        return dentry._replace(stat=self._shown(dentry.inode, dentry.stat)) if dentry.stat.viewed else dentry

    def still_names(self, node: Node) -> bool:
        """Whether the name of this version still means it, as far as is known, and need not be looked up again."""
        known = self.find(*self.parent_of(node.path))
        return known is not None and known.inode == node.inode and known.checked_at != NEVER

    def knows(self, path: bytes) -> bool:
        """Whether this is a name of the source, as far as is known."""
        return self._followed(path) is not None

    def _followed(self, path: bytes) -> int | None:
        """What a path means, from the root on; None if some name of it is not known."""
        place = self.forms.place(path)
        found = self.directory_inode(place.root)
        for name in place.path.split(b"/") if place.path else ():
            if (dentry := self.find(found, name)) is None:
                return None
            found = dentry.inode
        return found

    def entries(self, parent: int, after: int, limit: int) -> list[Dentry]:
        """Up to `limit` known names of a directory behind position `after`, in the order of their positions."""
        rows = self._records.scan("dentry", _DENTRY_KEY.pack(parent, after + 1), limit)
        return [
            self._dentry(position, value)
            for (directory, position), value in ((_DENTRY_KEY.unpack(key), value) for key, value in rows)
            if directory == parent
        ]

    def names_of(self, parent: int) -> frozenset[tuple[bytes, int]]:
        """The names of a directory whose attributes are known, each with its type (S_IFMT)."""
        entries = self._all_entries(parent)
        return frozenset((dentry.name, stat.S_IFMT(dentry.stat.mode)) for dentry in entries if dentry.stat.mode)

    def _all_entries(self, parent: int) -> Iterator[Dentry]:
        after = 0
        while entries := self.entries(parent, after, _BATCH_NAMES):
            yield from entries
            after = entries[-1].position

    def listing(self, inode: int) -> Listing | None:
        """The last scan of the directory as a whole, if there ever was one."""
        if (row := self._records.get("listing", _INODE_KEY.pack(inode))) is None:
            return None
        scanned_at, seconds, nanoseconds, settles_at = _LISTING.unpack(row)
        return Listing(scanned_at, joined_time(seconds, nanoseconds), settles_at)

    def known_files(self) -> int:
        return self._records.count("dentry")

    # -- what was found at the source; these write

    def record_root(self, found: SourceStat) -> None:
        """Note the root, and with its attributes the directories above those of the views."""
        row = _stat_row(found, 0.0)
        self._records.put([("inode", _INODE_KEY.pack(inode), row + path) for inode, path in OWN_DIRECTORIES.items()])

    def record_form(self, form: str) -> Dentry:
        """Note a form's directory, or a link to the root, which must be known, for the form that the root shows."""
        row = _MOUNTED_AT.pack(self.forms.mounted_at_s) + self._fingerprint(form)
        self.record_fact(_FINGERPRINT_FACT + form, row)
        found = self.node(ROOT_INODE).stat
        if form == self.forms.linked:
            found = found._replace(mode=stat.S_IFLNK | 0o777, size=len(ROOT_LINK), mtime_ns=0)
        return self.record(VIEWS_INODE, os.fsencode(form), found, self._now())

    def _fingerprint(self, form: str) -> bytes:
        """The fingerprint of a form. The first process of a mount that needs it takes a tenth of a second."""
        if (known := self.forms.known_fingerprint(form)) is not None:
            return known
        published = self.fact(_FINGERPRINT_FACT + form)
        if published is not None and _MOUNTED_AT.unpack_from(published)[0] != self.forms.mounted_at_s:
            published = None
        return self.forms.fingerprint(form, None if published is None else published[_MOUNTED_AT.size :])

    def record(self, parent: int, name: bytes, found: SourceStat, now: float, exactly: bool = False) -> Dentry:
        """Note the attributes of `name`, about which the source was asked at `now`.

        Returns what is recorded of the name afterwards: it is newer than `found` if someone else asked later, and was
        answered sooner. `exactly`: returns `found` in any case, as a name that no one is to trust if it was older.
        """
        rows = _Rows(self.node(parent), now, self._now)
        dentry = self._add_name(rows, self.find(parent, name), name, found)
        rows.write(self._records)
        recorded = self.find(parent, name) or dentry
        return dentry._replace(checked_at=NEVER) if exactly and recorded.inode != dentry.inode else recorded

    def record_gone(self, parent: int, name: bytes, now: float) -> None:
        """Note that `name` does not exist; the source was asked about it at `now`."""
        if (known := self._named(parent, name)) is not None:
            rows = _Rows(self.node(parent), now, self._now)
            rows.remove(known)
            rows.write(self._records)

    def record_listing(
        self, parent: int, names: Iterable[tuple[bytes, SourceStat]], directory_mtime_ns: int, now: float
    ) -> None:
        """Note all names of a directory, and delete the names that it no longer has.

        The scan began at `now`: a name that a look-up has recorded since then stays as it is, and so does a known one
        that comes as `UNKNOWN`. While a name has no attributes at all, the listing never settles.
        """
        before, rows = self.listing(parent), _Rows(self.node(parent), now, self._now)
        # All known names are read at once: one look-up for each name would take as long as to write them.
        known = {dentry.name: dentry for dentry in self._all_entries(parent)}
        complete = True
        for name, found in names:
            dentry = known.pop(name, None)
            if found == UNKNOWN:
                complete = complete and dentry is not None and dentry.stat != UNKNOWN
                if dentry is not None:
                    continue
            self._add_name(rows, dentry, name, found)
            if len(rows.taken) >= _BATCH_NAMES:
                rows.write(self._records)
        for dentry in known.values():
            rows.remove(dentry)
            if len(rows.rows) >= _BATCH_NAMES:
                rows.write(self._records)
        settled_before = None
        if before is not None and before.mtime_ns == directory_mtime_ns:
            settled_before = before.settles_at
        elif before is not None:
            self._compare_clocks(before.scanned_at, directory_mtime_ns)
        settles = self._settles_at(directory_mtime_ns, 0, now, rows.answered_at, settled_before)
        listing = _LISTING.pack(now, *split_time(directory_mtime_ns), settles if complete else math.inf)
        rows.rows.append(("listing", _INODE_KEY.pack(parent), listing))
        rows.write(self._records)

    def record_view(self, inode: int, size: int) -> int:
        """Note the size of a file's view, unless one is noted; returns the size that is noted now."""
        self._records.put([("form", _INODE_KEY.pack(inode), _FORM.pack(size))], ("form", lambda _: True))
        return self._form_size(inode) or size

    def record_link_texts(self, texts: Iterable[tuple[int, bytes]]) -> None:
        """Note the texts of links, which are versions as files are."""
        self._records.put([("link", _INODE_KEY.pack(inode), text) for inode, text in texts])

    def looked_at(self, limit: int) -> list[tuple[int, str]]:
        """Up to `limit` files that were looked at for a view: their inodes, and the form that is shown of each."""
        forms = self._records.scan("form", b"", limit)
        rows = self._records.get_many("inode", [key for key, _ in forms])
        found = []
        for (key, form), row in zip(forms, rows, strict=True):
            if row is not None:
                is_original = (_stat_of(row, 0)[0].size,) == _FORM.unpack(form)
                shown = ORIGINAL if is_original else self.forms.place(row[_STAT.size :]).form
                found.append((_INODE_KEY.unpack(key)[0], shown))
        return found

    def expire(self, path: bytes, whole: bool = False) -> None:
        """Make the next look-up of the last name of `path` ask the source; `whole`: of each of its names."""
        rows: list[Row] = []
        root = self.forms.place(path).root
        while path != root:
            parent, name = self.parent_of(path)
            if (known := self.find(parent, name)) is not None:
                row = _dentry_row(known._replace(checked_at=NEVER))
                rows.append(("dentry", _DENTRY_KEY.pack(parent, known.position), row))
            path = path.rpartition(b"/")[0] if whole else root
        self._records.put(rows)

    def parent_of(self, path: bytes) -> tuple[int, bytes]:
        """The inode of the directory that `path` lies in, and its last name."""
        directory, _, name = path.rpartition(b"/")
        return self.directory_inode(directory), name

    def directory_inode(self, path: bytes) -> int:
        return self._free_inode({}, path, None)[0] if path else ROOT_INODE

    def _add_name(self, rows: _Rows, known: Dentry | None, name: bytes, found: SourceStat) -> Dentry:
        parent, taken = rows.parent, rows.taken
        path = join(parent.path, name)
        version = None if stat.S_ISDIR(found.mode) else found.version
        if version is not None and stat.S_ISREG(found.mode) and self.forms.place(path).form != ORIGINAL:
            found = found._replace(viewed=True)
        inode, settled_before = self._free_inode(taken, path, version)
        if known is None:
            position, known = self._free_position(taken, parent.inode, name)
        else:
            position = known.position
        settles = 0.0
        if version is not None and not version.tag:
            if known is not None and known.inode != inode:
                self._compare_clocks(known.checked_at, version.mtime_ns)
            settles = self._settles_at(version.mtime_ns, version.size, rows.asked_at, rows.answered_at, settled_before)
        taken[parent.inode, position] = name
        taken[0, inode] = path
        asked_at = 0.0 if found == UNKNOWN else rows.asked_at
        dentry = Dentry(name, inode, found, asked_at, position, settles)
        rows.rows.append(("inode", _INODE_KEY.pack(inode), _stat_row(found, settles) + path))
        rows.rows.append(("dentry", _DENTRY_KEY.pack(parent.inode, position), _dentry_row(dentry)))
        if known is not None and known.inode != inode:
            rows.rows.append(("gone", _INODE_KEY.pack(known.inode), b""))
        return dentry

    def _settles_at(self, mtime_ns: int, size: int, asked_at: float, answered_at: float, known: float | None) -> float:
        mtime_ns += int(steady_clock.ahead_s() * 1e9)
        behind = 0.0
        if may_look_old(mtime_ns, size, asked_at) and (fact := self.fact(_BEHIND_FACT)) is not None:
            behind, found_at = _BEHIND.unpack(fact)
            # Not for ever: someone may have set the clock right since, or the mtime may have been set by hand.
            if not 0 <= answered_at - found_at <= MOST_BEHIND_S:
                behind = 0.0
        return settles_at(mtime_ns, size, asked_at, answered_at, behind, known)

    def _compare_clocks(self, seen_at: float, mtime_ns: int) -> None:
        """Learn how far the source's clock is behind: a change has this mtime, and was made after `seen_at`."""
        behind = behind_s(seen_at, mtime_ns + int(steady_clock.ahead_s() * 1e9), self._now())
        if behind:
            fact = self.fact(_BEHIND_FACT)
            if fact is None or behind > _BEHIND.unpack(fact)[0]:
                self.record_fact(_BEHIND_FACT, _BEHIND.pack(behind, self._now()))

    def _free_position(
        self, taken: dict[tuple[int, int], bytes], parent: int, name: bytes
    ) -> tuple[int, Dentry | None]:
        """A free position for a name that was unknown, and the name's dentry if someone has recorded it since."""
        position = _name_hash(name)
        while True:
            other = taken.get((parent, position))
            if other == name:  # readdir(3) may give one twice while the directory changes
                return position, None
            if other is None:
                if (row := self._records.get("dentry", _DENTRY_KEY.pack(parent, position))) is None:
                    return position, None
                dentry = self._dentry(position, row)
                if dentry.name == name:
                    return position, dentry
            position += 1

    def _free_inode(
        self, taken: dict[tuple[int, int], bytes], path: bytes, version: Version | None
    ) -> tuple[int, float | None]:
        """A version's inode, its hash or the next number that is free, and when the version settles, if known."""
        place = self.forms.place(path)
        # The root has one form, and a mount that shows another one there begins without names.
        view = self._fingerprint(place.form) if version is not None or place.root else b""
        inode = _version_hash(path if version is None else place.path, version, view)
        while True:
            if (other := taken.get((0, inode))) is None:
                if (row := self._records.get("inode", _INODE_KEY.pack(inode))) is None:
                    return inode, None
                known, settles_at = _stat_of(row, 0)
                other = row[_STAT.size :]
                same = stat.S_ISDIR(known.mode) == (version is None) and version in (None, known.version)
                if other == path and same:
                    return inode, settles_at
            elif other == path:
                return inode, None
            inode = max((inode + 1) & HASH_MASK, FIRST_INODE)

    # -- extents of large files

    def record_extents(self, file: Node, extents: Iterable[Extent]) -> list[int]:
        """Note extents of a file as small files that no directory lists; their inodes, 0 behind the file's end."""
        inodes: list[int] = []
        rows: list[Row] = []
        for extent in extents:
            found = stat_of(extent, file.stat)
            inode = 0 if found is None else self._free_inode({}, extent.path, found.version)[0]
            inodes.append(inode)
            if found is not None:
                rows.append(("inode", _INODE_KEY.pack(inode), _stat_row(found, file.settles_at) + extent.path))
            if len(rows) >= _BATCH_NAMES:
                self._records.put(rows)
                rows = []
        all_inodes = np.union1d(self._extents_of(file.inode), np.array(inodes, _INODES))
        rows.append(("extents", _INODE_KEY.pack(file.inode), all_inodes[all_inodes > 0].tobytes()))
        self._records.put(rows)
        return inodes

    def _extents_of(self, inode: int) -> npt.NDArray[np.uint64]:
        return np.frombuffer(self._records.get("extents", _INODE_KEY.pack(inode)) or b"", _INODES)

    def extent(self, extent: Extent, of: SourceStat) -> Node | None:
        """An extent of a file, if it was recorded; `of` are the attributes of the file or of another extent of it."""
        version = of._replace(size=extent.end - extent.begin).version
        return self.known(self._free_inode({}, extent.path, version)[0])

    # -- what is gone

    def gone(self, after: int, limit: int) -> list[int]:
        """Up to `limit` inodes above `after` that some name no longer means, or did not mean for a while."""
        return [_INODE_KEY.unpack(key)[0] for key, _ in self._records.scan("gone", _INODE_KEY.pack(after + 1), limit)]

    def is_current(self, inode: int) -> bool:
        """Whether the path of an inode still leads to that inode, from the root on; or an extent is of such a file."""
        if (node := self.known(inode)) is None:
            return False
        if (extent := extent_of(node.path)) is None:
            return self._followed(node.path) == inode
        file = self.known(self._followed(extent.file) or 0)
        found = None if file is None else stat_of(extent, file.stat)
        return found is not None and found.version == node.version

    def forget(self, inodes: Iterable[int]) -> None:
        """Delete the records of inodes that are gone. The names of a directory go first, some at each call."""
        for inode in inodes:
            self._forget(inode)

    def _forget(self, inode: int) -> None:
        key = _INODE_KEY.pack(inode)
        if self.is_current(inode):
            self._records.put([("gone", key, None)], unless=lambda: not self.is_current(inode))
            return
        rows: list[Row] = []
        for entry in self.entries(inode, 0, _BATCH_NAMES // 2):
            rows.append(("dentry", _DENTRY_KEY.pack(inode, entry.position), None))
            rows.append(("gone", _INODE_KEY.pack(entry.inode), b""))
        extents = self._extents_of(inode).tolist()
        for at in range(0, len(extents), _BATCH_NAMES):
            self._records.put([("gone", _INODE_KEY.pack(extent), b"") for extent in extents[at : at + _BATCH_NAMES]])
        rows = rows or [(table, key, None) for table in ("listing", "inode", "gone", "form", "link", "extents")]
        # A look-up may have found the name again since.
        self._records.put(rows, unless=lambda: self.is_current(inode))

    # -- facts about the source as a whole

    def fact(self, name: str) -> bytes | None:
        return self._records.get("facts", name.encode())

    def record_fact(self, name: str, value: bytes) -> None:
        self._records.put([("facts", name.encode(), value)])


def _name_hash(name: bytes) -> int:
    # Positions start at 3: readdir's 0 is the beginning, and some programs expect "." and ".." before the rest.
    hashed: int = xxhash.xxh3_64_intdigest(name) & HASH_MASK
    return max(hashed, 3)


def _stat_row(found: SourceStat, settles_at: float) -> bytes:
    mode = found.mode | _VIEWED if found.viewed else found.mode
    size, mtime = found.version.size, split_time(found.mtime_ns)
    return _STAT.pack(mode, found.uid, found.gid, size, *mtime, settles_at, found.tag)


def _stat_of(row: bytes, at: int) -> tuple[SourceStat, float]:
    mode, uid, gid, size, seconds, nanoseconds, settles_at, tag = _STAT.unpack_from(row, at)
    mtime_ns = joined_time(seconds, nanoseconds)
    # Without keywords, which take 0.1 us here.
    return SourceStat(mode & ~_VIEWED, uid, gid, size, mtime_ns, None, bool(mode & _VIEWED), tag), settles_at


def _dentry_row(dentry: Dentry) -> bytes:
    checked = _DENTRY.pack(dentry.inode, dentry.checked_at)
    return checked + _stat_row(dentry.stat, dentry.settles_at) + dentry.name


def _dentry(position: int, row: bytes) -> Dentry:
    inode, checked_at = _DENTRY.unpack_from(row)
    found, settles_at = _stat_of(row, _DENTRY.size)
    return Dentry(row[_DENTRY.size + _STAT.size :], inode, found, checked_at, position, settles_at)


_CONTROL_PATH = VIEWS_DIRECTORY.rpartition(b"/")[0]
# The kernel has another number for this one (`control_files.py`); its attributes decide who may pass.
_CONTROL_INODE = _version_hash(_CONTROL_PATH, None, b"")
VIEWS_INODE = _version_hash(VIEWS_DIRECTORY, None, b"")
# Directories that no name of the source means, and their paths.
OWN_DIRECTORIES = {ROOT_INODE: b"", _CONTROL_INODE: _CONTROL_PATH, VIEWS_INODE: VIEWS_DIRECTORY}
