"""Trainings that tests run beside themselves, and talk with: forks of the process that has imported torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from mounting import children, eventually, is_running

# The first time torch is imported, which takes 5 s, and a minute when ten programs share two cores.
PATIENCE_S = 120.0


def _run(main: Callable[..., None], *arguments: object) -> None:
    # Workers of its loaders would be forks of one more server by default. Such a server lives as long as they do, and
    # they as long as it does, so both would outlive a training that is killed.
    multiprocessing.set_start_method("fork", force=True)
    main(*arguments)


class TrainingProcess:
    """A process that runs `main(connection, *arguments)`; what it sends through its connection is heard here."""

    def __init__(self, main: Callable[..., None], *arguments: object) -> None:
        """`main` must be a function of a module, for the process imports that."""
        # Not fork: a test's process has threads.
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(main, theirs, *arguments))
        with theirs:
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def hear(self) -> Any:
        """What it says next; raises EOFError if it has ended."""
        assert self._connection.poll(PATIENCE_S), "the training says nothing"
        return self._connection.recv()

    def tell(self, what: object) -> None:
        self._connection.send(what)

    def ended_well(self, within_s: float) -> bool:
        """Whether it ends in time and without an error; it hears first that no one tells it any more."""
        self._connection.close()
        self._process.join(within_s)
        return self._process.exitcode == 0

    def kill(self) -> None:
        """Kill it and the workers of its loaders, which would use the mount for some more seconds."""
        self._connection.close()
        started = children(self.pid)
        for pid in started:
            started += children(pid)
        self._process.kill()
        self._process.join()
        self._process.close()
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not any(map(is_running, started)), what="the end of its loaders' workers")


@contextlib.contextmanager
def training_process(main: Callable[..., None], *arguments: object) -> Iterator[TrainingProcess]:
    """Start it; when the context ends, it is killed."""
    process = TrainingProcess(main, *arguments)
    try:
        yield process
    finally:
        process.kill()
