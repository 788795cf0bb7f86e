"""Files that the kernel reads by itself, from the plain file that the store has of each (FUSE passthrough).

The kernel demands (fs/fuse/iomode.c of Linux 6.9 and later) that at any time either all handles of an inode are cached
ones, or all of them read from one and the same registered file; an open that is answered otherwise fails with EIO. So
the first handle of an inode decides for all that are opened beside it. Each handle is counted before the kernel has it,
and until the kernel has let go of it (`kernel.py`).

A registered file stays as it is for a reader that has mapped it, however long the mapping lives (`store/blocks.py`).

A worker that dies leaves handles behind, and its successor has to know which inodes are passed through. So each such
inode has a file in the mount's run directory, made before the kernel gets the handle. The successor does not know
how many handles there are, nor which inodes have cached handles. So it keeps passing these inodes through for the rest
of the mount, and begins with no further one.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import time
from collections.abc import Callable

import trio

from spiderfs.fuse import wire
from spiderfs.fuse.wire import OpenFlag
from spiderfs.shared.layout import RunLayout
from spiderfs.vfs.large_files import LargeFiles

log = logging.getLogger(__name__)

# linux/fuse.h: struct fuse_backing_map is descriptor, flags, padding; _IOW(229, 1, struct) and _IOW(229, 2, uint32_t).
_BACKING_MAP = struct.Struct("<iIQ")
_BACKING_OPEN, _BACKING_CLOSE = 0x4010E501, 0x4004E502
_BACKING_ID = struct.Struct("<I")
# EPERM: not root, or the kernel has not offered it. ELOOP: the cache lies on an overlayfs. ENOTTY, EINVAL: Linux before
# 6.9. Anything else may pass.
_REFUSED = (errno.EPERM, errno.ELOOP, errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP)
# Registering a file and giving it up takes 100 us, as long as the rest of an open. So a file stays registered for some
# seconds after its last handle, and a reader that opens it for every sample in it finds it registered; at most
# _LINGERING files stay.
LINGER_S, _LINGERING = 2.0, 256


class BackingFiles:
    """Registers files with the kernel that it may read by itself; `descriptor` is its connection, an open /dev/fuse."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def register(self, fd: int) -> int:
        """Returns the number of the open file, more than 0, which `fd` need not stay open for; raises OSError."""
        # The number is what ioctl(2) returns, and Python says that only of a buffer that can be written.
        number: int = fcntl.ioctl(self._descriptor, _BACKING_OPEN, bytearray(_BACKING_MAP.pack(fd, 0, 0)))
        return number

    def give_up(self, number: int) -> None:
        """The kernel lets go of the file once no handle reads from it."""
        fcntl.ioctl(self._descriptor, _BACKING_CLOSE, _BACKING_ID.pack(number))


def passing_out(handle: int, number: int, past_pages: bool) -> bytes:
    """The answer to an OPEN whose handle reads from a backing file; `past_pages`: its reader uses O_DIRECT.

    Without KEEP_CACHE the kernel drops the pages that it has of the inode itself. With DIRECT_IO it asks the worker
    after all, which spares who reads past all pages the alignment that the disk would demand.
    """
    return wire.OPEN_OUT.pack(handle, OpenFlag.PASSTHROUGH | (OpenFlag.DIRECT_IO if past_pages else 0), number)


class Passthrough:
    """The sole worker's book of what the kernel reads from; `run` is where a successor looks."""

    def __init__(
        self, files: BackingFiles, large_files: LargeFiles, run: RunLayout, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._files = files
        self._large_files = large_files
        self._run = run
        self._now = clock
        self._possible = True
        self._numbers: dict[int, int] = {}
        # Since when inodes have had no handle any more; the oldest first.
        self._idle: dict[int, float] = {}
        self._closed = trio.Event()
        try:
            self._numbers.update(run.backing_files())
        except OSError as exc:
            log.warning("reads large files as workers do, because the notes of others cannot be read: %s", exc)
            self._possible = False

    def opened(self, inode: int, may_begin: bool) -> int:
        """Which backing file a new handle has to read from; 0: the handle is a cached one.

        `may_begin`: the kernel has no other handle of the inode, and the file is one to begin with.
        """
        if self._idle.pop(inode, None) is not None and not self._large_files.is_whole(inode):
            # Evicted since, and no one reads it: it is to be fetched again like any other.
            self._end(inode)
        return self._numbers.get(inode, 0) or (self._begin(inode) if may_begin and self._possible else 0)

    def closed(self, inode: int) -> None:
        """The kernel has no handle of the inode any more."""
        if inode in self._numbers:
            self._idle[inode] = self._now()
            self._closed.set()
            if len(self._idle) > _LINGERING:
                self._end(next(iter(self._idle)))

    async def lingers(self) -> None:
        """Return when some inode has no handle any more."""
        await self._closed.wait()

    def tidy(self) -> None:
        """End what no one has come back to; to be called every second or so, while something `lingers`."""
        latest = self._now() - LINGER_S
        for inode in [inode for inode, since in self._idle.items() if since <= latest]:
            self._end(inode)
        if not self._idle:
            self._closed = trio.Event()

    def _end(self, inode: int) -> None:
        self._idle.pop(inode, None)
        number = self._numbers.pop(inode)
        # In this order: a number that a successor finds is one that the kernel knows.
        try:
            self._run.backing_file(inode, number).unlink(missing_ok=True)
            self._files.give_up(number)
        except OSError as exc:
            log.debug("inode %d stays registered: %s", inode, exc)

    def _begin(self, inode: int) -> int:
        fd = self._large_files.plain_file(inode)
        if fd is None:
            return 0
        try:
            number = self._files.register(fd)
        except OSError as exc:
            if exc.errno in _REFUSED:
                log.info("the kernel does not read large files by itself (%s)", exc.strerror)
                self._possible = False
            return 0
        finally:
            os.close(fd)
        try:
            self._run.backing_file(inode, number).touch()
        except OSError as exc:
            log.debug("inode %d is not read by the kernel itself: %s", inode, exc)
            self._files.give_up(number)
            return 0
        self._numbers[inode] = number
        return number
