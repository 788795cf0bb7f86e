"""The guard: a process that outlives the supervisor, then ends the connection to the kernel and unlocks the cache.

The connection ends by itself when the last descriptor of /dev/fuse is closed, and the cache directory is unlocked when
the last descriptor of its lock file is closed. A process that waits in the kernel for a source that hangs cannot be
killed, and keeps both open; the mount's readers and the next mount would wait as long as this process does. The guard
has no descriptor of /dev/fuse and touches neither source nor mount, so nothing holds it up. It is no child of the
supervisor and has a session of its own, so a signal to the supervisor's children does not reach it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import signal

from spiderfs.linux.mounts import abort

log = logging.getLogger(__name__)


class Guard:
    """Ends the connection, and unlocks the cache, once the process that has made this object has ended."""

    def __init__(self, connection: int | None, lock: int) -> None:
        """`connection`: see `mountpoint.open_abort`. `lock`: the open file by which the cache directory is locked."""
        self._connection, self._lock = connection, lock
        self._alive = -1
        self.keep()

    def follow(self, lock: int) -> None:
        """Unlock this file instead: a new cache directory has taken the place of one that was lost."""
        self._lock = lock
        # The guard that runs now stays, for the connection; no other process asks for the lock that it has.
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1
        self.keep()

    def keep(self) -> None:
        """Start the guard unless it runs. Call this regularly, for someone may have killed the guard."""
        if self._alive >= 0:
            if not select.select([self._alive], [], [], 0)[0]:
                return
            os.close(self._alive)
            self._alive = -1
        try:
            self._alive = _start(self._connection, self._lock)
        except OSError as exc:
            log.warning("cannot start the guard (%s): it is tried again every 2 s", exc.strerror)


def _start(connection: int | None, lock: int) -> int:
    """A descriptor that is readable once the new guard has ended; raises OSError."""
    watched = os.pidfd_open(os.getpid())
    # The guard alone keeps the writing end, and writes nothing: the reading end is readable once the guard has ended.
    alive, held = os.pipe()
    # Forked twice, the guard is no child of this process.
    between = os.fork()
    if between == 0:
        try:
            if os.fork() == 0:
                _watch(watched, connection, lock, held)
        finally:
            os._exit(0)
    os.close(held)
    os.close(watched)
    os.waitpid(between, 0)
    return alive


def _watch(watched: int, connection: int | None, lock: int, held: int) -> None:
    os.setsid()
    os.chdir("/")
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    # All other descriptors are closed: that of /dev/fuse, and those of the terminal.
    last = 0
    for kept in sorted(fd for fd in (watched, connection, lock, held) if fd is not None):
        os.closerange(last, kept)
        last = kept + 1
    os.closerange(last, os.sysconf("SC_OPEN_MAX"))
    select.select([watched], [], [])
    if connection is not None:
        abort(connection)
    # This unlocks the file for all processes that share the descriptor. That is safe: the kernel killed the
    # supervisor's children before it said that the supervisor has ended, and what is left of them runs no instruction
    # any more.
    fcntl.flock(lock, fcntl.LOCK_UN)
