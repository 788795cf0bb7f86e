"""Memory that all processes of a mount share: make each part before they are forked.

`SharedSlots` is a table of numbers, and `Notice` wakes workers.

`Flights` are the samples that the manager fetches for plans, many at a time, and stores together. A process that wants
one of them waits until it is stored, or has failed: then it looks into the store. It notes that in the table, and the
manager wakes it through a pipe. Loads and stores of two processes may be seen in another order by each other, so no one
waits long without a look at the table (Dekker's problem: memory barriers cannot be had from Python).

`RecentRecords` are byte strings under byte keys: those that were put last, as many as fit. The memory is a ring. Each
record has a position, a number that only grows; it is there as long as the positions that were given out since are
fewer than the bytes of the ring. A record names the one before it whose key falls into the same slot, so none is lost
but those that the ring has overwritten. Writers hold a lock, which the kernel frees if they die. Readers hold none:
they check after they have copied that the record was still there. A writer that dies leaves a record that no one finds.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio
import xxhash

from spiderfs.shared.published import Edition, edition_of

T = TypeVar("T")


class Notice:
    """How workers learn that the manager has published a file: by an eventfd each, so that none has to look for it.

    A worker that replaces another one takes over.
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

    `values` are the types of what each number has, as in `struct`.
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


_SLOTS = 1 << 14
# In the machine's own format, in which the number is written at once.
_INODE = struct.Struct("@Q")
_LOOK_S = 0.02
_MOST_WOKEN = 4096 * _INODE.size
MANAGER = 0


class Flights:
    """The table; process 0 is the manager, and process n > 0 the n-th worker."""

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


_KEY_SLOTS = 1 << 16
_ALIGNED = 8
_WORD = struct.Struct("<Q")
# Position of the record itself and of the one before it in the slot; bytes of key and value.
_HEAD = struct.Struct("<QQII")


class RecentRecords:
    """A page takes no room before something is written to it."""

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes` is the size of the ring; a record may take a quarter of it."""
        self._limit = limit_bytes
        self._ring_at = _WORD.size * (1 + _KEY_SLOTS)
        # No file, because a limit on the size of files (ulimit -f) may be less than this.
        self._map = mmap.mmap(-1, self._ring_at + limit_bytes)
        self._file = os.memfd_create("spiderfs-records")  # for its lock alone
        # The first word is the next position; position 0 means that there is none.
        self._words = memoryview(self._map)[: self._ring_at].cast("Q")
        self._words[0] = _ALIGNED
        self._threads = threading.Lock()

    def __del__(self) -> None:
        os.close(self._file)

    def put(self, key: bytes, value: bytes) -> bool:
        """Keep the value under its key, in place of an earlier one; False if it is too long."""
        size = _HEAD.size + len(key) + len(value)
        if size > self._limit // 4:
            return False
        with self._locked():
            position = self._words[0]
            if position % self._limit + size > self._limit:
                position += self._limit - position % self._limit
            self._words[0] = position + size + -size % _ALIGNED
        at = self._ring_at + position % self._limit
        body = at + _HEAD.size
        self._map[body : body + len(key)] = key
        self._map[body + len(key) : at + size] = value
        slot = _slot(key)
        with self._locked():
            if self._has(position):
                _HEAD.pack_into(self._map, at, position, self._words[slot], len(key), len(value))
                self._words[slot] = position
        return True

    def get(self, key: bytes, offset: int = 0, size: int | None = None) -> bytes | None:
        """A piece of the value; None if there is none (any more)."""
        found = self._find(key)
        if found is None:
            return None
        position, start, length = found
        end = length if size is None else min(offset + size, length)
        piece = self._map[start + min(offset, end) : start + end]
        return piece if self._has(position) else None

    def remove(self, key: bytes) -> None:
        """Forget the value, and give back the pages that it alone lies in."""
        with self._locked():
            while (found := self._find(key)) is not None:
                position, start, length = found
                at = self._ring_at + position % self._limit
                before = _HEAD.unpack_from(self._map, at)[1]
                # No key is empty, so no one finds this record, and all find those before it.
                _HEAD.pack_into(self._map, at, position, before, 0, 0)
                first, end = (
                    -(-start // mmap.PAGESIZE) * mmap.PAGESIZE,
                    (start + length) // mmap.PAGESIZE * mmap.PAGESIZE,
                )
                if first < end:
                    self._map.madvise(mmap.MADV_REMOVE, first, end - first)

    def _find(self, key: bytes) -> tuple[int, int, int] | None:
        """Position of the record, and where its value begins and how long it is."""
        position = self._words[_slot(key)]
        while position and self._has(position):
            at = self._ring_at + position % self._limit
            own, before, key_bytes, length = _HEAD.unpack_from(self._map, at)
            start = at + _HEAD.size + key_bytes
            if own != position:
                break
            if key_bytes == len(key) and self._map[at + _HEAD.size : start] == key:
                return position, start, length
            position = before
        return None

    def _has(self, position: int) -> bool:
        return bool(position + self._limit >= self._words[0])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # The lock of the file is the process's, whichever thread asks.
        with self._threads:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)


def _slot(key: bytes) -> int:
    return 1 + xxhash.xxh3_64_intdigest(key) % _KEY_SLOTS
