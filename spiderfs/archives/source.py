"""A source whose archives are shown as directories.

A regular file of `inner` whose name ends in `.tar` or `.zip` is a directory here, under its own name. Its content comes
from the archive's index, which is built at the first lookup in it. A read of a member is one read of the archive. An
archive in an archive is a member like any other, unless a second such source lies over this.

**Versions.** A member's version is a tag (`Version`): a hash of the archive's version and of the member's place and
size. A read asks `inner` for the archive in the version of the index, so a changed archive raises SourceChanged.

**Damage.** An archive is shown whole or not at all. If it is damaged, every call about it raises ArchiveDamaged, and
the log has the reason once for each version and mount.

**Building an index** (`Indices`). A thread of `Indexers` builds it, for each archive in one process of the mount. Until
it is built, a lookup waits a moment and then raises SourceNotReady: the caller retries, and the source counts as
reachable. The index of a changed archive is built when that version has settled (`vfs/rules.py`).

**Index files.** An index is renamed into its place, so a process with an older one mapped keeps that. Its name is a
hash of the archive's path, which it holds, so that it can be deleted with the archive. If the disk is full or
read-only, each process builds the index in memory, and writes it as soon as the disk accepts it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import resource
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple

import trio
import xxhash

from spiderfs import errors
from spiderfs.archives import formats
from spiderfs.archives.index import (
    DEFLATED,
    DIRECTORY,
    FAILED,
    FILE,
    LINK,
    STORED,
    ArchiveIndex,
    IndexRow,
    archive_of,
    save,
)
from spiderfs.archives.indexer_process import FORMATS, MOST_SPARE_BYTES, Indexers
from spiderfs.core.chunks import Member
from spiderfs.linux import steady_clock
from spiderfs.linux.mounts import FAILURE_XATTR
from spiderfs.linux.range_lock import lock_shared, try_lock, unlock
from spiderfs.sources.client import pause_s
from spiderfs.sources.source import Source, SourceStat, Version, streamed
from spiderfs.vfs.catalogue import Catalogue, Node
from spiderfs.vfs.rules import settles_at


class Neighbourhood:
    """A member and those beside it, by the index that this process has; nothing here asks the source."""

    def __init__(self, archive: bytes, index: ArchiveIndex, row: IndexRow) -> None:
        self.archive, self._index, self._row = archive, index, row
        self.as_file = archive + b"/"
        """The path by which the source that gave this reads the archive as the file that it is."""
        self._is_zip = archive.endswith(b".zip")

    @property
    def member(self) -> Member | None:
        """The member itself; None if its bytes do not lie in the archive as they are."""
        return self._member(self._row)

    def beside(self, step: int) -> Iterator[Member]:
        """The members after this one (`step` is 1) or before it (-1), up to one that cannot be read along."""
        at, number = self._member(self._row), self._row.number
        while at is not None and 0 <= (number := number + step) < self._index.rows:
            found = self._member(self._index.row(number))
            # Aliases, and members of an archive whose directory has another order, do not lie beside each other.
            if found is None or (found.begin - at.begin) * step <= 0:
                return
            yield found
            at = found

    def node(self, catalogue: Catalogue, member: Member) -> Node | None:
        """The file of a member, if its name is known and means this version."""
        path = self.archive + b"/" + self._index.path(member.number)
        if (dentry := catalogue.find(*catalogue.parent_of(path))) is None or not dentry.stat.size:
            return None
        if dentry.stat.version.tag != self._index.tag(self._index.row(member.number)):
            return None
        return Node(dentry.inode, path, dentry.stat, dentry.settles_at)

    def read(self, begin: int, end: int) -> tuple[bytes, int, int, Version]:
        """The arguments of `Source.read` for the archive's bytes from `begin` to `end`."""
        return self.as_file, begin, min(end, self._index.version.size) - begin, self._index.version

    def cut(self, begin: int, member: Member) -> partial[bytes]:
        """Gives, in any process, the bytes of a member in those of the archive from `begin` on; see `_member_in`."""
        row = self._index.row(member.number)
        place = member.begin - begin, member.end - begin
        return partial(_member_in, *place, row, self._index.text(row), self._is_zip)

    def _member(self, row: IndexRow) -> Member | None:
        if row.kind != FILE or row.method != STORED:
            return None
        if not self._is_zip:
            return Member(row.number, row.offset - formats.TAR_HEADER_BYTES, row.offset + row.size)
        length = formats.LOCAL_BYTES + len(self._index.path(row.number)) + formats.EXTRA_BYTES + row.packed
        return Member(row.number, row.offset, row.offset + length)


