"""How long reads of a large object in order take beside a download.

    .venv-dev/bin/python -m benchmarks.serving.large_reads --json FILE     a few minutes
    .venv-dev/bin/python -m benchmarks.serving.large_reads --quick         under a minute

The object lies in a store of this benchmark's own (`paced_store`), which answers each request after `--latency-ms` and
counts the bytes that it gives. "Download" is obstore, which gets eight parts of 8 MiB at a time. "In order" is read(2)
of 1 MiB from the beginning to the end, through a mount with an empty cache that would hold all of it. The ways take
turns. Figures are medians. `s/GiB` is the processor time of the daemon, or of the download.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks import tables
from benchmarks.common.command import command_line, main
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.mounts import stats
from benchmarks.common.results import plain_table
from benchmarks.serving.object_store import ROOT, mounted
from benchmarks.serving.paced_store import Objects, PacedStore, paced_store
from benchmarks.serving.process_cost import cpu_seconds, process_tree

KEY, SMALL_KEY = "large/one.bin", "large/small.bin"
READ_BYTES = 1 << 20
DOWNLOAD, IN_ORDER = "download", "in order"
# Of the rate of the download.
TARGET = 0.8


@dataclass(frozen=True)
class Extent:
    size_mib: int
    rounds: int
    latency_ms: int


FULL = Extent(size_mib=1024, rounds=3, latency_ms=20)
QUICK = Extent(size_mib=256, rounds=1, latency_ms=20)


class Measured(NamedTuple):
    seconds: float
    wanted_bytes: int
    fetched_bytes: int
    cpu_s: float


def measure(way: str, extent: Extent, store: PacedStore, place: Path) -> Measured:
    """One way to read the object, which gives the number of bytes that it wanted."""
    if way == DOWNLOAD:
        store.asked()
        size = str(extent.size_mib << 20)
        command = [sys.executable, "-m", "benchmarks.serving.object_readers", "download", store.url, KEY, size]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        seconds, cpu_s = map(float, done.stdout.split())
        return Measured(seconds, extent.size_mib << 20, store.asked().given_bytes, cpu_s)
    with mounted("large", place, store.url, 2 * extent.size_mib << 20) as mount:
        path = mount / Path(KEY).name
        # The first read of a mount waits for its connection, and for the import of what makes it.
        (mount / Path(SMALL_KEY).name).read_bytes()
        store.asked()
        daemon = process_tree(stats(mount)["pid"])
        begin, begin_cpu_s = time.perf_counter(), cpu_seconds(daemon)
        with open(path, "rb", buffering=0) as file:
            wanted = sum(iter(lambda: len(file.read(READ_BYTES)), 0))
        seconds, cpu_s = time.perf_counter() - begin, cpu_seconds(daemon) - begin_cpu_s
        return Measured(seconds, wanted, store.asked().given_bytes, cpu_s)


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent, ways = arguments.extent, (DOWNLOAD, IN_ORDER)
    figures: dict[str, list[Measured]] = {way: [] for way in ways}
    objects = Objects([SMALL_KEY], 100, {KEY: extent.size_mib << 20})
    with scratch_directory("large_reads") as scratch, paced_store(objects, extent.latency_ms) as store:
        for turn in range(extent.rounds):
            for way in ways if turn % 2 == 0 else ways[::-1]:
                figures[way].append(measure(way, extent, store, scratch / str(turn)))
    title = f"An object of {extent.size_mib:,} MiB, {extent.latency_ms} ms away"
    table = plain_table(title, "", "fetched / wanted", "s", "s/GiB", "x download")
    rates = {way: [of.wanted_bytes / of.seconds for of in found] for way, found in figures.items()}
    for way, found in figures.items():
        cpu_s = tables.median(of.cpu_s / of.wanted_bytes * (1 << 30) for of in found)
        table.add_row(
            way,
            f"{tables.median(of.fetched_bytes / of.wanted_bytes for of in found):.2f}",
            f"{tables.median(of.seconds for of in found):.2f}",
            f"{cpu_s:.1f}",
            tables.aimed(tables.rounds(rates[way], rates[DOWNLOAD]), TARGET if way == IN_ORDER else None),
        )
    console.print(table)
    return {"extent": asdict(extent), "ways": {way: [of._asdict() for of in found] for way, found in figures.items()}}


if __name__ == "__main__":
    main(run, command_line(__doc__, FULL, QUICK))
