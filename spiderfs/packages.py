"""The format of a package: many small files in one, so that one read of the source returns all of them.

    header   magic (8 bytes), version (u32), files (u32), bytes of the index (u32), 0 (u32), seal (16 bytes)
    index    msgpack: for each file [path, size, mtime_ns, seal of its bytes]
    bytes    of the files, in the order of the index, back to back

A package holds those versions of its files that the index names. The name of a package is made from the key and the
seal of the header.

**Trust.** A user who may write to the source's root may have put anything there, and every reader of the mount would
get it. So all seals are made with a key (BLAKE2b, RFC 7693) that lies in the cache directory. The seal in the
header covers the header and the index. A package that was sealed with another key, by another mount for example, does
not count.
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

from spiderfs.errors import StoreDamaged
from spiderfs.sources.source import SourceStat, Version

DIRECTORY = b".spiderfs-packages"
_TEMPORARY = b".new-"
# An older temporary file is written by no mount any more.
_ABANDONED_S = 3600.0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def package_key(path: Path) -> bytes:
    """The key in a file. If there is no key of the right length, a new one is drawn and written; raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        key = path.read_bytes()
        if len(key) == KEY_BYTES:
            return key
    key, temporary = secrets.token_bytes(KEY_BYTES), path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(key)
    temporary.rename(path)
    return key


def is_ours(found: SourceStat | os.stat_result) -> bool:
    """Whether a directory or file belongs to this user, and no one else may write to it."""
    mode, uid = (found.mode, found.uid) if isinstance(found, SourceStat) else (found.st_mode, found.st_uid)
    return uid == os.geteuid() and not mode & _OTHERS_WRITE and (stat.S_ISDIR(mode) or stat.S_ISREG(mode))


class PackageDirectory:
    """Writes and removes packages at one source, the only thing that a mount ever writes there.

    `root_fd` is a descriptor of the source's root; the key lies in `key_file` (`package_key`). All packages lie in one
    directory in the root, which no mount shows (`views/tree.py`). A package is written under a temporary name, synced
    and renamed, so a name that ends in `.package` belongs to a whole package. Several mounts may share the directory:
    each leaves the packages of the others alone. Directory and packages must belong to this user, and no one else may
    have the right to write to them. Each call raises OSError, and blocks: make it in a thread.
    """

    def __init__(self, root_fd: int, key_file: Path) -> None:
        self._root_fd = root_fd
        self._key_file = key_file

    @cached_property
    def key(self) -> bytes:
        return package_key(self._key_file)

    def write(self, name: bytes, package: bytes) -> None:
        """Write a package, as a whole or not at all."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(DIRECTORY, 0o700, dir_fd=self._root_fd)
        with self._opened() as directory:
            # A package may hold files that not everybody may read.
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
        """Remove a package if it exists."""
        with contextlib.suppress(FileNotFoundError), self._opened() as directory:
            os.unlink(name, dir_fd=directory)

    def clean(self) -> int:
        """Remove the temporary files that crashes have left; returns their number."""
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


# The size is ImPACT's: the read of a larger package takes longer for its bytes than for the way to the source.
PACKAGE_BYTES = 1 << 20
SUFFIX = b".package"
KEY_BYTES = 32
_MAGIC, _VERSION = b"SPIDERPK", 2
_HEADER = struct.Struct("<8sIIII16s")
_SEAL_BYTES = 16
# Each kind of seal has a label of its own, so that none can be taken for another (hashlib, "Personalization").
_HEAD, _PAYLOAD, _NAME = b"spiderfs head", b"spiderfs file", b"spiderfs name"
HEADER_BYTES = _HEADER.size
# A longer index is damaged: a file takes some 100 bytes of it, and a package has a few thousand files at most.
INDEX_MAX_BYTES = 4 << 20


def _seal(key: bytes, what: bytes, *pieces: bytes) -> bytes:
    seal = hashlib.blake2b(key=key, person=what, digest_size=_SEAL_BYTES)
    for piece in pieces:
        seal.update(piece)
    return seal.digest()


def own_prefix(key: bytes) -> bytes:
    """The first bytes of the names of all packages that are sealed with this key."""
    return _seal(key, _NAME).hex()[:16].encode() + b"-"


class Packed(NamedTuple):
    """One file of a package, as the index names it; its bytes begin at `offset` of the package."""

    path: bytes
    version: Version
    seal: bytes
    offset: int


@dataclass(frozen=True)
class Index:
    files: Sequence[Packed]
    key: bytes = field(repr=False)

    def payload(self, file: Packed, package: bytes) -> bytes | None:
        """The bytes of one file, taken from the whole package; None if they are damaged."""
        payload = package[file.offset : file.offset + file.version.size]
        return payload if hmac.compare_digest(_seal(self.key, _PAYLOAD, payload), file.seal) else None


def pack(files: Sequence[tuple[bytes, Version, bytes]], key: bytes) -> tuple[bytes, bytes]:
    """Name and bytes of a package of `files`: path, version and bytes of each file."""
    index: bytes = msgpack.packb(
        [[path, version.size, version.mtime_ns, _seal(key, _PAYLOAD, payload)] for path, version, payload in files]
    )
    header = _HEADER.pack(_MAGIC, _VERSION, len(files), len(index), 0, b"")
    seal = _seal(key, _HEAD, header, index)
    header = header[:-_SEAL_BYTES] + seal
    name = own_prefix(key) + seal.hex().encode() + SUFFIX
    return name, b"".join([header, index, *(payload for _, _, payload in files)])


def index_bytes(header: bytes) -> int:
    """The length of the index that follows this header; raises StoreDamaged if these bytes are no header."""
    try:
        magic, version, _, length, _, _ = _HEADER.unpack_from(header)
    except struct.error:
        raise StoreDamaged("a package is cut short") from None
    if magic != _MAGIC or version != _VERSION or length > INDEX_MAX_BYTES:
        raise StoreDamaged("a package has an unknown header")
    return int(length)


def read_index(package: bytes, package_bytes: int, key: bytes) -> Index:
    """The index of a package; `package` holds at least header and index. Raises StoreDamaged, also for another key."""
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
        raise StoreDamaged("a package has another length than its index")
    return Index(files, key)
