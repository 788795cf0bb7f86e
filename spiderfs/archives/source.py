"""A source whose archives are shown as directories.

A regular file of `inner` whose name ends in `.tar` or `.zip` is a directory here, under its own name. What lies below
comes from the archive's index, which is made when somebody asks for it first (`indices.py`). A read of a member is one
read of the archive. An archive in an archive is a member like any other, unless a second such source lies over this.

**Versions.** A member's version is a tag (`Version`): a hash of the archive's version and of the member's place and
size. A read asks `inner` for the archive in the version of the index, so an archive that has changed gives
SourceChanged as any file does; nobody gets bytes of another archive, even if a rebuilt one has the same mtime.

**Damage.** An archive is shown as a whole or not at all: then all questions about it end with ArchiveDamaged, and the
log says why, once for each version and mount.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import trio
import xxhash

from spiderfs.archives import tar_format, zip_format
from spiderfs.archives.index import DEFLATED, DIRECTORY, FILE, LINK, Index, Row
from spiderfs.archives.indexer_process import Indexers
from spiderfs.archives.indices import Indices
from spiderfs.archives.neighbourhood import Neighbourhood
from spiderfs.errors import ArchiveFailed, SourceChanged, SourceNotADirectory, SourceNotFound, SourceUnavailable
from spiderfs.sources.source import Source, SourceStat, Version

log = logging.getLogger(__name__)

# Members whose own headers were looked at lately, for reads of pieces of them: where their bytes begin, and when that
# was. So long a header is believed; till then a replaced archive of the same size and time may give other bytes.
_BEGINNINGS, _BELIEVED_S = 65536, 60.0
# A piece that begins so near to the header of its member is read together with it: that takes less than a request.
_NEAR_BYTES = 64 << 10
_SECOND_NS = 1_000_000_000


class _Place(NamedTuple):
    """A path within an archive: the archive's path and attributes, and the path below it, empty for the archive."""

    archive: bytes
    found: SourceStat
    below: bytes


