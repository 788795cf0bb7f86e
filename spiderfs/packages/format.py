"""Packages: many small files in one, at the source, so that one read brings all; the only thing ever written there.

    header   magic (8 bytes), version (u32), files (u32), bytes of the index (u32), 0 (u32), seal (16 bytes)
    index    msgpack: of each file [path, size, mtime_ns, seal of its bytes]
    bytes    of the files, in that order, back to back

They lie in one directory in the source's root, which no mount shows (`WithoutPackages`), and are named after the key
and the seal. One is written under a temporary name, synced and renamed, so a name that ends in `.package` is a whole
one; what a crash left is removed later. A file of a package is that version of the file which the index names. Several
mounts may share the directory: each may find that a package is gone. The calls block: make them in threads.

**What is believed.** Whoever may write to the source's root may have put anything there, and every reader of the mount
would get it. So all seals are made with a key (BLAKE2b, RFC 7693) that lies in the cache directory: that of the header
is of the header and the index. What others have made, also other mounts, is left alone. Beside that directory and
packages must be this user's, and nobody else may write to them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgpack

from spiderfs.errors import SourceNotFound, StoreDamaged
from spiderfs.sources.source import Source, SourceStat, Version

DIRECTORY = b".spiderfs-packages"
# ImPACT's: from here on a read takes longer for its bytes than for the way to the source.
PACKAGE_BYTES = 1 << 20
SUFFIX, _TEMPORARY = b".package", b".new-"
# A temporary file so old belongs to nobody any more.
_ABANDONED_S = 3600.0
_MAGIC, _VERSION = b"SPIDERPK", 2
_HEADER = struct.Struct("<8sIIII16s")
_SEAL_BYTES = 16
_KEY_BYTES = 32
# What is sealed, so that none can be taken for another (hashlib, "Personalization").
_HEAD, _PAYLOAD, _NAME = b"spiderfs head", b"spiderfs file", b"spiderfs name"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
HEADER_BYTES = _HEADER.size
# An index of so many bytes is damaged: some 100 bytes a file, of which a package has a few thousand at most.
INDEX_MAX_BYTES = 4 << 20


def _seal(key: bytes, what: bytes, *pieces: bytes) -> bytes:
    seal = hashlib.blake2b(key=key, person=what, digest_size=_SEAL_BYTES)
    for piece in pieces:
        seal.update(piece)
    return seal.digest()


def package_key(path: Path) -> bytes:
    """The key that lies in a file, which is made if there is none of the right length; raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        key = path.read_bytes()
        if len(key) == _KEY_BYTES:
            return key
    key, temporary = secrets.token_bytes(_KEY_BYTES), path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(key)
    temporary.rename(path)
    return key


def own_prefix(key: bytes) -> bytes:
    """What names of packages of this key begin with."""
    return _seal(key, _NAME).hex()[:16].encode() + b"-"


class Packed(NamedTuple):
    """One file of a package, as its index has it; `offset` is that of its bytes in the package."""

    path: bytes
    version: Version
    seal: bytes
    offset: int


@dataclass(frozen=True)
class Index:
    files: Sequence[Packed]
    key: bytes = field(repr=False)

    def payload(self, file: Packed, package: bytes) -> bytes | None:
        """The file's bytes out of the whole package; None if they are damaged."""
        payload = package[file.offset : file.offset + file.version.size]
        return payload if hmac.compare_digest(_seal(self.key, _PAYLOAD, payload), file.seal) else None


def pack(files: Sequence[tuple[bytes, Version, bytes]], key: bytes) -> tuple[bytes, bytes]:
    """Name and bytes of a package of these files: path, version, bytes."""
    index: bytes = msgpack.packb(
        [[path, version.size, version.mtime_ns, _seal(key, _PAYLOAD, payload)] for path, version, payload in files]
    )
    header = _HEADER.pack(_MAGIC, _VERSION, len(files), len(index), 0, b"")
    seal = _seal(key, _HEAD, header, index)
    header = header[:-_SEAL_BYTES] + seal
    name = own_prefix(key) + seal.hex().encode() + SUFFIX
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


def read_index(package: bytes, package_bytes: int, key: bytes) -> Index:
    """The index at the begin of a package of that many bytes; raises StoreDamaged, also for one of another key."""
    length = index_bytes(package)
    _, _, count, _, _, seal = _HEADER.unpack_from(package)
    header = package[: HEADER_BYTES - _SEAL_BYTES] + bytes(_SEAL_BYTES)
    index = package[HEADER_BYTES : HEADER_BYTES + length]
    if len(index) != length or not hmac.compare_digest(_seal(key, _HEAD, header, index), seal):
        raise StoreDamaged("the index of a package is damaged")
    files, offset = [], HEADER_BYTES + length
    try:
        for row in msgpack.unpackb(index):
            path, size, mtime_ns, payload_seal = row
            if [type(value) for value in row] != [bytes, int, int, bytes] or size < 0:
                raise ValueError(f"no file of a package: {row}")
            files.append(Packed(path, Version(size, mtime_ns), payload_seal, offset))
            offset += size
    except (ValueError, TypeError):
        raise StoreDamaged("the index of a package makes no sense") from None
    if len(files) != count or offset != package_bytes:
        raise StoreDamaged("a package is not as long as its index says")
    return Index(files, key)


def is_ours(found: SourceStat | os.stat_result) -> bool:
    """Whether a directory or file belongs to this user, and nobody else may write to it."""
    mode, uid = (found.mode, found.uid) if isinstance(found, SourceStat) else (found.st_mode, found.st_uid)
    return uid == os.geteuid() and not mode & _OTHERS_WRITE and (stat.S_ISDIR(mode) or stat.S_ISREG(mode))


class PackageDirectory:
    """Writes and removes packages below the root of a source that this descriptor stands for; raises OSError.

    `key_file` keeps the key; see `package_key`.
    """

    def __init__(self, root_fd: int, key_file: Path) -> None:
        self._root_fd = root_fd
        self._key_file = key_file

    @cached_property
    def key(self) -> bytes:
        return package_key(self._key_file)

    def write(self, name: bytes, package: bytes) -> None:
        """Have a package there as a whole, or not at all."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(DIRECTORY, 0o700, dir_fd=self._root_fd)
        with self._opened() as directory:
            # Packages have the bytes of files that not everybody may read.
            os.fchmod(directory, 0o700)
            temporary = _TEMPORARY + b"%d-%d-" % (os.getpid(), time.monotonic_ns()) + name
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
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
            if not is_ours(os.fstat(fd)):
                raise PermissionError(errno.EPERM, f"{os.fsdecode(DIRECTORY)} there is another user's: delete it")
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
