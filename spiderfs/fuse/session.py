"""The descriptor of /dev/fuse: takes requests from it and writes answers to it, in several processes at once.

The supervisor mounts and answers the kernel's INIT, then forks; each worker serves the inherited descriptor. What a
killed worker did not answer is handed out again after FUSE_NOTIFY_RESEND (Linux >= 6.9). The descriptor is
non-blocking: a worker goes on waiting if another one was quicker, or if the request's caller was killed meanwhile.

A handler is a coroutine, and most never wait. The task that takes a request, the **attendant**, runs its handler at
once, and then looks for the next request without a pass of trio's loop. When a handler does have to wait, the attendant
stays with it, and another task becomes the attendant. So a request costs a task only if it waits. While nothing but
timers is under way, the attendant also **stands by**: it waits for the next request without trio, which costs a tenth
of a pass of trio's loop. Of several workers that stand by, the kernel wakes one (EPOLLEXCLUSIVE, epoll_ctl(2)).
"""

from __future__ import annotations

import errno
import logging
import math
import os
import select
import time
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from spiderfs.errors import Busy, MountError, StoreCorrupt
from spiderfs.fuse import wire
from spiderfs.fuse.resent_requests import HeldRequests
from spiderfs.linux import mounts
from spiderfs.metrics import Counters
from spiderfs.sources.source import FIRST_INODE
from spiderfs.vfs.answer_types import Caller
from spiderfs.vfs.catalogue import ROOT_INODE

log = logging.getLogger(__name__)

Body = bytes | memoryview | None
"""The body of an answer, without its header; None where the kernel expects no answer."""
Handler = Callable[[int, memoryview, Caller, int], Coroutine[Any, Any, Body]]
"""Answers one kind of request; its arguments are the inode, the request's body, the caller and the request's number.

The body may be looked at until the first await only.
"""

# Requests that may wait in a worker at a time, for the source above all. One takes 12 kB, and its reader's thread more.
# What would have to wait beside them gets an error: to take no more requests would hold up those for cached files.
MAX_WAITING = 8192
# Tasks that are kept for further requests that wait.
_MOST_RESTING = 512
# Requests in a row that are answered without a pass of trio's loop. Every other task waits for such a pass.
BURST = 16
# An attendant stands by for STANDBY_S after the last request. Timers may be late by PASS_INTERVAL_S meanwhile.
PASS_INTERVAL_S = 0.005
STANDBY_S = 0.1
_INIT_PATIENCE_MS = 10_000


def mount(at: Path, source: str, allow_other: bool, programs_run: bool, immutable: bool = False) -> int:
    """Mount, answer INIT, and return the FUSE descriptor; raises MountError."""
    descriptor = mounts.mount(at, source, allow_other, programs_run, immutable)
    unique, body = _take_init(descriptor, at)
    _write(descriptor, unique, 0, wire.init_out(body, immutable))
    mounts.set_read_ahead(at)
    os.set_blocking(descriptor, False)
    return descriptor


def kernel_offer(at: Path) -> wire.Offer:
    """What the kernel offers a mount, by one at this directory that ends at once; raises MountError."""
    descriptor = mounts.mount(at, "spiderfs", allow_other=False, programs_run=False)
    try:
        return wire.Offer.of(_take_init(descriptor, at)[1])
    finally:
        os.close(descriptor)  # no one waits for an answer any more
        mounts.unmount(at, lazy=True)


def _take_init(descriptor: int, at: Path) -> tuple[int, memoryview]:
    """Number and body of the kernel's first request."""
    if not select.select([descriptor], [], [], _INIT_PATIENCE_MS / 1000)[0]:
        raise MountError(f"the kernel does not talk to the mount on {at}")
    request = memoryview(os.read(descriptor, wire.REQUEST_BYTES))
    _, opcode, unique, *_ = wire.IN_HEADER.unpack_from(request)
    assert opcode == wire.Opcode.INIT
    return unique, request[wire.IN_HEADER.size :]


def resend(descriptor: int) -> bool:
    """Ask the kernel to hand out unanswered requests again; False where it cannot (Linux < 6.9)."""
    try:
        os.write(descriptor, wire.resend())
    except OSError as exc:
        if exc.errno == errno.EINVAL:
            return False
        raise
    return True


