"""Which files and blocks are being fetched by some process of a mount: range locks on one file.

The lock of a key lies at an offset drawn from the key. The kernel frees the locks of a process that dies. If two keys
have one offset, a fetch of one waits for that of the other, and `held` takes one for the other; nothing worse happens.
A thread that waits for a lock does so with a descriptor of its own (`linux/range_lock.py`).
"""

from __future__ import annotations

import os
from pathlib import Path

from spiderfs.linux.range_lock import lock_shared, locked, try_lock, unlock
from spiderfs.store.store import ContentKey

_LOCK_OFFSETS = (1 << 62) - 1


class FetchLock:
    """A lock per key between the processes of a mount; a process that only wants to know uses `held` alone."""

    def __init__(self, path: Path) -> None:
        # Make it after a fork: a process that inherits the descriptor shares its locks. It is a number and no file of
        # Python's, which warns if a collector of cycles ends it before its owner.
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            # The disk cannot be written to. Without a common lock, each process fetches what others fetch too.
            self._descriptor = os.memfd_create("spiderfs-fetches")

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()

    def try_hold(self, key: ContentKey) -> bool:
        """Take the key's lock unless another process holds it."""
        return try_lock(self._descriptor, _offset(key), 1)

    def let_go(self, key: ContentKey) -> None:
        unlock(self._descriptor, _offset(key), 1)

    def wait(self, key: ContentKey) -> None:
        """Block until no other process holds the key's lock; for a thread."""
        with open(f"/proc/self/fd/{self._descriptor}", "rb") as own:
            # A shared lock, so that all that wait go on at once; closing the descriptor frees it.
            lock_shared(own.fileno(), _offset(key), 1)

    def held(self, key: ContentKey) -> bool:
        """Whether another process holds the key's lock."""
        return locked(self._descriptor, _offset(key), 1)

    def close(self) -> None:
        """Free this process's locks; nothing but `close` may be called afterwards."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _offset(key: ContentKey) -> int:
    return (key.inode + key.block * 1_000_003) & _LOCK_OFFSETS
