"""The trainers' end of the daemon: a Unix socket on which training processes say what they learned.

Each connection is a trainer with tasks and a queue of its own (`hook_connection.py`), so neither a slow sink nor
another trainer keeps it waiting. Nothing that a trainer sends can raise beyond its connection. A message that makes no
sense is answered by an error and counted; too many of them, or a stream that cannot be understood any more, end the
connection. The kernel, not the trainer, says whose connection it is; users other than the daemon's own and root are
refused.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import trio

from spiderfs.daemon.context import socket_address
from spiderfs.daemon.training.declaring import DeclaredBytes
from spiderfs.daemon.training.hook_connection import Connection, HookSink, ServerLimits
from spiderfs.daemon.training.trainer import Trainer, TrainerStatus
from spiderfs.errors import SpiderfsError
from spiderfs.protocol import Error

log = logging.getLogger(__name__)

_BACKLOG = 64
# The daemon's end waits for a trainer's farewell so long.
_DETACH_TIMEOUT_S = 5.0
DEFAULT_LIMITS = ServerLimits()


def listen(path: Path) -> socket.socket:
    """A listening socket that only its owner (and root) can reach, in place of what an earlier daemon left."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The mode of a socket's file is that of the socket's inode before it is bound (unix(7)), so nobody slips in before.
    os.fchmod(listener.fileno(), 0o600)
    with socket_address(path) as address:
        listener.bind(address)
    path.chmod(0o600)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


class HookServer:
    """`count` is told of events by the names of counters in `metrics.COUNTERS`."""

    def __init__(
        self,
        sink: HookSink,
        count: Callable[[str, int], None],
        limits: ServerLimits = DEFAULT_LIMITS,
    ) -> None:
        self._sink = sink
        self._count = count
        self._limits = limits
        self._connections = 0
        self.declared_bytes = DeclaredBytes(limits.declared_bytes)
        self.trainers: list[Trainer] = []

    def status(self) -> tuple[TrainerStatus, ...]:
        """One for each trainer that is attached."""
        return tuple(trainer.status() for trainer in self.trainers)

    async def serve(self, listener: socket.socket) -> None:
        """Answer until cancelled; what goes wrong with one connection stays with it."""
        accepting = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
        await trio.serve_listeners(self._serve_one, [accepting])

    async def _serve_one(self, stream: trio.SocketStream) -> None:
        connection = Connection(stream, self._sink, self._count, self._limits, self.declared_bytes)
        self._connections += 1
        try:
            if await self._admitted(connection):
                await self._converse(connection)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            log.debug("process %d left in the middle of a talk", connection.pid)
        except Exception:
            log.exception("the talk with process %d broke off", connection.pid)
            self._count("internal_errors", 1)
        finally:
            self._connections -= 1
            await trio.aclose_forcefully(stream)

    async def _admitted(self, connection: Connection) -> bool:
        if connection.uid not in (0, os.geteuid()):
            refusal = Error("refused", f"this mount belongs to user {os.geteuid()}, not to user {connection.uid}")
        elif self._connections > self._limits.connections:
            refusal = Error("too-many", f"{self._limits.connections} trainers are connected already")
        else:
            return True
        self._count("hook_refused", 1)
        await connection.answer(refusal)
        return False

    async def _converse(self, connection: Connection) -> None:
        trainer = await connection.greet()
        if trainer is None:
            return
        try:
            await self._sink.attached(trainer)
        except SpiderfsError as exc:
            await connection.answer(Error("failed", str(exc)))
            return
        self.trainers.append(trainer)
        try:
            await connection.run(trainer)
        finally:
            self.trainers.remove(trainer)
            with trio.move_on_after(_DETACH_TIMEOUT_S, shield=True):
                await self._sink.detached(trainer)
