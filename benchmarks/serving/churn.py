"""How a mount ages: many files pass once through a cache that is much smaller than all of them.

    .venv-dev/bin/python -m benchmarks.serving.churn --json FILE                             a million files
    .venv-dev/bin/python -m benchmarks.serving.churn --gigabytes 100 --kilobytes 1000        in place of --files
    .venv-dev/bin/python -m benchmarks.serving.churn --quick                                 in a minute

The source makes its files when they are read, and takes no time or room. The files come in parts. Of each part two
loader workers read all but the last FETCHES files, by a plan, and these are then read one by one, so each is one fetch.
After each part the mount's directories and the memory of all its processes are counted. Growth is the slope of what
was counted, over the second half of the parts; by then the cache is full. What stays of a file that was evicted is its
name and its attributes.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from benchmarks import tables
from benchmarks.common.command import command_line, main
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.mounts import counts
from benchmarks.fakes.made_source import PER_DIRECTORY, SCHEME, content_of, name_of
from benchmarks.serving.peers import Mounted, shown
from benchmarks.serving.process_cost import pss_bytes
from benchmarks.serving.readers import open_read_close
from benchmarks.serving.workloads import loaders, published, reading

WORKERS = 2
FETCHES = 200


@dataclass(frozen=True)
class Extent:
    files: int
    kilobytes: int
    cache_mb: int
    parts: int


FULL = Extent(files=1_000_000, kilobytes=10, cache_mb=200, parts=20)
QUICK = Extent(files=20_000, kilobytes=10, cache_mb=20, parts=4)


class Counted(NamedTuple):
    """After a part: what has passed since the beginning, how fast the part was, and what the mount uses."""

    files: int
    gigabytes: float
    minutes: float
    files_per_s: float
    fetch_us: float
    fetch_p99_us: float
    disk_mb: float
    memory_mb: float
    """PSS of all processes, with what they have mapped of the cache."""
    own_mb: float
    """Of these, memory that belongs to no file."""
    descriptors: int
    known_names: int


GROWING = ("fetch_us", "disk_mb", "memory_mb", "own_mb")


def pass_part(peer: Mounted, numbers: range, size: int) -> tuple[float, list[float]]:
    """Read files of these numbers; returns the planned files a second, and the seconds that each fetch took."""
    for directory in dict.fromkeys(number // PER_DIRECTORY for number in numbers):
        os.listdir(peer.root / f"{directory:06d}")
    planned, single = numbers[:-FETCHES], numbers[-FETCHES:]
    names = [name_of(number) for number in planned]
    random.Random(numbers.start).shuffle(names)
    read = reading(peer, partial(open_read_close, drops_pages=True))
    with published(peer.root, names) as come:
        rate = loaders(names, read, come, WORKERS)
    took_s = []
    for number in random.Random(0).sample(single, FETCHES):
        began_s = time.perf_counter()
        content = (peer.root / name_of(number)).read_bytes()
        took_s.append(time.perf_counter() - began_s)
        if content != content_of(number, size):
            raise RuntimeError(f"{name_of(number)} has other bytes than its source")
    return rate, took_s


def disk_bytes(cache: Path) -> int:
    return sum(os.lstat(os.path.join(at, name)).st_blocks * 512 for at, _, names in os.walk(cache) for name in names)


def growth(rows: list[Counted]) -> dict[str, float]:
    """Of each of GROWING the slope over the second half of the parts, for a million files."""
    half = rows[len(rows) // 2 :]
    files = [row.files / 1e6 for row in half]
    return {name: float(np.polyfit(files, [getattr(row, name) for row in half], 1)[0]) for name in GROWING}


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent: Extent = arguments.extent
    size = extent.kilobytes * 1000
    files = round(arguments.gigabytes * 1e9 / size) if arguments.gigabytes else extent.files
    of_part = max(2 * FETCHES, files // extent.parts)
    rows: list[Counted] = []
    with scratch_directory("churn") as scratch:
        options = f"capacity={extent.cache_mb}MB,cache_dir={scratch / 'cache'}"
        command = [sys.executable, "-m", "benchmarks.fakes.made_source", "mount", f"{SCHEME}{files}/{size}"]
        command += [str(scratch / "mnt"), "--foreground", "-o", options]
        with shown("churn", command, scratch / "mnt", scratch / "log") as peer:
            began_s = time.monotonic()
            for first in range(0, files - of_part + 1, of_part):
                rate, took_s = pass_part(peer, range(first, first + of_part), size)
                minutes, passed, processes = (time.monotonic() - began_s) / 60, first + of_part, peer.processes()
                row = Counted(
                    files=passed,
                    gigabytes=passed * size / 1e9,
                    minutes=minutes,
                    files_per_s=rate,
                    fetch_us=float(np.median(took_s)) * 1e6,
                    fetch_p99_us=float(np.percentile(took_s, 99)) * 1e6,
                    disk_mb=disk_bytes(scratch / "cache") / 1e6,
                    memory_mb=pss_bytes(processes) / 1e6,
                    own_mb=pss_bytes(processes, "Pss_Anon") / 1e6,
                    descriptors=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in processes),
                    known_names=counts(peer.root)["known_files"],
                )
                rows.append(row)
                console.log(f"{passed:,} of {files:,} files")
                if minutes >= arguments.minutes:
                    break

    found: dict[str, Any] = {"extent": asdict(extent) | {"files": files}, "parts": [row._asdict() for row in rows]}
    found["per_million_files"] = growth(rows) if len(rows) >= 4 else {}
    print(tables.churn(found, len(rows)))
    return found


if __name__ == "__main__":
    program = command_line(__doc__, FULL, QUICK)
    program.add_argument("--gigabytes", type=float, metavar="N", help="so many bytes pass, in place of --files")
    program.add_argument("--minutes", type=float, default=60.0, metavar="N", help="then end (default %(default)g)")
    main(measure, program)
