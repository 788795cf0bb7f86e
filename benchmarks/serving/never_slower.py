"""Where a mount is slower than reading the source directly: loader workers, file sizes, sources and plans.

    .venv-dev/bin/python -m benchmarks.serving.never_slower --json FILE              hours; an interrupted one continues
    .venv-dev/bin/python -m benchmarks.serving.never_slower --minutes 40 --json FILE     a part of it
    .venv-dev/bin/python -m benchmarks.serving.never_slower --quick                  a narrow choice, in a minute

Loader workers read every file once in each epoch. A cell is the rate of a mount as a multiple of the same workers that
read the source directly, the median of all rounds; those below 1 are red and marked with <. Microseconds are processor
time for each file, of the loader's and the mount's processes together. Directly, a source without latency is read with
open(), any other by one request for each file.

The columns are the first epoch, and a later one with all and with a fifth of the bytes cached. A mount with a plan has
both epochs' orders when the first begins.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.common.command import add_minutes, add_names, command_line, main
from benchmarks.common.interruption import Slice, TimeIsOver, scratch_directory
from benchmarks.common.results import machine, plain_table, save
from benchmarks.common.walking import walk
from benchmarks.serving import process_cost
from benchmarks.serving.peers import mounted
from benchmarks.serving.readers import open_read_close
from benchmarks.serving.serve import FileSet, made_files
from benchmarks.serving.workloads import children_seconds, loaders, published_epochs, reading
from spiderfs.sources.local import LocalSource
from spiderfs.sources.slow import SlowSettings, SlowSource
from spiderfs.sources.source import Version


class Source(NamedTuple):
    latency_ms: float
    bandwidth: int = 0  # bytes a second; 0 is no limit


class Way(NamedTuple):
    mount: str
    planned: bool


SOURCES = {f"{latency} ms": Source(latency) for latency in (0, 1, 5, 20, 100)}
SOURCES["20 ms, 50 MB/s"] = Source(20, 50_000_000)
SIZES = {f"{size} kB": size * 1000 for size in (4, 16, 110, 1000)}
WORKERS = ("1", "2", "4", "8", "16")
WAYS = {
    "no plan": Way("spiderfs", False),
    "plan": Way("spiderfs", True),
    "immutable": Way("immutable", False),
    "immutable, plan": Way("immutable", True),
}
EPOCHS = ("first", "later, all cached", "later, a fifth")
# Directly, an epoch takes about so long, but it has enough files for a plan to begin, and no more bytes than the memory
# of a small machine holds.
EPOCH_S = 1.5
LEAST_FILES, MOST_FILES, MOST_BYTES = 96, 4000, 200_000_000
# What one core opens and reads in a second.
OPENS_A_SECOND = 20_000


@dataclass(frozen=True)
class Extent:
    rounds: int


FULL, QUICK = Extent(3), Extent(1)
Cell = dict[str, list[float]]
"""One figure for each round: "times" the direct rate, "rate" of files a second, and "cpu_us" for each file."""


def count_of(source: Source, size: int, workers: int) -> int:
    """How many files an epoch has."""
    rate = workers / (source.latency_ms / 1000 + 1 / OPENS_A_SECOND)
    if source.bandwidth:
        rate = min(rate, source.bandwidth / size)
    return int(max(LEAST_FILES, min(MOST_FILES, MOST_BYTES / size, EPOCH_S * rate)))


def measured(
    files: FileSet, source: Source, workers: int, ways: list[str], rounds: int, scratch: Path
) -> dict[str, Cell]:
    """The cells of one setting, by way and epoch; "direct" is one of them."""
    scratch.mkdir()
    count = count_of(source, files.total_bytes // len(files.names), workers)
    names = [os.fsdecode(name) for name in files.names[:count]]
    versions = {name: Version((found := os.stat(files.root / name)).st_size, found.st_mtime_ns) for name in names}
    slow = SlowSource(
        LocalSource(os.fspath(files.root)),
        SlowSettings.create(scratch / "faults", latency_ms=source.latency_ms, bandwidth=source.bandwidth),
    )

    def direct(name: str) -> int:
        if not source.latency_ms:
            return open_read_close(os.fsencode(files.root / name))
        return len(slow.read(name.encode(), 0, versions[name].size, versions[name]))

    cells: dict[str, Cell] = {}

    def add(cell: str, rate: float, cpu_s: float, base: float) -> None:
        row = cells.setdefault(cell, {"times": [], "rate": [], "cpu_us": []})
        for field, figure in (("times", rate / base), ("rate", rate), ("cpu_us", cpu_s / len(names) * 1e6)):
            row[field].append(figure)

    fifth = sum(versions[name].size for name in names) // 5
    for number in range(rounds):
        orders = [random.Random(2 * number + epoch).sample(names, len(names)) for epoch in (0, 1)]
        before_s = children_seconds()
        base = loaders(orders[0], direct, processes=workers)
        add("direct", base, children_seconds() - before_s, base)
        for way, capacity in itertools.product(ways, (None, fifth)):
            place = scratch / f"{number}-{list(WAYS).index(way)}-{capacity is None}"
            options = f"source.latency_ms={source.latency_ms:g},source.bandwidth={source.bandwidth}"
            options += "" if capacity is None else f",capacity={capacity}"
            with mounted(WAYS[way].mount, files.root, place, options) as peer, ExitStack() as stack:
                walk(peer.root)
                begin = stack.enter_context(published_epochs(peer.root, orders)) if WAYS[way].planned else None
                for epoch, order in enumerate(orders):
                    before_s = children_seconds() + process_cost.cpu_seconds(peer.processes())
                    rate = loaders(order, reading(peer), begin(epoch) if begin else None, workers)
                    cpu_s = children_seconds() + process_cost.cpu_seconds(peer.processes()) - before_s
                    if capacity is None or epoch:
                        which = EPOCHS[0] if not epoch else EPOCHS[1] if capacity is None else EPOCHS[2]
                        add(f"{way}: {which}", rate, cpu_s, base)
            shutil.rmtree(place, ignore_errors=True)
    return cells


def shown(cell: Cell) -> str:
    """The median, range and processor time of a cell; red and marked where it is below 1."""
    times = statistics.median(cell["times"])
    text = f"{times:.2f}"
    if len(cell["times"]) > 1:
        text += f" {min(cell['times']):.2f}-{max(cell['times']):.2f}"
    text += f" {statistics.median(cell['cpu_us']):,.0f} us"
    return f"[red]< {text}[/red]" if times < 1 else text


def show(settings: dict[str, dict[str, Cell]], ways: list[str], console: Console) -> None:
    for way in ways:
        table = plain_table(f"{way}: x direct, least and most, us of processor time", "", "direct", *EPOCHS)
        for setting, cells in settings.items():
            if f"{way}: {EPOCHS[0]}" in cells:
                direct = f"{statistics.median(cells['direct']['rate']):,.0f}/s {cells['direct']['cpu_us'][0]:,.0f} us"
                table.add_row(setting, direct, *(shown(cells[f"{way}: {epoch}"]) for epoch in EPOCHS))
        console.print(table)
    mounts = [cell for cells in settings.values() for name, cell in cells.items() if name != "direct"]
    slower = sum(statistics.median(cell["times"]) < 1 for cell in mounts)
    console.print(f"{slower} of {len(mounts)} cells are below 1", highlight=False)


def measure(arguments: argparse.Namespace, console: Console) -> None:
    rounds = arguments.extent.rounds
    ways = arguments.ways or (["no plan", "plan"] if arguments.quick else list(WAYS))
    sizes = arguments.sizes or (["110 kB"] if arguments.quick else list(SIZES))
    sources = arguments.sources or (["0 ms", "5 ms"] if arguments.quick else list(SOURCES))
    workers = arguments.workers or (["4"] if arguments.quick else list(WORKERS))
    result: dict[str, Any] = {"machine": machine(), "extent": {"rounds": rounds, "ways": ways}, "settings": {}}
    if arguments.json is not None and arguments.json.exists():
        kept = json.loads(arguments.json.read_text())
        if kept["extent"] != result["extent"]:
            raise RuntimeError(f"{arguments.json} holds another extent; choose another file with --json")
        result["settings"] = kept["settings"]
    part = Slice(arguments.minutes)
    wanted = [
        (f"{source}, {size}, {count} workers", source, size, int(count))
        for size, source, count in itertools.product(sizes, sources, workers)
    ]
    left = [setting for setting in wanted if setting[0] not in result["settings"]]
    with scratch_directory("never_slower") as scratch:
        made: dict[str, FileSet] = {}
        for number, (setting, source, size, count) in enumerate(left):
            if part.over:
                raise TimeIsOver(f"{len(left) - number} settings are left: the same command goes on")
            if size not in made:
                most = max(count_of(SOURCES[name], SIZES[size], int(each)) for name in sources for each in workers)
                made[size] = made_files(scratch / size.replace(" ", ""), most, SIZES[size])
                os.sync()
            began = time.monotonic()
            place = scratch / str(number)
            result["settings"][setting] = measured(made[size], SOURCES[source], count, ways, rounds, place)
            part.took(time.monotonic() - began)
            save(arguments.json, result)
            console.log(f"{setting}: {number + 1} of {len(left)}")
    show(result["settings"], ways, console)


if __name__ == "__main__":
    program = command_line(__doc__, FULL, QUICK)
    add_minutes(program, "setting")
    for option, known in (("--ways", WAYS), ("--sizes", SIZES), ("--sources", SOURCES), ("--workers", WORKERS)):
        add_names(program, option, known, f"{option[2:]} to measure (default all, quick some)")
    main(measure, program)
