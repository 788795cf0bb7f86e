"""The guard: a process that outlives the supervisor, and then ends the connection to the kernel.

The connection ends by itself when the last descriptor of /dev/fuse is closed. A process that cannot be killed, because
it waits in the kernel for a source that hangs, keeps its descriptor open, and the mount's readers would wait as long as
it does. The guard has no such descriptor, touches neither source nor cache nor mount, and so is never held up. It is no
child of the supervisor's and in a session of its own, so what is aimed at the supervisor's children does not meet it.
"""

from __future__ import annotations

import logging
import os
import select
import signal

from spiderfs.mountpoint import abort

log = logging.getLogger(__name__)


class Guard:
    """Ends the connection once the process that has made this object has ended."""

    def __init__(self, connection: int) -> None:
        """`connection`: see `mountpoint.open_abort`."""
        self._connection = connection
        self._alive = -1
        self.keep()

    def keep(self) -> None:
        """Start the guard unless it is there; call it now and then, for it may have been killed."""
        if self._alive >= 0:
            if not select.select([self._alive], [], [], 0)[0]:
                return
            os.close(self._alive)
            self._alive = -1
        try:
            self._alive = _start(self._connection)
        except OSError as exc:
            log.warning("the mount has no guard for now (%s)", exc.strerror)


def _start(connection: int) -> int:
    """A descriptor that is readable once the new guard has ended; raises OSError."""
    watched = os.pidfd_open(os.getpid())
    # The guard has the only end that is left for writing, and writes nothing.
    alive, held = os.pipe()
    # Twice, so that the guard is not a child of this process.
    between = os.fork()
    if between == 0:
        try:
            if os.fork() == 0:
                _watch(watched, connection, held)
        finally:
            os._exit(0)
    os.close(held)
    os.close(watched)
    os.waitpid(between, 0)
    return alive


def _watch(watched: int, connection: int, held: int) -> None:
    os.setsid()
    os.chdir("/")
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    # Everything else: the descriptor of /dev/fuse, the lock of the cache directory, the terminal.
    last = 0
    for kept in sorted((watched, connection, held)):
        os.closerange(last, kept)
        last = kept + 1
    os.closerange(last, os.sysconf("SC_OPEN_MAX"))
    select.select([watched], [], [])
    abort(connection)