@dataclass
class RequestLoop:
    """A worker's loop over requests: the task that takes them, and those that wait to take them again.

    `error_number` gives the errno for an exception. `idle` is called before each look for a request. `at_rest` says
    whether trio's loop has nothing to do but to wait for requests and timers. `held` notes requests that the kernel has
    handed out before.
    """

    descriptor: int
    handlers: Mapping[int, Handler]
    error_number: Callable[[Exception], int]
    counters: Counters
    idle: Callable[[], None]
    at_rest: Callable[[], bool]
    held: HeldRequests

    def __post_init__(self) -> None:
        self._buffer = bytearray(wire.REQUEST_BYTES)
        self._bodies = memoryview(self._buffer)[wire.IN_HEADER.size :]
        self._waiting = 0
        # Tasks that had to wait for an answer while other tasks became attendants; each may attend again. A new task
        # costs 30 us, which a fetch would pay.
        self._resting = trio.lowlevel.ParkingLot()
        # Answers that the counters do not have yet: to add each one at once would take 0.1 us.
        self._answers = 0

    async def serve(self) -> None:
        """Answer requests until the file system is unmounted."""
        with select.epoll() as self._arrivals:
            self._arrivals.register(self.descriptor, select.EPOLLIN | select.EPOLLEXCLUSIVE)
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._attend)

    async def _attend(self) -> None:
        """Take requests until the file system is unmounted; rest while another task does so."""
        burst = 0
        woken = False
        pass_at = standby_until = -math.inf
        while True:
            self.idle()
            try:
                length = os.readv(self.descriptor, (self._buffer,))
            except BlockingIOError:
                if woken:
                    self.counters.add("queue_races")
                self._count_answers()
                now = time.monotonic()
                if burst or woken:
                    standby_until = now + STANDBY_S
                    burst = 0
                if now >= standby_until or self._waiting or not self.at_rest():
                    await trio.lowlevel.wait_readable(self.descriptor)
                    woken = True
                elif now >= pass_at:
                    # Two passes: the task whose timer ends in the first one may be run after this task.
                    for _ in range(2):
                        await trio.lowlevel.checkpoint()
                    pass_at = time.monotonic() + PASS_INTERVAL_S
                    woken = False
                else:
                    woken = bool(self._arrivals.poll(pass_at - now))
                continue
            except OSError as exc:
                if exc.errno == errno.ENODEV:
                    # No one waits any more for what is still being answered, and the source may hang.
                    self._nursery.cancel_scope.cancel()
                    return
                if exc.errno in (errno.ENOENT, errno.EINTR):
                    continue  # the caller was killed while its request was being read
                raise
            burst += 1
            woken = False
            if length < wire.IN_HEADER.size:
                log.warning("ignored a request of the kernel of only %d bytes", length)
                continue
            _, opcode, unique, inode, uid, gid, pid, _ = wire.IN_HEADER.unpack_from(self._buffer)
            handler = self.handlers.get(opcode)
            if handler is None:
                # To most kinds of requests the kernel takes ENOSYS as: do not ask again.
                _write(self.descriptor, unique, errno.ENOSYS, b"")
                continue
            asked = self._bodies[: length - wire.IN_HEADER.size]
            if unique >= wire.RESENT:
                caller = Caller(uid, gid, pid, unique ^ wire.RESENT)
                answer = self._again(opcode, inode, asked, caller, unique)
            else:
                answer = handler(inode, asked, Caller(uid, gid, pid, unique), unique)
                # Control files wait for the manager, and may be what puts an end to the others' wait.
                if self._waiting >= MAX_WAITING and not ROOT_INODE < inode < FIRST_INODE:
                    answer = _at_once(answer)
            try:
                trap = answer.send(None)
            except StopIteration as done:
                if done.value is not None:
                    _write(self.descriptor, unique, 0, done.value)
                    self._answers += 1
            except Exception as exc:
                _write(self.descriptor, unique, self.error_number(exc), b"")
                self._answers += 1
            else:
                self._waiting += 1
                if not self._resting.unpark():
                    self._nursery.start_soon(self._attend)
                try:
                    body = await _rest(answer, trap)
                except Exception as exc:
                    _write(self.descriptor, unique, self.error_number(exc), b"")
                else:
                    if body is not None:
                        _write(self.descriptor, unique, 0, body)
                self._answers += 1
                self._waiting -= 1
                if len(self._resting) >= _MOST_RESTING:
                    return
                # It may be a view of all bytes of a file.
                body = None
                await self._resting.park()
                burst = 0
            if burst >= BURST:
                burst = 0
                self._count_answers()
                await trio.lowlevel.checkpoint()

    def _again(
        self, opcode: int, inode: int, asked: memoryview, caller: Caller, unique: int
    ) -> Coroutine[Any, Any, Body]:
        """Handle a request that the kernel has handed out before."""
        # It may have to wait, and the next request takes this place.
        kept = memoryview(bytes(asked))
        what = f"{wire.Opcode(opcode).name} of inode {inode}"
        return self.held.answer(unique, what, lambda: self.handlers[opcode](inode, kept, caller, unique))

    def _count_answers(self) -> None:
        if self._answers:
            self.counters.add("answers", self._answers)
            self._answers = 0


def _write(descriptor: int, unique: int, error: int, body: bytes | memoryview) -> None:
    header = wire.OUT_HEADER.pack(wire.OUT_HEADER.size + len(body), -error, unique)
    try:
        os.writev(descriptor, (header, body))
    except OSError as exc:
        if exc.errno == errno.EFAULT:
            # The kernel could not read the answer: a page of the store's map is gone. This process would die of SIGBUS
            # if it read that page. The supervisor has another worker answer the request.
            raise StoreCorrupt("a page of the cache is gone") from exc
        # ENOENT: the caller was killed, or the request was handed out twice. ENODEV: unmounted.
        if exc.errno not in (errno.ENOENT, errno.ENODEV):
            log.warning("an answer was refused by the kernel: %s", exc)


async def _at_once(answer: Coroutine[Any, Any, Body]) -> Body:
    """Handle a request; raises Busy if it would have to wait."""
    with trio.CancelScope() as scope:
        scope.cancel()
        return await answer
    raise Busy(f"{MAX_WAITING} requests wait already")


@types.coroutine
def _rest(answer: Coroutine[Any, Any, Body], trap: Any) -> Generator[Any, Any, Body]:
    """Go on with a coroutine that was begun by `send(None)` and has yielded `trap`."""
    try:
        while True:
            try:
                sent = yield trap
            except BaseException as exc:
                trap = answer.throw(exc)
            else:
                trap = answer.send(sent)
    except StopIteration as done:
        body: Body = done.value
        return body
