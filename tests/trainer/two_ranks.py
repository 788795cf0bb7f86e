"""A distributed training of two processes on this machine."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

# The first time torch is imported, which takes 5 s, and a minute when ten programs share two cores.
PATIENCE_S = 240.0


def in_two_ranks(train: Callable[[int, str], None], mount: Path) -> set[int | None]:
    """Run `train(rank, mount)`, which begins with `join_two_ranks`, in two processes; returns their pids."""
    return in_processes(train, mount, 2)


def in_processes(train: Callable[[int, str], None], mount: Path, count: int) -> set[int | None]:
    """Run `train(number, mount)` in so many processes; returns their pids.

    It must be a function of a module, for the processes import that.
    """
    # Not fork: a test's process has threads.
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=train, args=(rank, str(mount))) for rank in range(count)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(PATIENCE_S)
            assert process.exitcode == 0
    finally:
        for process in ranks:
            process.kill()
    return {process.pid for process in ranks}


def join_two_ranks(rank: int, mount: str) -> None:
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo", init_method=f"file://{mount}/ranks", rank=rank, world_size=2)
