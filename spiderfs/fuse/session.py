"""Several processes on one FUSE descriptor, none of which ever freezes. Owns every trick played on pyfuse3.

The supervisor mounts and answers the kernel's INIT, then forks; each worker runs pyfuse3's own session loop on the
inherited descriptor (forking before INIT is answered gives EIO). A request that a worker took and did not answer is
handed out again after FUSE_NOTIFY_RESEND (Linux >= 6.9), so a worker may be killed at any time.

The freeze: pyfuse3 waits until the descriptor is readable and then calls read(2), holding the interpreter's lock. When
another worker has taken the request meanwhile, or its caller was killed, that read blocks, and with it the whole
worker. Three things prevent it:

1. Between "readable" and the end of read(2) a worker holds a file lock that excludes the other workers, and looks again
   whether there is still a request. The lock is released as the first act of the handler, and in any case before the
   worker waits again. The kernel frees the lock of a worker that dies.
2. The descriptor is non-blocking, so what slips through (a caller that dies between the look and the read) ends in
   EAGAIN instead of a wait.
3. pyfuse3 takes EAGAIN for a fatal error; the session loop is wrapped to go on. The wrapped loop loses its receive
   buffer then (1 MiB of address space, never touched): rare enough to bear.

The cost of waiting: pyfuse3's own wait takes two passes of trio's loop and four epoll calls per request, half the time
of a cached open. Ours looks with one poll(2) first, and a task whose handler did not have to wait for anything takes
the next request without going through trio at all. One idle task at most, the sentinel, waits in epoll; the others are
parked. A handler that does suspend wakes one of them first, so that somebody is always there to take requests.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import struct
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pyfuse3
import trio

from spiderfs.errors import MountError
from spiderfs.metrics import Counters

log = logging.getLogger(__name__)
T = TypeVar("T")

# struct fuse_out_header with unique 0: a notification; code 7 is FUSE_NOTIFY_RESEND (linux/fuse.h).
_RESEND = struct.pack("<IiQ", 16, 7, 0)
# Requests that a worker answers at the same time; the others wait in the kernel. Readers that wait for a hanging source
# hold one each and must not use up those that serve cached files. A task that never ran costs 5 kB.
MAX_TASKS = 512
# Requests in a row that are answered without a pass of trio's loop, which is where fetches get on.
BURST = 16
# How long to stay off the lock when another worker has it: it is held for the time of one read(2), about 20 us.
_LOCK_PAUSE_S = 0.0002


def mount(operations: pyfuse3.Operations, mountpoint: Path, options: set[str]) -> int:
    """Mount, answer INIT, and return the FUSE descriptor; raises MountError."""
    before = _fuse_descriptors()
    try:
        with _stderr_captured() as complaint:
            pyfuse3.init(operations, os.fspath(mountpoint), options)
    except RuntimeError as exc:
        reason = " ".join(complaint()) or str(exc)
        raise MountError(f"cannot mount on {mountpoint}: {reason}") from exc
    (descriptor,) = _fuse_descriptors() - before
    trio.run(_answer_init, operations)
    os.set_blocking(descriptor, False)
    return descriptor


async def _answer_init(operations: pyfuse3.Operations) -> None:
    answered = trio.Event()
    setattr(operations, "init", answered.set)  # noqa: B010
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pyfuse3.main)
        await answered.wait()
        nursery.cancel_scope.cancel()


def resend(descriptor: int) -> bool:
    """Ask the kernel to hand out again what was not answered; False where it cannot (Linux < 6.9)."""
    try:
        os.write(descriptor, _RESEND)
    except OSError as exc:
        if exc.errno == errno.EINVAL:
            return False
        raise
    return True


def forget_name(parent: int, name: bytes) -> None:
    """Make the kernel ask again for a name; does nothing if it does not know it. May block: call it in a thread."""
    with contextlib.suppress(FileNotFoundError):
        pyfuse3.invalidate_entry(parent, name)


async def serve(
    descriptor: int,
    operations: pyfuse3.Operations,
    lock_path: Path | None,
    counters: Counters,
    idle: Callable[[], None],
) -> None:
    """Answer requests until the file system is unmounted.

    `lock_path` names the file that the workers of one mount lock between them; None where there is only one. `idle` is
    called before every wait for requests.
    """
    reception = _Reception(descriptor, lock_path, counters, idle)
    _announce(operations, reception)
    # pyfuse3 looks these names up in its module at every use; pyfuse3.asyncio replaces trio there in the same way.
    # Its own count of waiting tasks then stays 0, so it starts a task per request until there are max_tasks.
    module: Any = pyfuse3
    module._wait_fuse_readable = reception.wait
    module._session_loop = _going_on(module._session_loop, reception, counters)
    await pyfuse3.main(min_tasks=MAX_TASKS, max_tasks=MAX_TASKS)


class _Reception:
    """Where the tasks of a worker wait for requests."""

    def __init__(self, descriptor: int, lock_path: Path | None, counters: Counters, idle: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._counters = counters
        self._idle = idle
        self._lock = None if lock_path is None else os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._held = False
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._parked = trio.lowlevel.ParkingLot()
        self._sentinel = False
        self._burst = 0

    async def wait(self) -> bool:
        """Return when a request waits that only the caller may take, or when there will be no more."""
        self.release()
        self._idle()
        if self._burst < BURST and self._take():
            self._burst += 1
            return True
        while True:
            self._burst = 0
            if self._sentinel:
                await self._parked.park()
            else:
                self._sentinel = True
                try:
                    await trio.lowlevel.wait_readable(self._descriptor)
                finally:
                    self._sentinel = False
            if self._take():
                return True
            if self._lock is not None and not self._sentinel:
                await trio.sleep(_LOCK_PAUSE_S)

    def _take(self) -> bool:
        """Whether there is a request; with several workers, the lock is then held. POLLERR (unmounted) is one too."""
        if self._lock is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._counters.add("queue_races")
                return False
            self._held = True
        # No await from here to the read.
        if self._poll.poll(0):
            return True
        self.release()
        return False

    def release(self) -> None:
        if self._held:
            self._held = False
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # type: ignore[arg-type]

    def suspended(self) -> None:
        """A handler has to wait: let another task take its place."""
        if not self._sentinel:
            self._parked.unpark(count=1)

    def ended(self) -> None:
        """The file system was unmounted: every task is to find that out."""
        self._parked.unpark_all()


def _going_on(loop: Callable[..., Any], reception: _Reception, counters: Counters) -> Callable[..., Any]:
    async def session_loop(*args: Any) -> None:
        while True:
            try:
                await loop(*args)
            except OSError as exc:
                if exc.errno != errno.EAGAIN:
                    raise
                counters.add("queue_races")
            else:
                reception.ended()
                return

    return session_loop


# Every handler that pyfuse3 may call for a request that was read from the descriptor.
_HANDLERS = tuple(
    name for name, value in vars(pyfuse3.Operations).items() if callable(value) and not name.startswith("_")
)


def _announce(operations: pyfuse3.Operations, reception: _Reception) -> None:
    """Let the reception know when a request has been taken, and when its handler has to wait."""

    def announcing(handler: Callable[..., Any]) -> Callable[..., Any]:
        def handle(*args: Any) -> Any:
            reception.release()
            return _eagerly(handler(*args), reception.suspended)

        return handle

    for name in _HANDLERS:
        if name not in ("init", "stacktrace"):
            setattr(operations, name, announcing(getattr(operations, name)))


@types.coroutine
def _eagerly(handler: Coroutine[Any, Any, T], suspended: Callable[[], None]) -> Generator[Any, Any, T]:
    """Await a handler; if that takes longer than one step, call `suspended` before the first wait."""
    try:
        trap = handler.send(None)
        suspended()
        while True:
            try:
                sent = yield trap
            except BaseException as exc:
                trap = handler.throw(exc)
            else:
                trap = handler.send(sent)
    except StopIteration as done:
        value: T = done.value
        return value


def _fuse_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{name}") == "/dev/fuse":
                found.add(int(name))
    return found


@contextlib.contextmanager
def _stderr_captured() -> Iterator[Callable[[], list[str]]]:
    """libfuse and fusermount3 say why they failed on stderr alone; collect the lines for our own message."""
    saved = os.dup(2)
    captured = os.memfd_create("stderr")
    os.dup2(captured, 2)

    def lines() -> list[str]:
        text = os.pread(captured, 65536, 0).decode(errors="replace")
        return [line.strip() for line in text.splitlines() if line.strip()]

    try:
        yield lines
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        # `captured` stays readable for the caller's message; it goes with the process.
