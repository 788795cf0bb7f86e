"""The READs that workers have answered lately: memory that all processes of a mount share.

Each worker writes into a ring of its own, before it answers the READ. So whatever a thread has read is there when the
thread goes on, and any worker can tell it. Nothing is kept unless someone has asked in the last minute.
"""

from __future__ import annotations

import copy
import mmap
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# How long READs are kept after the latest question. A loader's worker asks for each sample that it learns.
KEPT_S = 60.0
# The READs that each worker remembers: of a sample of 32 MiB, if the kernel asks for one page at a time.
_READS = 8192
_COUNT, _UNTIL = struct.Struct("@Q"), struct.Struct("@d")
# When, the file, where it begins and ends, the process and the thread.
_READ = struct.Struct("@dQQQII")


class Read(NamedTuple):
    inode: int
    own: bool
    """Whether the thread that asks has made it."""
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

    def note(self, now_s: float, inode: int, begin: int, end: int, process: int, thread: int) -> None:
        (count,) = _COUNT.unpack_from(self._own)
        _READ.pack_into(self._own, _at(count), now_s, inode, begin, end, process, thread)
        _COUNT.pack_into(self._own, 0, count + 1)

    def since(self, begin_s: float, process: int, thread: int) -> list[Read] | None:
        """What a process has read since then; None if the log has not kept all of it. `thread` is the one that asks."""
        found: list[Read] = []
        for ring in self._rings:
            (count,) = _COUNT.unpack_from(ring)
            number = count
            while number and count - number < _READS:
                noted_s, inode, begin, end, its_process, its_thread = _READ.unpack_from(ring, _at(number - 1))
                if noted_s < begin_s:
                    break
                number -= 1
                if its_process == process:
                    found.append(Read(inode, its_thread == thread, begin, end))
            # What was written meanwhile may lie in the place of what was read here.
            if number and _COUNT.unpack_from(ring)[0] - number >= _READS:
                return None
        return merged(found)


def _at(number: int) -> int:
    return _COUNT.size + number % _READS * _READ.size


def merged(reads: Iterable[Read]) -> list[Read]:
    """The same bytes in as few pieces as can be."""
    found: list[Read] = []
    for read in sorted(reads):
        if found and found[-1][:2] == read[:2] and read.begin <= found[-1].end:
            found[-1] = found[-1]._replace(end=max(found[-1].end, read.end))
        else:
            found.append(read)
    return found
