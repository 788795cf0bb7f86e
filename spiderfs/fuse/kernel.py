"""The port to the kernel: the interface of the daemon to its FUSE code.

Such code is called a **binding**; `bindings.py` has the one that speaks the kernel's own protocol. The supervisor
mounts and makes one `Kernel` before it forks. A worker serves with it, every other process leaves it.
`benchmarks.fakes` has one without any mount.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from spiderfs.errors import ArchiveDamaged, SpiderfsError
from spiderfs.fuse.handles import Handles
from spiderfs.fuse.passthrough import Passthrough
from spiderfs.fuse.resent_requests import HeldRequests
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
        """The open file of /dev/fuse, for what speaks to the kernel by itself: deliveries and passthrough.

        None where the binding has it for itself alone.
        """

    async def serve(self, serving: Serving) -> None:
        """Answer requests until the file system is unmounted."""

    def push(self, inode: int, content: bytes) -> None:
        """Give the kernel a whole file's content, for which it has not asked.

        Blocks while a page of the file waits for an answer to a READ. Nothing happens if the kernel does not know the
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
        """Have the kernel forget the pages of a file in which these bytes lie.

        Blocks while one of the pages waits for an answer to a READ or a WRITE.
        """

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
