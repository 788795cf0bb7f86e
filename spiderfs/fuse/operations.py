"""The adapter between the kernel's requests and `Filesystem`: translates structures and errors, and decides nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import trio

from spiderfs.errors import AttributeTooLong, InvalidArgument, ReadOnly, SourceTimeout
from spiderfs.fuse import wire
from spiderfs.fuse.handles import Handles, OpenDelivery, open_out
from spiderfs.fuse.passthrough import Passthrough, passing_out
from spiderfs.fuse.session import Body, Handler
from spiderfs.fuse.wire import Opcode, OpenFlag
from spiderfs.metrics import Counters
from spiderfs.vfs.answer_types import Caller
from spiderfs.vfs.filesystem import Filesystem

log = logging.getLogger(__name__)


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
        return await self._fs.read(handle, offset, size, inode)

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
        return _sized(await self._fs.getxattr(inode, name), size)

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
    Opcode.SYMLINK,
    Opcode.MKNOD,
    Opcode.MKDIR,
    Opcode.UNLINK,
    Opcode.RMDIR,
    Opcode.RENAME,
    Opcode.RENAME2,
    Opcode.LINK,
    Opcode.CREATE,
    Opcode.TMPFILE,
    Opcode.SETXATTR,
    Opcode.REMOVEXATTR,
)


def _sized(value: bytes, size: int) -> bytes:
    """The answer to a caller that takes up to `size` bytes of an attribute; with 0 it asks for the length."""
    if size == 0:
        return wire.GETXATTR_OUT.pack(len(value))
    if len(value) > size:
        raise AttributeTooLong(f"{len(value)} bytes")
    return value
