"""Which files and blocks are being fetched by some process of a mount: range locks on one file.

The lock of a key lies at an offset drawn from it. The kernel frees the locks of a process that dies. Two keys with one
offset only wait for each other, or are taken for each other where somebody asks. A thread may wait for one with a
descriptor of its own (`linux/range_lock.py`).
"""

from __future__ import annotations

import os
from pathlib import Path

from spiderfs.linux.range_lock import lock_shared, locked, try_lock, unlock
from spiderfs.store.store import ContentKey

_LOCK_OFFSETS = (1 << 62) - 1


class FetchLock:
    """A lock per key between the processes of a mount; those who only ask use `held` alone."""

    def __init__(self, path: Path) -> None:
        # To be made after a fork: who inherits it shares its locks.
        try:
            self._file = open(path, "ab")  # noqa: SIM115
        except OSError:
            # Of a disk that cannot be written to. Who has no lock in common with others fetches what they fetch too.
            own = os.memfd_create("spiderfs-fetches")
            self._file = open(f"/proc/self/fd/{own}", "ab")  # noqa: SIM115
            os.close(own)

    def try_hold(self, key: ContentKey) -> bool:
        """Take the key's lock unless another process holds it."""
        return try_lock(self._file.fileno(), _offset(key), 1)

    def let_go(self, key: ContentKey) -> None:
        unlock(self._file.fileno(), _offset(key), 1)

    def wait(self, key: ContentKey) -> None:
        """Block until no other process holds the key's lock; for a thread."""
        with open(f"/proc/self/fd/{self._file.fileno()}", "rb") as own:
            # Shared, so that all who wait go on at once; it goes with the descriptor.
            lock_shared(own.fileno(), _offset(key), 1)

    def held(self, key: ContentKey) -> bool:
        """Whether another process holds the key's lock."""
        return locked(self._file.fileno(), _offset(key), 1)

    def close(self) -> None:
        self._file.close()


def _offset(key: ContentKey) -> int:
    return (key.inode + key.block * 1_000_003) & _LOCK_OFFSETS
