"""Which files the kernel has open, and which process may answer an OPEN that waits for the source.

The content that was fetched for an OPEN is given to the kernel before the answer (a **push**). That saves the reader a
round trip, for a file no longer than what the kernel would have asked for by itself. A push waits for pages that a READ
of the file has locked, and that READ may in turn wait for the process that pushes. So a file is pushed only while the
kernel has no other handle of it.
"""

from __future__ import annotations

from spiderfs.fuse import wire
from spiderfs.fuse.wire import OpenFlag
from spiderfs.linux.mounts import READ_AHEAD_KIB

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
    """The answer to one OPEN of a small file, for the process that reads the file; see `sources/source.py`.

    `number` is the kernel's number of the request. The handle is the inode, as `Filesystem.open` gives it.
    """

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
