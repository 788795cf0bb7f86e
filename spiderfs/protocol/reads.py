"""The attribute of the mount's root by which a process asks which bytes it has read lately: READS_XATTR.

Its value is the time on the mount's clock. With a dot and such a time behind its name, it also has the READs of large
files that the asking process has made since. The kernel answers what it has in its page cache without a READ.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

READS_XATTR = "user.spiderfs.reads"
# Of the kernel (limits.h).
_MOST_BYTES = 65536


class ReadBytes(NamedTuple):
    """The bytes of a file from `begin` up to `end`; `own`: the thread that asks has read them."""

    path: bytes
    begin: int
    end: int
    own: bool


def encoded(time_s: float, reads: Iterable[ReadBytes]) -> bytes | None:
    """None for more than an attribute can have."""
    rows = (b"%d %d %d %s\0" % (read.own, read.begin, read.end, read.path) for read in reads)
    value = b"%r\0" % time_s + b"".join(rows)
    return value if len(value) <= _MOST_BYTES else None


def decoded(value: bytes) -> tuple[str, list[ReadBytes]]:
    """The time, as the name of the next question has it, and what was read; raises ValueError."""
    time_s, *rows, _ = value.split(b"\0")
    found = []
    for row in rows:
        own, begin, end, path = row.split(b" ", 3)
        found.append(ReadBytes(path, int(begin), int(end), own == b"1"))
    return f"{float(time_s)!r}", found
