"""A set of numbers in memory that all processes of a mount share: one process changes it, and others look."""

from __future__ import annotations

import mmap
from collections.abc import Iterable


class SharedNumbers:
    """Numbers from 1 on; of two that are equal modulo `slots` the later is known. Make it before any fork."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._numbers = memoryview(mmap.mmap(-1, slots * 8)).cast("Q")

    def add(self, number: int) -> None:
        self._numbers[number % self._slots] = number

    def discard(self, number: int) -> None:
        if number in self:
            self._numbers[number % self._slots] = 0

    def replace(self, numbers: Iterable[int]) -> None:
        """Have these numbers and no others; what is in the set before and after is in it all the time."""
        wanted = {number % self._slots: number for number in numbers}
        for slot in range(self._slots):
            if self._numbers[slot] != (number := wanted.get(slot, 0)):
                self._numbers[slot] = number

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        return self._numbers[number % self._slots] == number != 0
