"""Packages: many small files in one, at the source, so that one read brings all; the only thing ever written there.

    header   magic (8 bytes), version (u32), files (u32), bytes of the index (u32), 0 (u32), XXH3-64 of the index (u64)
    index    msgpack: of each file [path, size, mtime_ns, XXH3-64 of its bytes]
    bytes    of the files, in that order, back to back

They lie in one directory in the source's root, which no mount shows (`WithoutPackages`), and are named after their
index. One is written under a temporary name, synced and renamed, so a name that ends in `.package` is a whole one; what
a crash left is removed later. A file of a package is that version of the file which the index names, and nothing is
taken from it unless index and bytes have their checksums. Several mounts may share the directory: each may find that a
package is gone. The calls block: make them in threads.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgpack
import xxhash

from spiderfs.errors import SourceNotFound, StoreDamaged
from spiderfs.sources.source import Source, SourceStat, Version

DIRECTORY = b".spiderfs-packages"
# ImPACT's: from here on a read takes longer for its bytes than for the way to the source.
PACKAGE_BYTES = 1 << 20
SUFFIX, _TEMPORARY = b".package", b".new-"
# A temporary file so old belongs to nobody any more.
_ABANDONED_S = 3600.0
_MAGIC, _VERSION = b"SPIDERPK", 1
_HEADER = struct.Struct("<8sIIIIQ")
HEADER_BYTES = _HEADER.size
# An index of so many bytes is damaged: some 100 bytes a file, of which a package has a few thousand at most.
INDEX_MAX_BYTES = 4 << 20


class Packed(NamedTuple):
    """One file of a package, as its index has it; `offset` is that of its bytes in the package."""

    path: bytes
    version: Version
    checksum: int
    offset: int


@dataclass(frozen=True)
class Index:
    files: Sequence[Packed]

    def payload(self, file: Packed, package: bytes) -> bytes | None:
        """The file's bytes out of the whole package; None if they are damaged."""
        payload = package[file.offset : file.offset + file.version.size]
        return payload if xxhash.xxh3_64_intdigest(payload) == file.checksum else None


def pack(files: Sequence[tuple[bytes, Version, bytes]]) -> tuple[bytes, bytes]:
    """Name and bytes of a package of these files: path, version, bytes."""
    index: bytes = msgpack.packb(
        [[path, version.size, version.mtime_ns, xxhash.xxh3_64_intdigest(payload)] for path, version, payload in files]
    )
    checksum = xxhash.xxh3_64_intdigest(index)
    header = _HEADER.pack(_MAGIC, _VERSION, len(files), len(index), 0, checksum)
    name = b"%016x" % checksum + SUFFIX
    return name, b"".join([header, index, *(payload for _, _, payload in files)])


def index_bytes(header: bytes) -> int:
    """How long the index is that follows this header; raises StoreDamaged for what is no header."""
    try:
        magic, version, _, length, _, _ = _HEADER.unpack_from(header)
    except struct.error:
        raise StoreDamaged("a package is cut short") from None
    if magic != _MAGIC or version != _VERSION or length > INDEX_MAX_BYTES:
        raise StoreDamaged("a package has no header that this spiderfs knows")
    return int(length)


def read_index(package: bytes, package_bytes: int) -> Index:
    """The index at the begin of a package of that many bytes; raises StoreDamaged."""
    length = index_bytes(package)
    _, _, count, _, _, checksum = _HEADER.unpack_from(package)
    index = package[HEADER_BYTES : HEADER_BYTES + length]
    if len(index) != length or xxhash.xxh3_64_intdigest(index) != checksum:
        raise StoreDamaged("the index of a package is damaged")
    files, offset = [], HEADER_BYTES + length
    try:
        for path, size, mtime_ns, payload_checksum in msgpack.unpackb(index):
            files.append(Packed(bytes(path), Version(int(size), int(mtime_ns)), payload_checksum, offset))
            offset += files[-1].version.size
    except (ValueError, TypeError):
        raise StoreDamaged("the index of a package makes no sense") from None
    if len(files) != count or offset != package_bytes:
        raise StoreDamaged("a package is not as long as its index says")
    return Index(files)


class PackageDirectory:
    """Writes and removes packages below the root of a source that this descriptor stands for; raises OSError."""

    def __init__(self, root_fd: int) -> None:
        self._root_fd = root_fd

    def write(self, name: bytes, package: bytes) -> None:
        """Have a package there as a whole, or not at all."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(DIRECTORY, 0o755, dir_fd=self._root_fd)
        with self._opened() as directory:
            temporary = _TEMPORARY + b"%d-%d-" % (os.getpid(), time.monotonic_ns()) + name
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=directory)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(package)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=directory)
                raise
            os.fsync(directory)

    def remove(self, name: bytes) -> None:
        """Remove a package, if it is there."""
        with contextlib.suppress(FileNotFoundError), self._opened() as directory:
            os.unlink(name, dir_fd=directory)

    def clean(self) -> int:
        """Remove what crashes have left in the middle of writing; returns how many there were."""
        removed = 0
        with contextlib.suppress(FileNotFoundError), self._opened() as directory:
            for name in map(os.fsencode, os.listdir(directory)):
                if name.startswith(_TEMPORARY):
                    with contextlib.suppress(FileNotFoundError):
                        if time.time() - os.stat(name, dir_fd=directory).st_mtime > _ABANDONED_S:
                            os.unlink(name, dir_fd=directory)
                            removed += 1
        return removed

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(DIRECTORY, flags, dir_fd=self._root_fd)
        try:
            yield fd
        finally:
            os.close(fd)


class WithoutPackages:
    """A source as mounts show it."""

    def __init__(self, inner: Source) -> None:
        self._inner = inner
        self.readlink, self.listxattr, self.getxattr = inner.readlink, inner.listxattr, inner.getxattr
        self.read, self.statvfs, self.close = inner.read, inner.statvfs, inner.close

    def stat(self, path: bytes) -> SourceStat:
        if path == DIRECTORY:
            raise SourceNotFound(f"{os.fsdecode(path)}: packages are not shown")
        return self._inner.stat(path)

    def scan(self, path: bytes) -> Iterator[tuple[bytes, SourceStat]]:
        entries = self._inner.scan(path)
        return entries if path else (entry for entry in entries if entry[0] != DIRECTORY)
