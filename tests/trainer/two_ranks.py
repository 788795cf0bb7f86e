"""A distributed training of two processes on this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

# The first time torch is imported, which takes 5 s, and a minute when ten programs share two cores.
PATIENCE_S = 240.0


def in_two_ranks(train: Callable[[int, str], None], mount: Path) -> set[int | None]:
    """Run `train(rank, mount)` in two processes, which are the ranks of a distributed training; returns their pids."""
    return in_processes(partial(_joined, train), mount, 2)


def _joined(train: Callable[[int, str], None], rank: int, mount: str) -> None:
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo", init_method=f"file://{mount}/ranks", rank=rank, world_size=2)
    train(rank, mount)
    torch.distributed.destroy_process_group()


def in_processes(train: Callable[[int, str], None], mount: Path, count: int) -> set[int | None]:
    """Run `train(number, mount)` in so many processes; returns their pids.

    It must be a function of a module. One process imports that module and forks the others, so they share its imports.
    """
    # Not fork: a test's process has threads.
    context = multiprocessing.get_context("forkserver")
    pids, told = context.Pipe(duplex=False)
    first = context.Process(target=_fork_all, args=(told, train, str(mount), count))
    first.start()
    try:
        first.join(PATIENCE_S)
        assert first.exitcode == 0
        return set(pids.recv())
    finally:
        assert first.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)
        first.kill()
        first.join()


def _fork_all(told: Connection, train: Callable[[int, str], None], mount: str, count: int) -> None:
    os.setpgid(0, 0)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=train, args=(number, mount)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    told.send([process.pid for process in processes])
    assert [process.exitcode for process in processes] == [0] * count
