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
from spiderfs.store.store import LANDING, ContentKey, Member

KEY = struct.Struct(">QI")
_MEMBER = struct.Struct("<QQf")  # size, sequence number, score; the section's name follows
# Behind the section's name, unless the disk is the first one.
_DISK_FOLLOWS = b"\0"
SEQUENCE = struct.Struct(">Q")
DISKS_AT = 6
"""Where the figures of disks begin in the usage."""
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
    disk: int = 0

    @classmethod
    def of(cls, packed: bytes, stored: bytes) -> MemberRow:
        """Unpack the row that is stored under this key; raises StoreCorrupt."""
        value = unsealed(packed, stored)
        size, sequence, score = _MEMBER.unpack_from(value)
        section, _, disk = value[_MEMBER.size :].partition(_DISK_FOLLOWS)
        return cls(size, sequence, score, section.decode(), int.from_bytes(disk))

    def stored(self, packed: bytes) -> bytes:
        value = _MEMBER.pack(self.size, self.sequence, self.score) + self.section.encode()
        return sealed(packed, value + _DISK_FOLLOWS + bytes([self.disk]) if self.disk else value)

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


def read_usage(txn: lmdb.Transaction, meta: lmdb._Database, disks: int = 0) -> list[int]:
    """Landing bytes and entries, kept bytes and entries, capacity, next sequence number.

    In a store that has or had several disks follow the landing bytes and the kept bytes of each, of at least `disks`.
    """
    stored = txn.get(_USAGE_KEY, db=meta)
    packed = bytes(8 * DISKS_AT) if stored is None else unsealed(_USAGE_KEY, bytes(stored))
    usage = list(struct.unpack(f"<{len(packed) // 8}Q", packed))
    if disks and len(usage) == DISKS_AT:
        usage += usage[0], usage[2]
    return usage + [0] * (DISKS_AT + 2 * disks - len(usage))


def write_usage(txn: lmdb.Transaction, usage: list[int], meta: lmdb._Database) -> None:
    if min(usage) < 0:
        raise StoreCorrupt("the cache is damaged (it holds less than nothing)")
    txn.put(_USAGE_KEY, sealed(_USAGE_KEY, struct.pack(f"<{len(usage)}Q", *usage)), db=meta)


def count(usage: list[int], row: MemberRow, times: int) -> None:
    """Count a record as one more or one less: `times` is 1 or -1."""
    is_kept = row.section != LANDING
    usage[2 * is_kept] += times * row.size
    usage[2 * is_kept + 1] += times
    if len(usage) > DISKS_AT:
        usage[DISKS_AT + 2 * row.disk + is_kept] += times * row.size


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
