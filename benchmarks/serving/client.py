"""How fast `spiderfs.client` reads a warm cache, beside the page cache and the mount in the same run.

    .venv-dev/bin/python -m benchmarks.serving.client            about three minutes
    .venv-dev/bin/python -m benchmarks.serving.client --quick    for a look

All ways of reading take turns round by round; a ratio is the median of the ratios within a round. Every reader is a
process that is forked for the run and reads every file once, in an order of its own. "new" is the first pass of a new
process, which maps the cache's pages while it reads; "again" is its second pass, as in the loader workers of a second
epoch. CPU is the time of the readers plus that of the daemon, which is notified of every open either way.
"""

from __future__ import annotations

import argparse
import builtins
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common.command import command_line
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.results import machine, plain_table, save, wide_console
from benchmarks.serving import process_cost
from benchmarks.serving.peers import Mounted, mounted
from benchmarks.serving.readers import open_read_close, read_all
from benchmarks.serving.serve import FileSet, made_files, paths_below
from spiderfs import client
from spiderfs.client.client import TABLE
from spiderfs.shared.bypass_terms import lost_record

READER_COUNTS = (1, 4)
PASSES = {"new": 0, "again": 1}
TARGET = 0.5  # of native, for read_bytes
TABLE_WIDTH = 100


def _read_bytes(path: bytes) -> int:
    return len(client.read_bytes(path))


def _client_open(path: bytes) -> int:
    with client.open(path, "rb") as file:
        return len(file.read())


def _built_in_open(path: bytes) -> int:
    with builtins.open(path, "rb") as file:
        return len(file.read())


# The ways to read: from which system, and by which function.
WAYS: dict[str, tuple[str, Callable[[bytes], int]]] = {
    "native": ("native", open_read_close),
    "native, open()": ("native", _built_in_open),
    "mount": ("spiderfs", open_read_close),
    "client.read_bytes": ("spiderfs", _read_bytes),
    "client.open": ("spiderfs", _client_open),
}


@dataclass(frozen=True)
class Run:
    files_per_s: float
    p50_us: float
    p99_us: float
    reader_cpu_us: float
    daemon_cpu_us: float


@dataclass(frozen=True)
class Case:
    readers: int
    process: str
    runs: dict[str, list[Run]]  # by way

    def ratio(self, way: str, to: str) -> float:
        pairs = zip(self.runs[way], self.runs[to], strict=True)
        return statistics.median(ours.files_per_s / theirs.files_per_s for ours, theirs in pairs)

    def median(self, way: str, field: str) -> float:
        return float(statistics.median(getattr(run, field) for run in self.runs[way]))


def measure(way: str, peers: dict[str, Mounted], files: FileSet, readers: int, process: str, seed: int) -> Run:
    where, read = WAYS[way]
    peer = peers[where]
    before_s = process_cost.cpu_seconds(peer.processes())
    reading = read_all(paths_below(peer, files), readers, seed, read, PASSES[process])
    daemon_s = process_cost.cpu_seconds(peer.processes()) - before_s
    if reading.read_bytes != readers * files.total_bytes:
        raise RuntimeError(f"{way} gave {reading.read_bytes} bytes, not {readers * files.total_bytes}")
    return Run(
        files_per_s=reading.files / reading.wall_s,
        p50_us=reading.percentile_us(50),
        p99_us=reading.percentile_us(99),
        reader_cpu_us=reading.cpu_s / reading.files * 1e6,
        # The time is that of all passes, in each of which each file was read once.
        daemon_cpu_us=daemon_s / reading.files / (1 + PASSES[process]) * 1e6,
    )


