"""How fast `spiderfs.client` reads a warm cache, beside the page cache and the mount in the same run.

    .venv-dev/bin/python -m benchmarks.serving.client            about three minutes
    .venv-dev/bin/python -m benchmarks.serving.client --quick    for a look

"served" is a source without a mount (`spiderfs serve`). All ways of reading take turns round by round; a ratio is the
median of the ratios within a round. Every reader is a process that is forked for the run and reads every file once, in
an order of its own. "new" is the first pass of a new process, which maps the cache's pages while it reads; "again" is
its second pass, as in the loader workers of a second epoch. CPU is the time of the readers plus that of the daemon,
which is notified of every open either way.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.console import Console

from benchmarks import tables
from benchmarks.common.command import command_line, main
from benchmarks.common.interruption import scratch_directory
from benchmarks.serving.peers import Mounted, mounted, served
from benchmarks.serving.readers import open_read_close, read_all
from benchmarks.serving.serve import READER_COUNTS, Run, made_files, measure, paths_below
from spiderfs import client
from spiderfs.protocol.requests import SCHEME

PASSES = {"new": 0, "again": 1}
SERVED = "benchmark"


@dataclass(frozen=True)
class Extent:
    files: int
    size: int
    rounds: int


FULL, QUICK = Extent(2_000, 112_000, rounds=9), Extent(500, 112_000, rounds=3)


def _read_bytes(path: bytes) -> int:
    return len(client.read_bytes(path))


def _client_open(path: bytes) -> int:
    with client.open(path, "rb") as file:
        return len(file.read())


def _served(root_bytes: int, path: bytes) -> int:
    return len(client.read_bytes(b"%s%s%s" % (SCHEME.encode(), SERVED.encode(), path[root_bytes:])))


# The ways to read: from which system, and by which function.
WAYS: dict[str, tuple[str, Callable[[bytes], int]]] = {
    "native": ("native", open_read_close),
    "mount": ("spiderfs", open_read_close),
    "client.read_bytes": ("spiderfs", _read_bytes),
    "client.open": ("spiderfs", _client_open),
}


def measured(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent: Extent = arguments.extent
    cases: list[dict[str, Any]] = []
    with scratch_directory("client") as scratch, ExitStack() as stack:
        files = made_files(scratch / "src", extent.files, extent.size)
        os.sync()
        peers = {name: stack.enter_context(mounted(name, files.root, scratch)) for name in ("native", "spiderfs")}
        pid = stack.enter_context(served(SERVED, files.root, scratch / "served"))
        # Its paths are those of the source, in whose place the address is put at each read.
        peers["served"] = Mounted("served", files.root, pid)
        ways: dict[str, tuple[str, Callable[[bytes], int]]]
        ways = {**WAYS, "served": ("served", partial(_served, len(os.fsencode(files.root))))}
        for way in ("native", "mount", "served"):
            where, read = ways[way]
            read_all(paths_below(peers[where], files), 1, seed=0, read=read)
        for readers in READER_COUNTS:
            for process, rehearsals in PASSES.items():
                runs: dict[str, list[Run]] = {way: [] for way in ways}
                for number in range(1, extent.rounds + 1):
                    for way, (where, read) in ways.items():
                        runs[way].append(measure(peers[where], files, readers, number, read, rehearsals))
                found_runs = {way: [asdict(run) for run in found] for way, found in runs.items()}
                cases.append({"readers": readers, "process": process, "runs": found_runs})
    result = {"files": files.name, "rounds": extent.rounds, "cases": cases}
    print(tables.client(result))
    return result


if __name__ == "__main__":
    main(measured, command_line(__doc__, FULL, QUICK))
