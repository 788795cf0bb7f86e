"""What reads of a large object fetch for each byte that is wanted, and how long reads in order take beside a download.

    .venv-dev/bin/python -m benchmarks.serving.large_reads --json FILE     a few minutes
    .venv-dev/bin/python -m benchmarks.serving.large_reads --quick         under a minute

The object lies in a store of this benchmark's own (`paced_store`), which answers each request after `--latency-ms` and
counts the bytes that it gives. Each way to read it has a mount of its own with an empty cache that would hold all of
it. Every byte that is read at random places is compared with the object's.

    pread            samples of 8 to 64 KiB at random places, each by one pread(2)
    mmap             the same samples of a mapped file: the kernel reads around the pages that fault
    mmap, random     the same with MADV_RANDOM: the kernel reads just these pages
    download         obstore gets all of it, eight parts of 8 MiB at a time
    in order         read(2) of 1 MiB from the beginning to the end
    from the middle  the same for 32 MiB behind a seek
    beginning        the same for the first 16 MiB

Ways take turns, and each round begins with another one. Figures are medians, with the least and the most. `s/GiB` is
the processor time of the daemon, or of the download, for each GiB that is wanted.
"""

from __future__ import annotations

import mmap
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.common.command import add_names, add_numbers, command_line
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.results import machine, plain_table, save, wide_console
from benchmarks.common.sources import patterned
from benchmarks.serving.object_store import ROOT, mounted
from benchmarks.serving.paced_store import BUCKET, Objects, PacedStore, paced_store
from benchmarks.serving.process_cost import cpu_seconds, process_tree
from spiderfs.shared.layout import CacheLayout

TABLE_WIDTH = 110
KEY, SMALL_KEY = "large/one.bin", "large/small.bin"
LEAST_BYTES, MOST_BYTES = 8 << 10, 64 << 10
READ_BYTES, PART_BYTES, PARTS = 1 << 20, 8 << 20, 8
DOWNLOAD = "download"


class Extent(NamedTuple):
    size_mib: int
    samples: int
    rounds: int
    latency_ms: int


FULL = Extent(size_mib=1024, samples=500, rounds=3, latency_ms=20)
QUICK = Extent(size_mib=256, samples=100, rounds=1, latency_ms=20)


class Measured(NamedTuple):
    seconds: float
    wanted_bytes: int
    fetched_bytes: int
    cpu_s: float


