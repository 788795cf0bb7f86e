"""A table of numbers with a value each, in memory that all processes of a mount share."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import trio

from spiderfs.shared.attached_trainers import Edition, edition_of

T = TypeVar("T")


class Notice:
    """How workers learn that the manager has published a file: by an eventfd each, so that none has to look for it.

    All processes of a mount share it, so make it before the fork; a worker that replaces another one takes over.
    """

    def __init__(self, workers: int) -> None:
        self._events = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(workers)]
        # How many notices there were, and by number, from 1 on, how many of these each worker has taken over.
        self._published = workers + 1
        self._counts = SharedSlots(workers + 1, "Q")

    def after(self, publish: Callable[[T], None]) -> Callable[[T], None]:
        """A function that publishes, and then wakes each worker, also where publishing has failed halfway."""

        def published(what: T) -> None:
            try:
                publish(what)
            finally:
                self._counts.put(self._published, self._count(self._published) + 1)
                for event in self._events:
                    os.eventfd_write(event, 1)

        return published

    def taken_over(self) -> bool:
        """Whether all workers act by what was published last."""
        published = self._count(self._published)
        return all(self._count(worker + 1) == published for worker in range(len(self._events)))

    def _count(self, number: int) -> int:
        return int((self._counts.get(number) or (0,))[0])

    async def follow(self, worker: int, takers: Mapping[Path, Callable[[], None]]) -> None:
        """For ever: call the function of each file at once, and at each notice after which the file is another one."""
        seen: dict[Path, Edition | None] = {}
        while True:
            published = self._count(self._published)
            for path, take_over in takers.items():
                # A file may come later, with the manager.
                there = edition_of(path)
                if there != seen.get(path):
                    seen[path] = there
                    take_over()
            self._counts.put(worker + 1, published)
            await trio.lowlevel.wait_readable(self._events[worker])
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._events[worker])


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
