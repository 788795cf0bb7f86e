"""What spiderfs knows of the source's names: the map from names to inodes, and from inodes to what they mean.

An inode names one immutable version of one file: it is a 63-bit hash of (path, size, mtime_ns), a directory's of its
path alone. Everything that is keyed by an inode (the page cache, open handles, cached bytes) therefore never mixes two
versions. The catalogue only records what others found at the source; it asks nothing and knows no clock.

Tables:
    inode   inode                      -> attributes, path          what a file handle means, for every worker
    dentry  directory inode, name hash -> inode, attributes, name   what a name means, and when that was checked
    listing directory inode            -> when the directory was scanned, and its mtime then

Dentries lie in the order of their name's hash, which is also the position that readdir hands to the kernel: a listing
goes on at the right place whatever came or went meanwhile. The `record` calls wait for LMDB's writer lock: call them in
threads.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import xxhash

from spiderfs.errors import Stale
from spiderfs.sources.source import SourceStat, Version
from spiderfs.store.store import Records

TABLES = ("inode", "dentry", "listing", "facts", "redirect")
ROOT_INODE = 1
# Inodes below belong to the root and to control files.
FIRST_INODE = 1 << 16

_HASH_MASK = (1 << 63) - 1
_INODE_KEY = struct.Struct(">Q")
_DENTRY_KEY = struct.Struct(">QQ")
_STAT = struct.Struct("<IIIQq")
_DENTRY = struct.Struct("<Qd")  # inode, time of the last check in seconds since the epoch
_LISTING = struct.Struct("<dq")
# A batch of rows is one transaction, and other writers wait for it: 2,000 names take about 10 ms.
_BATCH_NAMES = 2000
# How far behind the place of its hash a name may lie. Two names of one directory with the same 63 bits are never seen
# in practice; this many are not even thinkable.
_PROBES = 64


class Node(NamedTuple):
    """What an inode means."""

    inode: int
    path: bytes
    stat: SourceStat

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
    """What a name meant when it was last checked; `position` is its place in the directory's order."""

    name: bytes
    inode: int
    stat: SourceStat
    checked_at: float
    position: int


class Listing(NamedTuple):
    scanned_at: float
    mtime_ns: int


def join(parent: bytes, name: bytes) -> bytes:
    return parent + b"/" + name if parent else name


