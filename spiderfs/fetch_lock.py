"""Which files and blocks are being fetched by some process of a mount: byte-range locks on one file.

The lock of a key lies at an offset drawn from it. The kernel frees the locks of a process that dies. Two keys with one
offset only wait for each other, or are taken for each other where somebody asks. They are locks of the open file
(F_OFD_SETLK, fcntl(2)), not of the process, so that a thread may wait for one with a descriptor of its own.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

from spiderfs.store.store import ContentKey

_LOCK_OFFSETS = (1 << 62) - 1
# struct flock of 64-bit Linux, fcntl(2): type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi0q")


class FetchLock:
    """A lock per key between the processes of a mount; those who only ask use `held` alone."""

    def __init__(self, path: Path) -> None:
        # To be made after a fork: who inherits it shares its locks.
        self._file = open(path, "ab")  # noqa: SIM115

    def try_hold(self, key: ContentKey) -> bool:
        """Take the key's lock unless another process holds it."""
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, key))
        except OSError as exc:
            if exc.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True

    def let_go(self, key: ContentKey) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, key))

    def wait(self, key: ContentKey) -> None:
        """Block until no other process holds the key's lock; for a thread."""
        with open(self._file.name, "rb") as own:
            # Shared, so that all who wait go on at once; it goes with the descriptor.
            fcntl.fcntl(own, fcntl.F_OFD_SETLKW, _lock(fcntl.F_RDLCK, key))

    def held(self, key: ContentKey) -> bool:
        """Whether another process holds the key's lock."""
        kind, *_ = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, key)))
        return bool(kind != fcntl.F_UNLCK)

    def close(self) -> None:
        self._file.close()


def _lock(kind: int, key: ContentKey) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, (key.inode + key.block * 1_000_003) & _LOCK_OFFSETS, 1, 0)
