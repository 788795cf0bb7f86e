"""The index of an archive: which member lies where, in one file that all processes of a mount map.

It is made once for each version of an archive and kept across mounts, in `archives/` of the cache directory:

    header     a checksum of all that follows, the archive's version, how many rows and bytes of texts there are
    columns    one array for each field; the members' rows in the order of the archive, then those of directories
    by hash    the hashes of all paths, sorted, and the row of each
    listed     the rows of each directory side by side; a directory's `offset` and `size` are a range of this array
    texts      a row's path, and behind it a link's text, or the bytes of a small label
    archive    the path of the archive

An archive that cannot be shown has an index without rows; its text says why. Such a file is forgotten with the mount.
A look-up is a search among the hashes, about 5 us, and touches a few pages.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from spiderfs.errors import ArchiveFailed
from spiderfs.sources.source import Version, joined_time, split_time

FILE, DIRECTORY, LINK, _ALIAS = range(4)
STORED, DEFLATED = 0, 8
MOST_MEMBERS, MOST_PACKED = 1 << 23, (1 << 32) - 1
# Paths of all members and directories together; each level of a deep path is a directory with a path of its own.
MOST_NAME_BYTES = 1 << 30
_NAME_MAX, _PATH_MAX = 255, 4096
# A revision of the format, or of a parser that finds other members, gets a new number.
_MAGIC = b"spidera4"
# Magic, checksum; then what the checksum covers: size, seconds, nanoseconds and tag of the version, rows, listed rows,
# bytes of texts, members left out.
_BEGIN, _REST = struct.Struct("<8sQ"), struct.Struct("<QqIQQQQQ")
_HEADER_BYTES = _BEGIN.size + _REST.size
_TAGGED = struct.Struct("<QqIQQQ")
# Columns and their types, the widest first. `place` is where the row's path begins among the texts, `path` and `text`
# are its length and that of what lies behind it. `packed` is at most MOST_PACKED: no larger member is unpacked.
_COLUMNS = {"place": "Q", "offset": "Q", "size": "Q", "packed": "I", "crc": "I", "path": "H", "text": "H", "mode": "H"}
_COLUMNS |= {"kind": "B", "method": "B"}
_ARRAYS = {**_COLUMNS, "hashes": "Q", "by_hash": "I", "listed": "I"}
Part = bytes | bytearray | memoryview
FAILED = ".failed"
"""The suffix of a file whose index has no rows."""


class IndexRow(NamedTuple):
    """A member: `offset` of its bytes (zip: of its header), `size` for readers, CRC-32 of it (tar: of its header)."""

    number: int
    kind: int
    mode: int
    offset: int
    size: int
    packed: int
    method: int
    crc: int


class ArchiveIndex:
    """The index in a file, or in `spare` bytes for which the disk had no room; raises ValueError if wrong, OSError."""

    def __init__(self, path: Path, spare: bytes = b"") -> None:
        self.spare = spare
        whole = memoryview(spare or _mapped(path))
        if len(whole) < _HEADER_BYTES:
            raise ValueError(f"{path} is too short")
        magic, checksum = _BEGIN.unpack_from(whole)
        if magic != _MAGIC or checksum != xxhash.xxh3_64_intdigest(whole[_BEGIN.size :]):
            raise ValueError(f"{path} is not what was written")
        size, seconds, nanoseconds, tag, rows, listed, texts, self.left_out = _REST.unpack_from(whole, _BEGIN.size)
        self.version = Version(size, joined_time(seconds, nanoseconds), tag)
        self.rows = rows
        at = _HEADER_BYTES
        self._arrays: dict[str, Any] = {}
        for name, kind in _ARRAYS.items():
            end = at + (listed if name == "listed" else rows) * array(kind).itemsize
            typed: Any = whole[at:end]
            self._arrays[name] = typed.cast(kind)
            at = end
        self._texts = whole[at : at + texts]
        self._hashes, self._by_hash = self._arrays["hashes"], self._arrays["by_hash"]
        self._places, self._paths = self._arrays["place"], self._arrays["path"]
        self._of_rows = [self._arrays[name] for name in IndexRow._fields[1:]]

    @property
    def failure(self) -> str:
        """Why the archive cannot be shown; empty if it can."""
        return "" if self.rows else bytes(self._texts).decode()

    def find(self, path: bytes) -> IndexRow | None:
        """What lies at a path below the archive's root, which is the empty path."""
        wanted = xxhash.xxh3_64_intdigest(path)
        at = bisect_left(self._hashes, wanted)
        if at == self.rows or self._hashes[at] != wanted:
            return None
        row = self.row(self._by_hash[at])
        return row if self.path(row.number) == path else None

    def row(self, number: int) -> IndexRow:
        return IndexRow(number, *[column[number] for column in self._of_rows])

    def path(self, number: int) -> bytes:
        place = self._places[number]
        return bytes(self._texts[place : place + self._paths[number]])

    def below(self, directory: IndexRow) -> Iterator[tuple[bytes, IndexRow]]:
        """The name and the row of everything in a directory."""
        for number in self._arrays["listed"][directory.offset : directory.offset + directory.size]:
            yield self.path(number).rpartition(b"/")[2], self.row(number)

    def text(self, row: IndexRow) -> bytes:
        """A link's text, or the bytes of a label that lie in the index; empty if there are none."""
        place = self._places[row.number] + self._paths[row.number]
        return bytes(self._texts[place : place + self._arrays["text"][row.number]])

    def tag(self, row: IndexRow) -> int:
        """64 bits for the version of a member: that of its archive, and its place and size in it."""
        version = self.version
        said = _TAGGED.pack(version.size, *split_time(version.mtime_ns), version.tag, row.offset, row.size)
        return xxhash.xxh3_64_intdigest(said) or 1