class Catalogue:
    def __init__(self, records: Records) -> None:
        self._records = records

    # -- what is known

    def node(self, inode: int) -> Node:
        """Raises Stale for an inode that nobody has recorded."""
        row = self._records.get("inode", _INODE_KEY.pack(inode))
        if row is None:
            raise Stale(f"inode {inode} is not known (any more)")
        return Node(inode, row[_STAT.size :], SourceStat(*_STAT.unpack_from(row)))

    def paths(self, inodes: Iterable[int]) -> list[bytes]:
        """The paths of many inodes, `?` for one that nobody has recorded."""
        rows = self._records.get_many("inode", [_INODE_KEY.pack(inode) for inode in inodes])
        return [b"?" if row is None else row[_STAT.size :] for row in rows]

    def find(self, parent: int, name: bytes) -> Dentry | None:
        hashed = _name_hash(name)
        row = self._records.get("dentry", _DENTRY_KEY.pack(parent, hashed))
        if row is not None:
            dentry = _dentry(hashed, row)
            if dentry.name == name:
                return dentry
        # Another name may have this hash, or may have had it before it vanished: look onwards, as `_place` did.
        start = hashed
        while rows := self._records.scan("dentry", _DENTRY_KEY.pack(parent, start), 1):
            (key, value), *_ = rows
            directory, position = _DENTRY_KEY.unpack(key)
            if directory != parent or position > hashed + _PROBES:
                break
            dentry = _dentry(position, value)
            if dentry.name == name:
                return dentry
            start = position + 1
        return None

    def entries(self, parent: int, after: int, limit: int) -> list[Dentry]:
        """Up to `limit` known names of a directory behind position `after`, in the order of their positions."""
        rows = self._records.scan("dentry", _DENTRY_KEY.pack(parent, after + 1), limit)
        return [
            _dentry(position, value)
            for (directory, position), value in ((_DENTRY_KEY.unpack(key), value) for key, value in rows)
            if directory == parent
        ]

    def _all_entries(self, parent: int) -> Iterator[Dentry]:
        after = 0
        while entries := self.entries(parent, after, _BATCH_NAMES):
            yield from entries
            after = entries[-1].position

    def listing(self, inode: int) -> Listing | None:
        """When the directory was last scanned as a whole, if it ever was."""
        row = self._records.get("listing", _INODE_KEY.pack(inode))
        return None if row is None else Listing(*_LISTING.unpack(row))

    def known_files(self) -> int:
        return self._records.count("dentry")

    # -- what was found at the source; these write

    def record_root(self, found: SourceStat) -> None:
        self._records.put([("inode", _INODE_KEY.pack(ROOT_INODE), _node_row(b"", found))])

    def record(self, parent: int, name: bytes, found: SourceStat, now: float) -> Dentry:
        """Note that `name` was just seen with these attributes."""
        rows: list[tuple[str, bytes, bytes | None]] = []
        dentry = self._place(rows, {}, self.node(parent), self.find(parent, name), name, found, now)
        self._records.put(rows)
        return dentry

    def record_gone(self, parent: int, name: bytes) -> None:
        """Note that the source said that `name` does not exist."""
        known = self.find(parent, name)
        if known is not None:
            self._records.put([("dentry", _DENTRY_KEY.pack(parent, known.position), None)])

    def record_listing(
        self, parent: int, names: Iterable[tuple[bytes, SourceStat]], directory_mtime_ns: int, now: float
    ) -> None:
        """Note a whole directory; names that are no longer in it are forgotten, unless they were checked since `now`.

        `now` is the time at which the scan began, so a name that another look-up found meanwhile is kept.
        """
        node = self.node(parent)
        # All at once rather than a look-up per name, which would take as long as the writing.
        known = {dentry.name: dentry for dentry in self._all_entries(parent)}
        batch: list[tuple[str, bytes, bytes | None]] = []
        taken: dict[tuple[int, int], bytes] = {}
        for name, found in names:
            self._place(batch, taken, node, known.pop(name, None), name, found, now)
            if len(taken) >= _BATCH_NAMES:
                self._records.put(batch)
                batch, taken = [], {}
        # What was looked up since the scan began is newer than it.
        gone = [dentry for dentry in known.values() if dentry.checked_at <= now]
        for dentry in gone:
            batch.append(("dentry", _DENTRY_KEY.pack(parent, dentry.position), None))
            if len(batch) >= _BATCH_NAMES:
                self._records.put(batch)
                batch = []
        batch.append(("listing", _INODE_KEY.pack(parent), _LISTING.pack(now, directory_mtime_ns)))
        self._records.put(batch)

    def expire(self, parent: int, name: bytes) -> None:
        """Make the next look-up of `name` ask the source."""
        known = self.find(parent, name)
        if known is not None:
            row = _dentry_row(known.inode, 0.0, known.stat, name)
            self._records.put([("dentry", _DENTRY_KEY.pack(parent, known.position), row)])

    def parent_of(self, path: bytes) -> tuple[int, bytes]:
        """The inode of the directory that `path` lies in, and its last name."""
        directory, _, name = path.rpartition(b"/")
        return self.directory_inode(directory), name

    def directory_inode(self, path: bytes) -> int:
        return self._free_inode({}, path, None) if path else ROOT_INODE

    def _place(
        self,
        rows: list[tuple[str, bytes, bytes | None]],
        taken: dict[tuple[int, int], bytes],
        parent: Node,
        known: Dentry | None,
        name: bytes,
        found: SourceStat,
        now: float,
    ) -> Dentry:
        """Add the rows of one name; `taken` holds the places given away in rows not yet written."""
        path = join(parent.path, name)
        version = None if stat.S_ISDIR(found.mode) else found.version
        inode = self._free_inode(taken, path, version)
        position = known.position if known else self._free_position(taken, parent.inode, name)
        taken[parent.inode, position] = name
        taken[0, inode] = path
        rows.append(("inode", _INODE_KEY.pack(inode), _node_row(path, found)))
        rows.append(("dentry", _DENTRY_KEY.pack(parent.inode, position), _dentry_row(inode, now, found, name)))
        return Dentry(name, inode, found, now, position)

    def _free_position(self, taken: dict[tuple[int, int], bytes], parent: int, name: bytes) -> int:
        position = _name_hash(name)
        while True:
            other = taken.get((parent, position))
            # The name itself: readdir(3) may give one twice while the directory changes.
            if other == name or (
                other is None and self._records.get("dentry", _DENTRY_KEY.pack(parent, position)) is None
            ):
                return position
            position += 1

    def _free_inode(self, taken: dict[tuple[int, int], bytes], path: bytes, version: Version | None) -> int:
        """The inode of this version of this path: its hash, or the next place that no other version has taken."""
        inode = _version_hash(path, version)
        while True:
            other = taken.get((0, inode))
            if other is None:
                row = self._records.get("inode", _INODE_KEY.pack(inode))
                if row is None:
                    return inode
                known = SourceStat(*_STAT.unpack_from(row))
                other = row[_STAT.size :]
                same = stat.S_ISDIR(known.mode) if version is None else _file_version(known) == version
                if other == path and same:
                    return inode
            elif other == path:
                return inode
            inode = max((inode + 1) & _HASH_MASK, FIRST_INODE)

    # -- facts about the source as a whole

    def fact(self, name: str) -> bytes | None:
        return self._records.get("facts", name.encode())

    def record_fact(self, name: str, value: bytes) -> None:
        self._records.put([("facts", name.encode(), value)])


def _file_version(known: SourceStat) -> Version | None:
    return None if stat.S_ISDIR(known.mode) else known.version


def _version_hash(path: bytes, version: Version | None) -> int:
    text = path + b"/" if version is None else b"%s\0%d\0%d" % (path, version.size, version.mtime_ns)
    hashed: int = xxhash.xxh3_64_intdigest(text) & _HASH_MASK
    return max(hashed, FIRST_INODE)


def _name_hash(name: bytes) -> int:
    # Positions start at 3: readdir's 0 is the beginning, and some programs expect "." and ".." before the rest.
    hashed: int = xxhash.xxh3_64_intdigest(name) & _HASH_MASK
    return max(hashed, 3)


def _node_row(path: bytes, found: SourceStat) -> bytes:
    return _STAT.pack(*found) + path


def _dentry_row(inode: int, checked_at: float, found: SourceStat, name: bytes) -> bytes:
    return _DENTRY.pack(inode, checked_at) + _STAT.pack(*found) + name


def _dentry(position: int, row: bytes) -> Dentry:
    inode, checked_at = _DENTRY.unpack_from(row)
    found = SourceStat(*_STAT.unpack_from(row, _DENTRY.size))
    return Dentry(row[_DENTRY.size + _STAT.size :], inode, found, checked_at, position)
