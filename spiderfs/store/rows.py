"""The rows of the store's tables: how keys and values are packed, and which blocks of a file a table has.

LMDB notices a missing page, but not a changed byte in a page. So every row is sealed with a checksum of its key and its
value; a row that does not match its seal means that the store is corrupt. Contents have checksums of their own instead,
but for the rows that say where they lie.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import lmdb
import xxhash

from spiderfs.errors import StoreCorrupt
from spiderfs.store.store import ContentKey, Member

KEY = struct.Struct(">QI")
_MEMBER = struct.Struct("<QQf")  # size, sequence number, score; the section's name follows
SEQUENCE = struct.Struct(">Q")
_USAGE = struct.Struct("<6Q")
_USAGE_KEY = b"usage"
INODE = struct.Struct(">Q")
_BLOCK_COUNT = struct.Struct("<I")
TABLES = 5


# Bytes that are kept of a checksum of 8 bytes: of four billion damaged rows one passes.
SEAL_BYTES = 4


def sealed(key: bytes, value: bytes) -> bytes:
    """The value as it is stored under this key."""
    return value + xxhash.xxh3_64_digest(key + value)[:SEAL_BYTES]


def unsealed(key: bytes, stored: bytes) -> bytes:
    """The value of a sealed row; raises StoreCorrupt if the row does not match its seal."""
    value = stored[:-SEAL_BYTES]
    if xxhash.xxh3_64_digest(key + value)[:SEAL_BYTES] != stored[-SEAL_BYTES:]:
        raise StoreCorrupt("the cache is damaged (a row has a wrong checksum)")
    return value


class MemberRow(NamedTuple):
    size: int
    sequence: int
    score: float
    section: str

    @classmethod
    def of(cls, packed: bytes, stored: bytes) -> MemberRow:
        """Unpack the row that is stored under this key; raises StoreCorrupt."""
        value = unsealed(packed, stored)
        size, sequence, score = _MEMBER.unpack_from(value)
        return cls(size, sequence, score, value[_MEMBER.size :].decode())

    def stored(self, packed: bytes) -> bytes:
        value = _MEMBER.pack(self.size, self.sequence, self.score) + self.section.encode()
        return sealed(packed, value)

    def member(self, packed: bytes) -> Member:
        return Member(key_of(packed), self.size, self.section, self.score)


def key_of(packed: bytes) -> ContentKey:
    """Unpack a key; raises StoreCorrupt."""
    if len(packed) != KEY.size:
        raise StoreCorrupt(f"the cache is damaged (a key of {len(packed)} bytes)")
    return ContentKey(*KEY.unpack(packed))


def is_block(packed: bytes) -> bool:
    return bool(key_of(packed).block)


def block_count(txn: lmdb.Transaction, packed_inode: bytes, meta: lmdb._Database) -> int:
    """The number of a file's blocks in the store."""
    found = txn.get(packed_inode, db=meta)
    return 0 if found is None else int(_BLOCK_COUNT.unpack(unsealed(packed_inode, bytes(found)))[0])


def write_block_count(txn: lmdb.Transaction, packed_inode: bytes, count: int, meta: lmdb._Database) -> None:
    if count > 0:
        txn.put(packed_inode, sealed(packed_inode, _BLOCK_COUNT.pack(count)), db=meta)
    else:
        txn.delete(packed_inode, db=meta)


def read_usage(txn: lmdb.Transaction, meta: lmdb._Database) -> list[int]:
    """Landing bytes and entries, kept bytes and entries, capacity, next sequence number."""
    stored = txn.get(_USAGE_KEY, db=meta)
    return [0] * 6 if stored is None else list(_USAGE.unpack(unsealed(_USAGE_KEY, bytes(stored))))


def write_usage(txn: lmdb.Transaction, usage: list[int], meta: lmdb._Database) -> None:
    if min(usage) < 0:
        raise StoreCorrupt("the cache is damaged (it holds less than nothing)")
    txn.put(_USAGE_KEY, sealed(_USAGE_KEY, _USAGE.pack(*usage)), db=meta)


def blocks_of(
    txn: lmdb.Transaction, inode: int, limit: int | None = None, table: lmdb._Database | None = None
) -> list[int]:
    """The blocks of a file in a table, the transaction's own by default, in order."""
    found: list[int] = []
    with txn.cursor(table) as cursor:
        if cursor.set_range(KEY.pack(inode, 1)):
            for key in cursor.iternext(keys=True, values=False):
                owner, block = key_of(bytes(key))
                if owner != inode or len(found) == limit:
                    break
                found.append(block)
    return found
