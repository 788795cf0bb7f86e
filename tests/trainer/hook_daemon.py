"""A hook server that runs in a thread and remembers the messages that it gets, for tests without trio."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import trio

from spiderfs.daemon.training.connection.hook_connection import ServerLimits
from spiderfs.daemon.training.connection.hook_server import HookServer, listen
from spiderfs.testing import RecordingSink

PATIENCE_S = 20.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


class HookDaemon:
    """A directory `mount` that the hook takes for a mount: its control file names the socket.

    It is a context manager that can be entered several times.
    """

    def __init__(self, mount: Path, sink: RecordingSink | None = None, limits: ServerLimits | None = None) -> None:
        self.mount = mount
        self.sink = sink or RecordingSink()
        self.counted: Counter[str] = Counter()
        self._limits = limits or ServerLimits()
        self._socket = mount / "hook.sock"
        control = mount / ".spiderfs"
        control.mkdir(parents=True, exist_ok=True)
        (control / "hook").write_bytes(bytes(self._socket) + b"\n")

    def __enter__(self) -> HookDaemon:
        self._began = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main,))
        self._thread.start()
        assert self._began.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        trio.from_thread.run_sync(self._scope.cancel, trio_token=self._token)
        self._thread.join(PATIENCE_S)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        server = HookServer(self.sink, lambda name, amount: self.counted.update({name: amount}), self._limits)
        with trio.CancelScope() as self._scope:
            listener = listen(self._socket)
            self._began.set()
            await server.serve(listener, self._socket)
