"""The process in which a training's loader is measured, as `spiderfs profile` sees it.

What that process does is in `trainer_hook/refurbishing/profiled_loader.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from spiderfs.errors import UsageError
from spiderfs.forms.profile import Cost
from spiderfs.profiling.private_mount import PrivateMount

# The loader's workers and its main process end with their input, after the batch that they are at.
_PATIENCE_S = 30.0


@dataclass(frozen=True)
class Pass:
    cost: Cost
    kept_bytes: float
    """Bytes of a sample as the loader has given it, if it was kept so."""


class Kept(Enum):
    """Which samples a pass takes: as the loader makes them, as it has given them before, or these, to be kept anew."""

    NO = "no"
    READ = "read"
    ANEW = "anew"


class LoaderProcess:
    """The loader that `module:function` makes of one directory after the other."""

    def __init__(self, process: subprocess.Popen[str], named: str) -> None:
        """Raises UsageError if there is no such function."""
        self._process = process
        self._named = named
        # Until it has imported what it needs, SIGINT would make it print where it was.
        self._interrupt = signal.SIGTERM
        self._answer()
        self._interrupt = signal.SIGINT

    def open(self, mount: PrivateMount) -> Loader:
        """The loader of what this mount shows, in place of those that were opened before; raises UsageError."""
        return Loader(self, mount, **self.ask(directory=os.fspath(mount.root)))

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        # If it has ended, its last answer says why.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            line = self._process.stdout.readline()
        except BaseException:
            self._process.send_signal(self._interrupt)
            raise
        if not line:
            raise UsageError(f"--loader {self._named}: its process ended with status {self._process.wait()}; see above")
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise UsageError(f"--loader {self._named}: {told['error']}")
        return told


@dataclass(frozen=True)
class Loader:
    """One loader of what a mount shows: samples of its data set and of a batch, and whether there are steps."""

    process: LoaderProcess
    mount: PrivateMount
    samples: int
    workers: int
    batch: int
    steps: bool

    def measure(self, first: int, count: int, kept: Kept = Kept.NO) -> Pass:
        """A pass over samples from the `first` on."""
        before_s = self.mount.cpu_s()
        told = self.process.ask(first=first, count=count, kept=kept.value)
        mount_s = self.mount.cpu_s() - before_s
        samples = told["samples"]
        return Pass(
            Cost(
                told["worker_cpu_s"] / samples,
                told["worker_wait_s"] / samples,
                (mount_s + told["main_cpu_s"]) / samples,
            ),
            told["kept_bytes"] / samples,
        )

    def step_s(self, count: int) -> float:
        """Seconds of a step of the training, on batches of the last pass."""
        return float(self.process.ask(steps=count)["step_s"])


@contextmanager
def loader_process(named: str) -> Iterator[LoaderProcess]:
    """The process for this `module:function`, which is looked for where the user is, as `python -m` does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer_hook.refurbishing.profiled_loader", named],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # Ctrl-C reaches all processes of a terminal's group; this one is told by who waits for it
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield LoaderProcess(process, named)
    finally:
        # What it has not read of a question is of no use any more.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
