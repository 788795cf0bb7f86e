"""Where a mount is slower than reading the source directly: loader workers, file sizes, sources and plans.

    .venv-dev/bin/python -m benchmarks.serving.never_slower --json FILE              hours; an interrupted one continues
    .venv-dev/bin/python -m benchmarks.serving.never_slower --minutes 40 --json FILE     a part of it
    .venv-dev/bin/python -m benchmarks.serving.never_slower --quick                  a narrow choice, in a minute
    .venv-dev/bin/python -m benchmarks.serving.never_slower --json FILE --plot FILE  a picture of what FILE has, too

Loader workers read every file once in each epoch. A cell is the rate of a mount as a multiple of the same workers that
read the source directly, the median of all rounds; those below 1 are red and marked with <. Microseconds are processor
time for each file, of the loader's and the mount's processes together. Directly, a source without latency is read with
open(), any other by one request for each file.

The columns are the first epoch, and a later one with all and with a fifth of the bytes cached. For that fifth, readers
drop the pages of what they have read, as if the data were larger than memory. A mount with a plan has both epochs'
orders when the first begins.
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
from functools import partial
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
# Directly, an epoch takes about so long. With a plan it has as many files as a cache needs that is not tiny; no epoch
# has more bytes than the memory of a small machine holds.
EPOCH_S = 1.5
LEAST_FILES, LEAST_PLANNED, MOST_FILES, MOST_BYTES = 96, 3600, 4000, 400_000_000
# What one core opens and reads in a second.
OPENS_A_SECOND = 20_000


@dataclass(frozen=True)
class Extent:
    rounds: int


FULL, QUICK = Extent(3), Extent(1)
# The ends of the picture's colours, as multiples of the direct rate; what is further away has the same colour.
SLOWEST, FASTEST = 0.5, 8.0
Cell = dict[str, list[float]]
"""One figure for each round: "times" the direct rate, "rate" of files a second, and "cpu_us" for each file."""


def count_of(source: Source, size: int, workers: int, planned: bool = False) -> int:
    """How many files an epoch has."""
    rate = workers / (source.latency_ms / 1000 + 1 / OPENS_A_SECOND)
    if source.bandwidth:
        rate = min(rate, source.bandwidth / size)
    most = min(MOST_FILES, MOST_BYTES / size)
    return int(min(most, max(LEAST_PLANNED if planned else LEAST_FILES, EPOCH_S * rate)))


def measured(
    files: FileSet, source: Source, workers: int, ways: list[str], rounds: int, scratch: Path
) -> dict[str, Cell]:
    """The cells of one setting, by way and epoch; "direct" is one of them."""
    scratch.mkdir()
    counts = {
        planned: count_of(source, files.total_bytes // len(files.names), workers, planned) for planned in (False, True)
    }
    everything = [os.fsdecode(name) for name in files.names[: max(counts.values())]]
    versions = {name: Version((found := os.stat(files.root / name)).st_size, found.st_mtime_ns) for name in everything}
    slow = SlowSource(
        LocalSource(os.fspath(files.root)),
        SlowSettings.create(scratch / "faults", latency_ms=source.latency_ms, bandwidth=source.bandwidth),
    )

    def direct(name: str) -> int:
        if not source.latency_ms:
            return open_read_close(os.fsencode(files.root / name))
        return len(slow.read(name.encode(), 0, versions[name].size, versions[name]))

    cells: dict[str, Cell] = {}

    def add(cell: str, rate: float, cpu_s: float, base: float, files: int) -> None:
        row = cells.setdefault(cell, {"times": [], "rate": [], "cpu_us": []})
        for field, figure in (("times", rate / base), ("rate", rate), ("cpu_us", cpu_s / files * 1e6)):
            row[field].append(float(f"{figure:.4g}"))

    for number in range(rounds):
        before_s = children_seconds()
        base = loaders(everything[: counts[False]], direct, processes=workers)
        add("direct", base, children_seconds() - before_s, base, counts[False])
        for way, share in itertools.product(ways, (1.0, 0.2)):
            names = everything[: counts[WAYS[way].planned]]
            orders = [random.Random(2 * number + epoch).sample(names, len(names)) for epoch in (0, 1)]
            capacity = None if share == 1 else int(share * sum(versions[name].size for name in names))
            place = scratch / f"{number}-{list(WAYS).index(way)}-{capacity is None}"
            options = f"source.latency_ms={source.latency_ms:g},source.bandwidth={source.bandwidth}"
            options += "" if capacity is None else f",capacity={capacity}"
            with mounted(WAYS[way].mount, files.root, place, options) as peer, ExitStack() as stack:
                walk(peer.root)
                begin = stack.enter_context(published_epochs(peer.root, orders)) if WAYS[way].planned else None
                for epoch, order in enumerate(orders):
                    before_s = children_seconds() + process_cost.cpu_seconds(peer.processes())
                    read = reading(peer, partial(open_read_close, drops_pages=capacity is not None))
                    rate = loaders(order, read, begin(epoch) if begin else None, workers)
                    cpu_s = children_seconds() + process_cost.cpu_seconds(peer.processes()) - before_s
                    if capacity is None or epoch:
                        which = EPOCHS[0] if not epoch else EPOCHS[1] if capacity is None else EPOCHS[2]
                        add(f"{way}: {which}", rate, cpu_s, base, len(names))
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


def plot(settings: dict[str, dict[str, Cell]], ways: list[str], path: Path) -> None:
    """Draw a map for each way and epoch: sources and sizes by loader workers, red below 1 and blue above."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    from matplotlib import colors, pyplot

    places = list(dict.fromkeys(setting.rpartition(", ")[0] for setting in settings))
    workers = list(dict.fromkeys(setting.rpartition(", ")[2] for setting in settings))
    size = (3.2 * len(EPOCHS), (0.55 + 0.21 * len(places)) * len(ways))
    figure, axes = pyplot.subplots(len(ways), len(EPOCHS), figsize=size, layout="constrained", squeeze=False)
    norm = colors.TwoSlopeNorm(0.0, float(np.log2(SLOWEST)), float(np.log2(FASTEST)))
    for (row, way), (column, epoch) in itertools.product(enumerate(ways), enumerate(EPOCHS)):
        axis = axes[row][column]
        times = np.full((len(places), len(workers)), np.nan)
        for (y, place), (x, count) in itertools.product(enumerate(places), enumerate(workers)):
            cell = settings.get(f"{place}, {count}", {}).get(f"{way}: {epoch}")
            if cell is not None:
                times[y, x] = statistics.median(cell["times"])
                axis.text(x, y, f"{times[y, x]:.2g}" if times[y, x] < 10 else f"{times[y, x]:.0f}", fontsize=7)
        axis.imshow(np.log2(times), cmap="RdBu", norm=norm, aspect="auto")
        for text in axis.texts:
            x, y = map(int, text.get_position())
            text.set(ha="center", va="center", color="black" if 0.6 < times[y, x] < FASTEST / 2 else "white")
        axis.set_title(f"{way}: {epoch}", fontsize=9)
        axis.set_xticks(range(len(workers)), [count.removesuffix(" workers") for count in workers], fontsize=7)
        axis.set_yticks(range(len(places)), places if not column else [""] * len(places), fontsize=7)
        if row == len(ways) - 1:
            axis.set_xlabel("loader workers", fontsize=8)
    figure.suptitle("Rate of a mount as a multiple of reading directly", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def measure(arguments: argparse.Namespace, console: Console) -> None:
    rounds = arguments.extent.rounds
    ways = arguments.ways or (["no plan", "plan"] if arguments.quick else list(WAYS))
    sizes = arguments.sizes or (["110 kB"] if arguments.quick else list(SIZES))
    sources = arguments.sources or (["0 ms", "5 ms"] if arguments.quick else list(SOURCES))
    workers = arguments.workers or (["4"] if arguments.quick else list(WORKERS))
    result: dict[str, Any] = {"machine": machine(), "extent": {"rounds": rounds, "ways": ways, "epochs": list(EPOCHS)}}
    settings: dict[str, dict[str, Cell]] = {}
    if arguments.json is not None and arguments.json.exists():
        kept = json.loads(arguments.json.read_text())
        if kept["extent"] != result["extent"]:
            raise RuntimeError(f"{arguments.json} holds another extent; choose another file with --json")
        settings = settings_of(kept)
    part = Slice(arguments.minutes)
    wanted = [
        (f"{source}, {size}, {count} workers", source, size, int(count))
        for size, source, count in itertools.product(sizes, sources, workers)
    ]
    left = [setting for setting in wanted if setting[0] not in settings]
    with scratch_directory("never_slower") as scratch:
        made: dict[str, FileSet] = {}
        for number, (setting, source, size, count) in enumerate(left):
            if part.over:
                raise TimeIsOver(f"{len(left) - number} settings are left: the same command goes on")
            if size not in made:
                most = max(
                    count_of(SOURCES[name], SIZES[size], int(each), True) for name in sources for each in workers
                )
                made[size] = made_files(scratch / size.replace(" ", ""), most, SIZES[size])
                os.sync()
            began = time.monotonic()
            place = scratch / str(number)
            settings[setting] = measured(made[size], SOURCES[source], count, ways, rounds, place)
            part.took(time.monotonic() - began)
            save(arguments.json, result | {"settings": [{"setting": name} | settings[name] for name in settings]})
            console.log(f"{setting}: {number + 1} of {len(left)}")
    show(settings, ways, console)
    if arguments.plot is not None:
        plot(settings, ways, arguments.plot)


def settings_of(result: dict[str, Any]) -> dict[str, dict[str, Cell]]:
    """The cells of a kept result by their setting."""
    return {row["setting"]: {name: row[name] for name in row if name != "setting"} for row in result["settings"]}


if __name__ == "__main__":
    program = command_line(__doc__, FULL, QUICK)
    add_minutes(program, "setting")
    program.add_argument("--plot", type=Path, metavar="FILE", help="draw the matrix into FILE")
    for option, known in (("--ways", WAYS), ("--sizes", SIZES), ("--sources", SOURCES), ("--workers", WORKERS)):
        add_names(program, option, known, f"{option[2:]} to measure (default all, quick some)")
    main(measure, program)
