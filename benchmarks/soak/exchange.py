"""Trainings that exchange samples while the processes of their mount are killed: each reads each sample exactly once.

    .venv-dev/bin/python -m benchmarks.soak.exchange --json FILE             a million reads, some ten minutes
    .venv-dev/bin/python -m benchmarks.soak.exchange --immutable             the same, of a mount with -o immutable
    .venv-dev/bin/python -m benchmarks.soak.exchange --quick                 under a minute, for a look

Four processes read the same list through one mount, in batches and with two loader workers each: two whole trainings,
and two ranks that have half of each epoch. All take part in exchange. A fifth of the data is cached. Meanwhile the
manager or a worker of the mount is killed, in turns, every one to two seconds. Each process compares what it has read
in an epoch with what its sampler drew, and each sample with the number in its file; the first that is lost, repeated or
wrong ends the run with an error. The manager reports how many samples were exchanged since it was started last.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path

from rich.console import Console

from benchmarks.common.command import command_line
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.mounts import counts
from benchmarks.common.results import machine, plain_table, save, wide_console
from benchmarks.common.sources import write
from benchmarks.soak.daemon import Daemon
from benchmarks.soak.weather import Weather
from benchmarks.training.job_process import NUMBER_BYTES, JobProcess, Order

TABLE_WIDTH = 100
FILES, SIZE, CACHED = 2_000, 2_000, 0.2
QUICK_FILES = 500
BATCH = 16
READS, QUICK_READS = 1_000_000, 12_000
LATENCY_MS = 2.0
PAUSES_S = (1.0, 2.0)
VICTIMS = ("kill manager", "kill worker")
# Of each process: its rank, among how many.
RANKS = ((0, 1), (0, 1), (0, 2), (1, 2))


class Killed:
    """A mount, the trainings on it, and what befalls it."""

    def __init__(self, scratch: Path, files: int, immutable: bool, seed: int) -> None:
        self._rng = random.Random(seed)
        self._names = [f"{number:05d}" for number in range(files)]
        source = scratch / "source"
        source.mkdir()
        for number, name in enumerate(self._names):
            write(source / name, (b"%0*d" % (NUMBER_BYTES, number)).ljust(SIZE, b"."))
        self.daemon = Daemon(source, scratch, Weather())
        options = {"capacity": str(int(CACHED * files * SIZE)), "policy": "lru", "workers": "2"}
        options |= {"source.latency_ms": f"{LATENCY_MS:g}"} | ({"immutable": "true"} if immutable else {})
        self.daemon.mount(options)
        self._immutable = immutable
        self.kills = dict.fromkeys(VICTIMS, 0)
        self.reads = self.epochs = 0

    def run(self, processes: list[JobProcess], reads: int, seed: int) -> None:
        """Read so many samples in all, or a little more; raises RuntimeError at the first thing that is wrong."""
        per_round = sum(len(self._names) // ranks for _, ranks in RANKS)
        epochs = -(-reads // per_round)
        for number, (process, (rank, ranks)) in enumerate(zip(processes, RANKS, strict=True)):
            same = seed if ranks > 1 else seed + number + 1
            process.prepare(
                Order(
                    self.daemon.mountpoint,
                    self._names,
                    10,
                    "exchange",
                    same,
                    epochs,
                    BATCH,
                    0.0,
                    forgets=self._immutable,
                    warns=False,
                    rank=rank,
                    ranks=ranks,
                )
            )
        for process in processes:
            process.ready()
        for process in processes:
            process.begin()
        running = {process.pipe: process for process in processes}
        next_kill_s = time.monotonic() + self._rng.uniform(*PAUSES_S)
        while running:
            for pipe in wait(list(running), max(0.0, next_kill_s - time.monotonic())):
                epoch = running[pipe].receive()  # type: ignore[index]
                if epoch is None:
                    del running[pipe]  # type: ignore[arg-type]
                else:
                    self.reads += epoch.reads
                    self.epochs += 1
            if running and time.monotonic() >= next_kill_s:
                victim = VICTIMS[sum(self.kills.values()) % len(VICTIMS)]
                self.daemon.befall(victim, {"which": self._rng.random()})
                self.kills[victim] += 1
                next_kill_s = time.monotonic() + self._rng.uniform(*PAUSES_S)


def measure(arguments: argparse.Namespace, console: Console) -> None:
    reads = arguments.reads or (QUICK_READS if arguments.quick else READS)
    files = QUICK_FILES if arguments.quick else FILES
    with scratch_directory("exchange") as scratch, ExitStack() as stack:
        processes = [JobProcess() for _ in RANKS]
        for process in processes:
            stack.callback(process.end)
        killed = Killed(scratch, files, arguments.immutable, arguments.seed)
        stack.callback(killed.daemon.end)
        began_s = time.monotonic()
        killed.run(processes, reads, arguments.seed)
        lasted_s = time.monotonic() - began_s
        fetched = counts(killed.daemon.mountpoint)["origin_bytes"] / SIZE / killed.reads
        if wrong := killed.daemon.end():
            raise RuntimeError("; ".join(wrong))
    found = {"reads": killed.reads, "epochs": killed.epochs, "seconds": lasted_s, "fetched": fetched}
    table = plain_table("No sample was lost, repeated or wrong", "reads", "epochs", *VICTIMS, "fetched", "seconds")
    kills = [f"{killed.kills[victim]}" for victim in VICTIMS]
    table.add_row(f"{killed.reads:,}", f"{killed.epochs}", *kills, f"{fetched:.2f}", f"{lasted_s:.0f}")
    console.print(table)
    if arguments.json is not None:
        settings = {"files": files, "immutable": arguments.immutable, "seed": arguments.seed, "cached": CACHED}
        save(arguments.json, {"machine": machine(), "settings": settings, **found, "kills": killed.kills})


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--immutable", action="store_true", help="read a mount with -o immutable")
    parser.add_argument("--reads", type=int, metavar="N", help=f"default {READS}, quick {QUICK_READS}")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of orders and kills (default %(default)s)")
    arguments = parser.parse_args()
    console = wide_console(TABLE_WIDTH)
    return exit_status("exchange", lambda: measure(arguments, console), "interrupted; nothing is kept")


if __name__ == "__main__":
    sys.exit(main())
