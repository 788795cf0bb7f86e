"""Several trainings on one mount: what each fetches from a slow source, with exchange and without, and its time.

    .venv-dev/bin/python -m benchmarks.training.jobs_mount --json FILE     nine minutes on a quiet machine
    .venv-dev/bin/python -m benchmarks.training.jobs_mount --quick         under a minute, for a look

Each training is a process with a PyTorch DataLoader of two workers. After each batch comes a step of fixed length in
which nothing is computed. What loaders have in hand must be far less than the cache holds, so batches are small. The
source answers 5 ms late. Each run has a mount of its own with an empty cache; systems take turns, round by round:

    no sharing   the policy lru; nothing is published to the mount
    plan         trainer_hook.plan
    exchange     trainer_hook.plan(..., share=True)

`fetched` is what was read of the source for each sample that was read, in times of a sample's bytes: from the moment in
which the last training has ended its first epoch, which fills the cache, until the first one ends its last. `bound` is
(1 - c) / K for K equally fast trainings; c is what the sections of the cache hold at the end, for landing takes a part.
`waits` are opens that had to wait for the source, as a share of the samples read. In each epoch of each training every
sample must be read exactly once, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import tables
from benchmarks.common.command import add_names, command_line, main
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.mounts import counts, mounted, stats
from benchmarks.common.sources import write
from benchmarks.training.job_process import NUMBER_BYTES, Epoch, JobProcess, Order
from spiderfs.store.store import LANDING

LATENCY_MS = 5.0
SYSTEMS = ("no sharing", "plan", "exchange")
BATCH = 8
FOLDERS = LABELS = 10
CACHED = 0.2
# How many jobs there are in each situation.
SITUATIONS = {"1 job": 1, "2 jobs": 2, "3 jobs": 3, "4 jobs": 4}
QUICK_SITUATIONS = ("1 job", "3 jobs")


@dataclass(frozen=True)
class Extent:
    files: int
    kilobytes: int
    epochs: int
    rounds: int
    step_us: int
    """The length of a step, for each sample of a batch."""

    def __post_init__(self) -> None:
        if self.files % BATCH or self.epochs < 2:
            raise ValueError(f"--files is a multiple of {BATCH}, and --epochs at least 2")


FULL = Extent(files=1_600, kilobytes=12, epochs=3, rounds=3, step_us=1_500)
QUICK = Extent(files=400, kilobytes=12, epochs=2, rounds=1, step_us=1_000)


@dataclass(frozen=True)
class Found:
    """The figures of one run; see the module."""

    situation: str
    system: str
    jobs: int
    cached: float
    """The share of the data set's bytes that the cache holds at the end, landing left out."""
    fetched: float
    waits: float
    epoch_s: float
    bound: float


def made(source: Path, extent: Extent) -> list[str]:
    """The names of new files, each of which begins with its number."""
    names = [f"{number % FOLDERS}/{number:05d}" for number in range(extent.files)]
    for folder in range(FOLDERS):
        (source / str(folder)).mkdir(parents=True)
    for number, name in enumerate(names):
        write(source / name, (b"%0*d" % (NUMBER_BYTES, number)).ljust(extent.kilobytes << 10, b"."))
    return names


def run(
    processes: list[JobProcess], situation: str, system: str, seed: int, names: list[str], scratch: Path, extent: Extent
) -> Found:
    """Run the trainings of a situation side by side."""
    sample_bytes, jobs = extent.kilobytes << 10, SITUATIONS[situation]
    step_s = BATCH * extent.step_us / 1e6
    capacity = int(CACHED * len(names) * sample_bytes)
    with mounted(scratch / "source", scratch / "run", capacity, LATENCY_MS, "policy=lru") as mount:
        running: dict[JobProcess, Order] = {}
        for number, job in enumerate(processes[:jobs]):
            seed_of_job = 100 * seed + number
            running[job] = Order(mount, names, LABELS, system, seed_of_job, extent.epochs, BATCH, step_s)
            job.prepare(running[job])
        for job in running:
            job.ready()
        for job in running:
            job.begin()
        done, begin, end = received(mount, list(running), extent.epochs)
        sections = stats(mount)["sections"]
    cached = sum(section["entries"] for name, section in sections.items() if name != LANDING) / len(names)
    reads = BATCH * sum(begin.at_s < at_s <= end.at_s for epoch in done for at_s in epoch.taken_s)
    return Found(
        situation,
        system,
        jobs,
        cached,
        (end.origin_bytes - begin.origin_bytes) / sample_bytes / reads,
        (end.waits - begin.waits) / reads,
        statistics.fmean(epoch.lasted_s for epoch in done if epoch.number),
        (1 - cached) / jobs,
    )


def received(mount: Path, jobs: list[JobProcess], epochs: int) -> tuple[list[Epoch], Moment, Moment]:
    """All epochs of these trainings, and the moments between which fetches count."""
    found: list[Epoch] = []
    begun: set[JobProcess] = set()
    running = dict.fromkeys(jobs)
    begin = end = None
    while running:
        by_pipe = {job.pipe: job for job in running}
        for pipe in wait(list(by_pipe)):
            job = by_pipe[pipe]  # type: ignore[index]
            epoch = job.receive()
            if epoch is None:
                del running[job]
                continue
            found.append(epoch)
            begun.add(job)
            if begin is None and len(begun) == len(jobs):
                begin = Moment.now(mount)
            if end is None and epoch.number == epochs - 1:
                end = Moment.now(mount)
    assert begin is not None
    assert end is not None
    return found, begin, end


@dataclass(frozen=True)
class Moment:
    """What a mount has counted by a moment of the clock `time.monotonic`."""

    at_s: float
    origin_bytes: int
    waits: int

    @classmethod
    def now(cls, mount: Path) -> Moment:
        counted = counts(mount)
        return cls(time.monotonic(), counted["origin_bytes"], counted["opens"] - counted["opens_hit"])


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    found: list[Found] = []
    with scratch_directory("jobs") as scratch, ExitStack() as stack:
        processes = [JobProcess() for _ in range(max(SITUATIONS.values()))]
        for process in processes:
            stack.callback(process.end)
        names = made(scratch / "source", arguments.extent)
        for number in range(arguments.extent.rounds):
            turn = number % len(arguments.systems)
            for situation in arguments.situations or (QUICK_SITUATIONS if arguments.quick else SITUATIONS):
                for system in arguments.systems[turn:] + arguments.systems[:turn]:
                    with console.status(f"{situation}, {system}"):
                        found.append(run(processes, situation, system, number + 1, names, scratch, arguments.extent))
    extent = asdict(arguments.extent)
    result = {"extent": extent, "runs": [asdict(run) for run in found]}
    print(tables.jobs_mount(result))
    return result


if __name__ == "__main__":
    program = command_line(__doc__, FULL, QUICK)
    add_names(program, "--situations", SITUATIONS, "measure these alone")
    add_names(program, "--systems", SYSTEMS, "measure these alone", SYSTEMS)
    main(measure, program)
