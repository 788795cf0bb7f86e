"""The READs that workers have answered lately: memory that all processes of a mount share.

Each worker writes into a ring of its own, before it answers the READ. So whatever a thread has read is there when the
thread goes on, and any worker can tell it. Nothing is kept unless someone has asked in the last minute.
"""

from __future__ import annotations

import copy
import mmap
import struct
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

# How long READs are kept after the latest question. A loader's worker asks for each sample that it learns.
KEPT_S = 60.0
# The READs that each worker remembers: of a sample of 32 MiB, if the kernel asks for one page at a time.
_READS = 8192
_COUNT, _UNTIL = struct.Struct("@Q"), struct.Struct("@d")
_READ = struct.Struct("@dQQQII")


class Read(NamedTuple):
    thread: int
    inode: int
    begin: int
    end: int


class ReadLog:
    """Make it before the processes are forked; `mountpoint` is the mount's."""

    def __init__(self, workers: int, mountpoint: Path = Path("/")) -> None:
        self.mountpoint = mountpoint
        self._until = mmap.mmap(-1, mmap.PAGESIZE)
        self._rings = [mmap.mmap(-1, _COUNT.size + _READS * _READ.size) for _ in range(workers)]
        self._own = self._rings[0]

    def of_worker(self, index: int) -> ReadLog:
        """The same log, into whose ring of this worker `note` writes."""
        found = copy.copy(self)
        found._own = self._rings[index]
        return found

    def is_kept(self, now_s: float) -> bool:
        """Whether someone has asked lately. Ask this first, since it costs little."""
        return bool(_UNTIL.unpack_from(self._until)[0] > now_s)

    def keep(self, now_s: float) -> bool:
        """Keep READs from now on for a while; returns whether they were not kept until now."""
        begins = not self.is_kept(now_s)
        _UNTIL.pack_into(self._until, 0, now_s + KEPT_S)
        return begins

    def note(self, now_s: float, process: int, read: Read) -> None:
        (count,) = _COUNT.unpack_from(self._own)
        numbers = (read.inode, read.begin, read.end, process, read.thread)
        _READ.pack_into(self._own, _at(count), now_s, *numbers)
        _COUNT.pack_into(self._own, 0, count + 1)

    def since(self, begin_s: float, process: int) -> list[Read] | None:
        """What a process has read since then, in no order; None if the log has not kept all of it."""
        found: list[Read] = []
        for ring in self._rings:
            (count,) = _COUNT.unpack_from(ring)
            number = count
            while number and count - number < _READS:
                noted_s, inode, begin, end, of, thread = _READ.unpack_from(ring, _at(number - 1))
                if noted_s < begin_s:
                    break
                number -= 1
                if of == process:
                    found.append(Read(thread, inode, begin, end))
            # What was written meanwhile may lie in the place of what was read here.
            if number and _COUNT.unpack_from(ring)[0] - number >= _READS:
                return None
        return found


def _at(number: int) -> int:
    return _COUNT.size + number % _READS * _READ.size


def merged(reads: Iterable[Read], thread: int) -> Iterator[tuple[Read, bool]]:
    """The same bytes in as few pieces as can be; each with whether this thread has read it."""
    ordered = sorted((read.inode, read.thread == thread, read.begin, read.end) for read in reads)
    for (inode, own), pieces in groupby(ordered, lambda piece: piece[:2]):
        begin = end = -1
        for _, _, further, until in pieces:
            if further > end:
                if end > begin:
                    yield Read(thread, inode, begin, end), own
                begin = further
            end = max(end, until)
        yield Read(thread, inode, begin, end), own
