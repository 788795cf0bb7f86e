"""The gain from packages at the source, for policy=impact on a source that is far away.

    .venv-dev/bin/python -m benchmarks.training.packages --json FILE     some four minutes
    .venv-dev/bin/python -m benchmarks.training.packages --quick         a minute, for a look

A reader with 8 threads reads epochs as ImpactSampler draws them: if the loss of a sample is above the losses of a share
p of all samples, the sample is in an epoch with probability p. Losses are known and never change, so nothing is trained
and all runs read the same draws. The cache holds a fifth of the samples. There are four runs: with and without a plan,
with and without packages. The means leave out the first epochs, in which losses become known and packages are written.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common.command import command_line, main
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.mounts import counts, mounted
from benchmarks.common.results import plain_table
from benchmarks.common.sources import write
from spiderfs.protocol import Batch, EpochEnd, Hello, Plan
from trainer_hook import Declaration, HookClient
from trainer_hook.connection.client import socket_finder

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
    files: int


FULL, QUICK = Extent(10, 4_000), Extent(6, 2_000)
FILE_BYTES = 10_000


@dataclass(frozen=True)
class Epoch:
    seconds: float
    reads: int
    """Reads of file content from the source."""
    megabytes: float
    hit_share: float
    redirected_share: float
    loaded: int


def make(source: Path, files: int) -> list[str]:
    names = [f"{number % CLASSES}/{number:06d}" for number in range(files)]
    for number, name in enumerate(names):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        write(source / name, b"%08d" % number + bytes(FILE_BYTES - 8))
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


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent: Extent = arguments.extent
    rows: list[dict[str, Any]] = []
    headings = ("", "seconds", "reads", "MB", "hits", "substitutes", "loaded", "MB written")
    title = f"{extent.files} files of {FILE_BYTES} bytes, {LATENCY_MS:g} ms away: means of an epoch"
    table = plain_table(title, *headings)
    for variant, options in VARIANTS.items():
        with scratch_directory("packages") as place:
            names = make(place / "source", extent.files)
            capacity = int(extent.files * FILE_BYTES * CACHED_SHARE)
            with mounted(place / "source", place / "mount", capacity, LATENCY_MS, f"policy=impact,{options}") as point:
                epochs, totals = train(point, names, extent.epochs, "plan=on" in options)
        later = epochs[LEFT_OUT:]
        mean = {name: statistics.fmean(getattr(epoch, name) for epoch in later) for name in asdict(later[0])}
        rows.append({"variant": variant, **mean, "made_megabytes": totals["package_bytes_written"] / 1e6})
        rows[-1]["epochs"] = [asdict(epoch) for epoch in epochs]
        forms = (".2f", ".0f", ".1f", ".0%", ".0%", ".1f", ".1f")
        figures = (*mean.values(), rows[-1]["made_megabytes"])
        table.add_row(variant, *(format(figure, form) for figure, form in zip(figures, forms, strict=True)))
    console.print(table)
    return {"extent": asdict(extent), "rows": rows}


if __name__ == "__main__":
    main(measure, command_line(__doc__, FULL, QUICK))
