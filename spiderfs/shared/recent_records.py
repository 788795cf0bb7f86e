"""Byte strings under byte keys in memory that processes share: those that were put last, as many as fit.

The memory is a ring. Each record has a position, a number that only grows; it is there as long as the positions that
were given out since are fewer than the bytes of the ring. A record names the one before it whose key falls into the
same slot, so none is lost but those that the ring has overwritten.

Writers hold a lock, which the kernel frees if they die. Readers hold none: they check after they have copied that the
record was still there. A writer that dies leaves a record that no one finds.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import xxhash

_SLOTS = 1 << 16
_ALIGNED = 8
_WORD = struct.Struct("<Q")
# Position of the record itself and of the one before it in the slot; bytes of key and value.
_HEAD = struct.Struct("<QQII")


class RecentRecords:
    """Make it before the processes are forked. A page takes no room before something is written to it."""

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes` is the size of the ring; a record may take a quarter of it."""
        self._limit = limit_bytes
        self._ring_at = _WORD.size * (1 + _SLOTS)
        # No file, because a limit on the size of files (ulimit -f) may be less than this.
        self._map = mmap.mmap(-1, self._ring_at + limit_bytes)
        self._file = os.memfd_create("spiderfs-records")  # for its lock alone
        # The first word is the next position; position 0 means that there is none.
        self._words = memoryview(self._map)[: self._ring_at].cast("Q")
        self._words[0] = _ALIGNED
        self._threads = threading.Lock()

    def __del__(self) -> None:
        os.close(self._file)

    def put(self, key: bytes, value: bytes) -> bool:
        """Keep the value under its key, in place of an earlier one; False if it is too long."""
        size = _HEAD.size + len(key) + len(value)
        if size > self._limit // 4:
            return False
        with self._locked():
            position = self._words[0]
            if position % self._limit + size > self._limit:
                position += self._limit - position % self._limit
            self._words[0] = position + size + -size % _ALIGNED
        at = self._ring_at + position % self._limit
        body = at + _HEAD.size
        self._map[body : body + len(key)] = key
        self._map[body + len(key) : at + size] = value
        slot = _slot(key)
        with self._locked():
            if self._has(position):
                _HEAD.pack_into(self._map, at, position, self._words[slot], len(key), len(value))
                self._words[slot] = position
        return True

    def get(self, key: bytes, offset: int = 0, size: int | None = None) -> bytes | None:
        """A piece of the value; None if there is none (any more)."""
        found = self._find(key)
        if found is None:
            return None
        position, start, length = found
        end = length if size is None else min(offset + size, length)
        piece = self._map[start + min(offset, end) : start + end]
        return piece if self._has(position) else None

    def remove(self, key: bytes) -> None:
        """Forget the value, and give back the pages that it alone lies in."""
        with self._locked():
            while (found := self._find(key)) is not None:
                position, start, length = found
                at = self._ring_at + position % self._limit
                before = _HEAD.unpack_from(self._map, at)[1]
                # No key is empty, so no one finds this record, and all find those before it.
                _HEAD.pack_into(self._map, at, position, before, 0, 0)
                first, end = (
                    -(-start // mmap.PAGESIZE) * mmap.PAGESIZE,
                    (start + length) // mmap.PAGESIZE * mmap.PAGESIZE,
                )
                if first < end:
                    self._map.madvise(mmap.MADV_REMOVE, first, end - first)

    def _find(self, key: bytes) -> tuple[int, int, int] | None:
        """Position of the record, and where its value begins and how long it is."""
        position = self._words[_slot(key)]
        while position and self._has(position):
            at = self._ring_at + position % self._limit
            own, before, key_bytes, length = _HEAD.unpack_from(self._map, at)
            start = at + _HEAD.size + key_bytes
            if own != position:
                break
            if key_bytes == len(key) and self._map[at + _HEAD.size : start] == key:
                return position, start, length
            position = before
        return None

    def _has(self, position: int) -> bool:
        return bool(position + self._limit >= self._words[0])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # The lock of the file is the process's, whichever thread asks.
        with self._threads:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)


def _slot(key: bytes) -> int:
    return 1 + xxhash.xxh3_64_intdigest(key) % _SLOTS