def parts(root: Path, files: FileSet) -> dict[str, float]:
    """CPU microseconds for each part of a read, in one process, and what the first pass adds, with its page faults."""
    paths = [os.fsencode(root) + b"/" + name for name in files.names]

    def each(call: Callable[[bytes], object], arguments: list[bytes]) -> tuple[float, float]:
        before, faults = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for argument in arguments:
            call(argument)
        taken = time.process_time() - before
        return taken / len(arguments) * 1e6, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / len(paths)

    found: dict[str, float] = {}
    client.read_bytes(paths[0])
    found["whole, first pass"], found["page faults, first pass"] = each(client.read_bytes, paths)
    found["whole"], found["page faults"] = each(client.read_bytes, paths)
    one = client.Client(root)
    one.read_bytes(files.names[0])
    cache = one._cache
    assert cache is not None
    inodes = {path: os.stat(path).st_ino for path in paths}
    now = time.time()
    above = files.names[0].rpartition(b"/")[0]
    directory = cache._directory(above, now)
    assert directory is not None
    leaves = [name.rpartition(b"/")[2] for name in files.names if name.startswith(above)]
    found["copy and checksum"], _ = each(lambda path: cache._store.content.copy(inodes[path]), paths)
    found["name"], _ = each(lambda leaf: cache._catalogue.find(directory.inode, leaf), leaves)
    found["telling the manager"], _ = each(lambda _: cache._report(lost_record(now, 0), now), paths)
    found["mount table"], _ = each(lambda _: TABLE.state(), paths)
    return found


def table(case: Case) -> Table:
    title = f"{case.readers} reader{'s' * (case.readers > 1)}, {case.process}"
    shown = plain_table(title, "", "files/s", "spread", "p50 us", "p99 us", "CPU us a file", "x native", "x mount")
    for way, runs in case.runs.items():
        rates = [run.files_per_s for run in runs]
        shown.add_row(
            way,
            f"{statistics.median(rates):,.0f}",
            f"{min(rates) / 1000:.3g}k-{max(rates) / 1000:.3g}k",
            f"{case.median(way, 'p50_us'):,.0f}",
            f"{case.median(way, 'p99_us'):,.0f}",
            f"{case.median(way, 'reader_cpu_us'):.0f}+{case.median(way, 'daemon_cpu_us'):.0f}",
            f"{case.ratio(way, 'native'):.2f}",
            f"{case.ratio(way, 'mount'):.2f}",
        )
    return shown


def run(console: Console, count: int, size: int, rounds: int) -> dict[str, object]:
    cases = []
    with scratch_directory("client") as scratch, ExitStack() as stack:
        files = made_files(scratch / "src", count, size)
        os.sync()
        peers = {name: stack.enter_context(mounted(name, files.root, scratch)) for name in ("native", "spiderfs")}
        for peer in peers.values():
            read_all(paths_below(peer, files), 1, seed=0)
        console.print(f"{files.name}, {rounds} rounds")
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found = pool.apply(parts, (peers["spiderfs"].root, files))
        console.print("one read, CPU us: " + ", ".join(f"{name} {value:.1f}" for name, value in found.items()))
        for readers in READER_COUNTS:
            for process in PASSES:
                case = Case(readers, process, {way: [] for way in WAYS})
                for number in range(1, rounds + 1):
                    for way in WAYS:
                        case.runs[way].append(measure(way, peers, files, readers, process, number))
                cases.append(case)
                console.print(table(case))
    for case in cases:
        ratio = case.ratio("client.read_bytes", "native")
        word = "reached" if ratio >= TARGET else "missed"
        console.print(f"{case.readers} reader(s), {case.process}: {ratio:.2f} x native, target {TARGET:g}: {word}")
    return {
        "machine": machine(),
        "files": files.name,
        "rounds": rounds,
        "parts": found,
        "cases": [asdict(case) for case in cases],
    }


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of each case (default 9, quick 3)")
    parser.add_argument(
        "--size", type=int, default=112_000, metavar="BYTES", help="bytes of each file (default %(default)s)"
    )
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()

    def run_all() -> None:
        rounds = arguments.rounds or (3 if arguments.quick else 9)
        result = run(wide_console(TABLE_WIDTH), 500 if arguments.quick else 2000, arguments.size, rounds)
        save(arguments.json, result)

    return exit_status("client", run_all, "interrupted; everything is unmounted and deleted")


if __name__ == "__main__":
    sys.exit(main())
