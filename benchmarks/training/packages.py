"""The gain from packages at the source, for policy=impact on a source that is far away.

    .venv-dev/bin/python -m benchmarks.training.packages --json FILE     some four minutes
    .venv-dev/bin/python -m benchmarks.training.packages --quick         a minute, for a look

A reader with 8 threads reads epochs as ImpactSampler draws them: if the loss of a sample is above the losses of a share
p of all samples, the sample is in an epoch with probability p. Losses are known and never change, so nothing is trained
and all runs read the same draws. The cache holds a fifth of the samples. There are four runs: with and without a plan,
with and without packages. The means leave out the first epochs, in which losses become known and packages are written.

A second part compares places where packages could lie: how long it takes to read as many files as a package holds from
the cache, from a package on the same disk, and (latency alone) from the source.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common.command import command_line
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.mounts import counts, mounted
from benchmarks.common.results import machine, plain_table, save
from benchmarks.common.sources import write
from spiderfs.packages.format import PACKAGE_BYTES, pack, read_index
from spiderfs.protocol import Batch, EpochEnd, Hello, Plan
from spiderfs.sources.source import Version
from spiderfs.store.content import LmdbContent
from spiderfs.store.store import ContentKey, Keep
from trainer_hook import Declaration, HookClient
from trainer_hook.connection.mounts import socket_finder

LATENCY_MS = 5.0
CACHED_SHARE = 0.2
THREADS, BATCH, CLASSES = 8, 64, 10
# The first epoch reads all samples, and only after some more have most samples been missed and packed.
LEFT_OUT = 4
VARIANTS = {
    "neither": "plan=off,packages=off",
    "packages": "plan=off,packages=source",
    "plan": "plan=on,packages=off",
    "plan, packages": "plan=on,packages=source",
}


@dataclass(frozen=True)
class Extent:
    epochs: int
    files: dict[int, int]
    """The number of files of each size in bytes."""


FULL = Extent(10, {10_000: 4_000})
QUICK = Extent(6, {10_000: 2_000})


@dataclass(frozen=True)
class Epoch:
    seconds: float
    reads: int
    """Reads of file content from the source."""
    megabytes: float
    hit_share: float
    redirected_share: float
    loaded: int


def make(source: Path, files: int, size: int) -> list[str]:
    names = [f"{number % CLASSES}/{number:06d}" for number in range(files)]
    for number, name in enumerate(names):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        write(source / name, b"%08d" % number + bytes(size - 8))
    return names


def train(point: Path, names: list[str], epochs: int, plan: bool) -> tuple[list[Epoch], dict[str, int]]:
    """Read all epochs; returns their figures, and the mount's counters at the end."""
    labels = np.arange(len(names), dtype=np.int32) % CLASSES
    rng = np.random.default_rng(1)
    losses = rng.permutation(len(names)) / len(names) + 0.01
    client = HookClient(socket_finder(point, None), Hello("packages", "packages"))
    client.declare(Declaration("train", "train", [name.encode() for name in names], labels))
    client.scores("train", 60.0)
    done = []

    def read(index: int) -> int:
        with open(point / names[index], "rb") as file:
            return int(file.read()[:8])

    with ThreadPoolExecutor(THREADS) as readers:
        for epoch in range(epochs):
            order = rng.permutation(len(names))
            if epoch:
                order = order[rng.random(len(order)) < losses[order]]
            before = counts(point)
            began = time.perf_counter()
            if plan:
                client.plan(Plan("train", epoch, 0, True, order.astype(np.uint32)))
            for step, first in enumerate(range(0, len(order), BATCH)):
                indices = order[first : first + BATCH]
                client.set_progress("train", first + len(indices), first)
                served = np.array(list(readers.map(read, indices.tolist())))
                client.set_progress("train", first + len(indices), first + len(indices))
                batch = Batch(
                    "train",
                    epoch,
                    step,
                    indices.astype(np.uint32),
                    np.ones((len(indices), 4), np.float16),
                    losses[served].astype(np.float16),
                )
                client.batch(lambda batch=batch: batch)  # type: ignore[misc]
            seconds = time.perf_counter() - began
            client.epoch_end(EpochEnd(epoch, 0.5))
            client.scores("train", 60.0)
            after = counts(point)
            since = {name: after[name] - before[name] for name in after}
            opens = since["opens"]
            done.append(
                Epoch(
                    seconds=seconds,
                    reads=since["origin_reads"],
                    megabytes=since["origin_bytes"] / 1e6,
                    hit_share=since["opens_hit"] / opens,
                    redirected_share=since["redirects"] / opens,
                    loaded=since["packages_loaded"],
                )
            )
    client.close()
    return done, counts(point)


