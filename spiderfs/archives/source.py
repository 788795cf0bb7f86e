"""A source whose archives are shown as directories.

A regular file of `inner` whose name ends in `.tar` or `.zip` is a directory here, under its own name. What lies below
comes from the archive's index, which is made when somebody asks for it first (`index.py`). A read of a member is one
read of the archive. An archive in an archive is a member like any other, unless a second such source lies over this.

**Versions.** A member's version is a tag (`Version`): a hash of the archive's version and of the member's place and
size. A read asks `inner` for the archive in the version of the index, so an archive that has changed gives
SourceChanged as any file does; nobody gets bytes of another archive, even if a rebuilt one has the same mtime. The
index of an archive that has just changed is made when that version has settled (`vfs/settling.py`).

**Waiting for an index.** It is made in a thread of `Indexers`, and for each archive in one process of the mount. Who
asks meanwhile waits a moment, and is then told to ask again (SourceNotReady): so callers have the patience that they
have for any question, and the source counts as reachable.

**Damage.** An archive is shown as a whole or not at all: then all questions about it end with ArchiveDamaged, and the
log says why, once for each version and mount.
"""

from __future__ import annotations

import logging
import os
import random
import resource
import stat
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import xxhash

from spiderfs.archives import tar_format, zip_format
from spiderfs.archives.index import DEFLATED, DIRECTORY, FILE, LINK, Index, Row, write_failure
from spiderfs.archives.indexer_process import FORMATS, Indexers
from spiderfs.errors import (
    ArchiveDamaged,
    ArchiveFailed,
    SourceChanged,
    SourceNotADirectory,
    SourceNotFound,
    SourceNotReady,
    SourceThrottled,
    SourceUnavailable,
)
from spiderfs.linux import steady_clock
from spiderfs.linux.range_lock import lock_shared, try_lock, unlock
from spiderfs.sources.source import Source, SourceStat, Version
from spiderfs.vfs.settling import settles_at

log = logging.getLogger(__name__)

