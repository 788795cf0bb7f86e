"""The server of the hook's socket, to which training processes send what they have learned.

Each connection is one trainer, and has tasks and a queue of its own (`hook_connection.py`). So neither a slow sink nor
another trainer makes it wait, and no bytes of a trainer do harm beyond its connection. A message that makes no sense is
answered with an error and counted. Too many such messages, or a stream that cannot be read any more, end the
connection. The kernel says which user's process is at the other end; only root and the daemon's own user are admitted.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from spiderfs.daemon.training.connection.declaring import DeclaredBytes
from spiderfs.daemon.training.connection.hook_connection import Connection, HookSink, ServerLimits
from spiderfs.daemon.training.connection.partial_connection import PartialConnection, PartialKeeper
from spiderfs.daemon.training.trainer import Trainer
from spiderfs.errors import SpiderfsError
from spiderfs.linux.sockets import socket_address
from spiderfs.protocol import Error, PartialSamples

log = logging.getLogger(__name__)

_BACKLOG = 64
# How long the sink may act on the end of a connection.
_DETACH_TIMEOUT_S = 5.0
# How often the server looks whether the socket's file is there; each look costs 0.3 ms where nothing else goes on.
LOOK_AGAIN_S = 5.0
DEFAULT_LIMITS = ServerLimits()


def listen(path: Path) -> socket.socket:
    """A listening socket that only its owner and root can reach; it replaces the one of an earlier daemon."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The file gets the mode that the socket has when it is bound (unix(7)), so no other user can connect in between.
    os.fchmod(listener.fileno(), 0o600)
    with socket_address(path) as address:
        listener.bind(address)
    path.chmod(0o600)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


class HookServer:
    """Admits trainers that connect to the hook's socket, and passes their messages to `sink`.

    `count` adds to a counter of `metrics.COUNTERS`, by its name.
    """

    def __init__(
        self,
        sink: HookSink,
        count: Callable[[str, int], None],
        limits: ServerLimits = DEFAULT_LIMITS,
        partials: PartialKeeper | None = None,
    ) -> None:
        """Without `partials`, loaders are refused as by a daemon that knows nothing of them."""
        self._sink = sink
        self._partials = partials
        self._count = count
        self._limits = limits
        self._connections = 0
        self.declared_bytes = DeclaredBytes(limits.declared_bytes)
        self.trainers: list[Trainer] = []

    async def serve(self, listener: socket.socket, path: Path) -> None:
        """Serve connections until cancelled; the failure of one connection ends only that connection.

        `path` is that of the listening socket. Where its file goes away, because somebody tidies up, another takes its
        place, and connections go on.
        """
        async with trio.open_nursery() as connections:
            while True:
                accepting = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
                async with trio.open_nursery() as nursery:
                    serving = partial(trio.serve_listeners, self._serve_one, [accepting], handler_nursery=connections)
                    nursery.start_soon(serving)
                    while os.path.lexists(path):
                        await trio.sleep(LOOK_AGAIN_S)
                    nursery.cancel_scope.cancel()
                listener = await self._listen_again(path)

    async def _listen_again(self, path: Path) -> socket.socket:
        said = False
        while True:
            try:
                listener = listen(path)
            except OSError as exc:
                # Without its directory the whole mount begins anew, and says so.
                if not said and path.parent.is_dir():
                    log.warning(
                        "cannot make the hook's socket (%s): no trainer can attach until %s can be made", exc, path
                    )
                    said = True
                await trio.sleep(LOOK_AGAIN_S)
            else:
                log.info("the hook's socket had gone: there is another one")
                return listener

    async def _serve_one(self, stream: trio.SocketStream) -> None:
        connection = Connection(stream, self._sink, self._count, self._limits, self.declared_bytes)
        self._connections += 1
        try:
            if await self._admitted(connection):
                await self._converse(connection)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            log.debug("process %d closed its connection early", connection.pid)
        except Exception:
            log.exception("the connection of process %d failed", connection.pid)
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
        if isinstance(trainer, PartialSamples):
            await self._keep_partials(connection, trainer)
            return
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

    async def _keep_partials(self, connection: Connection, begun: PartialSamples) -> None:
        if self._partials is None:
            await connection.answer(Error("unknown", "this daemon keeps no partial samples"))
            return
        limits = self._limits
        serving = PartialConnection(
            connection.stream, self._partials, connection.answer, self._count, limits.message, limits.malformed
        )
        await serving.run(begun)
