"""File contents in LMDB, with a checksum before every payload and the byte budget held in every transaction.

Tables: `content` (inode, block) -> header + payload; `member` the same key -> size, sequence number, score, section;
`queue` landing's sequence number -> key; `meta` -> usage and capacity. A payload follows its checksums, so that a
read is a slice of the mapped pages and nothing is copied.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import lmdb
import xxhash

from spiderfs.errors import StoreDamaged
from spiderfs.store.environment import open_environment, translate, translated_errors
from spiderfs.store.store import LANDING, ContentKey, Keep, Member, Usage

_KEY = struct.Struct(">QI")
_LENGTH = struct.Struct("<Q")
_HEADER_OF_ONE = struct.Struct("<QQ")
_MEMBER = struct.Struct("<QQf")  # size, sequence number, score; the section's name follows
_SEQUENCE = struct.Struct(">Q")
# landing bytes, landing entries, kept bytes, kept entries, capacity, next sequence number
_USAGE = struct.Struct("<6Q")
_USAGE_KEY = b"usage"
# What the kernel asks for at a time: a READ verifies the pieces that it takes bytes from, and nothing else.
PIECE_BYTES = 128 << 10


class LmdbContent:
    """The store of one cache directory; see `Content` for the contract and `store.py` for the theory."""

    def __init__(self, path: Path) -> None:
        self._env = open_environment(path, 4)
        with translated_errors():
            self._content = self._env.open_db(b"content")
            self._member = self._env.open_db(b"member")
            self._queue = self._env.open_db(b"queue")
            self._meta = self._env.open_db(b"meta")
        self._reader: lmdb.Transaction | None = None
        self.damaged = 0  # records whose checksum failed, since this process opened the store

    # -- reading, on the event loop's thread

    def _transaction(self) -> lmdb.Transaction:
        if self._reader is None:
            self._reader = self._env.begin(self._content, buffers=True)
        return self._reader

    def end_read(self) -> None:
        if self._reader is not None:
            self._reader.abort()
            self._reader = None

    def has(self, key: ContentKey) -> bool:
        try:
            return self._transaction().get(_KEY.pack(*key)) is not None
        except lmdb.Error as exc:
            raise translate(exc) from exc

    def read(self, key: ContentKey, offset: int = 0, size: int | None = None) -> memoryview | bytes | None:
        packed = _KEY.pack(*key)
        try:
            found = self._transaction().get(packed)
        except lmdb.Error as exc:
            raise translate(exc) from exc
        if found is None:
            return None
        piece = _verified(memoryview(found), offset, size)
        if piece is None:
            self.damaged += 1
        return piece

    def member(self, key: ContentKey) -> Member | None:
        with translated_errors(), self._env.begin(self._member) as txn:
            record = txn.get(_KEY.pack(*key))
        return None if record is None else _member(key, record)

    # -- writing, in any thread

    def land(self, key: ContentKey, payload: bytes) -> bool:
        return self.land_all([(key, payload)])[0]

    def land_all(self, records: Sequence[tuple[ContentKey, bytes]]) -> list[bool]:
        # Outside the transaction, which others may wait for.
        rows = [(_KEY.pack(*key), len(payload), _header(payload) + payload) for key, payload in records]
        with translated_errors(), self._env.begin(write=True) as txn:
            usage = self._usage(txn)
            landed = [self._land(txn, usage, *row) for row in rows]
            txn.put(_USAGE_KEY, _USAGE.pack(*usage), db=self._meta)
        return landed

    def _land(self, txn: lmdb.Transaction, usage: list[int], packed: bytes, size: int, value: bytes) -> bool:
        if txn.get(packed, db=self._member) is not None:
            # A version never changes, so this is a repair of damaged bytes: same size, same place.
            txn.put(packed, value, db=self._content)
            return True
        if usage[2] + size > usage[4]:
            return False
        self._shrink_landing(txn, usage, usage[4] - size)
        sequence = usage[5]
        usage[0] += size
        usage[1] += 1
        usage[5] += 1
        txn.put(packed, value, db=self._content)
        txn.put(packed, _MEMBER.pack(size, sequence, 0.0) + LANDING.encode(), db=self._member)
        txn.put(_SEQUENCE.pack(sequence), packed, db=self._queue, append=True)
        return True

    def apply(self, drop: Iterable[ContentKey], keep: Iterable[Keep]) -> list[ContentKey]:
        missing = []
        with translated_errors(), self._env.begin(write=True) as txn:
            usage = self._usage(txn)
            for key in drop:
                self._remove(txn, usage, _KEY.pack(*key))
            for key, section, score in keep:
                packed = _KEY.pack(*key)
                record = txn.get(packed, db=self._member)
                if record is None:
                    missing.append(key)
                    continue
                size, sequence, _ = _MEMBER.unpack_from(record)
                if record[_MEMBER.size :] == LANDING.encode():
                    txn.delete(_SEQUENCE.pack(sequence), db=self._queue)
                    usage[0] -= size
                    usage[1] -= 1
                    usage[2] += size
                    usage[3] += 1
                txn.put(packed, _MEMBER.pack(size, usage[5], score) + section.encode(), db=self._member)
                usage[5] += 1
            txn.put(_USAGE_KEY, _USAGE.pack(*usage), db=self._meta)
        return missing

    def set_capacity(self, capacity_bytes: int) -> None:
        with translated_errors(), self._env.begin(write=True) as txn:
            usage = self._usage(txn)
            usage[4] = capacity_bytes
            self._shrink_landing(txn, usage, capacity_bytes)
            txn.put(_USAGE_KEY, _USAGE.pack(*usage), db=self._meta)

    def _usage(self, txn: lmdb.Transaction) -> list[int]:
        record = txn.get(_USAGE_KEY, db=self._meta)
        return [0] * 6 if record is None else list(_USAGE.unpack(record))

    def _shrink_landing(self, txn: lmdb.Transaction, usage: list[int], room: int) -> None:
        """Drop what landed first until landing and the kept records fit into `room` bytes, or landing is empty."""
        while usage[1] and usage[0] + usage[2] > room:
            with txn.cursor(self._queue) as cursor:
                cursor.first()
                packed = bytes(cursor.value())
            self._remove(txn, usage, packed)

    def _remove(self, txn: lmdb.Transaction, usage: list[int], packed: bytes) -> None:
        record = txn.get(packed, db=self._member)
        if record is None:
            return
        size, sequence, _ = _MEMBER.unpack_from(record)
        landing = record[_MEMBER.size :] == LANDING.encode()
        if landing:
            txn.delete(_SEQUENCE.pack(sequence), db=self._queue)
        txn.delete(packed, db=self._content)
        txn.delete(packed, db=self._member)
        usage[0 if landing else 2] -= size
        usage[1 if landing else 3] -= 1

    # -- bookkeeping

    def members(self) -> Iterator[Member]:
        with translated_errors(), self._env.begin(self._member) as txn:
            rows = [(bytes(key), bytes(value)) for key, value in txn.cursor()]
        rows.sort(key=lambda row: _MEMBER.unpack_from(row[1])[1])
        for key, value in rows:
            yield _member(ContentKey(*_KEY.unpack(key)), value)

    def usage(self) -> Usage:
        with translated_errors(), self._env.begin(self._meta) as txn:
            return Usage(*self._usage(txn)[:5])

    def file_bytes(self) -> int:
        """Bytes that LMDB's pages take on disk, free ones included."""
        return int((self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"])

    def clear_dead_readers(self) -> int:
        """Free the slots of readers that were killed; returns how many."""
        with translated_errors():
            return int(self._env.reader_check())

    def close(self) -> None:
        self.end_read()
        self._env.close()


class ContentReader:
    """The whole files of a store that other processes write; for any thread, and across a fork (`environment.py`)."""

    def __init__(self, path: Path) -> None:
        self._env = open_environment(path, 4, readonly=True)
        with translated_errors():
            self._content = self._env.open_db(b"content", create=False)

    def has(self, inode: int) -> bool:
        with translated_errors(), self._env.begin(self._content, buffers=True) as txn:
            return txn.get(_KEY.pack(inode, 0)) is not None

    def copy(self, inode: int) -> bytes | None:
        """A file's bytes, verified; None if they are not there. Raises StoreDamaged, StoreError.

        They are copied first and verified after it: what was verified is what is returned, and it lies in the
        processor's cache then.
        """
        try:
            txn = self._env.begin(self._content, buffers=True)
            try:
                found = txn.get(_KEY.pack(inode, 0))
                if found is None:
                    return None
                value = memoryview(found)
                (length,) = _LENGTH.unpack_from(value) if len(value) >= _LENGTH.size else (0,)
                start = _LENGTH.size * (1 + -(-length // PIECE_BYTES))
                header, payload = bytes(value[:start]), bytes(value[start:])
            finally:
                txn.abort()
        except lmdb.Error as exc:
            raise translate(exc) from exc
        if len(payload) != length or header != _header(payload):
            raise StoreDamaged("a record of the cache fails its checksum")
        return payload

    def close(self) -> None:
        self._env.close()


def _member(key: ContentKey, record: bytes) -> Member:
    size, _, score = _MEMBER.unpack_from(record)
    return Member(key, size, record[_MEMBER.size :].decode(), score)


def _header(payload: bytes) -> bytes:
    """The payload's length, then the XXH3-64 of each of its pieces."""
    if 0 < len(payload) <= PIECE_BYTES:
        return _HEADER_OF_ONE.pack(len(payload), xxhash.xxh3_64_intdigest(payload))
    view = memoryview(payload)
    sums = [xxhash.xxh3_64_intdigest(view[at : at + PIECE_BYTES]) for at in range(0, len(payload), PIECE_BYTES)]
    return struct.pack(f"<{1 + len(sums)}Q", len(payload), *sums)


def _verified(value: memoryview, offset: int, size: int | None) -> memoryview | None:
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
