"""The port to the kernel: the interface of the daemon to its FUSE code.

Such code is called a **binding**; `bindings.py` has the one that speaks the kernel's own protocol. The supervisor
mounts and makes one `Kernel` before it forks. A worker serves with it, every other process leaves it.
`benchmarks.fakes` has one without any mount.

`Handles` knows which files the kernel has open. The content that was fetched for an OPEN is given to the kernel before
the answer (a **push**). That saves the reader a round trip, for a file no longer than what the kernel would have asked
for by itself. A push waits for pages that a READ of the file has locked, and that READ may in turn wait for the process
that pushes. So a file is pushed only while the kernel has no other handle of it.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from spiderfs.errors import ArchiveDamaged, SpiderfsError
from spiderfs.fuse import wire
from spiderfs.fuse.passthrough import Passthrough
from spiderfs.fuse.resent_requests import HeldRequests
from spiderfs.fuse.wire import OpenFlag
from spiderfs.linux.mounts import READ_AHEAD_KIB
from spiderfs.metrics import Counters
from spiderfs.vfs.filesystem import Filesystem


@dataclass(frozen=True)
class Serving:
    """The parts with which a worker answers requests."""

    filesystem: Filesystem
    counters: Counters
    idle: Callable[[], None]
    """To be called before each look for a request: the store may then drop the bytes that the last answer showed."""
    handles: Handles
    held: HeldRequests
    passthrough: Passthrough | None = None
    """Given only where no other process answers requests."""


class Kernel(Protocol):
    """The kernel's side of one mount, as each process of the mount has it."""

    @property
    def descriptor(self) -> int | None:
        """The open /dev/fuse, for deliveries and passthrough; None where the binding keeps it to itself."""

    async def serve(self, serving: Serving) -> None:
        """Answer requests until the file system is unmounted."""

    def push(self, inode: int, content: bytes, offset: int = 0) -> None:
        """Give the kernel a whole file, or from `offset` on whole pages of it, for which it has not asked.

        Blocks while one of these pages waits for an answer to a READ. Nothing happens if the kernel does not know the
        inode.
        """

    def forget_name(self, parent: int, name: bytes) -> None:
        """Have the kernel look this name up again. Blocks while a request about it, or its directory, is under way."""

    def forget_names(self) -> bool:
        """Have the kernel look all names up again; False where it cannot (Linux < 6.16).

        Waits for nothing. What is mounted on a directory of the mount disappears, and so do the pages of files that
        no one has open.
        """

    def doubt(self, inode: int) -> None:
        """Have the kernel ask for the attributes of an inode again before it opens the file. Waits for nothing."""

    def drop_pages(self, inode: int, offset: int, size: int) -> None:
        """Have the kernel forget pages with these bytes; blocks while one waits for a READ or a WRITE."""

    def resend(self) -> bool:
        """Have the kernel hand out again what was not answered; False where it cannot (Linux < 6.9)."""

    def unmount(self, at: Path) -> None:
        """For the supervisor: no new request comes from here on. It waits for nothing."""

    def leave(self) -> None:
        """For a process that does not answer the kernel: the mount must not live for as long as it does."""


log = logging.getLogger(__name__)


def error_number(exc: Exception, counters: Counters) -> int:
    """The errno for an exception of a handler. Logs an I/O error; logs and counts an exception that is not our own."""
    if isinstance(exc, SpiderfsError):
        if exc.errno == errno.EIO and not isinstance(exc, ArchiveDamaged):
            log.warning("%s", exc)
        return exc.errno
    counters.add("internal_errors")
    log.error("unexpected error in a request handler", exc_info=exc)
    return errno.EIO


PUSHED_BYTES = READ_AHEAD_KIB << 10
# A member of an enumeration takes as long to look up as to pack.
_DIRECT_IO, _KEEP_CACHE = int(OpenFlag.DIRECT_IO), int(OpenFlag.KEEP_CACHE)


class Handles:
    """Counts the handles of each inode, from before an open is answered until its RELEASE.

    So the kernel has no more handles of an inode than are counted here, except those of a caller that was killed.
    """

    def __init__(self, sole: bool) -> None:
        """`sole`: no other process answers, or has answered, for this mount; else nothing is known."""
        self._sole = sole
        self._count: dict[int, int] = {}

    def open(self, inode: int) -> None:
        if self._sole:
            self._count[inode] = self._count.get(inode, 0) + 1

    def close(self, inode: int) -> bool:
        """Note that a handle was released, or that its open failed; whether the kernel is known to have none now."""
        if (count := self._count.pop(inode, 1)) > 1:
            self._count[inode] = count - 1
        return self._sole and count == 1

    def alone(self, inode: int) -> bool:
        """Whether the open that is counted last is the only one."""
        return self._count.get(inode) == 1

    def may_push(self, inode: int, size: int) -> bool:
        """Whether the open that is counted last is the only one, and the content small enough."""
        return self.alone(inode) and size <= PUSHED_BYTES


class OpenDelivery:
    """The answer to the OPEN of a small file with this `number`, by who reads the file (`sources/source.py`)."""

    __slots__ = ("_handles", "_inode", "_number", "done")

    def __init__(self, handles: Handles, inode: int, number: int) -> None:
        self._handles = handles
        self._inode = inode
        self._number = number
        self.done = False

    def messages(self, size: int) -> tuple[bytes, bytes] | None:
        """The content as a notice, and the answer to the OPEN."""
        if not self._handles.may_push(self._inode, size):
            return None
        return wire.store(self._inode, size), wire.answered(self._number, open_out(self._inode))


def open_out(handle: int, direct_io: bool = False, keeps_pages: bool = True) -> bytes:
    """The pages of an inode are those of one version, so they may stay from one open to the next."""
    return wire.OPEN_OUT.pack(handle, _DIRECT_IO if direct_io else _KEEP_CACHE if keeps_pages else 0, 0)
