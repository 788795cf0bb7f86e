"""The rows of the content store's tables: how keys and values are packed, and which blocks of a file a table has."""

from __future__ import annotations

import struct

import lmdb

from spiderfs.store.store import ContentKey, Member

KEY = struct.Struct(">QI")
MEMBER = struct.Struct("<QQf")  # size, sequence number, score; the section's name follows
SEQUENCE = struct.Struct(">Q")
# landing bytes, landing entries, kept bytes, kept entries, capacity, next sequence number
USAGE = struct.Struct("<6Q")
USAGE_KEY = b"usage"
INODE = struct.Struct(">Q")
BLOCK_COUNT = struct.Struct("<I")
TABLES = 5


def member_of(key: ContentKey, record: bytes) -> Member:
    size, _, score = MEMBER.unpack_from(record)
    return Member(key, size, record[MEMBER.size :].decode(), score)


def is_block(packed: bytes) -> bool:
    _, block = KEY.unpack(packed)
    return bool(block)


def block_count(txn: lmdb.Transaction, packed_inode: bytes, meta: lmdb._Database) -> int:
    """How many blocks of a file are there."""
    found = txn.get(packed_inode, db=meta)
    return 0 if found is None else int(BLOCK_COUNT.unpack(found)[0])


def blocks_of(
    txn: lmdb.Transaction, inode: int, limit: int | None = None, table: lmdb._Database | None = None
) -> list[int]:
    """The blocks of a file in a table, the transaction's own by default, in order."""
    found: list[int] = []
    with txn.cursor(table) as cursor:
        if cursor.set_range(KEY.pack(inode, 1)):
            for key in cursor.iternext(keys=True, values=False):
                owner, block = KEY.unpack(key)
                if owner != inode or len(found) == limit:
                    break
                found.append(block)
    return found
