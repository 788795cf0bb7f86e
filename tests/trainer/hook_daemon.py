"""A hook server that runs in a thread and remembers the messages that it gets, for tests without trio."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from benchmarks.fakes import RecordingSink
from spiderfs.daemon.training.connection.hook_server import HookServer, ServerLimits, listen
from trainer_hook.connection import introduce
from trainer_hook.connection.client import HookClient

# Only a test that fails waits for so long; beside others an epoch with loader workers has taken 18 s.
PATIENCE_S = 90.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


class Connected(HookClient):
    """A client that is connected before the training goes on.

    A daemon that is connected to later hears nothing of the epochs that are over, and the epochs of tests take a few
    milliseconds.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        until(lambda: self.connected.is_set() or self._gone_said)

    def close(self, timeout_s: float = PATIENCE_S) -> None:
        """On a busy machine a goodbye has taken more than the two seconds after which a hook gives up."""
        super().close(max(timeout_s, PATIENCE_S))


class HookDaemon:
    """A directory `mount` that the hook takes for a mount: its control file names the socket.

    It is a context manager that can be entered several times. While it is, who attaches is connected at once.
    """

    def __init__(self, mount: Path, sink: RecordingSink | None = None, limits: ServerLimits | None = None) -> None:
        self.mount = mount
        self.sink = sink or RecordingSink()
        self.counted: Counter[str] = Counter()
        self._limits = limits or ServerLimits()
        self._patch = pytest.MonkeyPatch()
        self._socket = mount / "hook.sock"
        control = mount / ".spiderfs"
        control.mkdir(parents=True, exist_ok=True)
        (control / "hook").write_bytes(bytes(self._socket) + b"\n")

    def __enter__(self) -> HookDaemon:
        self._began = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main,))
        self._thread.start()
        assert self._began.wait(PATIENCE_S)
        self._patch.setattr(introduce, "HookClient", Connected)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        trio.from_thread.run_sync(self._scope.cancel, trio_token=self._token)
        self._thread.join(PATIENCE_S)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        server = HookServer(self.sink, lambda name, amount: self.counted.update({name: amount}), self._limits)
        with trio.CancelScope() as self._scope:
            listener = listen(self._socket)
            self._began.set()
            await server.serve(listener, self._socket)