class IndexBuilder:
    """Takes the members of an archive one by one, and writes their index.

    As tar(1) does when it unpacks, it keeps the last of several members of one path, and makes an alias (a hard link)
    what its target is by then: a file or a symbolic link. Left out, and counted, are members whose path leads out of
    the archive or is none for Linux, aliases of what is not there, and files on the way to other members. It takes some
    100 bytes of memory for each member.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self._columns = {name: array(kind) for name, kind in _COLUMNS.items()}
        self._append_to = [column.append for column in self._columns.values()]
        self._hashes, self._parents = array("Q"), array("Q")
        self._texts = bytearray()
        # The hash of each directory and of the one above it, and its mode, by its path.
        self._directories: dict[bytes, tuple[int, int, int]] = {}
        # The rows of aliases, and the hashes of their targets.
        self._aliases: list[tuple[int, int]] = []
        self._directories[b""] = xxhash.xxh3_64_intdigest(b""), 0, 0o755
        self._name_bytes = 0

    def add_directory(self, name: bytes, mode: int) -> None:
        """Add a directory; those on the way to a member need not be added. Raises ArchiveFailed as `add` does."""
        if path := _plain(name):
            self._directories[path] = (*self._directory(path)[:2], mode)
        elif path is None:
            self.left_out += 1

    def add_alias(self, name: bytes, target: bytes) -> None:
        """The path `name` means what `target` means now."""
        if not (path := _plain(target)):
            self.left_out += 1
        elif self.add(name, _ALIAS):
            self._aliases.append((len(self._hashes) - 1, xxhash.xxh3_64_intdigest(path)))

    def add(
        self,
        name: bytes,
        kind: int,
        offset: int = 0,
        size: int = 0,
        mode: int = 0o644,
        packed: int = 0,
        method: int = STORED,
        crc: int = 0,
        text: bytes = b"",
    ) -> bool:
        """Add a file or a link; returns whether it was. Raises ArchiveFailed if there are too many members."""
        path = _plain(name)
        if not path or (kind == LINK and not 0 < size < _PATH_MAX):
            self.left_out += 1
            return False
        self._make_room(path)
        parent = self._directory(path.rpartition(b"/")[0])[0]
        packed = min(packed, MOST_PACKED)
        self._append(path, text, parent, offset, size, packed, crc, len(path), len(text), mode, kind, method)
        return True

    def _append(self, path: bytes, text: bytes, parent: int, *values: int) -> None:
        for append, value in zip(self._append_to, (len(self._texts), *values), strict=True):
            append(value)
        self._hashes.append(xxhash.xxh3_64_intdigest(path))
        self._parents.append(parent)
        self._texts += path + text

    def _make_room(self, path: bytes) -> None:
        if len(self._hashes) + len(self._directories) >= MOST_MEMBERS:
            raise ArchiveFailed(f"it has more than {MOST_MEMBERS:,} members")
        self._count_name(path)

    def _count_name(self, path: bytes | bytearray) -> None:
        self._name_bytes += len(path)
        if self._name_bytes > MOST_NAME_BYTES:
            raise ArchiveFailed(f"its names take more than {MOST_NAME_BYTES >> 20:,} MiB")

    def _directory(self, path: bytes) -> tuple[int, int, int]:
        # Paths may have more levels than Python has for functions that call themselves.
        missing = []
        while (known := self._directories.get(path)) is None:
            missing.append(path)
            path = path.rpartition(b"/")[0]
        for path in reversed(missing):
            self._make_room(path)
            known = self._directories[path] = xxhash.xxh3_64_intdigest(path), known[0], 0o755
        return known

    def parts(self, archive: bytes, version: Version) -> list[Part]:
        """The bytes of the index, to be saved; raises ArchiveFailed."""
        root = len(self._hashes)
        for path, (_, above, mode) in self._directories.items():
            self._append(path, b"", above, 0, 0, 0, 0, len(path), 0, mode, DIRECTORY, STORED)
        columns = {name: np.frombuffer(column, column.typecode) for name, column in self._columns.items()}
        hashes, parents = (np.frombuffer(each, np.uint64) for each in (self._hashes, self._parents))
        kept = self._kept(columns, hashes)
        root = int(kept[:root].sum())
        if not kept.all():
            columns = {name: column[kept] for name, column in columns.items()}
            hashes, parents = hashes[kept], parents[kept]
        by_hash = np.argsort(hashes, kind="stable").astype(np.uint32)
        listed = np.argsort(parents, kind="stable").astype(np.uint32)
        listed = listed[listed != root]
        above = parents[listed]
        directories = np.flatnonzero(columns["kind"] == DIRECTORY)
        begin = np.searchsorted(above, hashes[directories], "left")
        columns["offset"][directories] = begin
        columns["size"][directories] = np.searchsorted(above, hashes[directories], "right") - begin
        arrays = [*columns.values(), hashes[by_hash], by_hash, listed]
        bytes_of = [each.data.cast("B") for each in arrays]
        return index_parts(archive, version, self._texts, bytes_of, len(hashes), self.left_out)

    def _kept(self, columns: dict[str, Any], hashes: Any) -> Any:
        """Which rows are shown; raises ArchiveFailed. Aliases become what their targets are."""
        order = np.argsort(hashes, kind="stable")
        kept = np.ones(len(hashes), bool)
        for row, target in self._aliases:
            # The last row of the target's path before this one.
            first, end = (np.searchsorted(hashes, np.uint64(target), side, order) for side in ("left", "right"))
            same = order[first:end]
            before = same[: np.searchsorted(same, row)]
            found = before[-1] if len(before) else row
            if columns["kind"][found] not in (FILE, LINK):
                kept[row] = False
                self.left_out += 1
                continue
            for name in ("offset", "size", "mode", "kind", "crc", "text"):
                columns[name][row] = columns[name][found]
            if columns["text"][row]:
                begin = int(columns["place"][found]) + int(columns["path"][found])
                copy = self._path(columns, row) + self._texts[begin : begin + int(columns["text"][found])]
                self._count_name(copy)
                columns["place"][row] = len(self._texts)
                self._texts += copy
        order = order[kept[order]]
        last = np.append(hashes[order][:-1] != hashes[order][1:], True)
        for row, after in zip(order[:-1][~last[:-1]].tolist(), order[1:][~last[:-1]].tolist(), strict=True):
            if self._path(columns, row) != self._path(columns, after):
                raise ArchiveFailed("two of its paths cannot be distinguished")
            # Directories come last: this one is on the way to a member.
            self.left_out += int(columns["kind"][after] == DIRECTORY)
            kept[row] = False
        return kept

    def _path(self, columns: dict[str, Any], row: int) -> bytes:
        place = int(columns["place"][row])
        return bytes(self._texts[place : place + int(columns["path"][row])])


def archive_of(path: Path) -> bytes:
    """The path of the archive that an index is of; raises ValueError for a file that is none, and OSError."""
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
        if len(header) < _HEADER_BYTES or header[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"{path} is no index")
        *_, rows, listed, texts, _ = _REST.unpack_from(header, _BEGIN.size)
        widths = {name: array(kind).itemsize for name, kind in _ARRAYS.items()}
        columns = sum(width for name, width in widths.items() if name != "listed")
        file.seek(_HEADER_BYTES + rows * columns + listed * widths["listed"] + texts)
        return file.read()


def index_parts(
    archive: bytes,
    version: Version,
    texts: bytes | bytearray,
    arrays: Sequence[Part] = (),
    rows: int = 0,
    left_out: int = 0,
) -> list[Part]:
    """The bytes of an index, to be saved. Without rows the archive cannot be shown: `texts` says why."""
    said = version.size, *split_time(version.mtime_ns), version.tag, rows, max(0, rows - 1), len(texts), left_out
    parts = [_REST.pack(*said), *arrays, texts, archive]
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return [_BEGIN.pack(_MAGIC, checksum.intdigest()), *parts]


def save(parts: Sequence[Part], to: Path) -> None:
    """Put an index there as a whole; raises OSError. Who has an older one mapped keeps that."""
    new = to.with_suffix(f".new{os.getpid()}")
    try:
        with new.open("wb") as file:
            file.writelines(parts)
        new.rename(to)
    finally:
        new.unlink(missing_ok=True)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _plain(name: bytes) -> bytes | None:
    """The path of a member below the root of its archive; None if it leads somewhere else, or is no path for Linux."""
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if name[:1] == b"/" or len(name) > _PATH_MAX or b".." in parts or b"\0" in name:
        return None
    return b"/".join(parts) if max(map(len, parts), default=0) <= _NAME_MAX else None