# Indices that a process has open; each is a map, which holds a descriptor, so they take an eighth of those at most (two
# sources may lie over each other). And versions of archives that have yet to settle.
_OPEN_INDICES, _UNSETTLED = 4096, 4096
_SHARE_OF_DESCRIPTORS = 8
# Where the bytes of stored members of zip files begin, which only their own headers say.
_BEGINNINGS = 65536
# So many bytes more than the name has are taken along for a member's own header: what zip(1) and zip64 put there.
_EXTRA_BYTES = 64
# How often a read for an index is tried, and the pauses between, as in `sources/client.py`.
_ATTEMPTS, _PAUSE_S, _LONGEST_PAUSE_S = 4, 0.1, 2.0
_LOCK_OFFSETS = (1 << 62) - 1
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
        self._inner, self._directory, self._longest_bytes = inner, directory, longest_bytes
        self._indexers = indexers
        self._suffixes = tuple(b"." + kind.encode() for kind in kinds)
        self._lock = threading.Lock()
        self._open: OrderedDict[bytes, Index] = OrderedDict()
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_open = min(_OPEN_INDICES, descriptors // _SHARE_OF_DESCRIPTORS)
        self._coming: dict[tuple[bytes, Version], Future[Index]] = {}
        self._unsettled: dict[tuple[bytes, Version], float] = {}
        self._beginnings: dict[tuple[bytes, Version, int], int] = {}
        self.undated_directories = inner.undated_directories
        self.statvfs = inner.statvfs

    def forget_failures(self) -> None:
        """Have archives that could not be shown be looked at again; call it when a mount begins. Raises OSError."""
        if self._directory.is_dir():
            for path in [*self._directory.glob("*.failed"), *self._directory.glob("*.new*")]:
                path.unlink(missing_ok=True)

    # -- the contract of a source

    def stat(self, path: bytes) -> SourceStat:
        place = self._place(path)
        if place is None:
            return self._inner.stat(path)
        return self._member(place)[2] if place.below else self._directory_stat(place.found)

    def scan(self, path: bytes) -> Iterator[tuple[bytes, SourceStat]]:
        place = self._place(path)
        if place is None:
            for name, found in self._inner.scan(path):
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
        for archive, below in self._archives_on(path):
            for again in (False, True):
                # Who knows the member of this version has made the index, or has had another process make it.
                index = self._index_here(archive, again=again) if below and version.tag else None
                row = index.find(below) if index is not None else None
                if index is not None and row is not None and row.kind == FILE and index.tag(row) == version.tag:
                    try:
                        return self._bytes_of(archive, index, row, below, offset, length)
                    except SourceChanged:
                        self.stat(path)  # raises SourceNotFound if it is gone
                        raise
        place = self._place(path)
        if place is None:
            return self._inner.read(path, offset, length, version)
        index, row, found = self._member(place)
        if row.kind != FILE or found.version != version:
            raise SourceChanged(f"{os.fsdecode(path)}: no longer the version that was asked for")
        return self._bytes_of(place.archive, index, row, place.below, offset, length)

    def read_present(self, path: bytes, most_bytes: int) -> tuple[SourceStat, bytes]:
        place = self._place(path)
        if place is None:
            return self._inner.read_present(path, most_bytes)
        index, row, found = self._member(place)
        if row.kind != FILE or row.size > most_bytes:
            raise SourceChanged(f"{os.fsdecode(path)}: no file of up to {most_bytes} bytes")
        return found, self._bytes_of(place.archive, index, row, place.below, 0, row.size)

    def readlink(self, path: bytes) -> bytes:
        place = self._place(path)
        if place is None:
            return self._inner.readlink(path)
        index, row, _ = self._member(place)
        if row.kind != LINK:
            raise SourceChanged(f"{os.fsdecode(path)}: no longer a symbolic link")
        return self._bytes_of(place.archive, index, row, place.below, 0, row.size)

    def listxattr(self, path: bytes) -> list[str]:
        if self._place(path) is None:
            return self._inner.listxattr(path)
        self.stat(path)
        return []

    def getxattr(self, path: bytes, name: str) -> bytes | None:
        if self._place(path) is None:
            return self._inner.getxattr(path, name)
        self.stat(path)
        return None

    def close(self) -> None:
        self._indexers.close()
        self._inner.close()

    # -- what lies where

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
            found = self._inner.stat(archive)
            if stat.S_ISREG(found.mode):
                # A path with a slash behind it is none.
                return _Place(archive, found, below or (b"" if path == archive else b"/"))
        return None

    def _member(self, place: _Place) -> tuple[Index, Row, SourceStat]:
        index = self._index(place.archive, place.found)
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

    def _bytes_of(self, archive: bytes, index: Index, row: Row, below: bytes, offset: int, length: int) -> bytes:
        """Bytes of a file, or of a link's text; raises SourceChanged if the archive is not that of the index."""
        length = max(0, min(length, row.size - offset))
        if text := index.text(row):
            return text[offset : offset + length]
        try:
            if not archive.endswith(b".zip"):
                return self._tarred(archive, index, row, offset, length)
            if row.method == DEFLATED or length == row.size:
                return self._unpacked(archive, index, row, below)[offset : offset + length]
            key = archive, index.version, row.number
            begin = self._beginnings.get(key)
            if begin is None:
                header = self._inner.read(archive, row.offset, zip_format.LOCAL_BYTES, index.version)
                if len(self._beginnings) >= _BEGINNINGS:
                    self._beginnings.clear()
                begin = self._beginnings[key] = row.offset + zip_format.bytes_begin(bytes(header))
            return self._inner.read(archive, begin + offset, length, index.version)
        except ArchiveFailed as exc:
            raise ArchiveFailed(f"{os.fsdecode(archive)}/{os.fsdecode(below)}: {exc}") from exc

    def _tarred(self, archive: bytes, index: Index, row: Row, offset: int, length: int) -> bytes:
        """Bytes of a tar's member; who reads its beginning gets no other bytes than those behind its header."""
        if offset:
            return self._inner.read(archive, row.offset + offset, length, index.version)
        header = tar_format.HEADER_BYTES
        got = memoryview(self._inner.read(archive, row.offset - header, header + length, index.version))
        if zlib.crc32(got[:header]) != row.crc:
            raise ArchiveFailed("the archive has other bytes than when its members were looked for: give it a new time")
        return bytes(got[header:])

    def _unpacked(self, archive: bytes, index: Index, row: Row, below: bytes) -> bytes:
        if row.method == DEFLATED and (row.size > self._longest_bytes or row.packed > 2 * self._longest_bytes):
            raise ArchiveFailed("it is packed, and has more than sample_max_bytes: mount with a larger one")
        guess = zip_format.LOCAL_BYTES + len(below) + _EXTRA_BYTES + row.packed
        got = bytes(self._inner.read(archive, row.offset, guess, index.version))
        begin = zip_format.bytes_begin(got)
        if (missing := begin + row.packed - len(got)) > 0:
            got += bytes(self._inner.read(archive, row.offset + len(got), missing, index.version))
        return zip_format.unpacked(got[begin : begin + row.packed], row.method, row.size, row.crc)

    # -- indices

    def _index(self, archive: bytes, found: SourceStat) -> Index:
        """The index of this version of an archive; raises ArchiveDamaged, SourceNotReady while it is being made."""
        key = archive, found.version
        index = self._index_here(archive, found.version)
        if index is None:
            self._check_settled(key)
            with self._lock:
                coming = self._coming.get(key)
                if coming is None:
                    coming = self._coming[key] = self._indexers.threads.submit(self._made, *key)
                    coming.add_done_callback(lambda _: self._coming.pop(key, None))
            try:
                index = coming.result(self._indexers.moment_s)
            except TimeoutError:
                raise SourceNotReady(f"{os.fsdecode(archive)}: its members are being looked for") from None
        if index.failure:
            raise ArchiveDamaged(f"{os.fsdecode(archive)}: {index.failure}")
        return index

    def _index_here(self, archive: bytes, version: Version | None = None, again: bool = False) -> Index | None:
        """The index of this version, or of any, if some process has made it. `again`: look at the file anew."""
        with self._lock:
            index = None if again else self._open.get(archive)
        if index is not None and version in (None, index.version):
            return index
        for path in self._files(archive):
            try:
                index = Index(path)
            except (OSError, ValueError):
                continue
            if version in (None, index.version):
                with self._lock:
                    self._open[archive] = index
                    self._open.move_to_end(archive)
                    while len(self._open) > self._most_open:
                        self._open.popitem(last=False)
                return index
        return None

    def _files(self, archive: bytes) -> tuple[Path, Path]:
        """The file of an index, and that of the note that there is none."""
        name = xxhash.xxh3_128_hexdigest(archive)
        return self._directory / f"{name}.index", self._directory / f"{name}.failed"

    def _check_settled(self, key: tuple[bytes, Version]) -> None:
        """Raises SourceNotReady while the bytes of this version may still change without a sign."""
        archive, version = key
        if version.tag:
            return
        now = steady_clock.now()
        at = settles_at(version.mtime_ns, version.size, now, now, 0.0, self._unsettled.get(key))
        if at <= now:
            return
        if len(self._unsettled) >= _UNSETTLED:
            self._unsettled.clear()
        self._unsettled[key] = at
        raise SourceNotReady(f"{os.fsdecode(archive)}: it has just changed, and is shown when it has settled")

    def _made(self, archive: bytes, version: Version) -> Index:
        """Make the index of this version, unless another process does; in a thread of this module's."""
        at = xxhash.xxh3_64_intdigest(archive) & _LOCK_OFFSETS
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self._directory / "lock", "a+b") as lock:
                while not try_lock(lock.fileno(), at, 1):
                    lock_shared(lock.fileno(), at, 1)
                    unlock(lock.fileno(), at, 1)
                if self._index_here(archive, version) is None:
                    self._make(archive, version)
        except OSError as exc:
            raise ArchiveFailed(f"its index cannot be written ({exc.strerror or exc}): free the cache's disk") from exc
        index = self._index_here(archive, version)
        if index is None:
            raise SourceUnavailable(f"{os.fsdecode(archive)}: its index has been removed")
        return index

    def _read_patiently(self, archive: bytes, offset: int, length: int, version: Version) -> bytes:
        """Read for an index, again if the source fails: to begin anew would be to read all of the archive again."""
        until_s, pause_s, attempts = time.monotonic() + self._indexers.timeout_s, _PAUSE_S, _ATTEMPTS
        while True:
            try:
                return self._inner.read(archive, offset, length, version)
            except SourceUnavailable as exc:
                attempts -= not isinstance(exc, SourceThrottled)
                if not attempts or time.monotonic() > until_s:
                    raise
            time.sleep(pause_s * random.uniform(0.5, 1))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _make(self, archive: bytes, version: Version) -> None:
        to, failed = self._files(archive)

        def read(offset: int, length: int) -> bytes:
            return self._read_patiently(archive, offset, length, version)

        kind = next(kind for kind in FORMATS if archive.endswith(b"." + kind.encode()))
        try:
            left_out = self._indexers.index(kind, version, read, to)
        except SourceChanged as exc:
            # Who asks again asks for its attributes first, and so for the new version.
            raise SourceNotReady(f"{os.fsdecode(archive)} changes while it is read") from exc
        except ArchiveFailed as exc:
            log.warning("%s cannot be shown as a directory: %s", os.fsdecode(archive), exc)
            write_failure(version, failed, str(exc))
            return
        if left_out:
            told = "%s: %d members are not shown, such as devices or names that lead out of it"
            log.warning(told, os.fsdecode(archive), left_out)
