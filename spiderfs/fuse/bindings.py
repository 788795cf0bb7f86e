"""Mounting: the choice of the binding to the kernel, for which all others use the port.

The binding that speaks the kernel's own protocol is here too: `session.py` takes requests, `Operations` answers them.
It translates structures and errors between the kernel and `Filesystem`, and decides nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import trio

from spiderfs.errors import AttributeTooLong, InvalidArgument, MountError, ReadOnly, SourceTimeout
from spiderfs.fuse import session, wire
from spiderfs.fuse.kernel import Handles, Kernel, OpenDelivery, Serving, error_number, open_out
from spiderfs.fuse.passthrough import Passthrough, passing_out
from spiderfs.fuse.session import Body, Handler
from spiderfs.fuse.wire import Opcode, OpenFlag
from spiderfs.linux import mounts
from spiderfs.linux.worker_threads import WorkerThreads
from spiderfs.metrics import Counters
from spiderfs.vfs.answer_types import Caller
from spiderfs.vfs.filesystem import Filesystem
from spiderfs.vfs.immutable_filesystem import ImmutableFilesystem


class KernelBinding:
    """A `Kernel` over the descriptor that `session.mount` has returned."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    async def serve(self, serving: Serving) -> None:
        filesystem, counters = serving.filesystem, serving.counters
        operations = (
            ImmutableOperations(filesystem, counters, self.push, self.drop_pages)
            if isinstance(filesystem, ImmutableFilesystem)
            else Operations(filesystem, counters, self.push, serving.handles, serving.passthrough)
        )
        await session.RequestLoop(
            self.descriptor,
            operations.handlers(),
            lambda exc: error_number(exc, counters),
            counters,
            serving.idle,
            lambda: filesystem.at_rest,
            serving.held,
        ).serve()

    def push(self, inode: int, content: bytes, offset: int = 0) -> None:
        # ENOENT: the kernel does not know the inode any more. Nor is it an error that it has no memory for this.
        with contextlib.suppress(OSError):
            os.writev(self.descriptor, (wire.store(inode, len(content), offset), content))

    def forget_name(self, parent: int, name: bytes) -> None:
        # ENOENT: the kernel does not know the name.
        with contextlib.suppress(FileNotFoundError):
            os.write(self.descriptor, wire.forget_name(parent, name))

    def forget_names(self) -> bool:
        return self._notify(wire.forget_names())

    def doubt(self, inode: int) -> None:
        self._notify(wire.doubt(inode))

    def drop_pages(self, inode: int, offset: int, size: int) -> None:
        self._notify(wire.drop_pages(inode, offset, size))

    def _notify(self, notice: bytes) -> bool:
        # ENOENT: the kernel does not know the inode any more. EINVAL: it does not know this notice, or the connection
        # is at its end.
        try:
            os.write(self.descriptor, notice)
        except OSError:
            return False
        return True

    def resend(self) -> bool:
        return session.resend(self.descriptor)

    def unmount(self, at: Path) -> None:
        mounts.unmount_or_detach(at)

    def leave(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def mount(
    binding: str, at: Path, source: str, allow_other: bool, programs_run: bool, immutable: bool = False
) -> Kernel:
    """Mount, and answer INIT; `immutable`: the kernel is to open files without asking. Raises MountError."""
    speak = BINDINGS[binding]()
    return speak(session.mount(at, source, allow_other, programs_run, immutable))


def _pyfuse3() -> Callable[[int], Kernel]:
    # Here, for spiderfs works without pyfuse3.
    try:
        from spiderfs.fuse.pyfuse3_binding import Pyfuse3Binding
    except ImportError as exc:
        raise MountError(
            f"binding=pyfuse3 cannot be used here ({exc}): "
            "run `pip install '.[pyfuse3]'` in a checkout of spiderfs, or mount with -o binding=kernel"
        ) from exc
    return Pyfuse3Binding


# Each function loads one binding and returns what makes a `Kernel` of the descriptor of a mount. It raises MountError
# if the binding is not installed.
BINDINGS: dict[str, Callable[[], Callable[[int], Kernel]]] = {"kernel": lambda: KernelBinding, "pyfuse3": _pyfuse3}


_CAPABILITY = b"security.capability"

log = logging.getLogger(__name__)


class ReadDelivery:
    """The answer to one READ of `size` bytes from the beginning of a file; see `sources/source.py`."""

    __slots__ = ("_number", "_size", "done")

    def __init__(self, size: int, number: int) -> None:
        self._size = size
        self._number = number
        self.done = False

    def messages(self, size: int) -> tuple[bytes, bytes] | None:
        """The answer's header, if the READ asks for the whole file."""
        return (wire.answer_head(self._number, size), b"") if size <= self._size else None


class Operations:
    """A method for each kind of request: it gets inode, body, caller, and the kernel's number of the request."""

    def __init__(
        self,
        filesystem: Filesystem,
        counters: Counters,
        push: Callable[[int, bytes], None],
        handles: Handles,
        passthrough: Passthrough | None = None,
    ) -> None:
        """`push`: see `Kernel.push`. `passthrough`: where no other process answers now."""
        self._fs = filesystem
        self._counters = counters
        self._push = push
        self._handles = handles
        self._passthrough = passthrough

    def handlers(self) -> dict[int, Handler]:
        """The methods by opcode. A missing opcode is answered with ENOSYS, after which the kernel does not ask again.

        So FLUSH is missing on purpose: that saves a round trip at every close.
        """
        answered: dict[int, Handler] = {
            Opcode.LOOKUP: self.lookup,
            Opcode.FORGET: self.forget,
            Opcode.BATCH_FORGET: self.forget,
            Opcode.GETATTR: self.getattr,
            Opcode.SETATTR: self.setattr,
            Opcode.READLINK: self.readlink,
            Opcode.OPEN: self.open,
            Opcode.READ: self.read,
            Opcode.WRITE: self.write,
            Opcode.RELEASE: self.release,
            Opcode.STATFS: self.statfs,
            Opcode.GETXATTR: self.getxattr,
            Opcode.LISTXATTR: self.listxattr,
            Opcode.OPENDIR: self.opendir,
            Opcode.READDIRPLUS: self.readdirplus,
            Opcode.RELEASEDIR: self.nothing,
            Opcode.ACCESS: self.access,
            Opcode.DESTROY: self.nothing,
        }
        return answered | dict.fromkeys(CHANGES, self.refuse)

    async def lookup(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        return wire.entry_out(await self._fs.lookup(inode, bytes(body[:-1]), caller))

    async def forget(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        # Nothing is remembered per inode that could be forgotten.
        return None

    async def getattr(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        return wire.attr_out(await self._fs.getattr(inode))

    async def readlink(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        return await self._fs.readlink(inode)

    async def open(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        (flags,) = wire.unpacked(wire.FIRST_WORD, body)
        self._handles.open(inode)
        delivery = OpenDelivery(self._handles, inode, number)
        try:
            handle, direct_io, fetched, large, keeps_pages = await self._fs.open(inode, flags, caller, delivery)
        except (SourceTimeout, trio.Cancelled):
            # The reading process may still answer this open in the same moment. So the handle stays counted: one too
            # many costs a push, one too few would let a push wait for a READ.
            raise
        except BaseException:
            self._closed(inode)
            raise
        if delivery.done:
            return None
        if fetched is not None and self._handles.may_push(inode, len(fetched)):
            self._push(inode, fetched)
        if large and self._passthrough is not None:
            past_pages = bool(flags & os.O_DIRECT)
            may_begin = not past_pages and self._handles.alone(inode)
            if backing := self._passthrough.opened(inode, may_begin):
                self._fs.large_files.passed_through(inode)
                return passing_out(handle, backing, past_pages)
        return open_out(handle, direct_io, keeps_pages)

    async def read(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        handle, offset, size = wire.unpacked(wire.READ_IN, body)
        return await self._fs.read(handle, offset, size, inode, caller)

    async def release(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        (handle,) = wire.unpacked(wire.HANDLE, body)
        self._closed(inode)
        await self._fs.release(handle, inode)
        return b""

    def _closed(self, inode: int) -> None:
        if self._handles.close(inode) and self._passthrough is not None:
            self._passthrough.closed(inode)

    async def opendir(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        handle, keeps, kept = await self._fs.opendir(inode)
        flags = (OpenFlag.CACHE_DIR if keeps else 0) | (OpenFlag.KEEP_CACHE if kept else 0)
        return wire.OPEN_OUT.pack(handle, flags, 0)

    async def readdirplus(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        handle, after, size = wire.unpacked(wire.READ_IN, body)
        if after > wire.MOST_POSITION:
            raise InvalidArgument(f"no listing has a position {after}")
        listing = bytearray()
        limit = wire.most_names(size)
        for name, entry, position in await self._fs.readdir(handle, after, limit):
            row = wire.direntry_out(name, entry, position)
            if len(listing) + len(row) > size:
                break
            listing += row
        return bytes(listing)

    async def access(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        (mask,) = wire.unpacked(wire.FIRST_WORD, body)
        await self._fs.access(inode, mask, caller)
        return b""

    async def statfs(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        return wire.statfs_out(await self._fs.statfs())

    async def listxattr(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        (size,) = wire.unpacked(wire.FIRST_WORD, body)
        return _sized(b"".join(os.fsencode(name) + b"\0" for name in await self._fs.listxattr(inode)), size)

    async def getxattr(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        (size,) = wire.unpacked(wire.FIRST_WORD, body)
        name = os.fsdecode(bytes(body[wire.GETXATTR_IN_BYTES : -1]))
        return _sized(await self._fs.getxattr(inode, name, caller), size)

    async def nothing(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        return b""

    # -- what would change something: only control files can be written

    async def write(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        handle, _, size = wire.unpacked(wire.READ_IN, body)
        data = bytes(body[wire.WRITE_IN_BYTES : wire.WRITE_IN_BYTES + size])
        return wire.WRITE_OUT.pack(await self._fs.write(handle, data))

    async def setattr(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        wanted, _, _ = wire.unpacked(wire.SETATTR_IN, body)
        if not wanted & wire.FATTR_SIZE:
            return await self.refuse(inode, body, caller, number)
        return wire.attr_out(await self._fs.truncate(inode))

    async def refuse(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        raise ReadOnly("spiderfs is read-only")


# Every request that would change a name or an attribute.
CHANGES = (
    Opcode.SYMLINK, Opcode.MKNOD, Opcode.MKDIR, Opcode.UNLINK, Opcode.RMDIR, Opcode.RENAME, Opcode.RENAME2,
    Opcode.LINK, Opcode.CREATE, Opcode.TMPFILE, Opcode.SETXATTR, Opcode.REMOVEXATTR,
)  # fmt: skip


def _sized(value: bytes, size: int) -> bytes:
    """The answer to a caller that takes up to `size` bytes of an attribute; with 0 it asks for the length."""
    if size == 0:
        return wire.GETXATTR_OUT.pack(len(value))
    if len(value) > size:
        raise AttributeTooLong(f"{len(value)} bytes")
    return value


class ImmutableOperations(Operations):
    """The operations of an immutable mount, where the kernel opens files without asking (`-o immutable`).

    The first OPEN is answered with ENOSYS: for the kernel, success of all opens of the mount (FUSE_NO_OPEN_SUPPORT). It
    sends no OPEN or RELEASE, keeps the pages, and does not say that someone opens a file to write. **No one may write
    into the pages, which are all readers'**, and are changed before WRITE is sent. But before that, write(2) and
    truncate(2) take away the permissions that the file gives to a program (file_remove_privs): the kernel asks how long
    the attribute `security.capability` is, and has it removed. So the daemon says that there is one, and refuses
    REMOVEXATTR: the call fails, and no page is touched. A program that asks for the capabilities gets none. A store
    through a shared mapping asks no one; when the kernel writes its page back, WRITE is refused, and the pages are
    dropped.
    """

    _fs: ImmutableFilesystem

    def __init__(
        self,
        filesystem: ImmutableFilesystem,
        counters: Counters,
        push: Callable[[int, bytes], None],
        drop_pages: Callable[[int, int, int], None],
    ) -> None:
        """`push` and `drop_pages`: see `Kernel`."""
        super().__init__(filesystem, counters, push, Handles(sole=False))
        self._drop_pages, self._thread = drop_pages, WorkerThreads(1)

    def handlers(self) -> dict[int, Handler]:
        answered = super().handlers() | {Opcode.BATCH_FORGET: self.batch_forget}
        del answered[Opcode.OPEN], answered[Opcode.RELEASE]
        return answered

    async def forget(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        await self._fs.forget(inode)
        return None

    async def batch_forget(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        for forgotten in wire.forgotten(body):
            await self._fs.forget(forgotten)
        return None

    async def getattr(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        (flags,) = wire.unpacked(wire.FIRST_WORD, body)
        return wire.attr_out(await self._fs.getattr(inode, bool(flags & wire.GETATTR_FH), caller.uid))

    async def read(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        _, offset, size = wire.unpacked(wire.READ_IN, body)
        delivery = ReadDelivery(size, number)
        piece = await self._fs.read_immutable(inode, offset, size, caller, delivery)
        return None if delivery.done else piece

    async def getxattr(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        (size,) = wire.unpacked(wire.FIRST_WORD, body)
        if size == 0 and body[wire.GETXATTR_IN_BYTES : -1] == _CAPABILITY and not self._fs.may_be_written(inode):
            return wire.GETXATTR_OUT.pack(1)
        return await super().getxattr(inode, body, caller, number)

    async def write(self, inode: int, body: memoryview, caller: Caller, number: int) -> Body:
        _, offset, size = wire.unpacked(wire.READ_IN, body)
        data = bytes(body[wire.WRITE_IN_BYTES : wire.WRITE_IN_BYTES + size])
        try:
            return wire.WRITE_OUT.pack(await self._fs.write_immutable(inode, data))
        except ReadOnly:
            # In a thread, and not in the writer's task, which has to answer first: the kernel waits for a page that a
            # READ or a WRITE has locked. No other pages are dropped, for some READ of them may be hanging.
            trio.lowlevel.spawn_system_task(self._thread.run, self._drop_pages, inode, offset, size)
            raise
