"""The attribute of the mount's root by which a process asks what it has read lately.

Its value is the time on the mount's clock. With a dot and such a time behind the name, it also has the READs that the
asking process has made since. The kernel answers what it has in its page cache without a READ.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

READS_XATTR = "user.spiderfs.reads"


class ReadBytes(NamedTuple):
    """The bytes of a file from `begin` up to `end`; `own`: the thread that asks has read them."""

    own: bool
    begin: int
    end: int
    path: bytes


def encoded(time_s: float, reads: Iterable[ReadBytes]) -> bytes:
    return b"%r\0" % time_s + b"".join(b"%d %d %d %s\0" % read for read in reads)


def decoded(value: bytes) -> tuple[str, list[ReadBytes]]:
    """The time, as the name of the next question has it, and what was read; raises ValueError."""
    time_s, *rows, _ = value.split(b"\0")
    parts = (row.split(b" ", 3) for row in rows)
    return repr(float(time_s)), [ReadBytes(own == b"1", int(begin), int(end), path) for own, begin, end, path in parts]
