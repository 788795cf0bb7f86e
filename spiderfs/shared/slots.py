"""A table of numbers, and what each of them has, in memory that all processes of a mount share."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from typing import Any


class SharedSlots:
    """Numbers from 1 on, each in the slot that it has modulo `slots`: of two in one slot, only the later one is known.

    Make it before the processes are forked. `values` are the types of what each number has, as in `struct`.
    """

    def __init__(self, slots: int, values: str = "") -> None:
        self._slots = slots
        # In the machine's own format, in which each number is written at once.
        self._slot = struct.Struct("@Q" + values)
        self._map = mmap.mmap(-1, slots * self._slot.size)

    def put(self, number: int, *values: float) -> None:
        self._slot.pack_into(self._map, self._at(number), number, *values)

    def get(self, number: int) -> tuple[Any, ...] | None:
        """What the number has; None if the number is not known."""
        found, *values = self._slot.unpack_from(self._map, self._at(number))
        return tuple(values) if found == number else None

    def discard(self, number: int) -> None:
        if number in self:
            self._empty(self._at(number))

    def replace(self, numbers: Iterable[int]) -> None:
        """Have these numbers, without values, and no others; what is known before and after is known all the time."""
        wanted = {self._at(number): number for number in numbers}
        for at in range(0, self._slots * self._slot.size, self._slot.size):
            if at in wanted:
                self.put(wanted[at])
            elif self._slot.unpack_from(self._map, at)[0]:
                self._empty(at)

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        return bool(self._slot.unpack_from(self._map, self._at(number))[0] == number != 0)

    def _empty(self, at: int) -> None:
        self._map[at : at + self._slot.size] = bytes(self._slot.size)

    def _at(self, number: int) -> int:
        return number % self._slots * self._slot.size
