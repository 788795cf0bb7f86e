"""Which samples are pushed ahead and wait for their readers: memory that all processes of a mount share.

The kernel has such a sample, or is about to get it, whether the store has it or not. So its reader needs no stand-in.
"""

from __future__ import annotations

import mmap

# Half a megabyte. A reader whose sample was left out of a full table may get a stand-in.
_SLOTS = 1 << 16


class PushedSamples:
    """One process adds inodes and takes them out, and others look. Of two in one slot, only the later one is known."""

    def __init__(self) -> None:
        self._inodes = memoryview(mmap.mmap(-1, _SLOTS * 8)).cast("Q")

    def add(self, inode: int) -> None:
        self._inodes[inode % _SLOTS] = inode

    def discard(self, inode: int) -> None:
        if inode in self:
            self._inodes[inode % _SLOTS] = 0

    def clear(self) -> None:
        for slot in range(_SLOTS):
            if self._inodes[slot]:
                self._inodes[slot] = 0

    def __contains__(self, inode: object) -> bool:
        assert isinstance(inode, int)
        return self._inodes[inode % _SLOTS] == inode
