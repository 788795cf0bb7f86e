"""Which files and blocks are being fetched by some process of a mount: byte-range locks on one file.

The lock of a key lies at an offset drawn from it. The kernel frees the locks of a process that dies. Two keys with one
offset only wait for each other, or are taken for each other where somebody asks.
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
        # Kept open for good: closing any descriptor of the file would free all locks of this process (fcntl(2)).
        self._file = open(path, "ab")  # noqa: SIM115

    def try_hold(self, key: ContentKey) -> bool:
        """Take the key's lock unless another process holds it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _offset(key))
        except OSError as exc:
            if exc.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True

    def let_go(self, key: ContentKey) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _offset(key))

    def held(self, key: ContentKey) -> bool:
        """Whether another process holds the key's lock."""
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _offset(key), 1, 0)
        kind, *_ = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, question))
        return bool(kind != fcntl.F_UNLCK)

    def close(self) -> None:
        self._file.close()


def _offset(key: ContentKey) -> int:
    return (key.inode + key.block * 1_000_003) & _LOCK_OFFSETS
