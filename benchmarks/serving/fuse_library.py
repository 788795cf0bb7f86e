"""The cost of each binding to the kernel: one file system, served over both, in turns.

    .venv-dev/bin/python -m benchmarks.serving.fuse_library             the whole measurement, about ten minutes
    .venv-dev/bin/python -m benchmarks.serving.fuse_library --quick     under a minute, for a look

The same plain `Filesystem`, over a store of its own each, is served by (the daemons are fuse_servers.py)

    kernel           spiderfs' own code for the protocol, as a mount with binding=kernel has it
    pyfuse3          pyfuse3, as a mount with binding=pyfuse3 has it: it looks before it waits for a request
    pyfuse3-plain    the same, with pyfuse3's own wait

All run in one process without manager, by the same interpreter with the same trio, and agree on the same things with
the kernel at the mount. There is one exception: pyfuse3 has no call for a listing kept by the kernel (FOPEN_CACHE_DIR).

Systems take turns round by round, each round beginning with another one; a ratio is kernel by other within a round, its
median and its range over the rounds. Before anything is measured, all must show the same names, sizes and times.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.common.command import add_numbers, command_line
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.results import machine, save
from benchmarks.serving import process_cost
from benchmarks.serving.peers import Mounted, shown
from benchmarks.serving.readers import read_all
from benchmarks.serving.serve import FileSet, made_files, measure, paths_below
from benchmarks.serving.workloads import LATENCY_MS, LOADERS, loaders, reading, seconds

KERNEL = "kernel"
SYSTEMS = (KERNEL, "pyfuse3", "pyfuse3-plain")
READER_COUNTS = (1, 4)
# (number of files, bytes of each, how often each is read in a run): photographs as in ImageNet, and files that cost
# nothing but their requests. A run must be long for the clock of processor time, which goes in steps of 10 ms.
FILE_SETS = ((2_000, 112_000, 5), (10_000, 2_000, 1))


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    share: float  # of FILE_SETS
    names: int  # of the scan
    epoch: int  # files
    rounds: int


FULL = Extent(share=1.0, names=20_000, epoch=2_000, rounds=7)
QUICK = Extent(share=0.1, names=3_000, epoch=200, rounds=2)


@dataclass(frozen=True)
class Row:
    """One thing that was measured: of each system, a figure a round."""

    what: str
    unit: str
    less_is_better: bool
    figures: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SYSTEMS})

    def median(self, system: str) -> float:
        return statistics.median(self.figures[system])

    def ratios(self, system: str) -> list[float]:
        """kernel by `system`, in each round."""
        return [kernel / other for kernel, other in zip(self.figures[KERNEL], self.figures[system], strict=True)]


def turns(round_number: int) -> list[str]:
    """The systems in the order of this round: whoever comes first follows another one's work."""
    first = round_number % len(SYSTEMS)
    return [*SYSTEMS[first:], *SYSTEMS[:first]]


def served(system: str, source: Path, scratch: Path, latency_ms: float = 0) -> AbstractContextManager[Mounted]:
    """`source` through `system`; its mount point, store and log lie in the directory `scratch`."""
    mountpoint = scratch / f"mnt-{system}"
    arguments = [system, str(source), str(mountpoint), str(scratch / f"store-{system}"), f"{latency_ms:g}"]
    command = [sys.executable, "-m", "benchmarks.serving.fuse_servers", *arguments]
    return shown(system, command, mountpoint, scratch / f"{system}.log")


def walk(root: Path) -> list[tuple[str, os.stat_result]]:
    """Every file below; unlike os.walk, raises what a system answers to a listing."""
    found = []
    for directory, _, names in os.walk(root, onerror=_raise):
        for name in names:
            path = os.path.join(directory, name)
            found.append((path, os.stat(path)))
    return found


def _raise(error: OSError) -> None:
    raise error


def seen(root: Path) -> list[tuple[str, int, int]]:
    """Every file below: path, size, time of change."""
    return sorted((os.path.relpath(path, root), it.st_size, it.st_mtime_ns) for path, it in walk(root))


def check_alike(source: Path, peers: list[Mounted]) -> None:
    """Raises RuntimeError if a system shows anything but the source."""
    expected = seen(source)
    for peer in peers:
        if seen(peer.root) != expected:
            raise RuntimeError(f"{peer.name} does not show what the source holds")


def cost_us(peer: Mounted, call: Callable[[], float], count: int) -> tuple[float, float]:
    """Run `call`; returns its result, and the daemon's processor time meanwhile: microseconds for each of `count`."""
    processes = peer.processes()
    before_s = process_cost.cpu_seconds(processes)
    result = call()
    return result, (process_cost.cpu_seconds(processes) - before_s) / count * 1e6


# -- what is measured


def warm(peers: dict[str, Mounted], files: FileSet, rounds: int) -> Iterator[Row]:
    """Open, read and close files that have been read before."""
    for readers in READER_COUNTS:
        case = f"{files.name}, readers: {readers}"
        rate, p50, cpu = Row(case, "files/s", False), Row(case, "p50 us", True), Row(case, "daemon us/file", True)
        for number in range(rounds):
            for name in turns(number):
                run = measure(peers[name], files, readers, number)
                rate.figures[name].append(run.files_per_s)
                p50.figures[name].append(run.p50_us)
                cpu.figures[name].append(run.daemon_cpu_s_per_1000 * 1000)
        yield from (rate, p50, cpu)


