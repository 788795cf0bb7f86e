"""A process that runs one training after another, as they are asked for: a real data loader, and nothing is trained.

The process that measures starts some of these, and sends each through a pipe when to begin. So torch is imported once.
After a batch comes a step of fixed length in which nothing is computed, so that the cores are not the limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LOADER_WORKERS = 2
PATIENCE_S = 5.0
NUMBER_BYTES = 8  # each file begins with its number, in decimal digits


@dataclass(frozen=True)
class Order:
    """What one training is to do; `system` is one of "no sharing", "plan" and "exchange"."""

    mount: Path
    names: Sequence[str]
    labels: int
    system: str
    seed: int
    epochs: int
    batch: int
    step_s: float
    """The time after each batch."""


@dataclass(frozen=True)
class Epoch:
    """One epoch of one training, by the clock `time.monotonic`, which all processes share."""

    number: int
    lasted_s: float
    taken_s: list[float]
    """When each batch was taken."""
    reads: int


class JobProcess:
    """One of these processes, seen from the one that measures; `end` must be called."""

    def __init__(self) -> None:
        self.pipe, other = Pipe()
        # Not one of multiprocessing's: those are ended with each mount, as loader workers are.
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve({other.fileno()})"],
            pass_fds=[other.fileno()],
            cwd=ROOT,
        )
        other.close()

    def prepare(self, order: Order) -> None:
        """Have the training made; `ready` must follow."""
        self.pipe.send(order)

    def ready(self) -> None:
        """Wait until the training is made and its plan, if it has one, was declared."""
        assert self.receive() == "ready"

    def begin(self) -> None:
        self.pipe.send("begin")

    def receive(self) -> Any:
        """What the training says next: an Epoch after each, then None; raises RuntimeError if it has failed.

        It has failed, too, if it has not read each sample of an epoch exactly once.
        """
        try:
            said = self.pipe.recv()
        except EOFError:
            raise RuntimeError("a training has died") from None
        if isinstance(said, Exception):
            raise RuntimeError(f"a training has failed: {said}")
        return said

    def end(self) -> None:
        self.pipe.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(descriptor: int) -> None:
    """Run the trainings that are asked for through a pipe, until it is closed."""
    pipe = Connection(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            order: Order = pipe.recv()
            try:
                _train(order, pipe)
            except (OSError, RuntimeError, ValueError) as error:
                pipe.send(RuntimeError(str(error)))
                continue
            pipe.send(None)


def _train(order: Order, pipe: Connection) -> None:
    # Imported here, so that the process that measures does not wait for torch.
    import torch
    from torch.utils.data import DataLoader

    import trainer_hook
    from benchmarks.common.mounts import leave_signals_to_the_parent

    torch.set_num_threads(1)
    files = Files(order.mount, order.names, order.labels)
    loader: DataLoader[Any] = DataLoader(
        files,  # type: ignore[arg-type]
        order.batch,
        shuffle=True,
        generator=torch.Generator().manual_seed(order.seed),
        num_workers=LOADER_WORKERS,
        persistent_workers=True,
        worker_init_fn=leave_signals_to_the_parent,
    )
    with contextlib.ExitStack() as stack:
        if order.system != "no sharing":
            stack.enter_context(trainer_hook.plan(order.mount, loader, share=order.system == "exchange"))
        pipe.send("ready")
        pipe.recv()
        for number in range(order.epochs):
            began_s = time.monotonic()
            taken_s: list[float] = []
            read: list[int] = []
            for batch in loader:
                taken_s.append(time.monotonic())
                read += batch.tolist()
                time.sleep(order.step_s)
            if sorted(read) != list(range(len(files))):
                raise RuntimeError(f"in epoch {number} it did not read each of its samples exactly once")
            pipe.send(Epoch(number, time.monotonic() - began_s, taken_s, len(read)))


class Files:
    """The files of a mount as a data set; a sample is the number that its file holds."""

    def __init__(self, mount: Path, names: Sequence[str], labels: int) -> None:
        self.samples = [(os.path.join(mount, name), number % labels) for number, name in enumerate(names)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        with open(self.samples[index][0], "rb", buffering=0) as file:
            content = file.read()
        number = int(content[:NUMBER_BYTES])
        if number != index:
            raise RuntimeError(f"file {index} has the bytes of file {number}")
        return number
