"""Locks on ranges of a file that belong to an open file, not to a process (F_OFD_SETLK, see fcntl(2)).

Two open files exclude each other even within one process. A lock lasts until the last descriptor of its open file is
closed, in whatever process that descriptor is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

# struct flock of 64-bit Linux, see fcntl(2): type, whence, start, length (0 means: to the end of the file), pid.
_FLOCK = struct.Struct("hhqqi0q")


def try_lock(fd: int, start: int, length: int, shared: bool = False) -> bool:
    """Lock the range and return True, or return False if another open file's lock there excludes this one."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, start, length))
    except OSError as exc:
        if exc.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def lock_exclusive(fd: int, start: int, length: int) -> None:
    """Wait until no open file has a lock on the range, then lock the range."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _flock(fcntl.F_WRLCK, start, length))


def lock_shared(fd: int, start: int, length: int) -> None:
    """Wait until no open file has an exclusive lock on the range, then lock the range for shared use."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _flock(fcntl.F_RDLCK, start, length))


def unlock(fd: int, start: int, length: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, start, length))


def locked(fd: int, start: int, length: int) -> bool:
    """Whether another open file has locked any part of the range."""
    kind, *_ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, start, length)))
    return bool(kind != fcntl.F_UNLCK)


def _flock(kind: int, start: int, length: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
