"""The bytes of file content that one process has asked for and not handed on."""

from __future__ import annotations

from collections.abc import Callable

import trio

from spiderfs.core.memory import UNBOUNDED


class InFlight:
    """Belongs to one trio run. One read may always go, however large it is, so `most_bytes` may be exceeded by it."""

    def __init__(self, most_bytes: int = UNBOUNDED, note: Callable[[int], object] = lambda held_bytes: None) -> None:
        """`note` is called with the bytes in flight at each change."""
        self.most_bytes, self.held_bytes = most_bytes, 0
        self._note = note
        self._turn = trio.StrictFIFOLock()
        self._freed = trio.lowlevel.ParkingLot()

    def fits(self, size: int, others: int = 0) -> bool:
        """Whether a read of `size` bytes may go, after `others` in bytes that are about to."""
        held = self.held_bytes + others
        return not held or held + size <= self.most_bytes

    async def reserve(self, size: int) -> None:
        """Wait until a read fits, and count it; in the order of the calls, so no large one waits for ever."""
        if self._turn.locked() or not self.fits(size):
            async with self._turn:
                while not self.fits(size):
                    await self._freed.park()
                self.add(size)
        else:
            self.add(size)

    def add(self, size: int) -> None:
        self.held_bytes += size
        self._note(self.held_bytes)

    def remove(self, size: int) -> None:
        self.add(-size)
        self._freed.unpark_all()