def scan(peers: dict[str, Mounted], directory: str, names: int, rounds: int) -> Iterator[Row]:
    """os.walk and stat of names that have been listed before."""
    case = f"walk and stat {names:,} names again"
    took, cpu = Row(case, "ms", True), Row(case, "daemon us/name", True)
    for number in range(rounds):
        for name in turns(number):
            peer = peers[name]
            took_s, cost = cost_us(peer, lambda peer=peer: seconds(walk, peer.root / directory), names)  # type: ignore[misc]
            took.figures[name].append(took_s * 1000)
            cpu.figures[name].append(cost)
    yield took
    yield cpu


def epoch(scratch: Path, files: FileSet, rounds: int) -> Iterator[Row]:
    """Every file once, over a slow source, into an empty store; names and attributes are known."""
    case = f"first epoch, {len(files.names):,} x 112 kB, {LATENCY_MS} ms away, readers: {LOADERS}"
    rate, cpu = Row(case, "files/s", False), Row(case, "daemon us/file", True)
    names = [os.fsdecode(name) for name in files.names]
    for number in range(rounds):
        random.Random(number).shuffle(names)
        for name in turns(number):
            with served(name, files.root, scratch / f"epoch-{number}", LATENCY_MS) as peer:
                walk(peer.root)
                rate_found, cost = cost_us(peer, lambda peer=peer: loaders(names, reading(peer)), len(names))  # type: ignore[misc]
            rate.figures[name].append(rate_found)
            cpu.figures[name].append(cost)
    yield rate
    yield cpu


def measured(extent: Extent, scratch: Path) -> Iterator[Row]:
    sources = scratch / "src"
    file_sets = [
        made_files(sources / str(size), max(int(count * extent.share), 1), size) for count, size, _ in FILE_SETS
    ]
    for number in range(extent.names):
        directory = sources / "names" / f"{number // 1000:03d}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{number:06d}.jpg").touch()
    # Else the disk still writes them during the first rounds.
    os.sync()
    with ExitStack() as stack:
        peers = {name: stack.enter_context(served(name, sources, scratch / "warm")) for name in SYSTEMS}
        check_alike(sources, list(peers.values()))
        for files, (_, _, times) in zip(file_sets, FILE_SETS, strict=True):
            below = FileSet(
                files.name, sources, [_below(files, sources) + name for name in files.names], files.total_bytes
            )
            for peer in peers.values():
                read_all(paths_below(peer, below), 1, seed=0)
            yield from warm(peers, repeated(below, times), extent.rounds)
        yield from scan(peers, "names", extent.names, extent.rounds)
    photographs = file_sets[0]
    names = photographs.names[: extent.epoch]
    yield from epoch(scratch, replace(photographs, names=names), extent.rounds)


def _below(files: FileSet, root: Path) -> bytes:
    return os.fsencode(files.root.relative_to(root)) + b"/"


def repeated(files: FileSet, times: int) -> FileSet:
    """Each file `times` times."""
    return replace(files, names=files.names * times, total_bytes=files.total_bytes * times)


# -- what is said


def tables(rows: list[Row]) -> Iterator[Table]:
    """One table for each operation that was measured, with all figures of that operation."""
    for what in dict.fromkeys(row.what for row in rows):
        shown_as = Table(title=what, title_justify="left", box=box.SIMPLE, show_edge=False, pad_edge=False)
        for heading in ("", "system", "median", "range", "kernel/it", "range"):
            shown_as.add_column(heading, justify="left" if heading in ("", "system") else "right", no_wrap=True)
        for row in rows:
            if row.what == what:
                for cells in lines(row):
                    shown_as.add_row(*cells)
        yield shown_as


def lines(row: Row) -> Iterator[tuple[str, ...]]:
    unit = f"{row.unit} {'↓' if row.less_is_better else '↑'}"
    for system, figures in row.figures.items():
        ratios = row.ratios(system) if system != KERNEL and min(figures) > 0 else []
        yield (
            unit if system == KERNEL else "",
            system,
            figure(row.median(system)),
            f"{figure(min(figures))}-{figure(max(figures))}",
            f"{statistics.median(ratios):.2f}" if ratios else "",
            f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "",
        )


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def versions() -> dict[str, str]:
    libfuse = subprocess.run(["pkg-config", "--modversion", "fuse3"], capture_output=True, text=True, check=False)
    return {"pyfuse3": version("pyfuse3"), "libfuse3": libfuse.stdout.strip(), "trio": version("trio")}


def run(arguments: argparse.Namespace, console: Console) -> dict[str, object]:
    extent = QUICK if arguments.quick else FULL
    extent = replace(extent, rounds=arguments.rounds or extent.rounds)
    rows = []
    with scratch_directory("fuse-library") as scratch:
        for row in measured(extent, scratch):
            rows.append(row)
            medians = ", ".join(f"{name} {figure(row.median(name))}" for name in SYSTEMS)
            console.print(f"{row.what}, {row.unit}: {medians}", highlight=False)
    for shown_as in tables(rows):
        console.print(shown_as)
    console.print("↑ more is better, ↓ less is better; kernel/it: the median and range of the ratios within a round")
    return {
        "machine": machine(),
        "versions": versions(),
        "extent": asdict(extent),
        "rows": [
            asdict(row) | {"ratios": {name: row.ratios(name) for name in SYSTEMS if min(row.figures[name]) > 0}}
            for row in rows
        ],
    }


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    add_numbers(parser, FULL, QUICK, rounds="rounds")
    arguments = parser.parse_args(words)
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("at least one round")
    return arguments


def main() -> int:
    arguments = parse_arguments()

    def measure_all() -> None:
        save(arguments.json, run(arguments, Console()))

    return exit_status("fuse_library", measure_all, "interrupted; everything is unmounted")


if __name__ == "__main__":
    sys.exit(main())
