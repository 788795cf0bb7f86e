"""The checksums of a record: one XXH3-64 for each piece, so that a READ verifies what it takes and nothing else.

A header is the payload's length, then the checksum of each piece of 128 KiB. A small file's header is followed by its
payload; other payloads lie somewhere else (`extents.py`, `blocks.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import xxhash

from spiderfs.store.store import BLOCK_BYTES, ContentKey

# The kernel asks for at most this many bytes at a time.
PIECE_BYTES = 128 << 10
_LENGTH = struct.Struct("<Q")
LENGTH_BYTES = _LENGTH.size
_HEADER_OF_ONE = struct.Struct("<QQ")
ALL_PIECES = range(BLOCK_BYTES // PIECE_BYTES)
# The header of a block; that of a file's last block may be shorter.
BLOCK_HEADER_BYTES = LENGTH_BYTES * (1 + len(ALL_PIECES))
_ALL = (1 << len(ALL_PIECES)) - 1
# Files that `SoundPieces` remembers. When it forgets a file, the file has to be read through READ once more.
_FILES = 65536


def header(payload: bytes | memoryview) -> bytes:
    """The payload's length, then the XXH3-64 of each of its pieces."""
    if 0 < len(payload) <= PIECE_BYTES:
        return _HEADER_OF_ONE.pack(len(payload), xxhash.xxh3_64_intdigest(payload))
    view = memoryview(payload)
    sums = [xxhash.xxh3_64_intdigest(view[at : at + PIECE_BYTES]) for at in range(0, len(payload), PIECE_BYTES)]
    return struct.pack(f"<{1 + len(sums)}Q", len(payload), *sums)


def length_of(value: bytes | memoryview) -> int:
    """The length of the payload, as a record says."""
    length: int = _LENGTH.unpack_from(value)[0]
    return length


def header_bytes(value: bytes | memoryview) -> int:
    """The length of the header of a whole file's record, as the length of its payload says."""
    length: int = _LENGTH.unpack_from(value)[0] if len(value) >= _LENGTH.size else 0
    return _LENGTH.size * (1 + -(-length // PIECE_BYTES))


def verified(value: memoryview, offset: int, size: int | None) -> memoryview | None:
    """Bytes [offset, offset + size) of a record's payload; None if any piece they lie in fails its checksum."""
    if len(value) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(value)
    pieces = -(-length // PIECE_BYTES)
    start = _LENGTH.size * (1 + pieces)
    if len(value) != start + length:
        return None
    end = length if size is None else min(offset + size, length)
    for piece in range(offset // PIECE_BYTES, -(-end // PIECE_BYTES)):
        first = start + piece * PIECE_BYTES
        last = min(first + PIECE_BYTES, start + length)
        if _LENGTH.unpack_from(value, _LENGTH.size * (1 + piece)) != (xxhash.xxh3_64_intdigest(value[first:last]),):
            return None
    return value[start + offset : start + max(end, offset)]


class VerifiedPieces(NamedTuple):
    payload: memoryview
    pieces: range
    """The pieces that were found sound."""


def verified_by_another(
    head: bytes, read: Callable[[int, int], bytes], offset: int, size: int | None
) -> VerifiedPieces | None:
    """Bytes [offset, offset + size) of a payload that `read(offset, length)` reads; None if a piece fails."""
    # An earlier version of spiderfs had the payload of a block behind its header too.
    if len(head) < _LENGTH.size or len(head) != header_bytes(head):
        return None
    (length,) = _LENGTH.unpack_from(head)
    end = length if size is None else min(offset + size, length)
    if offset >= end:
        return VerifiedPieces(memoryview(b""), range(0))
    pieces = range(offset // PIECE_BYTES, -(-end // PIECE_BYTES))
    begin = pieces.start * PIECE_BYTES
    view = memoryview(read(begin, min(pieces.stop * PIECE_BYTES, length) - begin))
    for number in pieces:
        at = number * PIECE_BYTES - begin
        piece = view[at : at + PIECE_BYTES]
        if _LENGTH.unpack_from(head, _LENGTH.size * (1 + number)) != (xxhash.xxh3_64_intdigest(piece),):
            return None
    return VerifiedPieces(view[offset - begin : end - begin], pieces)


class SoundPieces:
    """Which pieces of large files this process has written or verified; a bit for each.

    If two threads add pieces of one block at the same time, one addition may be lost: then too little is known, never
    too much.
    """

    def __init__(self) -> None:
        self._files: dict[int, bytearray] = {}

    def add(self, key: ContentKey, pieces: range) -> None:
        known = self._files.get(key.inode)
        if known is None:
            if len(self._files) >= _FILES:
                self._files.clear()
            known = self._files.setdefault(key.inode, bytearray())
        if len(known) < key.block:
            known.extend(bytes(key.block - len(known)))
        known[key.block - 1] |= (1 << pieces.stop) - (1 << pieces.start)

    def forget(self, key: ContentKey) -> None:
        known = self._files.get(key.inode)
        if known is not None and len(known) >= key.block:
            known[key.block - 1] = 0

    def whole(self, inode: int, size: int) -> bool:
        """Whether every piece of a file of this size is known to be sound."""
        known = self._files.get(inode)
        if known is None:
            return False
        full, rest = divmod(size, BLOCK_BYTES)
        of_the_last = (1 << -(-rest // PIECE_BYTES)) - 1
        if len(known) < full + bool(rest) or known.count(_ALL, 0, full) != full:
            return False
        return not rest or known[full] & of_the_last == of_the_last
