"""The table of redirects: the manager writes its rows, and workers and clients read them at each look-up.

A row says which inode is the stand-in for which other one, for the readers of one course. The table lies in the
store, so that a new worker knows all redirects at once, and no worker has to ask the manager.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from spiderfs.store.store import Records, Row

TABLE = "redirect"
# A row's key: the inode that a reader asks for, and the number of the course. In this order all rows of an inode lie
# side by side.
_KEY = struct.Struct(">QI")
_INODE = struct.Struct(">Q")
_ROWS_AT_A_TIME = 1000


def redirect_row(course_number: int, wanted: int, stand_in: int | None) -> Row:
    """The row by which the readers of a course get `stand_in` for `wanted`; None deletes the row."""
    return TABLE, _KEY.pack(wanted, course_number), None if stand_in is None else _INODE.pack(stand_in)


def redirect_rows(records: Records) -> list[tuple[int, int, int]]:
    """All redirects: the wanted inode, the course's number, the stand-in."""
    return list(each_redirect(records))


def each_redirect(records: Records) -> Iterator[tuple[int, int, int]]:
    """All redirects of a table of any length: it is read in pieces, and each piece shows the table as it is then."""
    start = b""
    while rows := records.scan(TABLE, start, _ROWS_AT_A_TIME):
        yield from ((*_KEY.unpack(key), _INODE.unpack(value)[0]) for key, value in rows)
        # The least key behind the last one.
        start = rows[-1][0] + b"\0"


def stand_in_of(records: Records, wanted: int, course_number: int) -> int | None:
    """The stand-in that the readers of one course may be given for an inode; None if there is none."""
    row = records.get(TABLE, _KEY.pack(wanted, course_number))
    return None if row is None else int(_INODE.unpack(row)[0])


def stand_ins_of(records: Records, wanted: int, limit: int) -> list[int]:
    """The stand-ins of an inode, one for each course that has one for it; `limit` of them at most."""
    rows = records.scan(TABLE, _KEY.pack(wanted, 0), limit)
    return [_INODE.unpack(value)[0] for key, value in rows if _KEY.unpack(key)[0] == wanted]
