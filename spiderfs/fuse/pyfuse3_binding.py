"""The binding that leaves the kernel's protocol to pyfuse3, and so to libfuse (docs/reference/bindings.md).

**Who mounts.** The supervisor does, and answers INIT, as for the other binding. libfuse takes an open file of /dev/fuse
in the place of a mount point (`/dev/fd/N`), but wants to answer INIT itself before anything else. So every worker tells
it once more what was agreed on, through a socket that has the number N, and puts /dev/fuse in the socket's place after
that. That is how a second worker can take over a mount after the first has died.

**Who waits for requests.** pyfuse3 does, in tasks of its own, and reads with a call that holds Python's lock. A request
may be gone when it is read, if its caller was killed; the read would then hold up everything else in this process until
the next request comes. A timer interrupts such a read, and stands still while no request comes. Each pass of trio's
loop costs as much as a small request, so pyfuse3's private wait, if it still has one, has to look before it waits.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import logging
import os
import select
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import pyfuse3
import trio

from spiderfs.errors import MountError, ReadOnly, StoreCorrupt
from spiderfs.fuse import session, wire
from spiderfs.fuse.kernel import Serving, error_number
from spiderfs.linux import mounts
from spiderfs.vfs.answer_types import Attributes, Caller, Entry

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])

# pyfuse3's tasks: as many requests may wait as with the other binding.
_MAX_TASKS = session.MAX_WAITING
# libfuse answers the repeated INIT in less than a millisecond.
_HANDSHAKE_S = 10.0
# How long a read that finds nothing may hold up this process.
_HELD_UP_S = 0.05
# How long the last answer may stay a view of the store when no one asks for anything.
_VIEW_S = 0.02
# A listing does not know how much room there is: as many names as fit into what getdents64(2) of glibc asks for.
_NAMES = wire.most_names(32768)


class Pyfuse3Binding:
    """A `Kernel` over the descriptor that `session.mount` has returned."""

    # Only libfuse knows how to answer a request that it has taken.
    descriptor = None

    def __init__(self, connection: int) -> None:
        self._connection = connection
        # libfuse takes "no request after all" (EAGAIN) for the end.
        os.set_blocking(connection, True)

    async def serve(self, serving: Serving) -> None:
        logging.getLogger("pyfuse3").addFilter(_is_news)
        answers = Answers(serving, self.push)
        descriptor = await self._begin(answers)
        alarm = Alarm()
        try:
            with looking_before_waiting(descriptor, alarm):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(answers.let_go_of_views)
                    await pyfuse3.main(max_tasks=_MAX_TASKS)
                    nursery.cancel_scope.cancel()
        finally:
            alarm.rest()
            pyfuse3.close(unmount=False)

    async def _begin(self, answers: Answers) -> int:
        """Bring libfuse to where the mount is already; returns the descriptor that it reads from."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            descriptor = theirs.detach()
            pyfuse3.init(answers, f"/dev/fd/{descriptor}", set())
            ours.send(wire.init_again())
            with trio.move_on_after(_HANDSHAKE_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(pyfuse3.main)
                    await trio.lowlevel.wait_readable(ours)
                    nursery.cancel_scope.cancel()
            with contextlib.suppress(BlockingIOError):
                message = ours.recv(wire.REQUEST_BYTES, socket.MSG_DONTWAIT)
                if wire.OUT_HEADER.unpack_from(message)[1] == 0:
                    os.dup2(self._connection, descriptor, inheritable=False)
                    return descriptor
        raise MountError("this libfuse does not take over a mount: mount with -o binding=kernel")

    def push(self, inode: int, content: bytes, offset: int = 0) -> None:
        # ENOENT: the kernel does not know the inode any more. Nor is it an error that it has no memory for this.
        with contextlib.suppress(OSError):
            pyfuse3.notify_store(inode, offset, content)

    def forget_name(self, parent: int, name: bytes) -> None:
        # ENOENT: the kernel does not know the name.
        with contextlib.suppress(FileNotFoundError):
            pyfuse3.invalidate_entry(parent, name)

    def forget_names(self) -> bool:
        return False

    def doubt(self, inode: int) -> None:
        with contextlib.suppress(OSError):
            pyfuse3.invalidate_inode(inode, attr_only=True)

    def drop_pages(self, inode: int, offset: int, size: int) -> None:
        # pyfuse3 drops the other pages too.
        with contextlib.suppress(OSError):
            pyfuse3.invalidate_inode(inode)

    def resend(self) -> bool:
        return session.resend(self._connection)

    def unmount(self, at: Path) -> None:
        mounts.unmount_or_detach(at)

    def leave(self) -> None:
        if self._connection >= 0:
            os.close(self._connection)
            self._connection = -1


def _answering(handler: F) -> F:
    """A handler that pyfuse3 may call: FUSEError is the only exception that comes out of it.

    pyfuse3 shows neither the kernel's number of a request, nor whether the kernel has handed it out before. So each is
    noted, under a number that follows from what is asked and is the same in each process of the mount.
    """
    kind = handler.__name__

    @functools.wraps(handler)
    async def answer(self: Answers, *args: Any) -> Any:
        self.idle()
        asked = hash((kind, *(argument for argument in args if isinstance(argument, int | bytes))))
        try:
            answered = await self.held.answer(
                asked % wire.RESENT, f"{kind.upper()} of inode {args[0]}", lambda: handler(self, *args)
            )
        except Exception as exc:
            self.counters.add("answers")
            self.answered.set()
            raise pyfuse3.FUSEError(error_number(exc, self.counters)) from exc
        self.counters.add("answers")
        self.answered.set()
        return answered

    return cast(F, answer)


class Answers(pyfuse3.Operations):
    """As `operations.Operations`: the same questions to `Filesystem`, and the same answers.

    A missing method is answered with ENOSYS, after which the kernel does not ask again (FLUSH, FSYNC, POLL).
    """

    supports_dot_lookup = False

    def __init__(self, serving: Serving, push: Callable[[int, bytes], None]) -> None:
        super().__init__()
        self._fs = serving.filesystem
        self.counters = serving.counters
        self._handles = serving.handles
        self.held = serving.held
        # pyfuse3 has sent an answer before it calls the next handler, so a view of the store ends there.
        self.idle = serving.idle
        self.answered = trio.Event()
        self._push = push
        # READ and RELEASE name the handle alone. Which inode it is of, where it is not the inode itself.
        self._inodes: dict[int, int] = {}

    async def let_go_of_views(self) -> None:
        """For ever: let go of the store's pages that answers were views of, so that they can be used again."""
        while True:
            await self.answered.wait()
            self.answered = trio.Event()
            await trio.sleep(_VIEW_S)
            self.idle()

    @_answering
    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return _entry(await self._fs.lookup(parent_inode, name, _caller(ctx)))

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        # Nothing is remembered per inode that could be forgotten.
        return

    @_answering
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return _attributes(await self._fs.getattr(inode))

    @_answering
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        return await self._fs.readlink(inode)

    @_answering
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        self._handles.open(inode)
        try:
            opened = await self._fs.open(inode, flags, _caller(ctx))
        except BaseException:
            self._handles.close(inode)
            raise
        if opened.fetched is not None and self._handles.may_push(inode, len(opened.fetched)):
            self._push(inode, opened.fetched)
        if opened.handle != inode:
            self._inodes[opened.handle] = inode
        keeps = opened.keeps_pages and not opened.direct_io
        return pyfuse3.FileInfo(fh=opened.handle, direct_io=opened.direct_io, keep_cache=keeps)

    @_answering
    async def read(self, fh: int, off: int, size: int) -> bytes:  # any buffer, as pyfuse3 hands it on
        return cast(bytes, await self._fs.read(fh, off, size, self._inodes.get(fh, fh)))

    @_answering
    async def release(self, fh: int) -> None:
        inode = self._inodes.pop(fh, fh)
        self._handles.close(inode)
        await self._fs.release(fh, inode)

    @_answering
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        # Whether the kernel may keep the listing, or use what it has, cannot be said.
        return (await self._fs.opendir(inode)).handle

    @_answering
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        while True:
            names = await self._fs.readdir(fh, start_id, _NAMES)
            for name, entry, position in names:
                if not pyfuse3.readdir_reply(token, name, _entry(entry), position):
                    return
                start_id = position
            if len(names) < _NAMES:
                return

    async def releasedir(self, fh: int) -> None:
        return

    @_answering
    async def access(self, inode: int, mode: int, ctx: pyfuse3.RequestContext) -> bool:
        await self._fs.access(inode, mode, _caller(ctx))
        return True

    @_answering
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        found = await self._fs.statfs()
        answer = pyfuse3.StatvfsData()
        for name in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_files", "f_ffree", "f_namemax"):
            setattr(answer, name, getattr(found, name))
        # Nothing can be written here, so nothing is available.
        answer.f_bavail = answer.f_favail = 0
        return answer

    @_answering
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> list[bytes]:
        return [os.fsencode(name) for name in await self._fs.listxattr(inode)]

    @_answering
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        return await self._fs.getxattr(inode, os.fsdecode(name))

    # -- what would change something: only control files can be written

    @_answering
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return await self._fs.write(fh, buf)

    @_answering
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        if not fields.update_size:
            raise ReadOnly("spiderfs is read-only")
        return _attributes(await self._fs.truncate(inode))


async def _refuse(self: Answers, *args: object) -> None:
    raise ReadOnly("spiderfs is read-only")


for _change in ["mknod", "mkdir", "unlink", "rmdir", "symlink", "rename", "link", "create", "setxattr", "removexattr"]:
    setattr(Answers, _change, _answering(_refuse))


def _caller(context: pyfuse3.RequestContext) -> Caller:
    return Caller(context.uid, context.gid, context.pid)


def _entry(found: Entry) -> pyfuse3.EntryAttributes:
    """Inode 0 makes the kernel remember that there is no such name."""
    entry = _attributes(found.attributes)
    entry.entry_timeout = found.timeout_s
    return entry


def _attributes(found: Attributes) -> pyfuse3.EntryAttributes:
    inode, mode, uid, gid, size, mtime_ns, timeout_s, shown = found
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = shown or inode
    entry.st_mode = mode
    entry.st_uid = uid
    entry.st_gid = gid
    entry.st_size = size
    entry.st_nlink = wire.links(mode)
    entry.st_blocks = wire.stat_blocks(size)
    entry.st_blksize = wire.piece_bytes(size)
    # One time for all three: the source's access and change times are not part of a version.
    entry.st_mtime_ns = entry.st_atime_ns = entry.st_ctime_ns = mtime_ns
    entry.attr_timeout = timeout_s
    return entry


# -- pyfuse3's ways


class Alarm:
    """Interrupts each read that finds nothing, by a signal every `_HELD_UP_S`; pyfuse3 then waits for a request."""

    may_rest = False
    """Whether every read is `announced`: then no signal comes while nothing is read."""

    def __init__(self) -> None:
        signal.signal(signal.SIGALRM, self._rung)
        self._rings = False
        self.announced()

    def announced(self) -> None:
        """A read is about to begin."""
        self._announced = True
        if not self._rings:
            self._rings = True
            signal.setitimer(signal.ITIMER_REAL, _HELD_UP_S, _HELD_UP_S)

    def rest(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._rings = False

    def _rung(self, number: int, frame: object) -> None:
        # This runs between two reads, and one that was announced may not have begun.
        if self.may_rest and not self._announced:
            self.rest()
        self._announced = False


@contextlib.contextmanager
def looking_before_waiting(descriptor: int, alarm: Alarm) -> Iterator[None]:
    """Take up to a burst of requests without a pass of trio's loop, and let the alarm rest while none comes.

    pyfuse3 looks its wait up in its module at each use. Where a version has none, it waits as it does.
    """
    module: Any = pyfuse3
    wait: Callable[[], Awaitable[bool]] | None = getattr(module, "_wait_fuse_readable", None)
    if wait is None or not inspect.iscoroutinefunction(wait) or inspect.signature(wait).parameters:
        log.info("this pyfuse3 waits for requests in its own way, which costs a pass of trio's loop for each")
        yield
        return
    alarm.may_rest = True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    burst = 0

    async def look_then_wait() -> bool:
        nonlocal burst
        while True:
            # Also after a wait: another task may have been quicker, and the read that follows would block.
            if burst < session.BURST and poll.poll(0):
                burst += 1
                alarm.announced()
                return True
            burst = 0
            if not await wait():
                return False

    module._wait_fuse_readable = look_then_wait
    try:
        yield
    finally:
        module._wait_fuse_readable = wait


def _is_news(record: logging.LogRecord) -> bool:
    """Whether to keep this log record; raises StoreCorrupt for one that means a reader who would wait without end.

    False for pyfuse3's error about an answer that no one waits for: its reader was killed, or has unmounted.
    Of an answer that the kernel could not read, because a page of the store's map is gone, pyfuse3 does no more than
    log it. An exception raised here comes out of that request and ends the worker; the next one answers the reader.
    """
    if record.args == (os.strerror(errno.EFAULT),):
        raise StoreCorrupt("a page of the cache is gone")
    return record.args not in ((os.strerror(errno.ENOENT),), (os.strerror(errno.ENODEV),))
