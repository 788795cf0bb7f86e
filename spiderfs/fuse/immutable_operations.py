"""The adapter of an immutable mount, where the kernel opens files without asking (`-o immutable`).

The first OPEN is answered with ENOSYS. For the kernel that means success, here and for all later opens of the mount
(FUSE_NO_OPEN_SUPPORT): it sends no further OPEN and no RELEASE, and treats each handle as one that keeps the pages. It
does not say that somebody opens a file to write.

**Nobody may write into the pages of a file, which are all readers'.** The kernel puts what is written there before it
sends WRITE. But before that, write(2) and truncate(2) take away the permissions that the file gives to a program
(file_remove_privs): the kernel asks how long the attribute `security.capability` is, and if there is one, it has it
removed. So the daemon says that there is one, and refuses REMOVEXATTR: the call fails, and no page is touched. A
program that asks what the capabilities are is told that there are none. A store through a shared mapping asks nobody.
The kernel writes such a page back later; then WRITE is refused, and the pages are dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from spiderfs.errors import ReadOnly
from spiderfs.fuse import wire
from spiderfs.fuse.handles import Handles
from spiderfs.fuse.operations import Operations
from spiderfs.fuse.session import Body, Handler
from spiderfs.fuse.wire import Opcode
from spiderfs.linux.worker_threads import WorkerThreads
from spiderfs.metrics import Counters
from spiderfs.vfs.answer_types import Caller
from spiderfs.vfs.immutable_filesystem import ImmutableFilesystem

_CAPABILITY = b"security.capability"


class ImmutableOperations(Operations):
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
        self._dropper = _PageDropper(drop_pages)

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
            self._dropper.add((inode, offset, size))
            raise


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


class _PageDropper:
    """Has the kernel drop pages, those of one WRITE at a time, in a thread.

    The kernel waits for a page that a READ or a WRITE has locked, and the answer may be this process's to give. So no
    other pages of the file are dropped, for some READ of them may be hanging.
    """

    def __init__(self, drop_pages: Callable[[int, int, int], None]) -> None:
        self._drop_pages = drop_pages
        self._thread = WorkerThreads(1)
        self._waiting: set[tuple[int, int, int]] = set()
        self._running = False

    def add(self, written: tuple[int, int, int]) -> None:
        """`written`: inode, offset, size."""
        self._waiting.add(written)
        if not self._running:
            self._running = True
            # Not in the writer's task: that has to answer first.
            trio.lowlevel.spawn_system_task(self._run)

    async def _run(self) -> None:
        while self._waiting:
            await self._thread.run(self._drop_pages, *self._waiting.pop())
        self._running = False
