"""Where a mount is slower than reading the source directly: loader workers, file sizes, sources and plans.

    .venv-dev/bin/python -m benchmarks.serving.never_slower --json FILE              some twenty minutes
    .venv-dev/bin/python -m benchmarks.serving.never_slower --quick                  two settings, in a minute
    .venv-dev/bin/python -m benchmarks.serving.never_slower --json FILE --plot FILE  a picture of what FILE has, too

Sources, file sizes and numbers of loader workers are varied one at a time around CENTRE, and CORNERS are added. With
--sources, --sizes or --workers all of their combinations are measured; what is not given is the centre's.

Loader workers read every file once in each epoch. A cell is the rate of a mount as a multiple of the same workers that
read the source directly, the median of all rounds; those below 1 are bold. The picture has the least and the most too,
and microseconds of processor time for each file, of the loader's and the mount's processes together. Directly, a source
without latency is read with open(), any other by one request for each file: of an S3 server by obstore.

The columns are the first epoch, and a later one with all and with a fifth of the bytes cached. For that fifth, readers
drop the pages of what they have read, as if the data were larger than memory. A mount with a plan has both epochs'
orders when the first begins.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks import tables
from benchmarks.common.command import add_names, command_line, main
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.results import machine, save
from benchmarks.common.sources import BUCKET
from benchmarks.common.walking import walk
from benchmarks.serving import process_cost
from benchmarks.serving.paced_store import Bucket, Objects, paced_store
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
    is_store: bool = False  # an S3 server, not a directory


class Way(NamedTuple):
    mount: str
    planned: bool


SOURCES = {f"{latency} ms": Source(latency) for latency in (0, 1, 5, 20, 100)}
SOURCES["5 ms, 25 MB/s"] = Source(5, 25_000_000)
SOURCES["S3, 5 ms"] = Source(5, is_store=True)
SIZES = {f"{size} kB": size * 1000 for size in (4, 16, 110, 1000)}
WORKERS = ("1", "2", "4", "8", "16")
Setting = tuple[str, str, str]
"""A source, a size, and the number of loader workers."""
CENTRE: Setting = ("5 ms", "110 kB", "2")
# Where the processor is the limit: by bytes, and by opens.
CORNERS: list[Setting] = [("5 ms", "1000 kB", "8"), ("1 ms", "4 kB", "16")]
QUICK_SETTINGS: list[Setting] = [CENTRE, ("S3, 5 ms", *CENTRE[1:])]
WAYS = {
    "no plan": Way("spiderfs", False),
    "plan": Way("spiderfs", True),
    "immutable": Way("immutable", False),
    "immutable, plan": Way("immutable", True),
}
EPOCHS = ("first", "later, all cached", "later, a fifth")
# Directly, an epoch takes about so long. With a plan it has as many files as a cache needs that is not tiny, and that
# its first second is not most of; on a narrow line, which no plan widens, a few times as many as directly. No epoch
# has more bytes than the memory of a small machine holds.
EPOCH_S = 1.5
LEAST_FILES, LEAST_PLANNED, MOST_FILES, MOST_BYTES = 96, 3600, 4000, 800_000_000
NARROW_TIMES = 3
# What one core opens and reads in a second.
OPENS_A_SECOND = 20_000


@dataclass(frozen=True)
class Extent:
    rounds: int


FULL, QUICK = Extent(2), Extent(1)
# The ends of the picture's colours, as multiples of the direct rate; what is further away has the same colour.
SLOWEST, FASTEST = 0.5, 8.0
Cell = dict[str, list[float]]
"""One figure for each round: "times" the direct rate, "rate" of files a second, and "cpu_us" for each file."""


def count_of(source: Source, size: int, workers: int, planned: bool = False) -> int:
    """How many files an epoch has."""
    rate = workers / (source.latency_ms / 1000 + 1 / OPENS_A_SECOND)
    if source.bandwidth:
        rate = min(rate, source.bandwidth / size)
    least = LEAST_FILES
    if planned:
        least = int(NARROW_TIMES * EPOCH_S * rate) if source.bandwidth else LEAST_PLANNED
    return int(min(MOST_FILES, MOST_BYTES / size, max(least, EPOCH_S * rate)))


class Shown(NamedTuple):
    """A source that can be mounted, with the options of its mounts, and how it is read without a mount."""

    source: Path | str
    options: str
    direct: Callable[[str], int]


@contextmanager
def shown_source(source: Source, files: FileSet, scratch: Path) -> Iterator[Shown]:
    names, size = list(map(os.fsdecode, files.names)), files.total_bytes // len(files.names)
    if source.is_store:
        with paced_store(Objects(names, size), source.latency_ms) as store:
            options = f"source.endpoint={store.url},source.anonymous"
            yield Shown(f"s3://{BUCKET}", options, Bucket(store.url).read)
        return
    versions = {name: Version(size, os.stat(files.root / name).st_mtime_ns) for name in names}
    slow = SlowSource(
        LocalSource(os.fspath(files.root)),
        SlowSettings.create(scratch / "faults", latency_ms=source.latency_ms, bandwidth=source.bandwidth),
    )

    def direct(name: str) -> int:
        if not source.latency_ms:
            return open_read_close(os.fsencode(files.root / name))
        return len(slow.read(name.encode(), 0, size, versions[name]))

    yield Shown(files.root, f"source.latency_ms={source.latency_ms:g},source.bandwidth={source.bandwidth}", direct)


def measured(
    files: FileSet, source: Source, workers: int, ways: list[str], rounds: int, scratch: Path
) -> dict[str, Cell]:
    """The cells of one setting, by way and epoch; "direct" is one of them."""
    scratch.mkdir()
    size = files.total_bytes // len(files.names)
    counts = {planned: count_of(source, size, workers, planned) for planned in (False, True)}
    everything = [os.fsdecode(name) for name in files.names[: max(counts.values())]]
    cells: dict[str, Cell] = {}

    def add(cell: str, rate: float, cpu_s: float, base: float, files: int) -> None:
        row = cells.setdefault(cell, {"times": [], "rate": [], "cpu_us": []})
        for field, figure in (("times", rate / base), ("rate", rate), ("cpu_us", cpu_s / files * 1e6)):
            row[field].append(float(f"{figure:.4g}"))

    with shown_source(source, files, scratch) as found:
        for number in range(rounds):
            before_s = children_seconds()
            base = loaders(everything[: counts[False]], found.direct, processes=workers)
            add("direct", base, children_seconds() - before_s, base, counts[False])
            for way, share in itertools.product(ways, (1.0, 0.2)):
                names = everything[: counts[WAYS[way].planned]]
                orders = [random.Random(2 * number + epoch).sample(names, len(names)) for epoch in (0, 1)]
                capacity = None if share == 1 else int(share * size * len(names))
                place = scratch / f"{number}-{list(WAYS).index(way)}-{capacity is None}"
                options = found.options + ("" if capacity is None else f",capacity={capacity}")
                with mounted(WAYS[way].mount, found.source, place, options) as peer, ExitStack() as stack:
                    walk(peer.root)
                    planned = WAYS[way].planned
                    begin = stack.enter_context(published_epochs(peer.root, orders)) if planned else None
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


def short(times: float) -> str:
    return f"{times:.0f}" if times >= 10 else f"{times:.2f}"


def plot(settings: dict[str, dict[str, Cell]], ways: list[str], path: Path) -> None:
    """Draw all settings by ways and epochs, red below 1 and blue above, with range and processor time."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    from matplotlib import colors, pyplot

    columns = [(way, epoch) for way in ways for epoch in EPOCHS]
    size = (2.2 + 0.95 * len(columns), 0.9 + 0.42 * len(settings))
    figure, axis = pyplot.subplots(figsize=size, layout="constrained")
    found = [[cells[f"{way}: {epoch}"] for way, epoch in columns] for cells in settings.values()]
    times = np.array([[statistics.median(cell["times"]) for cell in row] for row in found])
    norm = colors.TwoSlopeNorm(0.0, float(np.log2(SLOWEST)), float(np.log2(FASTEST)))
    axis.imshow(np.log2(times), cmap="RdBu", norm=norm, aspect="auto")
    for (y, x), middle in np.ndenumerate(times):
        least, most = (short(end(found[y][x]["times"])) for end in (min, max))
        text = f"{short(middle)}\n{least}-{most}; {statistics.median(found[y][x]['cpu_us']):,.0f} us"
        color = "black" if 0.6 < middle < FASTEST / 2 else "white"
        axis.text(x, y, text, ha="center", va="center", fontsize=6, color=color)
    axis.set_xticks(range(len(columns)), [f"{way}\n{epoch}" for way, epoch in columns], fontsize=7)
    axis.xaxis.tick_top()
    labels = []
    for setting, cells in settings.items():
        rate, cpu_us = (statistics.median(cells["direct"][what]) for what in ("rate", "cpu_us"))
        labels.append(f"{setting}\ndirect {rate:,.0f}/s, {cpu_us:,.0f} us")
    axis.set_yticks(range(len(settings)), labels, fontsize=7)
    for x in range(len(EPOCHS), len(columns), len(EPOCHS)):
        axis.axvline(x - 0.5, color="white", linewidth=3)
    figure.suptitle("Rate of a mount as a multiple of reading directly", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def chosen(arguments: argparse.Namespace) -> list[Setting]:
    given = arguments.sources, arguments.sizes, arguments.workers
    if any(given):
        return list(itertools.product(*(names or [own] for names, own in zip(given, CENTRE, strict=True))))
    if arguments.quick:
        return QUICK_SETTINGS
    source, size, workers = CENTRE
    along: list[Setting] = [(name, size, workers) for name in SOURCES]
    along += [(source, name, workers) for name in SIZES]
    along += [(source, size, name) for name in WORKERS]
    return list(dict.fromkeys([*along, *CORNERS]))


def measure(arguments: argparse.Namespace, console: Console) -> None:
    rounds = arguments.extent.rounds
    ways = arguments.ways or (["no plan", "plan"] if arguments.quick else list(WAYS))
    result: dict[str, Any] = {"machine": machine(), "extent": {"rounds": rounds, "ways": ways, "epochs": list(EPOCHS)}}
    settings: dict[str, dict[str, Cell]] = {}
    wanted = chosen(arguments)
    with scratch_directory("never_slower") as scratch:
        made: dict[str, FileSet] = {}
        for source, size, count in wanted:
            if size not in made:
                of_size = [each for each in wanted if each[1] == size]
                most = max(count_of(SOURCES[each[0]], SIZES[size], int(each[2]), planned=True) for each in of_size)
                made[size] = made_files(scratch / size.replace(" ", ""), most, SIZES[size])
                os.sync()
            setting = f"{source}, {size}, {count} worker{'s' * (count != '1')}"
            place = scratch / str(len(settings))
            settings[setting] = measured(made[size], SOURCES[source], int(count), ways, rounds, place)
            save(arguments.json, result | {"settings": rows_of(settings)})
            console.log(f"{setting}: {len(settings)} of {len(wanted)}")
    print(tables.never_slower(result | {"settings": rows_of(settings)}))
    if arguments.plot is not None:
        plot(settings, ways, arguments.plot)


def rows_of(settings: dict[str, dict[str, Cell]]) -> list[dict[str, Any]]:
    return [{"setting": name} | cells for name, cells in settings.items()]


if __name__ == "__main__":
    program = command_line(__doc__, FULL, QUICK)
    program.add_argument("--plot", type=Path, metavar="FILE", help="draw the matrix into FILE")
    for option, known in (("--ways", WAYS), ("--sizes", SIZES), ("--sources", SOURCES), ("--workers", WORKERS)):
        add_names(program, option, known, f"{option[2:]} to measure")
    main(measure, program)