def samples_of(extent: Extent) -> list[tuple[int, int]]:
    """Where the samples begin and end."""
    rng = random.Random(7)
    sizes = [rng.randrange(LEAST_BYTES, MOST_BYTES + 1) for _ in range(extent.samples)]
    begins = [rng.randrange((extent.size_mib << 20) - size) for size in sizes]
    return [(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]


def _compared(piece: bytes, begin: int, end: int) -> int:
    if piece != patterned(begin, end):
        raise RuntimeError(f"the bytes from {begin} to {end} are not those of the object")
    return end - begin


def _by_pread(path: Path, extent: Extent) -> int:
    with open(path, "rb", buffering=0) as file:
        samples = samples_of(extent)
        return sum(_compared(os.pread(file.fileno(), end - begin, begin), begin, end) for begin, end in samples)


def _by_mmap(path: Path, extent: Extent, advice: int = mmap.MADV_NORMAL) -> int:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        mapped.madvise(advice)
        return sum(_compared(mapped[begin:end], begin, end) for begin, end in samples_of(extent))


def _in_order(path: Path, begin: int, end: int) -> int:
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        while begin < end and (piece := file.read(min(READ_BYTES, end - begin))):
            begin += len(piece)
    return begin


def _from_the_middle(path: Path, extent: Extent) -> int:
    middle, most = (extent.size_mib << 20) // 2, 32 << 20
    return _in_order(path, middle, middle + most) - middle


AT_RANDOM: dict[str, Callable[[Path, Extent], int]] = {
    "pread": _by_pread,
    "mmap": _by_mmap,
    "mmap, random": lambda path, extent: _by_mmap(path, extent, mmap.MADV_RANDOM),
}
IN_ORDER: dict[str, Callable[[Path, Extent], int]] = {
    "in order": lambda path, extent: _in_order(path, 0, extent.size_mib << 20),
    "from the middle": _from_the_middle,
    "beginning": lambda path, _: _in_order(path, 0, 16 << 20),
}
WAYS = (*AT_RANDOM, DOWNLOAD, *IN_ORDER)


def measure(way: str, extent: Extent, store: PacedStore, place: Path) -> Measured:
    """One way to read the object, which gives the number of bytes that it wanted."""
    if way == DOWNLOAD:
        store.asked()
        command = [sys.executable, "-m", "benchmarks.serving.large_reads", "--download", store.url]
        command += ["--size-mib", str(extent.size_mib)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        seconds, cpu_s = map(float, done.stdout.split())
        return Measured(seconds, extent.size_mib << 20, store.asked().given_bytes, cpu_s)
    with mounted("large", place, store.url, f",capacity={2 * extent.size_mib}MiB") as mount:
        path = mount / Path(KEY).name
        # The first read of a mount waits for its connection, and for the import of what makes it.
        (mount / Path(SMALL_KEY).name).read_bytes()
        store.asked()
        daemon = process_tree(_daemon(place / "cache"))
        begin, begin_cpu_s = time.perf_counter(), cpu_seconds(daemon)
        wanted = {**AT_RANDOM, **IN_ORDER}[way](path, extent)
        seconds, cpu_s = time.perf_counter() - begin, cpu_seconds(daemon) - begin_cpu_s
        return Measured(seconds, wanted, store.asked().given_bytes, cpu_s)


def _daemon(cache: Path) -> int:
    """The process that has locked a cache directory."""
    lock = os.stat(CacheLayout(cache).lock)
    place = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
    held = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return next(int(fields[4]) for fields in held if fields[1] == "FLOCK" and fields[5] == place)


def download(url: str, size: int) -> None:
    """Print how long obstore takes, and the processor; in a process of its own, for its client survives no fork."""
    import obstore
    from obstore.store import S3Store

    options: Any = {"allow_http": True}
    bucket = S3Store(BUCKET, endpoint=url, region="us-east-1", skip_signature=True, client_options=options)
    begin, begin_cpu_s = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(PARTS) as threads:
        parts = threads.map(
            lambda at: len(obstore.get_range(bucket, KEY, start=at, length=min(PART_BYTES, size - at))),
            range(0, size, PART_BYTES),
        )
    assert sum(parts) == size
    print(time.perf_counter() - begin, time.process_time() - begin_cpu_s)


def show(figures: dict[str, list[Measured]], extent: Extent, console: Console) -> None:
    title = f"An object of {extent.size_mib:,} MiB, {extent.latency_ms} ms away"
    table = plain_table(title, "", "fetched / wanted", "s", "MB/s", "s/GiB", "x download")
    direct = [of.wanted_bytes / of.seconds for of in figures.get(DOWNLOAD, [])]
    for way, found in figures.items():
        rates = [of.wanted_bytes / of.seconds for of in found]
        beside = [rate / of for rate, of in zip(rates, direct, strict=True)] if direct and way in IN_ORDER else []
        table.add_row(
            way,
            _shown([of.fetched_bytes / of.wanted_bytes for of in found], ".2f"),
            _shown([of.seconds for of in found], ".2f"),
            _shown([rate / 1e6 for rate in rates], ".0f"),
            _shown([of.cpu_s / of.wanted_bytes * (1 << 30) for of in found], ".1f"),
            _shown(beside, ".2f") if beside else "",
        )
    console.print(table)


def _shown(values: list[float], form: str) -> str:
    text = format(statistics.median(values), form)
    return text if len(values) == 1 else f"{text} ({min(values):{form}}-{max(values):{form}})"


def run(extent: Extent, ways: list[str], console: Console) -> dict[str, Any]:
    figures: dict[str, list[Measured]] = {way: [] for way in ways}
    objects = Objects([SMALL_KEY], 100, {KEY: extent.size_mib << 20})
    with scratch_directory("large_reads") as scratch, paced_store(objects, extent.latency_ms) as store:
        for turn in range(extent.rounds):
            first = turn % len(ways)
            for way in ways[first:] + ways[:first]:
                place = scratch / re.sub(r"\W+", "-", f"{turn} {way}")
                figures[way].append(measure(way, extent, store, place))
            console.log(f"round {turn + 1} of {extent.rounds}")
    show(figures, extent, console)
    return {
        "extent": extent._asdict(),
        "ways": {way: [of._asdict() for of in found] for way, found in figures.items()},
    }


def main() -> int:
    parser = command_line(__doc__)
    add_numbers(parser, FULL, QUICK, **{name: name for name in Extent._fields})
    add_names(parser, "--ways", WAYS, "ways to read (default all)", WAYS)
    parser.add_argument("--download", metavar="URL", help="say how long obstore takes for the object; then end")
    arguments = parser.parse_args()
    chosen = {name: value for name in Extent._fields if (value := getattr(arguments, name)) is not None}
    extent = (QUICK if arguments.quick else FULL)._replace(**chosen)
    if arguments.download:
        download(arguments.download, extent.size_mib << 20)
        return 0

    def measured() -> None:
        save(arguments.json, {"machine": machine()} | run(extent, arguments.ways, wide_console(TABLE_WIDTH)))

    return exit_status("large_reads", measured, "interrupted")


if __name__ == "__main__":
    sys.exit(main())
