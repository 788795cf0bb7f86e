"""Locks on ranges of a file that belong to the open file, not to the process (F_OFD_SETLK, fcntl(2)).

Two descriptors that were opened apart exclude each other within one process too, and a lock lasts as long as its open
file: until the last descriptor of it is closed, wherever that was passed to.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

# struct flock of 64-bit Linux, fcntl(2): type, whence, start, length (0: to the end of all files), pid.
_FLOCK = struct.Struct("hhqqi0q")


def try_lock(fd: int, start: int, length: int, shared: bool = False) -> bool:
    """Lock the range unless another open file has a lock there that excludes this one."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, start, length))
    except OSError as exc:
        if exc.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def lock_shared(fd: int, start: int, length: int) -> None:
    """Block until nobody has an exclusive lock on the range, and keep others from taking one."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _flock(fcntl.F_RDLCK, start, length))


def unlock(fd: int, start: int, length: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, start, length))


def locked(fd: int, start: int, length: int) -> bool:
    """Whether another open file has a lock on a part of the range."""
    kind, *_ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, start, length)))
    return bool(kind != fcntl.F_UNLCK)


def _flock(kind: int, start: int, length: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
