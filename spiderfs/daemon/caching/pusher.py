"""The pusher as the manager has it: a process of its own (`push_process.py`), started when it is first needed.

The process asks the mount for files, so it may wait for anything that a reader may wait for, and the manager never
waits for it: orders and answers go through a socket that does not block. If it dies, another one is started after a
pause; so what it was told and had not done is not done.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import trio

from spiderfs.daemon.caching import push_process
from spiderfs.daemon.caching.push_process import ANSWER, HELLO, MOST_BYTES, ORDER
from spiderfs.linux.mounts import mounted_at
from spiderfs.shared.pusher_threads import PusherThreads

log = logging.getLogger(__name__)

# A process that dies at once must not keep the processor busy: the pause doubles with each one that did nothing.
PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0


class Pusher:
    """Keeps the process, which opens `at_a_time` files.

    `answered` is told the number and the outcome of an order; `lost`, that all others will not be answered.
    """

    def __init__(
        self,
        mountpoint: Path,
        at_a_time: int,
        threads: PusherThreads,
        answered: Callable[[int, int], None],
        lost: Callable[[], None],
    ) -> None:
        self._mountpoint = mountpoint
        self._at_a_time = at_a_time
        self._threads = threads
        self._answered = answered
        self._lost = lost
        self._needed = trio.Event()
        self._orders: trio.socket.SocketType | None = None
        self.broken = False
        """Whether the last process could not begin."""
        # A manager before this one may have had another pusher.
        threads.replace(())

    @property
    def ready(self) -> bool:
        """Whether orders are taken."""
        return self._orders is not None

    def need(self) -> None:
        """Have the process started, unless it is there."""
        self._needed.set()

    def order(self, number: int, path: bytes) -> bool:
        """Have a file pushed, by its path in the mount; False if the process takes no more orders now."""
        message = ORDER.pack(number) + os.path.join(os.fsencode(self._mountpoint), path)
        if self._orders is None or len(message) > MOST_BYTES:
            return False
        try:
            # Not through trio: that would be a pass of its loop, and this never waits.
            os.write(self._orders.fileno(), message)
        except OSError:
            return False
        return True

    async def run(self) -> None:
        """For ever: have one process after the other, from the time when it is needed."""
        await self._needed.wait()
        pause_s = PAUSE_S
        while True:
            try:
                worked = await self._live()
            except OSError as exc:
                log.warning("cannot start the process that pushes files ahead: %s", exc)
                worked = False
            self.broken = not worked
            pause_s = PAUSE_S if worked else min(2 * pause_s, LONGEST_PAUSE_S)
            await trio.sleep(pause_s)

    async def _live(self) -> bool:
        """The life of one process; returns whether it was ready for work. Raises OSError if it cannot be started."""
        mount = mounted_at(self._mountpoint)
        if mount is None:
            return False
        major, minor = map(int, mount.device.split(":"))
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with trio.socket.from_stdlib_socket(ours) as answers:
            with its:
                # The package's own modules are left out, and so is whatever the user's environment adds.
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", push_process.__file__),
                        *map(str, (os.getpid(), os.makedev(major, minor), self._at_a_time)),
                    ],
                    stdin=its.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                )
            try:
                return await self._hear(answers)
            finally:
                was_ready, self._orders = self.ready, None
                self._threads.replace(())
                process.kill()
                # If it waits in the kernel, it ends later, and is waited for when the next one is made.
                if was_ready and process.poll() is None:
                    log.debug("the process that pushes files ahead ends")
                self._lost()

    async def _hear(self, answers: trio.socket.SocketType) -> bool:
        threads: list[int] = []
        while len(threads) < self._at_a_time:
            hello = await answers.recv(MOST_BYTES)
            if not hello:
                log.warning("the process that pushes files ahead has ended before it could begin")
                return False
            threads.append(*HELLO.unpack(hello))
        self._threads.replace(threads)
        self._orders = answers
        self.broken = False
        while answer := await answers.recv(MOST_BYTES):
            self._answered(*ANSWER.unpack(answer))
        log.warning("the process that pushes files ahead has ended: another one starts in %g s", PAUSE_S)
        return True
