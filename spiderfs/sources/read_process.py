"""A process that reads from the source for another one.

A thread that reads a file hands the interpreter's lock on at half a dozen system calls: 75 futex(2) calls for each
fetch if the threads are in the worker itself, 2 if they have an interpreter of their own. Each read has one slot of
shared memory: a header, then the path, and in its place later the result. The slot's number goes through one pipe for
each direction; it has 4 bytes, so none is torn (pipe(7)). All threads wait at the same pipe, and the kernel wakes one.

A read may come with a **delivery**: the reading process writes the bytes and an answer to a descriptor before it
reports, so the reader has them two wake-ups sooner. The reader's next request may come before that report, so
deliveries are counted in shared memory before they are made, and a parent that has to know waits until it has
`caught_up`.

Whole files that no one waits for are read in **batches** (`begin`, `send`): many numbers go through the pipe at once,
and what comes within a moment is handed over together. The reading process **seals** the bytes: it makes a record of
the store of each file that is cut out of them, and may write it there. A sealed read of one file may come with a
**push**: the bytes are given to the kernel after the report, and that is reported too. In this order, because the
kernel may make it wait for a reader who waits for what the parent does with the report. A **part** of a large file is
written into the store while it comes; the reply has its records, and the number with a mark says that the header has
another number of blocks that are written.

The reading process ends with its parent (PR_SET_PDEATHSIG, and the end of the pipe). If it dies first, the parent's
`attend` or `watch` raises, and the parent must end too: its successor asks again for whatever is wanted.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import math
import mmap
import os
import pickle
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, NoReturn, Protocol

import outcome
import trio

from spiderfs.errors import SourceError, SourceUnavailable
from spiderfs.linux.process_table import end_with_parent, ended_status
from spiderfs.sources.in_flight import InFlight
from spiderfs.sources.source import Delivery, FromPeer, Source, Version, joined_time, split_time, streamed

_NUMBER = struct.Struct("<I")
# Request: offset, length, the version's size, mtime (seconds, nanoseconds) and tag; bytes of the path, of what a
# delivery begins with, of its answer, and of where to put the bytes; what to do. Reply: how many bytes, of what kind
# they are, and how many seconds the source took. Inode, cuts and leases of a sealed read are pickled.
_REQUEST = struct.Struct("<QQQqIQIHHIB")
_REPLY = struct.Struct("<QBf")
_READ, _DELIVERED, _FAILED = 0, 1, 2
_BYTES, _SEALED, _PART = 0, 1, 2
# A part has come further: a mark in the number of its slot, and where the header has how far.
_CAME, _BLOCKS, _BLOCKS_AT = 1 << 31, struct.Struct("<I"), 60
# Marks in the number of a slot whose bytes were pushed: the kernel has them, or it does not.
_PUSHED, _NOT_PUSHED = 1 << 30, 1 << 29
# Added to the kind of bytes that a peer gave.
_FROM_PEER = 4
_COUNT = struct.Struct("<Q")
_HEADER_BYTES = 64
# A cautious process that makes n reads at a time makes n times this many of them before it makes n + 1 at a time.
_STEADY_READS = 8
# It also makes one more at a time when a read has waited this long for the others.
_HELD_BACK_S = 2.0
# A slot gives its memory back after a read of more bytes than this, or than its part of what may be in flight: so 16
# slots keep 16 MiB at most between reads.
_KEPT_BYTES = 1 << 20
_HELD_UP_S = 0.05
# How soon the parent notices a reading process that was killed while it waits for the source.
_WATCH_INTERVAL_S = 1.0
# While no one waits for a read, results are collected for so long: that spares the parent most of its wake-ups.
_GATHER_S = 0.0015
# Bytes of slot numbers that are read from the pipe at a time.
_MOST_REPLIES = 4096 * _NUMBER.size


Cut = Callable[[bytes], bytes]
"""Gives the bytes of a file among those of a read; raises SourceError if they are not there. It can be pickled."""


class SealedRead(NamedTuple):
    """A read of a batch: the records that were made of it, empty where a cut failed, or the error that it raised."""

    slot: int
    records: list[bytes]
    took_s: float
    from_peer: bool
    error: Exception | None


class Destination(Protocol):
    """Blocks at the `place` of `write_part`, held from `begun` to `ended`; `came` gets the number that are written."""

    place: bytes

    def begun(self) -> None: ...

    def came(self, blocks: int) -> None: ...

    def ended(self) -> None: ...


class ReadProcess:
    """Make it before the process has other threads; `read` works while `attend` runs."""

    def __init__(
        self,
        source: Source,
        limit: int,
        longest: int,
        before: Callable[[], object],
        deliver_to: int | None = None,
        cautious: bool = False,
        seal: Callable[[bytes, bytes], bytes] = lambda payload, lease: payload,
        write_part: Callable[[Iterator[bytes], int, bytes, Callable[[int], object]], bytes] = lambda *_: b"",
        connect: Callable[[], object] = lambda: None,
        in_flight: InFlight | None = None,
        awaited: Callable[[int], bool] = lambda inode: False,
    ) -> None:
        """Fork a process that makes at most `limit` reads at a time, of at most `longest` bytes each.

        `seal` makes a record, of at most `longest` bytes, of what a sealed read gives and `begin` was given for it.
        `write_part` is `RecordWriter`'s. `connect` runs beside the first reads. What is read is counted `in_flight`. A
        file is not pushed while it is `awaited`, by its inode: its reader holds the pages.

        The new process calls `before` first. It makes deliveries only if it has the descriptor `deliver_to`. A
        `cautious` one makes one read at a time at first, and one more after each while without trouble, because its
        predecessor may have died of a lack of memory. (Measured: 16 readers read files of 7 MB in 150 MB of memory;
        each successor was asked for all 16 files at once, and died too.)
        """
        self._limit = limit
        self._most = 1 if cautious else limit
        self._steady = 0
        self._longest = longest
        self.in_flight = in_flight or InFlight()
        self._kept_bytes = min(_KEPT_BYTES, self.in_flight.most_bytes // limit)
        # How many bytes each slot was asked for.
        self._lengths = [0] * limit
        self._deliver_to = deliver_to
        self._seal, self._write_part, self._connect, self._awaited = seal, write_part, connect, awaited
        self._slot_bytes = -(-(_HEADER_BYTES + longest) // mmap.PAGESIZE) * mmap.PAGESIZE
        # A file in memory: only the pages that were touched exist.
        memory = os.memfd_create("spiderfs-reads")
        self._count_at = limit * self._slot_bytes
        os.ftruncate(memory, self._count_at + mmap.PAGESIZE)
        self._memory = mmap.mmap(memory, self._count_at + mmap.PAGESIZE)
        os.close(memory)
        self._view = memoryview(self._memory)
        self._heard = 0
        self._hearing = trio.lowlevel.ParkingLot()
        self._counting = threading.Lock()
        self._free = list(range(limit - 1, -1, -1))
        self._room = trio.lowlevel.ParkingLot()
        self._wanting = 0
        self._tasks: dict[int, trio.lowlevel.Task | None] = {}
        self._sealing: set[int] = set()
        self._late: dict[int, Callable[[], object]] = {}
        self._parts: dict[int, Destination] = {}
        self._unsent = b""
        # The slots whose reads come with a push, each with the bytes of its record once that has come.
        self._pushing: dict[int, int] = {}
        self.sealed: Callable[[list[SealedRead]], object] = lambda reads: None
        """Is given the reads of batches that have ended."""
        self.pushed: Callable[[int, bool], object] = lambda slot, done: None
        """Is called after that for each read that did not fail and came with a push: whether the kernel has the bytes,
        or a reader waits for them."""
        self._reading = trio.lowlevel.ParkingLot()
        self._delivering: set[int] = set()
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if end_with_parent(parent):
                    os.close(self._requests)
                    os.close(self._replies)
                    before()
                    self._serve(source, limit, requests, replies)
            finally:
                os._exit(1)
        os.close(requests)
        os.close(replies)
        os.set_blocking(self._replies, False)

    # -- here

    async def read(
        self,
        path: bytes,
        offset: int,
        length: int,
        version: Version,
        delivery: Delivery | None = None,
        to: Destination | None = None,
    ) -> bytes:
        """See `Source.read`. If the caller is cancelled, the read goes on and keeps its slot until it returns.

        The delivery is made only if the read gives `length` bytes. A part goes `to` a place in the store; then this
        returns how many bytes are the source's own, and the records.
        """
        messages = None if delivery is None or self._deliver_to is None else delivery.messages(length)
        head, answer = messages or (b"", b"")
        # The slot has to hold the path, or an error whose text has the path in it.
        if max(2 * len(path) + len(head) + len(answer), 0 if to else length) > self._longest:
            raise SourceUnavailable(f"{length} bytes of a path of {len(path)} are more than is read at a time")
        await trio.lowlevel.checkpoint_if_cancelled()
        self._wanting += 1
        reserved = 0
        try:
            await self.in_flight.reserve(length)
            reserved = length
            while not self._free or self._limit - len(self._free) >= self._most:
                with trio.move_on_after(math.inf if self._most == self._limit else _HELD_BACK_S) as waiting:
                    await self._room.park()
                # A read that hangs must not hold up the others.
                if waiting.cancelled_caught and self._most < self._limit:
                    self._most += 1
        except BaseException:
            self.in_flight.remove(reserved)
            raise
        finally:
            self._wanting -= 1
        if to is None:
            slot = self._request(path, offset, length, version, head, answer)
        else:
            slot = self._request(path, offset, length, version, place=to.place, asks=_PART)
            self._parts[slot] = to
            to.begun()
        begin = slot * self._slot_bytes + _HEADER_BYTES
        if head:
            self._delivering.add(slot)
        self._tasks[slot] = trio.lowlevel.current_task()
        if self._reading:
            self._reading.unpark_all()
        # If the process has just ended, `attend` raises in a moment.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._requests, _NUMBER.pack(slot))

        def abandon(_: object) -> trio.lowlevel.Abort:
            self._given_up(slot)
            return trio.lowlevel.Abort.SUCCEEDED

        what, size = await trio.lowlevel.wait_task_rescheduled(abandon)
        result = (FromPeer if what & _FROM_PEER else bytes)(self._view[begin : begin + size])
        what &= ~_FROM_PEER
        self._give_back(slot, size)
        if what == _FAILED:
            raise pickle.loads(result)
        if delivery is not None:
            delivery.done = what == _DELIVERED
        return result

    def _request(
        self,
        path: bytes,
        offset: int,
        length: int,
        version: Version,
        head: bytes = b"",
        answer: bytes = b"",
        place: bytes = b"",
        asks: int = _BYTES,
    ) -> int:
        """Write a request into a free slot; returns the slot."""
        slot = self._free.pop()
        self._lengths[slot] = length
        begin = slot * self._slot_bytes
        versioned = (version.size, *split_time(version.mtime_ns), version.tag)
        parts = (path, head, answer, place)
        sizes = (len(part) for part in parts)
        _REQUEST.pack_into(self._view, begin, offset, length, *versioned, *sizes, asks)
        said = b"".join(parts)
        self._view[begin + _HEADER_BYTES : begin + _HEADER_BYTES + len(said)] = said
        return slot

    @property
    def room(self) -> int:
        """How many reads may `begin` now."""
        # A read that was given room and has not run yet comes first, too.
        return 0 if self._wanting else max(0, self._most - (self._limit - len(self._free)))

    @property
    def pushes(self) -> bool:
        """Whether a read may come with a push."""
        return self._deliver_to is not None

    def begin(
        self,
        path: bytes,
        offset: int,
        length: int,
        version: Version,
        files: Sequence[tuple[Cut | None, bytes]],
        inode: int = 0,
        push: bytes = b"",
    ) -> int:
        """Read bytes and seal files among them, from the next `send` on; returns the slot.

        `files` are a cut for each, None for one that has all bytes, and the lease to seal it with. There must be
        `room`, also `in_flight`. The read may have no more than `longest` bytes, nor path, cuts and leases half of
        that. `push` begins the message that gives the kernel the bytes, as those of this inode.
        """
        slot = self._request(path, offset, length, version, push, place=pickle.dumps((inode, files)), asks=_SEALED)
        self.in_flight.add(length)
        self._sealing.add(slot)
        if push:
            self._pushing[slot] = 0
        self._unsent += _NUMBER.pack(slot)
        return slot

    def send(self) -> None:
        """Have the reads made that have begun."""
        if self._unsent:
            if self._reading:
                self._reading.unpark_all()
            with contextlib.suppress(BrokenPipeError):
                os.write(self._requests, self._unsent)
            self._unsent = b""

    def abandon(self, slot: int, returned: Callable[[], object]) -> None:
        """No longer wait for a sealed read, which keeps its slot until it returns; then call `returned`."""
        self._sealing.discard(slot)
        self._given_up(slot)
        self._late[slot] = returned

    def _given_up(self, slot: int) -> None:
        self._tasks[slot] = None
        # While it hangs, it has hardly any bytes, and it must not hold up the others.
        self.in_flight.remove(self._lengths[slot])
        self._lengths[slot] = 0

    @property
    def behind(self) -> bool:
        """Whether the process has made, or is making, a delivery that `attend` has not seen yet."""
        return bool(_COUNT.unpack_from(self._view, self._count_at)[0] != self._heard)

    async def caught_up(self) -> None:
        """Return when all callers of `read` whose bytes were delivered have gone on; at the latest after a moment.

        If the descriptor holds up a delivery, it may be waiting for this very process, which then must not wait for it.
        """
        with trio.move_on_after(_HELD_UP_S):
            while self.behind:
                await self._hearing.park()
            # trio may run this task before the tasks that were woken in the same turn; two turns later all have run.
            for _ in range(2):
                await trio.lowlevel.checkpoint()

    async def attend(self) -> None:
        """For ever: hand results to the callers of `read`. Raises SourceUnavailable when the process has ended."""
        while True:
            try:
                replies = os.read(self._replies, _MOST_REPLIES)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._replies)
                continue
            if not replies:
                raise SourceUnavailable("the process that reads from the source has ended")
            sealed, pushed = [], []
            for (slot,) in _NUMBER.iter_unpack(replies):
                if slot & _CAME:
                    begin = (slot ^ _CAME) * self._slot_bytes
                    self._parts[slot ^ _CAME].came(*_BLOCKS.unpack_from(self._view, begin + _BLOCKS_AT))
                    continue
                if slot & (_PUSHED | _NOT_PUSHED):
                    done, slot = bool(slot & _PUSHED), slot & ~(_PUSHED | _NOT_PUSHED)
                    self._give_back(slot, self._pushing.pop(slot))
                    pushed.append((slot, done))
                    continue
                size, what, took_s = _REPLY.unpack_from(self._view, slot * self._slot_bytes)
                if slot in self._sealing:
                    self._sealing.discard(slot)
                    sealed.append(self._sealed_read(slot, size, what, took_s))
                    continue
                if slot in self._delivering:
                    self._delivering.discard(slot)
                    self._heard += 1
                if (part := self._parts.pop(slot, None)) is not None:
                    part.ended()
                task = self._tasks.pop(slot)
                if task is None:
                    self._free_read(slot, size, what)
                    if (returned := self._late.pop(slot, None)) is not None:
                        returned()
                else:
                    trio.lowlevel.reschedule(task, outcome.Value((what, size)))
            self._hearing.unpark_all()
            if sealed:
                self.sealed(sealed)
            for slot, done in pushed:
                self.pushed(slot, done)
            if sealed and not self._tasks:
                await trio.sleep(_GATHER_S)

    def _sealed_read(self, slot: int, size: int, what: int, took_s: float) -> SealedRead:
        begin = slot * self._slot_bytes + _HEADER_BYTES
        result = pickle.loads(self._view[begin : begin + size])
        failed = what & ~_FROM_PEER == _FAILED
        self._free_read(slot, size, what)
        return SealedRead(slot, [] if failed else result, took_s, bool(what & _FROM_PEER), result if failed else None)

    def _free_read(self, slot: int, size: int, what: int) -> None:
        """Give back the slot of a read, unless its bytes are being pushed."""
        if slot in self._pushing and what & ~_FROM_PEER != _FAILED:
            self._pushing[slot] = size
        else:
            self._pushing.pop(slot, None)
            self._give_back(slot, size)

    async def watch(self) -> None:
        """For ever: look whether the process was killed. Raises SourceUnavailable when it was.

        Threads of the process that wait in the kernel for the source may keep its pipe open; then `attend` hears
        nothing of its end. While nothing is being read there are none, and no one looks.
        """
        while ended_status(self.pid) is None:
            if not (self._tasks or self._sealing or self._pushing):
                await self._reading.park()
            await trio.sleep(_WATCH_INTERVAL_S)
        raise SourceUnavailable("the process that reads from the source was killed while it waited there")

    def close(self) -> None:
        """Close the pipes, which ends the process. Only tests need this: a worker ends with its mount."""
        os.close(self._requests)
        os.close(self._replies)
        self._view.release()
        self._memory.close()

    def _give_back(self, slot: int, size: int) -> None:
        self.in_flight.remove(self._lengths[slot])
        if size > self._kept_bytes:
            begin = slot * self._slot_bytes
            self._memory.madvise(mmap.MADV_REMOVE, begin, self._slot_bytes)
        # The slot that was used last is used next: its memory is in the processor's cache.
        self._free.append(slot)
        if self._most < self._limit:
            self._steady += 1
            if self._steady >= _STEADY_READS * self._most:
                self._most, self._steady = self._most + 1, 0
                self._room.unpark()
        self._room.unpark()

    # -- there

    def _serve(self, source: Source, limit: int, requests: int, replies: int) -> NoReturn:
        # What was imported is never garbage, so no collection has to look at it.
        gc.freeze()
        threading.Thread(target=self._connect, daemon=True).start()
        for _ in range(limit):
            threading.Thread(target=self._answer, args=(source, requests, replies), daemon=True).start()
        while True:
            signal.pause()

    def _answer(self, source: Source, requests: int, replies: int) -> None:
        # What a read gave ends with the call: hundreds of threads that wait would hold as many files.
        while number := os.read(requests, _NUMBER.size):
            self._answer_one(source, number, replies)
        os._exit(0)

    def _answer_one(self, source: Source, number: bytes, replies: int) -> None:
        begin = _NUMBER.unpack(number)[0] * self._slot_bytes
        offset, length, size, *rest, place_bytes, asks = _REQUEST.unpack_from(self._view, begin)
        seconds, nanoseconds, tag, path_bytes, head_bytes, answer_bytes = rest
        version = Version(size, joined_time(seconds, nanoseconds), tag)
        start = begin + _HEADER_BYTES
        said = bytes(self._view[start : start + path_bytes + head_bytes + answer_bytes + place_bytes])
        path = said[:path_bytes]
        began_s = time.monotonic()
        try:
            if asks == _PART:
                pieces, own = streamed(source, path, offset, length, version), [0]
                came = partial(self._came, begin, number, replies)
                result = self._write_part(_whole(pieces, length, own), offset, said[path_bytes:], came)
                result = _COUNT.pack(*own) + result
            elif asks == _SEALED:
                inode, files = pickle.loads(said[path_bytes + head_bytes :])
                payload = source.read(path, offset, length, version)
                result = self._sealed_as(payload, length, files)
            else:
                result = source.read(path, offset, length, version)
            what = _READ
        except Exception as exc:
            result, what = pickle.dumps(exc.with_traceback(None)), _FAILED
        if head_bytes and asks != _SEALED:
            with self._counting:
                (count,) = _COUNT.unpack_from(self._view, self._count_at)
                _COUNT.pack_into(self._view, self._count_at, count + 1)
            if what == _READ and len(result) == length:
                head_end = path_bytes + head_bytes
                what = self._deliver(said[path_bytes:head_end], result, said[head_end:])
        pushes = head_bytes and asks == _SEALED and what != _FAILED
        # A reader who waits goes on with the report, and then waits no more.
        awaited = pushes and self._awaited(inode)
        if isinstance(result, FromPeer):
            what += _FROM_PEER
        self._view[start : start + len(result)] = result
        _REPLY.pack_into(self._view, begin, len(result), what, time.monotonic() - began_s)
        os.write(replies, number)
        if pushes:
            done = awaited or self._push(said[path_bytes : path_bytes + head_bytes], payload)
            os.write(replies, _NUMBER.pack(_NUMBER.unpack(number)[0] | (_PUSHED if done else _NOT_PUSHED)))

    def _sealed_as(self, payload: bytes, length: int, files: Sequence[tuple[Cut | None, bytes]]) -> bytes:
        if len(payload) != length:
            raise SourceUnavailable(f"{len(payload)} bytes came in place of {length}")
        records = pickle.dumps([self._record(payload, *file) for file in files])
        return FromPeer(records) if isinstance(payload, FromPeer) else records

    def _record(self, payload: bytes, cut: Cut | None, lease: bytes) -> bytes:
        if cut is not None:
            try:
                payload = cut(payload)
            except SourceError:
                return b""
        return self._seal(payload, lease)

    def _came(self, begin: int, number: bytes, replies: int, blocks: int) -> None:
        _BLOCKS.pack_into(self._view, begin + _BLOCKS_AT, blocks)
        os.write(replies, _NUMBER.pack(_NUMBER.unpack(number)[0] | _CAME))

    def _push(self, head: bytes, content: bytes) -> bool:
        assert self._deliver_to is not None
        try:
            os.writev(self._deliver_to, (head, content))
        except OSError:
            # ENOENT: the kernel does not know the file. ENODEV: the file system is unmounted.
            return False
        return True

    def _deliver(self, head: bytes, content: bytes, answer: bytes) -> int:
        assert self._deliver_to is not None
        try:
            if not answer:
                os.writev(self._deliver_to, (head, content))
                return _DELIVERED
            # It does no harm if the kernel refuses the content: it has no memory for it, or does not know the file any
            # more.
            with contextlib.suppress(OSError):
                os.writev(self._deliver_to, (head, content))
            os.write(self._deliver_to, answer)
        except OSError as exc:
            # ENOENT: no one waits any more. ENODEV: the file system is unmounted.
            if exc.errno not in (errno.ENOENT, errno.ENODEV):
                return _READ
        return _DELIVERED


def _whole(pieces: Iterator[bytes], length: int, own: list[int]) -> Iterator[bytes]:
    """The same pieces; `own` counts those bytes that no peer gave. Raises SourceUnavailable unless all bytes come."""
    for piece in pieces:
        length -= len(piece)
        if length < 0:
            break
        own[0] += 0 if isinstance(piece, FromPeer) else len(piece)
        yield piece
    if length:
        raise SourceUnavailable(f"{abs(length)} bytes {'are missing' if length > 0 else 'too many came'}")
