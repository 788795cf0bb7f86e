"""The kernel's mount table, watched: what is mounted where is known without a look at the table for each file.

Reading `/proc/self/mountinfo` takes the kernel a tenth of a millisecond; epoll on it, which says whether something was
mounted or unmounted since it last said so, a third of a microsecond (proc_pid_mounts(5)). What it says it says once, to
whoever asks first, so a process has one table, and a child of fork another one.
"""

from __future__ import annotations

import os
import select
import threading

from spiderfs.linux.mounts import FSTYPE, MOUNT_TABLE, mounts


class MountTable:
    """`state` is a number that changes with the table, and in a child of fork; the rest is as of the last `state`."""

    def __init__(self) -> None:
        self._state = 0
        self._watch: select.epoll | None = None
        self._file = -1
        self._points: list[tuple[bytes, bool]] = []
        self._beginning = threading.Lock()

    def state(self) -> int:
        watch = self._watch
        if watch is None:
            self._begin()
        elif watch.poll(0):
            self._read()
        return self._state

    def spiderfs_points(self) -> list[bytes]:
        """Where a spiderfs mount is on top, the innermost first."""
        on_top = dict(self._points)
        return sorted((point for point, ours in on_top.items() if ours), key=len, reverse=True)

    def below(self, point: bytes) -> tuple[bytes, ...]:
        """Prefixes of the paths below `point` that belong to other mounts."""
        inner = (other for other, _ in self._points if other.startswith(point + b"/"))
        return tuple(prefix for other in inner for prefix in (other, other + b"/"))

    def _begin(self) -> None:
        with self._beginning:
            if self._watch is None:
                self._file = os.open(MOUNT_TABLE, os.O_RDONLY | os.O_CLOEXEC)
                watch = select.epoll()
                watch.register(self._file, select.EPOLLPRI)
                self._read()
                self._watch = watch

    def _read(self) -> None:
        self._points = [(os.fsencode(mount.mountpoint), mount.fstype == FSTYPE) for mount in mounts()]
        self._state += 1

    def _after_fork(self) -> None:
        self._beginning = threading.Lock()
        # The child shares the parent's file, and would take its news away.
        if self._watch is not None:
            self._watch.close()
            os.close(self._file)
            self._watch = None
            self._state += 1


TABLE = MountTable()
os.register_at_fork(after_in_child=TABLE._after_fork)