def _member_in(begin: int, end: int, row: IndexRow, text: bytes, is_zip: bool, whole: bytes) -> bytes:
    """The bytes of the member at this place of `whole`; raises ArchiveFailed if they are not its."""
    if text:
        return text
    part = memoryview(whole)[begin:end]
    if not is_zip:
        formats.check_tar_header(part[: formats.TAR_HEADER_BYTES], row.crc)
        return bytes(part[formats.TAR_HEADER_BYTES :])
    at = formats.bytes_begin(bytes(part[: formats.LOCAL_BYTES]))
    return formats.unpacked(bytes(part[at : at + row.packed]), row.method, row.size, row.crc)


log = logging.getLogger(__name__)

# Indices that a process has open; each is a map, which holds a descriptor, so they take an eighth of those at most (two
# sources may lie over each other). And versions of archives that have yet to settle.
_OPEN_INDICES, _UNSETTLED = 4096, 4096
_SHARE_OF_DESCRIPTORS = 8
_LOCK_OFFSETS = (1 << 62) - 1
# How often a disk that took no index gets another one to write.
_SAVE_EVERY_S = 5.0


class Indices:
    """Those of one process; threads may share it."""

    def __init__(self, inner: Source, directory: Path, indexers: Indexers) -> None:
        """Indices of archives of `inner`, in a directory that is for no other source."""
        self._inner, self._directory, self._indexers = inner, directory, indexers
        self._lock = threading.Lock()
        self._random = random.Random()
        self._open: OrderedDict[bytes, ArchiveIndex] = OrderedDict()
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_open = min(_OPEN_INDICES, descriptors // _SHARE_OF_DESCRIPTORS)
        self._coming: dict[tuple[bytes, Version], Future[ArchiveIndex]] = {}
        self._unsettled: dict[tuple[bytes, Version], float] = {}
        self._disk_works, self._save_at_s = True, 0.0

    def close(self) -> None:
        self._indexers.close()

    def forget_failures(self) -> None:
        """Have archives that could not be shown be looked at again; call it when a mount begins. Raises OSError."""
        if self._directory.is_dir():
            for path in [*self._directory.glob(f"*{FAILED}"), *self._directory.glob("*.new*")]:
                path.unlink(missing_ok=True)

    def forget_gone(self) -> None:
        """Delete indices of archives that are gone, asking the source for each; raises SourceUnavailable, OSError."""
        for path in self._directory.glob("*.index"):
            try:
                self._inner.stat(archive_of(path))
            except (ValueError, errors.SourceNotFound):
                # It may be of another revision of the format.
                path.unlink(missing_ok=True)
            except errors.SourceUnavailable:
                raise
            except errors.SourceError:
                pass

    def of(self, archive: bytes, version: Version) -> ArchiveIndex:
        """The index of this version of an archive; raises ArchiveDamaged, SourceNotReady while it is being made."""
        key = archive, version
        if (index := self.here(archive, version)) is None:
            self._check_settled(key)
            with self._lock:
                if (coming := self._coming.get(key)) is None:
                    coming = self._coming[key] = self._indexers.threads.submit(self._made, *key)
                    coming.add_done_callback(lambda _: self._coming.pop(key, None))
            try:
                index = coming.result(self._indexers.moment_s)
            except TimeoutError:
                raise errors.SourceNotReady(f"{os.fsdecode(archive)}: its members are being looked for") from None
        if index.failure:
            raise errors.ArchiveDamaged(f"{os.fsdecode(archive)}: {index.failure}")
        return index

    def here(self, archive: bytes, version: Version | None = None, again: bool = False) -> ArchiveIndex | None:
        """The index of this version, or of any, if some process has made it. `again`: look at the file again."""
        with self._lock:
            index = None if again else self._open.get(archive)
        if index is not None and version in (None, index.version):
            if index.spare:
                self._save_soon()
            return index
        for path in self._files(archive):
            try:
                index = ArchiveIndex(path)
            except (OSError, ValueError):
                continue
            if version in (None, index.version):
                return self._keep(archive, index)
        return None

    def _keep(self, archive: bytes, index: ArchiveIndex) -> ArchiveIndex:
        with self._lock:
            self._open[archive] = index
            self._open.move_to_end(archive)
            spare_bytes = sum(len(each.spare) for each in self._open.values())
            while len(self._open) > self._most_open or spare_bytes > MOST_SPARE_BYTES:
                spare_bytes -= len(self._open.popitem(last=False)[1].spare)
        return index

    def _save_soon(self) -> None:
        """Have the indices in memory be written, now and then: the disk may have room by now."""
        now = time.monotonic()
        with self._lock:
            if now < self._save_at_s:
                return
            self._save_at_s = now + _SAVE_EVERY_S
        # The threads may have ended, as the process is about to.
        with contextlib.suppress(RuntimeError):
            self._indexers.threads.submit(self._save)

    def _save(self) -> None:
        with self._lock:
            spare = [(archive, index) for archive, index in self._open.items() if index.spare]
        for archive, index in spare:
            written, failed = self._files(archive)
            try:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                save([index.spare], failed if index.failure else written)
            except OSError as exc:
                log.debug("indices of archives stay in memory: %s", exc)
                return
            with self._lock:
                if self._open.get(archive) is index:
                    del self._open[archive]
        if not self._disk_works:
            self._disk_works = True
            log.warning("the disk of the cache takes indices of archives again")

    def _files(self, archive: bytes) -> tuple[Path, Path]:
        """The file of an index, and that of the note that there is none."""
        name = xxhash.xxh3_128_hexdigest(archive)
        return self._directory / f"{name}.index", self._directory / f"{name}{FAILED}"

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
        raise errors.SourceNotReady(f"{os.fsdecode(archive)}: it has just changed, and is shown when it has settled")

    def _made(self, archive: bytes, version: Version) -> ArchiveIndex:
        """Make the index of this version, unless another process does; in a thread of this module's."""
        with self._alone(archive):
            return self.here(archive, version) or self._make(archive, version)

    @contextlib.contextmanager
    def _alone(self, archive: bytes) -> Iterator[None]:
        """One process at a time; a disk that takes no lock takes no index either, so each makes its own."""
        at = xxhash.xxh3_64_intdigest(archive) & _LOCK_OFFSETS
        with contextlib.ExitStack() as held:
            try:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = held.enter_context(open(self._directory / "lock", "a+b"))
                while not try_lock(lock.fileno(), at, 1):
                    lock_shared(lock.fileno(), at, 1)
                    unlock(lock.fileno(), at, 1)
            except OSError as exc:
                log.debug("no lock for the index of an archive: %s", exc)
            yield

    def _read_patiently(self, archive: bytes, offset: int, length: int, version: Version) -> bytes:
        """Read for an index, again if the source fails: to begin again would be to read all of the archive again."""
        limits, attempt, failures = self._indexers.limits, 0, 0
        until_s = time.monotonic() + limits.timeout_s
        while True:
            try:
                return self._inner.read(archive, offset, length, version)
            except errors.SourceUnavailable as exc:
                failures += not isinstance(exc, errors.SourceThrottled)
                if failures == limits.attempts or time.monotonic() > until_s:
                    raise
            attempt += 1
            time.sleep(pause_s(attempt, limits, self._random))

    def _make(self, archive: bytes, version: Version) -> ArchiveIndex:
        to, named = self._files(archive)[0], os.fsdecode(archive)

        def read(offset: int, length: int) -> bytes:
            return self._read_patiently(archive, offset, length, version)

        kind = next(kind for kind in FORMATS if archive.endswith(b"." + kind.encode()))
        try:
            spare = self._indexers.index(kind, archive, version, read, to)
        except errors.SourceChanged as exc:
            # Who asks again asks for its attributes first, and so for the new version.
            raise errors.SourceNotReady(f"{named} changes while it is read") from exc
        except OSError as exc:
            raise errors.ArchiveFailed(f"{named}: its index cannot be written ({exc}): free the cache's disk") from exc
        if spare and self._disk_works:
            self._disk_works = False
            log.warning("the disk of the cache takes no indices of archives, so they are kept in memory")
        index = self._keep(archive, ArchiveIndex(to, spare)) if spare else self.here(archive, version)
        if index is None:
            raise errors.SourceUnavailable(f"{named}: its index has been removed")
        if index.failure:
            log.warning("%s cannot be shown as a directory: %s", named, index.failure)
        elif index.left_out:
            message = "%s: %d members are not shown, such as devices or names that lead out of it"
            log.warning(message, named, index.left_out)
        return index


# Members whose own headers were looked at lately, for reads of pieces of them: where their bytes begin, and when that
# was. So long a header is trusted; till then a replaced archive of the same size and time may give other bytes.
_BEGINNINGS, _TRUSTED_S = 65536, 60.0
# A piece that begins so near to the header of its member is read together with it: that takes less than a request.
_NEAR_BYTES = 64 << 10
_SECOND_NS = 1_000_000_000


class _ArchivePlace(NamedTuple):
    """A path within an archive: the archive's path and attributes, and the path below it, empty for the archive."""

    archive: bytes
    found: SourceStat
    below: bytes


class ArchiveSource:
    def __init__(
        self, inner: Source, kinds: Sequence[str], directory: Path, longest_bytes: int, indexers: Indexers
    ) -> None:
        """Show archives of `kinds`, with indices in a `directory` of their own; unpack up to `longest_bytes`."""
        self.inner, self._longest_bytes = inner, longest_bytes
        self.indices = Indices(inner, directory, indexers)
        self._suffixes = tuple(b"." + kind.encode() for kind in kinds)
        self._beginnings: dict[tuple[bytes, Version, int], tuple[int, float]] = {}
        self.undated_directories, self.statvfs = inner.undated_directories, inner.statvfs

    def stat(self, path: bytes) -> SourceStat:
        if (place := self._place(path)) is None:
            return self.inner.stat(path)
        return self._member(place)[2] if place.below else self._directory_stat(place.found)

    def scan(self, path: bytes, known: Container[tuple[bytes, int]] = ()) -> Iterator[tuple[bytes, SourceStat]]:
        if (place := self._place(path)) is None:
            for name, found in self.inner.scan(path, known):
                is_archive = name.endswith(self._suffixes) and stat.S_ISREG(found.mode)
                yield name, self._directory_stat(found) if is_archive else found
            return
        index, directory, own = self._member(place)
        if directory.kind != DIRECTORY:
            raise errors.SourceNotADirectory(f"{os.fsdecode(path)}: Not a directory")
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
            except errors.SourceChanged:
                self.stat(path)  # raises SourceNotFound if it is gone
                raise
        if (place := self._place(path)) is None:
            return self.inner.read(path, offset, length, version)
        index, row, found = self._member(place)
        if row.kind != FILE or found.version != version:
            raise errors.SourceChanged(f"{os.fsdecode(path)}: no longer the version that was asked for")
        return self._bytes_of(place.archive, place.below, index, row, offset, length)

    def stream(self, path: bytes, offset: int, length: int, version: Version) -> Iterator[bytes]:
        """As `Streams.stream`, of a member that lies in its archive as it is; its beginning is one read."""
        known = self._known(path, version) if offset > _NEAR_BYTES else None
        if known is not None and known[3].method == STORED:
            archive, _, index, row = known
            length = max(0, min(length, row.size - offset))
            return streamed(self.inner, archive, self._begin(archive, index, row) + offset, length, index.version)
        if any(self._archives_on(path)):
            return iter((self.read(path, offset, length, version),))
        return streamed(self.inner, path, offset, length, version)

    def read_present(self, path: bytes, most_bytes: int) -> tuple[SourceStat, bytes]:
        if (place := self._place(path)) is None:
            return self.inner.read_present(path, most_bytes)
        index, row, found = self._member(place)
        if row.kind != FILE or row.size > most_bytes:
            raise errors.SourceChanged(f"{os.fsdecode(path)}: no file of up to {most_bytes} bytes")
        return found, self._bytes_of(place.archive, place.below, index, row, 0, row.size)

    def readlink(self, path: bytes) -> bytes:
        if (place := self._place(path)) is None:
            return self.inner.readlink(path)
        index, row, _ = self._member(place)
        if row.kind != LINK:
            raise errors.SourceChanged(f"{os.fsdecode(path)}: no longer a symbolic link")
        return self._bytes_of(place.archive, place.below, index, row, 0, row.size)

    def listxattr(self, path: bytes) -> list[str]:
        if self._place(path) is None:
            return self.inner.listxattr(path)
        self.stat(path)
        return []

    def getxattr(self, path: bytes, name: str) -> bytes | None:
        if (place := self._place(path)) is None:
            return self.inner.getxattr(path, name)
        if place.below:
            self._member(place)
        elif name == FAILURE_XATTR and (index := self.indices.here(place.archive, place.found.version)) is not None:
            return index.failure.encode() or None
        return None

    def close(self) -> None:
        self.indices.close()
        self.inner.close()

    def neighbourhood(self, path: bytes, version: Version) -> Neighbourhood | None:
        """What lies beside a member of this version, if this process finds its index; asks the source nothing."""
        if known := self._known(path, version):
            archive, _, index, row = known
            return Neighbourhood(archive, index, row)
        found = self.inner.neighbourhood(path, version) if isinstance(self.inner, ArchiveSource) else None
        if found is not None:
            found.as_file += b"/"
        return found

    def _known(
        self, path: bytes, version: Version, again: bool = False
    ) -> tuple[bytes, bytes, ArchiveIndex, IndexRow] | None:
        """Archive, path below, index and row of a member, if an index is here; `again`: see `Indices.here`."""
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

    def _place(self, path: bytes) -> _ArchivePlace | None:
        for archive, below in self._archives_on(path):
            found = self.inner.stat(archive)
            if stat.S_ISREG(found.mode):
                # A path with a slash behind it is none.
                return _ArchivePlace(archive, found, below or (b"" if path == archive else b"/"))
        return None

    def _member(self, place: _ArchivePlace) -> tuple[ArchiveIndex, IndexRow, SourceStat]:
        index = self.indices.of(place.archive, place.found.version)
        if (row := index.find(place.below)) is None:
            above = place.below
            while above and (row := index.find(above := above.rpartition(b"/")[0])) is None:
                pass
            kind = errors.SourceNotFound if row is None or row.kind == DIRECTORY else errors.SourceNotADirectory
            raise kind(f"{os.fsdecode(place.archive)} has no {os.fsdecode(place.below)}")
        return index, row, self._stat_of(place.found, index, row)

    def _stat_of(self, archive: SourceStat, index: ArchiveIndex, row: IndexRow) -> SourceStat:
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
        """Attributes of an archive or a directory in one: what is below the second of mtime tells versions apart."""
        readable = archive.mode & 0o444
        drawn_ns = xxhash.xxh3_64_intdigest(repr(archive.version).encode()) % _SECOND_NS
        mtime_ns = 0 if self.undated_directories else archive.mtime_ns // _SECOND_NS * _SECOND_NS + drawn_ns
        return archive._replace(mode=stat.S_IFDIR | readable | readable >> 2, size=0, mtime_ns=mtime_ns, tag=0)

    def _bytes_of(
        self, archive: bytes, below: bytes, index: ArchiveIndex, row: IndexRow, offset: int, length: int
    ) -> bytes:
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
        except errors.ArchiveFailed as exc:
            raise errors.ArchiveFailed(f"{os.fsdecode(archive)}/{os.fsdecode(below)}: {exc}") from exc

    def _tarred(self, archive: bytes, index: ArchiveIndex, row: IndexRow, offset: int, length: int) -> bytes:
        """Bytes of a tar's member: no other bytes than those behind its header."""
        if offset > _NEAR_BYTES:
            return self.inner.read(archive, self._begin(archive, index, row) + offset, length, index.version)
        header = formats.TAR_HEADER_BYTES
        got = memoryview(self.inner.read(archive, row.offset - header, header + offset + length, index.version))
        formats.check_tar_header(got[:header], row.crc)
        if offset + length < row.size:
            self._note_beginning((archive, index.version, row.number), row.offset)
        return bytes(got[header + offset :])

    def _begin(self, archive: bytes, index: ArchiveIndex, row: IndexRow) -> int:
        """Where the bytes of a member begin, by its own header; raises ArchiveFailed if that is another member's."""
        key = archive, index.version, row.number
        begin, looked_at_s = self._beginnings.get(key, (0, -math.inf))
        if time.monotonic() < looked_at_s + _TRUSTED_S:
            return begin
        if archive.endswith(b".zip"):
            header = self.inner.read(archive, row.offset, formats.LOCAL_BYTES, index.version)
            begin = row.offset + formats.bytes_begin(bytes(header), row.crc)
        else:
            before = formats.TAR_HEADER_BYTES
            formats.check_tar_header(self.inner.read(archive, row.offset - before, before, index.version), row.crc)
            begin = row.offset
        self._note_beginning(key, begin)
        return begin

    def _note_beginning(self, key: tuple[bytes, Version, int], begin: int) -> None:
        if len(self._beginnings) >= _BEGINNINGS:
            self._beginnings.clear()
        self._beginnings[key] = begin, time.monotonic()

    def _unpacked(self, archive: bytes, index: ArchiveIndex, row: IndexRow, below: bytes) -> bytes:
        if row.method == DEFLATED and (row.size > self._longest_bytes or row.packed > 2 * self._longest_bytes):
            raise errors.ArchiveFailed("it is packed, and has more than sample_max_bytes: mount with a larger one")
        guess = formats.LOCAL_BYTES + len(below) + formats.EXTRA_BYTES + row.packed
        got = bytes(self.inner.read(archive, row.offset, guess, index.version))
        begin = formats.bytes_begin(got)
        if (missing := begin + row.packed - len(got)) > 0:
            got += bytes(self.inner.read(archive, row.offset + len(got), missing, index.version))
        return formats.unpacked(got[begin : begin + row.packed], row.method, row.size, row.crc)


async def forget_gone(source: Source) -> None:
    """Delete the indices of archives that `source`, or one that it wraps, no longer has."""
    while isinstance(source, ArchiveSource):
        try:
            await trio.to_thread.run_sync(source.indices.forget_gone, abandon_on_cancel=True)
        except (OSError, errors.SourceUnavailable) as exc:
            log.info("indices of archives that are gone are deleted at the next mount: %s", exc)
        source = source.inner