# -- where packages might lie


def ways_of_a_megabyte(scratch: Path, size: int) -> dict[str, float]:
    """Seconds to read as many files as a package holds: from the store, from a package, from the source."""
    count = -(-PACKAGE_BYTES // size)
    files = [(b"%08d" % number, Version(size, 7), bytes(size)) for number in range(count)]
    store = LmdbContent(scratch / "store")
    store.set_capacity(8 * PACKAGE_BYTES)
    keys = [ContentKey(number + 1) for number in range(count)]
    store.land_all([(key, payload) for key, (_, _, payload) in zip(keys, files, strict=True)])
    store.apply((), [Keep(key, "samples") for key in keys])
    path = scratch / "package"
    key = bytes(32)
    path.write_bytes(pack(files, key)[1])

    def from_store() -> None:
        for key in keys:
            assert store.read(key) is not None
        store.end_read()

    def from_package() -> None:
        package = path.read_bytes()
        index = read_index(package, len(package), key)
        assert all(index.payload(file, package) is not None for file in index.files)

    found = {}
    for name, way in (("store", from_store), ("package", from_package)):
        times = []
        for _ in range(50):
            began = time.perf_counter()
            way()
            times.append(time.perf_counter() - began)
        found[name] = statistics.median(times)
    store.close()
    return found | {"source, 16 at a time": count * LATENCY_MS / 1000 / 16, "source, package": LATENCY_MS / 1000}


# -- the program


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent: Extent = arguments.extent
    rows: list[dict[str, Any]] = []
    for size, files in extent.files.items():
        headings = ("", "seconds", "reads", "MB", "hits", "substitutes", "loaded", "written")
        title = f"{files} files of {size} bytes, {LATENCY_MS:g} ms away: means of an epoch"
        table = plain_table(title, *headings)
        for variant, options in VARIANTS.items():
            with scratch_directory("packages") as place:
                source = place / "source"
                names = make(source, files, size)
                capacity = int(files * size * CACHED_SHARE)
                with mounted(source, place / "mount", capacity, LATENCY_MS, f"policy=impact,{options}") as point:
                    epochs, totals = train(point, names, extent.epochs, "plan=on" in options)
            later = epochs[LEFT_OUT:]
            made = totals["package_bytes_written"] / 1e6
            mean = {name: statistics.fmean(getattr(epoch, name) for epoch in later) for name in asdict(later[0])}
            rows.append({"size": size, "files": files, "variant": variant, **mean, "made_megabytes": made})
            rows[-1]["epochs"] = [asdict(epoch) for epoch in epochs]
            table.add_row(
                variant,
                f"{mean['seconds']:.2f}",
                f"{mean['reads']:.0f}",
                f"{mean['megabytes']:.1f}",
                f"{mean['hit_share']:.0%}",
                f"{mean['redirected_share']:.0%}",
                f"{mean['loaded']:.1f}",
                f"{made:.1f} MB",
            )
        console.print(table)
        with scratch_directory("packages") as place:
            ways = ways_of_a_megabyte(place, size)
        rows.append({"size": size, "ways_of_a_megabyte": ways})
        shown = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in ways.items())
        console.print(f"a package full of these files: {shown}", soft_wrap=True)
    result = {"machine": machine(), "extent": asdict(extent), "rows": rows}
    save(arguments.json, result)


def main() -> int:
    arguments = command_line(__doc__).parse_args()
    arguments.extent = QUICK if arguments.quick else FULL
    return exit_status("packages", lambda: measure(arguments, Console()), "interrupted", (OSError, RuntimeError))


if __name__ == "__main__":
    sys.exit(main())