class ArchiveSource:
    def __init__(
        self, inner: Source, kinds: Sequence[str], directory: Path, longest_bytes: int, indexers: Indexers
    ) -> None:
        """Show archives of these `kinds` (of FORMATS); their indices lie in `directory`, which is for no other source.

        A packed member is unpacked as a whole, and refused if it has more than `longest_bytes`.
        """
        self.inner, self._longest_bytes = inner, longest_bytes
        self.indices = Indices(inner, directory, indexers)
        self._suffixes = tuple(b"." + kind.encode() for kind in kinds)
        self._beginnings: dict[tuple[bytes, Version, int], tuple[int, float]] = {}
        self.undated_directories = inner.undated_directories
        self.statvfs = inner.statvfs

    # -- the contract of a source

    def stat(self, path: bytes) -> SourceStat:
        place = self._place(path)
        if place is None:
            return self.inner.stat(path)
        return self._member(place)[2] if place.below else self._directory_stat(place.found)

    def scan(self, path: bytes) -> Iterator[tuple[bytes, SourceStat]]:
        place = self._place(path)
        if place is None:
            for name, found in self.inner.scan(path):
                is_archive = name.endswith(self._suffixes) and stat.S_ISREG(found.mode)
                yield name, self._directory_stat(found) if is_archive else found
            return
        index, directory, own = self._member(place)
        if directory.kind != DIRECTORY:
            raise SourceNotADirectory(f"{os.fsdecode(path)}: Not a directory")
        yield b".", own
        for name, row in index.below(directory):
            yield name, self._stat_of(place.found, index, row)

    def read(self, path: bytes, offset: int, length: int, version: Version) -> bytes:
        """As `Source.read`. A path with a slash behind it is that of an archive as the file that it is."""
        if path[-1:] == b"/":
            return self.inner.read(path[:-1], offset, length, version)
        if known := self._known(path, version) or self._known(path, version, again=True):
            try:
                return self._bytes_of(*known, offset, length)
            except SourceChanged:
                self.stat(path)  # raises SourceNotFound if it is gone
                raise
        place = self._place(path)
        if place is None:
            return self.inner.read(path, offset, length, version)
        index, row, found = self._member(place)
        if row.kind != FILE or found.version != version:
            raise SourceChanged(f"{os.fsdecode(path)}: no longer the version that was asked for")
        return self._bytes_of(place.archive, place.below, index, row, offset, length)

    def read_present(self, path: bytes, most_bytes: int) -> tuple[SourceStat, bytes]:
        place = self._place(path)
        if place is None:
            return self.inner.read_present(path, most_bytes)
        index, row, found = self._member(place)
        if row.kind != FILE or row.size > most_bytes:
            raise SourceChanged(f"{os.fsdecode(path)}: no file of up to {most_bytes} bytes")
        return found, self._bytes_of(place.archive, place.below, index, row, 0, row.size)

    def readlink(self, path: bytes) -> bytes:
        place = self._place(path)
        if place is None:
            return self.inner.readlink(path)
        index, row, _ = self._member(place)
        if row.kind != LINK:
            raise SourceChanged(f"{os.fsdecode(path)}: no longer a symbolic link")
        return self._bytes_of(place.archive, place.below, index, row, 0, row.size)

    def listxattr(self, path: bytes) -> list[str]:
        if self._place(path) is None:
            return self.inner.listxattr(path)
        self.stat(path)
        return []

    def getxattr(self, path: bytes, name: str) -> bytes | None:
        if self._place(path) is None:
            return self.inner.getxattr(path, name)
        self.stat(path)
        return None

    def close(self) -> None:
        self.indices.close()
        self.inner.close()

    # -- what lies where

    def neighbourhood(self, path: bytes, version: Version) -> Neighbourhood | None:
        """What lies beside a member of this version, if this process finds its index; asks the source nothing."""
        if known := self._known(path, version):
            archive, _, index, row = known
            return Neighbourhood(archive, index, row)
        found = self.inner.neighbourhood(path, version) if isinstance(self.inner, ArchiveSource) else None
        if found is not None:
            found.as_file += b"/"
        return found

    def _known(self, path: bytes, version: Version, again: bool = False) -> tuple[bytes, bytes, Index, Row] | None:
        """The archive, what is below it, and the index and row of a member of this version, if an index is here.

        Who knows such a member has made the index, or has had another process make it: `again` as in `Indices.here`.
        """
        for archive, below in self._archives_on(path) if version.tag else ():
            index = self.indices.here(archive, again=again) if below else None
            row = index.find(below) if index is not None else None
            if index is not None and row is not None and row.kind == FILE and index.tag(row) == version.tag:
                return archive, below, index, row
        return None

    def _archives_on(self, path: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Each beginning of a path that has the name of an archive, and the rest of the path."""
        if not any(suffix in path for suffix in self._suffixes):
            return
        at = -1
        while (at := path.find(b"/", at + 1)) >= 0:
            if path[:at].endswith(self._suffixes):
                yield path[:at], path[at + 1 :]
        if path.endswith(self._suffixes):
            yield path, b""

    def _place(self, path: bytes) -> _Place | None:
        for archive, below in self._archives_on(path):
            found = self.inner.stat(archive)
            if stat.S_ISREG(found.mode):
                # A path with a slash behind it is none.
                return _Place(archive, found, below or (b"" if path == archive else b"/"))
        return None

    def _member(self, place: _Place) -> tuple[Index, Row, SourceStat]:
        index = self.indices.of(place.archive, place.found.version)
        row = index.find(place.below)
        if row is None:
            above = place.below
            while above and (row := index.find(above := above.rpartition(b"/")[0])) is None:
                pass
            kind = SourceNotFound if row is None or row.kind == DIRECTORY else SourceNotADirectory
            raise kind(f"{os.fsdecode(place.archive)} has no {os.fsdecode(place.below)}")
        return index, row, self._stat_of(place.found, index, row)

    def _stat_of(self, archive: SourceStat, index: Index, row: Row) -> SourceStat:
        """A member's attributes: who may read the archive may read the member."""
        if row.kind == DIRECTORY:
            return self._directory_stat(archive)
        if row.kind == LINK:
            return archive._replace(mode=stat.S_IFLNK | 0o777, size=row.size, tag=index.tag(row))
        readable = archive.mode & 0o444
        return archive._replace(
            mode=stat.S_IFREG | readable | (row.mode & readable >> 2), size=row.size, tag=index.tag(row)
        )

    def _directory_stat(self, archive: SourceStat) -> SourceStat:
        """The attributes of an archive, or of a directory in one.

        A listing is compared by the mtime, so what is below the second is drawn from the archive's whole version.
        """
        readable = archive.mode & 0o444
        drawn_ns = xxhash.xxh3_64_intdigest(repr(archive.version).encode()) % _SECOND_NS
        mtime_ns = 0 if self.undated_directories else archive.mtime_ns // _SECOND_NS * _SECOND_NS + drawn_ns
        return archive._replace(mode=stat.S_IFDIR | readable | readable >> 2, size=0, mtime_ns=mtime_ns, tag=0)

    # -- bytes

    def _bytes_of(self, archive: bytes, below: bytes, index: Index, row: Row, offset: int, length: int) -> bytes:
        """Bytes of a file, or of a link's text; raises SourceChanged if the archive is not that of the index."""
        length = max(0, min(length, row.size - offset))
        if text := index.text(row):
            return text[offset : offset + length]
        try:
            if not archive.endswith(b".zip"):
                return self._tarred(archive, index, row, offset, length)
            if row.method == DEFLATED or length == row.size:
                return self._unpacked(archive, index, row, below)[offset : offset + length]
            return self.inner.read(archive, self._begin(archive, index, row) + offset, length, index.version)
        except ArchiveFailed as exc:
            raise ArchiveFailed(f"{os.fsdecode(archive)}/{os.fsdecode(below)}: {exc}") from exc

    def _tarred(self, archive: bytes, index: Index, row: Row, offset: int, length: int) -> bytes:
        """Bytes of a tar's member: no other bytes than those behind its header."""
        if offset > _NEAR_BYTES:
            return self.inner.read(archive, self._begin(archive, index, row) + offset, length, index.version)
        header = tar_format.HEADER_BYTES
        got = memoryview(self.inner.read(archive, row.offset - header, header + offset + length, index.version))
        tar_format.check_header(got[:header], row.crc)
        if offset + length < row.size:
            self._note_beginning((archive, index.version, row.number), row.offset)
        return bytes(got[header + offset :])

    def _begin(self, archive: bytes, index: Index, row: Row) -> int:
        """Where the bytes of a member begin, by its own header; raises ArchiveFailed if that is another member's."""
        key = archive, index.version, row.number
        begin, looked_at_s = self._beginnings.get(key, (0, -_BELIEVED_S))
        if time.monotonic() < looked_at_s + _BELIEVED_S:
            return begin
        if archive.endswith(b".zip"):
            header = self.inner.read(archive, row.offset, zip_format.LOCAL_BYTES, index.version)
            begin = row.offset + zip_format.bytes_begin(bytes(header), row.crc)
        else:
            before = tar_format.HEADER_BYTES
            tar_format.check_header(self.inner.read(archive, row.offset - before, before, index.version), row.crc)
            begin = row.offset
        self._note_beginning(key, begin)
        return begin

    def _note_beginning(self, key: tuple[bytes, Version, int], begin: int) -> None:
        if len(self._beginnings) >= _BEGINNINGS:
            self._beginnings.clear()
        self._beginnings[key] = begin, time.monotonic()

    def _unpacked(self, archive: bytes, index: Index, row: Row, below: bytes) -> bytes:
        if row.method == DEFLATED and (row.size > self._longest_bytes or row.packed > 2 * self._longest_bytes):
            raise ArchiveFailed("it is packed, and has more than sample_max_bytes: mount with a larger one")
        guess = zip_format.LOCAL_BYTES + len(below) + zip_format.EXTRA_BYTES + row.packed
        got = bytes(self.inner.read(archive, row.offset, guess, index.version))
        begin = zip_format.bytes_begin(got)
        if (missing := begin + row.packed - len(got)) > 0:
            got += bytes(self.inner.read(archive, row.offset + len(got), missing, index.version))
        return zip_format.unpacked(got[begin : begin + row.packed], row.method, row.size, row.crc)


async def forget_gone(source: Source) -> None:
    """Delete the indices of archives that `source`, or one that it wraps, no longer has."""
    while isinstance(source, ArchiveSource):
        try:
            await trio.to_thread.run_sync(source.indices.forget_gone, abandon_on_cancel=True)
        except (OSError, SourceUnavailable) as exc:
            log.info("indices of archives that are gone are deleted at the next mount: %s", exc)
        source = source.inner
