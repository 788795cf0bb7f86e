"""Reader processes that open, read and close files against the clock.

Each reader is a forked process that reads every file once, in an order of its own. All readers wait at a barrier, so
their start is not measured. The time of each call is taken from CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import numpy as np

# One call of read(2) takes a whole sample; only larger files need more calls.
READ_BYTES = 1 << 20
# A reader that takes longer hangs; the slowest peer needs about two minutes for the largest case.
PATIENCE_S = 900.0


@dataclass(frozen=True)
class Reading:
    """The results of all readers of one run together."""

    wall_s: float
    read_bytes: int
    cpu_s: float
    latencies_ns: np.ndarray

    @property
    def files(self) -> int:
        return len(self.latencies_ns)

    def percentile_us(self, percent: float) -> float:
        return float(np.percentile(self.latencies_ns, percent)) / 1000


def open_read_close(path: bytes, drops_pages: bool = False) -> int:
    """The system calls of a data loader reading one sample, without Python's file object around them.

    `drops_pages`: the kernel forgets the file's pages, as where the data are larger than memory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        total = 0
        while count := len(os.read(descriptor, READ_BYTES)):
            total += count
        if drops_pages:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return total
    finally:
        os.close(descriptor)


def _reader(
    paths: list[bytes], seed: int, barrier: Barrier, result: Connection, read: Callable[[bytes], int], rehearsals: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its readers
    random.Random(seed).shuffle(paths)
    for _ in range(rehearsals):
        for path in paths:
            read(path)
    latencies = np.empty(len(paths), dtype=np.int64)
    clock = time.monotonic_ns
    total = 0
    barrier.wait()
    cpu_before = resource.getrusage(resource.RUSAGE_SELF)
    begin = before = clock()
    for index, path in enumerate(paths):
        total += read(path)
        after = clock()
        latencies[index] = after - before
        before = after
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = cpu.ru_utime - cpu_before.ru_utime + cpu.ru_stime - cpu_before.ru_stime
    result.send((begin, before, total, cpu_s, latencies))


def read_all(
    paths: Sequence[bytes],
    readers: int,
    seed: int,
    read: Callable[[bytes], int] = open_read_close,
    rehearsals: int = 0,
) -> Reading:
    """Let `readers` processes read all of `paths`, each in its own order, drawn from `seed`.

    `read` reads one file and returns its size; each process reads all files `rehearsals` times before the clock runs.
    Raises RuntimeError if a reader fails (its traceback is on stderr). Leaves no reader behind, however it ends.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(readers)
    results: list[Connection] = []
    processes = []
    try:
        for number in range(readers):
            receiving, sending = context.Pipe(duplex=False)
            arguments = (list(paths), seed * 1000 + number, barrier, sending, read, rehearsals)
            process = context.Process(target=_reader, args=arguments, daemon=True)
            process.start()
            # The parent closes its copy; otherwise it would never see the end of a dead reader's pipe.
            sending.close()
            processes.append(process)
            results.append(receiving)
        parts = []
        for receiving in results:
            if not receiving.poll(PATIENCE_S):
                raise RuntimeError(f"a reader did not finish within {PATIENCE_S:.0f} s")
            try:
                parts.append(receiving.recv())
            except EOFError:
                raise RuntimeError("a reader failed") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
    return Reading(
        wall_s=(max(part[1] for part in parts) - min(part[0] for part in parts)) / 1e9,
        read_bytes=sum(part[2] for part in parts),
        cpu_s=sum(part[3] for part in parts),
        latencies_ns=np.concatenate([part[4] for part in parts]),
    )
