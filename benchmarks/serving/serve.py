"""How fast a warm cache serves: spiderfs, with and without `immutable`, beside the bare disk, bindfs and rclone.

    .venv-dev/bin/python -m benchmarks.serving.serve             the whole measurement, about a quarter of an hour
    .venv-dev/bin/python -m benchmarks.serving.serve --quick     under a minute, for a look

All systems are mounted at the same time over the same files. They take turns round by round, so that other load on the
machine falls on all of them alike, and each round begins with another system. A ratio is the median of the ratios
within a round. Each system has served every file once before the clock runs, so its cache is warm. In a run every
reader process opens, reads and closes every file once, in an order of its own. "Dropped": before each run the kernel
forgets the pages that it has of a mount, so that each system answers from its own cache, and bindfs from the page cache
of the disk; that is measured where `immutable` takes part.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks import tables
from benchmarks.common.command import add_names, command_line, main
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.results import turns
from benchmarks.common.sources import write
from benchmarks.serving import process_cost
from benchmarks.serving.peers import PEERS, Mounted, install_missing, mounted
from benchmarks.serving.readers import open_read_close, read_all

READER_COUNTS = (1, 4)


@dataclass(frozen=True)
class Extent:
    file_sets: tuple[tuple[int, int], ...]
    """The number of files, and the bytes of each."""
    rounds: int


FULL = Extent(((2_000, 112_000), (20_000, 2_000)), rounds=5)
QUICK = Extent(((500, 112_000), (2_000, 2_000)), rounds=2)
# Of the daemon of an immutable mount, for 1,000 warm files.
MOST_CPU_MS = 1.0


@dataclass(frozen=True)
class FileSet:
    name: str
    root: Path
    names: list[bytes]  # below root
    total_bytes: int


@dataclass(frozen=True)
class Run:
    """One peer in one round: its rate, its latencies and its cost."""

    round: int
    files_per_s: float
    p50_us: float
    p99_us: float
    daemon_cpu_s_per_1000: float
    client_cpu_s_per_1000: float


@dataclass(frozen=True)
class Case:
    file_set: str
    readers: int
    dropped: bool
    runs: dict[str, list[Run]]  # by peer

    @property
    def title(self) -> str:
        return f"{self.file_set}, {self.readers} reader{'s' * (self.readers > 1)}{', dropped' * self.dropped}"


def made_files(root: Path, count: int, size: int) -> FileSet:
    """Files of random bytes, 1,000 to a directory."""
    random = np.random.default_rng(count)
    names = []
    for number in range(count):
        name = f"{number // 1000:03d}/{number:06d}"
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, random.bytes(size))
        names.append(os.fsencode(name))
    return FileSet(f"{count:,} x {size / 1000:g} kB", root, names, count * size)


def drop_pages(paths: Iterable[bytes]) -> None:
    """Have the kernel forget the pages that it has of these files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(
    peer: Mounted,
    files: FileSet,
    readers: int,
    round_number: int,
    read: Callable[[bytes], int] = open_read_close,
    rehearsals: int = 0,
) -> Run:
    """Measure one run (see `read_all`); raises RuntimeError if the peer served a wrong number of bytes."""
    processes = peer.processes()
    cpu_before = process_cost.cpu_seconds(processes)
    reading = read_all(paths_below(peer, files), readers, round_number, read, rehearsals)
    daemon_cpu_s = process_cost.cpu_seconds(processes) - cpu_before
    if reading.read_bytes != readers * files.total_bytes:
        raise RuntimeError(f"{peer.name} served {reading.read_bytes} bytes, not {readers * files.total_bytes}")
    return Run(
        round=round_number,
        files_per_s=reading.files / reading.wall_s,
        p50_us=reading.percentile_us(50),
        p99_us=reading.percentile_us(99),
        daemon_cpu_s_per_1000=daemon_cpu_s / reading.files / (1 + rehearsals) * 1000,
        client_cpu_s_per_1000=reading.cpu_s / reading.files * 1000,
    )


def compared(
    peers: list[Mounted], files: FileSet, readers: int, dropped: bool, rounds: int, progress: Progress
) -> Case:
    """Let the systems take turns; `dropped` leaves native out, whose pages the others need."""
    taking_part = [peer for peer in peers if not (dropped and peer.pid is None)]
    case = Case(files.name, readers, dropped, {peer.name: [] for peer in taking_part})
    task = progress.add_task(case.title, total=rounds * len(taking_part))
    # The system that comes after native is some 5 % slower than it is somewhere else in a round.
    for number, peer in turns(taking_part, rounds):
        if dropped:
            drop_pages(paths_below(peer, files))
        case.runs[peer.name].append(measure(peer, files, readers, number + 1))
        progress.advance(task)
    return case


def paths_below(peer: Mounted, files: FileSet) -> list[bytes]:
    root = os.fsencode(peer.root)
    return [root + b"/" + name for name in files.names]


def measured(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    install_missing(arguments.peers)
    extent: Extent = arguments.extent
    cases: list[Case] = []
    with scratch_directory("serve") as scratch, Progress(console=console, transient=True) as progress:
        file_sets = [made_files(scratch / "src" / str(size), count, size) for count, size in extent.file_sets]
        # Otherwise the disk still writes during the first rounds, which made them 30 % slower.
        os.sync()
        for files in file_sets:
            own_scratch = scratch / f"set-{file_sets.index(files)}"
            with ExitStack() as stack:
                peers = [stack.enter_context(mounted(name, files.root, own_scratch)) for name in arguments.peers]
                for peer in peers:
                    read_all(paths_below(peer, files), 1, seed=0)
                # rclone removes what it has copied from the page cache, which native and bindfs need: native fell from
                # 190,000 to 16,000 files/s in its first round. Reading the source once more puts the files back.
                read_all(paths_below(Mounted("native", files.root, None), files), 1, seed=0)
                # Files of 2 kB are left out: a READ of one costs what an open of one costs.
                kinds = (False, True) if files is file_sets[0] and "immutable" in arguments.peers else (False,)
                for dropped, readers in itertools.product(kinds, READER_COUNTS):
                    cases.append(compared(peers, files, readers, dropped, extent.rounds, progress))
    result = {"rounds": extent.rounds, "cases": [asdict(case) for case in cases]}
    print(f"{tables.serve(result)}\n{tables.serve_immutable(result)}")
    for case in cases:
        if "immutable" in case.runs and not case.dropped:
            cost_ms = tables.median(run.daemon_cpu_s_per_1000 for run in case.runs["immutable"]) * 1000
            print(f"{case.title}: {tables.aimed(cost_ms, MOST_CPU_MS, most=True)} ms of the daemon for 1,000 files")
    return result


if __name__ == "__main__":
    program = command_line(__doc__, FULL, QUICK)
    add_names(program, "--peers", PEERS, "systems to measure (default all)", default=PEERS)
    main(measured, program)
