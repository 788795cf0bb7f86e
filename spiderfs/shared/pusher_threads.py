"""Which threads push files ahead: memory that all processes of a mount share.

What such a thread looks up and reads is asked for by the mount itself and not by a reader, and the kernel says of each
request which thread it comes from.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

_SLOTS = mmap.PAGESIZE // 4
# No thread has this number.
_NOBODY = 0xFFFFFFFF


class PusherThreads:
    """The numbers of the threads. One process sets them, and others look."""

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("I")
        self.replace(())

    def replace(self, numbers: Iterable[int]) -> None:
        """Set the numbers of all such threads.

        Of two numbers that are equal modulo the number of slots only the last is known. The threads of one process,
        which are made one after the other, hardly ever have such numbers.
        """
        wanted = [_NOBODY] * _SLOTS
        for number in numbers:
            wanted[number % _SLOTS] = number
        for slot, number in enumerate(wanted):
            if self._numbers[slot] != number:
                self._numbers[slot] = number

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        return self._numbers[number % _SLOTS] == number
