"""The pusher as the manager has it: a process of its own (`push_process.py`), started when it is first needed.

The process asks the mount for files, so it may wait for anything that a reader may wait for, and the manager never
waits for it: orders and answers go through a socket that does not block. If it dies, another one is started after a
pause; so orders that it had and had not carried out are dropped.

A process may also live and do nothing: someone has stopped it, or all of its threads wait for something that does not
come. It says nothing of most orders anyway. So when it has been silent for a while it is asked for an answer, which any
of its free threads gives; one that gives none is killed, and counts as dead. A source that hangs is no reason for that,
for the mount answers with an error before the patience ends.
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
from spiderfs.daemon.caching.push_process import ANSWER, HELLO, HERE, MOST_BYTES, packed_order
from spiderfs.linux.mounts import mounted_at
from spiderfs.shared.shared_memory import SharedSlots

log = logging.getLogger(__name__)

# A process that dies at once must not keep the processor busy: the pause doubles with each one that did nothing.
PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
# How long a process may take to begin: it imports a few modules of the standard library.
BEGIN_S = 20.0
# The process is asked for a word after this time without one.
ASK_S = 5.0
# The orders of one message. Each message wakes a thread, which costs both processes more than an order does.
# But a thread carries out its orders one after the other, so where each has to ask the source for a name, more of them
# would leave other threads idle.
ORDERS_AT_ONCE = 4


class Pusher:
    """Keeps the process, which opens `at_a_time` files.

    One that does not answer for longer than `patience_s` is replaced: the mount has to answer its requests sooner.
    `answered` is called with the number and the outcome of an order; `lost`, when all others will not be answered.
    """

    def __init__(
        self,
        mountpoint: Path,
        at_a_time: int,
        threads: SharedSlots,
        patience_s: float,
        answered: Callable[[int, int], None],
        lost: Callable[[], None],
    ) -> None:
        self._mountpoint = mountpoint
        self._at_a_time = at_a_time
        self._threads = threads
        self._patience_s = patience_s
        self._answered = answered
        self._lost = lost
        self._needed = trio.Event()
        self._orders: trio.socket.SocketType | None = None
        self._mount_path = os.path.join(os.fsencode(mountpoint), b"")
        self._to_send: list[tuple[int, bytes]] = []
        self.broken = False
        """Whether the last process could not begin, or did nothing."""
        # A manager before this one may have had another pusher.
        threads.replace(())

    @property
    def ready(self) -> bool:
        """Whether orders are taken."""
        return self._orders is not None

    def need(self) -> None:
        """Have the process started, unless it is there."""
        self._needed.set()

    def order(self, number: int, path: bytes) -> None:
        """Have a file pushed, by its path in the mount, from the next `send` on."""
        self._to_send.append((number, packed_order(number, self._mount_path + path)))

    def send(self) -> list[int]:
        """Send all orders; returns the numbers of those that the process does not take now."""
        to_send, self._to_send = self._to_send, []
        refused: list[int] = []
        for first in range(0, len(to_send), ORDERS_AT_ONCE):
            bunch = to_send[first : first + ORDERS_AT_ONCE]
            message = b"".join(order for _, order in bunch)
            if len(message) > MOST_BYTES or not self._send(message):
                refused += [number for number, _ in bunch]
        return refused

    def _send(self, message: bytes) -> bool:
        if self._orders is None:
            return False
        try:
            # Not through trio: that would be a pass of its loop, and this never waits.
            os.write(self._orders.fileno(), message)
        except OSError:
            return False
        return True

    async def run(self) -> None:
        """Have one process after the other until cancelled, from the time when it is needed."""
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
        """The life of one process; returns whether it worked. Raises OSError if it cannot be started."""
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
                return await self._begin(answers) and await self._receive(answers)
            finally:
                was_ready, self._orders = self.ready, None
                self._threads.replace(())
                process.kill()
                # If it waits in the kernel, it ends later, and is waited for when the next one is made.
                if was_ready and process.poll() is None:
                    log.debug("the process that pushes files ahead ends")
                self._lost()

    async def _begin(self, answers: trio.socket.SocketType) -> bool:
        """Wait until all threads of the process take orders; returns whether they do."""
        threads: list[int] = []
        with trio.move_on_after(BEGIN_S) as waiting:
            while len(threads) < self._at_a_time:
                hello = await _received(answers)
                if not hello:
                    log.warning("the process that pushes files ahead has ended before it could begin")
                    return False
                threads.append(*HELLO.unpack(hello))
        if waiting.cancelled_caught:
            log.warning("the process that pushes files ahead has not begun within %g s: another one starts", BEGIN_S)
            return False
        self._threads.replace(threads)
        self._orders = answers
        self.broken = False
        return True

    async def _receive(self, answers: trio.socket.SocketType) -> bool:
        """Pass answers on until the process has ended, or is to be ended because it does nothing: False."""
        asked_at_s: float | None = None
        while True:
            answer: bytes | None = None
            with trio.move_on_after(ASK_S):
                answer = await _received(answers)
            now_s = trio.current_time()
            if answer:
                asked_at_s = None
                number, outcome = ANSWER.unpack(answer)
                if outcome != HERE:
                    self._answered(number, outcome)
            elif answer is not None:
                log.warning("the process that pushes files ahead has ended: another one starts in %g s", PAUSE_S)
                return True
            elif asked_at_s is not None and now_s >= asked_at_s + self._patience_s:
                log.warning(
                    "the process that pushes files ahead does nothing (no answer for %.0f s): another one starts",
                    now_s - asked_at_s,
                )
                return False
            else:
                # Once more each time, since a socket that is full of orders takes no question.
                self._send(packed_order(0, b""))
                asked_at_s = now_s if asked_at_s is None else asked_at_s


async def _received(answers: trio.socket.SocketType) -> bytes:
    """The next message of the process; empty once it has ended."""
    try:
        return await answers.recv(MOST_BYTES)
    except ConnectionResetError:
        # It has ended with orders that it had not read (unix(7) has the error of a peer that is gone).
        return b""
