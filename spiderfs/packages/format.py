"""The format of a package: many small files in one, so that one read of the source brings all of them.

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

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgpack

from spiderfs.errors import StoreDamaged
from spiderfs.sources.source import Version

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
        raise StoreDamaged("a package has no header that this spiderfs knows")
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
        raise StoreDamaged("a package is not as long as its index says")
    return Index(files, key)
