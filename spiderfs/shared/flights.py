"""Which samples the manager is fetching for plans, in memory that all processes of a mount share.

The manager fetches planned samples many at a time, and stores them together. A process that wants one of them waits
until it is stored, or has failed: then it looks into the store. It says so in the table, and the manager wakes it
through a pipe. Loads and stores of two processes may be seen in another order by each other, so no one waits long
without a look at the table (Dekker's problem: memory barriers cannot be had from Python).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterable

import trio

_SLOTS = 4096
# In the machine's own format, in which the number is written at once.
_INODE = struct.Struct("@Q")
_LOOK_S = 0.02
_MOST_WOKEN = 4096 * _INODE.size
MANAGER = 0


class Flights:
    """The table; process 0 is the manager, and process n > 0 the n-th worker. Make it before they are forked."""

    def __init__(self, workers: int) -> None:
        self._processes = workers + 1
        # The inode, then a byte for each process: whether it waits.
        self._slot_bytes = _INODE.size + -(-self._processes // _INODE.size) * _INODE.size
        self._map = mmap.mmap(-1, _SLOTS * self._slot_bytes)
        self._pipes = [os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(self._processes)]
        self._parked: dict[int, trio.lowlevel.ParkingLot] = {}

    def __contains__(self, inode: int) -> bool:
        return bool(_INODE.unpack_from(self._map, self._at(inode))[0] == inode)

    # -- the manager

    def begin(self, inode: int) -> bool:
        """Note that a sample is being fetched; False if another one has its place in the table."""
        at = self._at(inode)
        if _INODE.unpack_from(self._map, at)[0]:
            return False
        _INODE.pack_into(self._map, at, inode)
        return True

    def finish(self, inodes: Iterable[int]) -> None:
        """The fetches of these, which have begun, are over; wake those who wait for them."""
        for inode in inodes:
            at = self._at(inode)
            _INODE.pack_into(self._map, at, 0)
            waiting = self._map[at + _INODE.size : at + self._slot_bytes]
            if any(waiting):
                self._map[at + _INODE.size : at + self._slot_bytes] = bytes(len(waiting))
                for process in range(self._processes):
                    if waiting[process]:
                        # Where the pipe is full, the process looks by itself soon.
                        with contextlib.suppress(BlockingIOError):
                            os.write(self._pipes[process][1], _INODE.pack(inode))

    def clear(self) -> None:
        """Nothing is being fetched: the manager has just started."""
        for at in range(0, _SLOTS * self._slot_bytes, self._slot_bytes):
            _INODE.pack_into(self._map, at, 0)

    def awaited(self, inode: int) -> bool:
        """Whether a process waits for this sample."""
        at = self._at(inode)
        return inode in self and any(self._map[at + _INODE.size : at + self._slot_bytes])

    # -- who waits

    async def wait(self, inode: int, process: int) -> None:
        """Return when the manager does not fetch this sample, or fetches it no more."""
        waits = self._at(inode) + _INODE.size + process
        while inode in self:
            self._map[waits] = 1
            if inode not in self:
                return
            with trio.move_on_after(_LOOK_S):
                await self._parked.setdefault(inode, trio.lowlevel.ParkingLot()).park()

    async def attend(self, process: int) -> None:
        """For ever: let those tasks of this process go on that the manager wakes."""
        wakings = self._pipes[process][0]
        while True:
            await trio.lowlevel.wait_readable(wakings)
            try:
                woken = os.read(wakings, _MOST_WOKEN)
            except BlockingIOError:
                continue
            for (inode,) in _INODE.iter_unpack(woken):
                if (lot := self._parked.pop(inode, None)) is not None:
                    lot.unpark_all()

    def _at(self, inode: int) -> int:
        return inode % _SLOTS * self._slot_bytes
