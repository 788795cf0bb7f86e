"""How fast a training may be before the daemon drops its batches, and how many of its rows are scored then.

    .venv/bin/python -m benchmarks.training.saturation [--quick] [--large] [--json FILE]

A client of the hook sends batches of 128 samples at growing rates to a hook server with a scorer, in a process of its
own whose index is filled first. Each rate is sent twice, in turns: to a daemon that takes one batch at a time and drops
a batch when its queue is full, and to a daemon that takes more batches together the more of them wait, and scores those
of their rows that were scored longest ago. --large adds a list of a million samples, which takes some fifteen minutes.

The limit is the highest of these rates at which no batch is dropped.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import trio
from rich.console import Console

from benchmarks.common.command import command_line
from benchmarks.common.interruption import exit_status
from benchmarks.common.results import machine, plain_table, save
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.guide import Guide
from spiderfs.daemon.training.hook_connection import ServerLimits
from spiderfs.daemon.training.hook_server import HookServer, listen
from spiderfs.daemon.training.trainer import SampleList, Trainer
from spiderfs.daemon.training.wiring import Training
from spiderfs.metrics import Counters, SharedCounters
from spiderfs.options.model import Options
from spiderfs.protocol import Batch, Hello
from spiderfs.scorer.scorer import Scorer
from spiderfs.scorer.scoring import ScorerOptions
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.store.records import LmdbRecords
from spiderfs.testing import MemoryContent, MemorySource
from spiderfs.vfs.catalogue import TABLES, Catalogue
from spiderfs.vfs.lister import Lister
from trainer_hook import Client, Declaration

BATCH = 128
DIMENSION = 64
CLASSES = 10
NAME = "train"
# So many different batches are made, and sent again and again.
BATCHES = 256
PATIENCE_S = 3600.0
TOGETHER = ServerLimits().together


@dataclass(frozen=True)
class Extent:
    samples: tuple[int, ...]
    offered_s: float
    rates: tuple[int, ...] = (500, 1000, 2000, 4000, 8000, 16000, 32000)


QUICK = Extent((10_000,), 2.0, (2000, 8000, 32000))
FULL = Extent((10_000, 100_000), 10.0)
LARGE = Extent((10_000, 100_000, 1_000_000), 10.0)


@dataclass(frozen=True)
class Row:
    samples: int
    together: int
    offered_per_s: float
    sent_per_s: float
    dropped_share: float  # of the batches, by the hook or the daemon
    scored_per_s: float
    left_out_share: float  # of the rows that arrived


class FilledGuide(Guide):
    """Has an index in which every sample is, as after an epoch."""

    async def samples(self, trainer: Trainer, samples: SampleList) -> int:
        unknown = await super().samples(trainer, samples)
        known_list = self.trainers.list_of(trainer, samples.name)
        scorer = known_list.scoring_for("graph", DIMENSION, ScorerOptions())
        assert isinstance(scorer, Scorer)
        rng = np.random.default_rng(0)
        for start in range(0, len(samples), 8192):
            ids = np.arange(start, min(start + 8192, len(samples)))
            await trio.to_thread.run_sync(scorer.index.update, ids, _embeddings(rng, samples.labels[ids]))
        return unknown


def _embeddings(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """Embeddings of unit length, of classes that overlap."""
    centres = np.random.default_rng(9).normal(size=(CLASSES, DIMENSION))
    vectors = centres[labels] + rng.normal(size=(len(labels), DIMENSION))
    unit: np.ndarray = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return unit


def _serve(place: Path, samples: int, together: int, counters: Counters, ready: Event) -> None:
    async def main() -> None:
        source = MemorySource()
        for number in range(samples):
            source.add(b"train/%07d" % number)
        for name in ("names", "source", "point"):
            (place / name).mkdir()
        records = LmdbRecords(place / "names", TABLES)
        catalogue = Catalogue(records)
        client = SourceClient(source, SourceLimits(), rng=random.Random(0), on_event=counters.add)
        lister = Lister(catalogue, client)
        cache = CacheControl(MemoryContent(), "spider", 0.5, counters)
        cache.restore(0, None)
        options = Options(source=place / "source", mountpoint=place / "point", cache_dir=place / "cache")
        files = place / "trainers", place / "scores"
        training = Training(catalogue, lister, records, cache, counters, *files, options, None, lambda: None)
        limits = ServerLimits(together=together)
        parts = {field.name: getattr(training.guide, field.name) for field in fields(Guide)}
        server = HookServer(FilledGuide(**parts), counters.add, limits)
        await lister.root()
        listener = listen(place / "hook.sock")
        ready.set()
        await server.serve(listener)

    trio.run(main)


@contextmanager
def connected(samples: int, together: int) -> Iterator[tuple[Client, SharedCounters]]:
    """A client of the hook that is connected to a daemon of its own, which knows the list."""
    context = multiprocessing.get_context("fork")
    counters = SharedCounters(1)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        ready = context.Event()
        arguments = place, samples, together, counters.row(0), ready
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        try:
            assert ready.wait(PATIENCE_S), "the daemon did not start"
            client = Client(lambda: place / "hook.sock", Hello("saturation", "saturation"))
            labels = np.random.default_rng(1).integers(0, CLASSES, samples).astype(np.int32)
            paths = [b"train/%07d" % number for number in range(samples)]
            client.declare(Declaration(NAME, NAME, paths, labels))
            # The daemon takes the first batch once the list is known and the index is full, and finds the radius by it.
            for made in itertools.islice(batches(labels), 2):
                client.batch(partial(_given, made))
            _until(lambda: counters.totals()["hook_batches"] == 2)
            yield client, counters
            client.close()
        finally:
            process.terminate()
            process.join()


def _given(made: Batch) -> Batch:
    return made


def _until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def batches(labels: np.ndarray) -> Iterator[Batch]:
    rng = np.random.default_rng(2)
    for step in itertools.count():
        ids = rng.choice(len(labels), BATCH, replace=False).astype(np.uint32)
        yield Batch(NAME, 0, step, ids, _embeddings(rng, labels[ids]).astype(np.float16), None)


def offer(
    client: Client, counters: SharedCounters, made: list[Batch], rate: float, seconds: float
) -> tuple[float, ...]:
    """Send so many samples a second; returns seconds, batches sent, batches dropped, and rows left out."""
    names = ("hook_batches", "hook_batches_dropped", "hook_rows_left_out")
    before, refused = counters.totals(), client.counts["dropped"]
    offered = round(rate * seconds / BATCH)
    began = time.perf_counter()
    for number in range(offered):
        delay_s = began + number * BATCH / rate - time.perf_counter()
        if delay_s > 0:
            time.sleep(delay_s)
        client.batch(partial(_given, made[number % len(made)]))
    refused = client.counts["dropped"] - refused

    def learned() -> list[int]:
        after = counters.totals()
        return [after[name] - before[name] for name in names]

    _until(lambda: sum(learned()[:2]) + refused == offered)
    # The daemon counts a batch when it begins with it, so the last one may not be finished.
    took_s = time.perf_counter() - began
    arrived, dropped, left_out = learned()
    return took_s, offered, arrived, dropped + refused, left_out


def measure(extent: Extent) -> Iterator[Row]:
    for samples in extent.samples:
        labels = np.random.default_rng(1).integers(0, CLASSES, samples).astype(np.int32)
        made = list(itertools.islice(batches(labels), BATCHES))
        with connected(samples, 1) as alone, connected(samples, TOGETHER) as grouped:
            for rate in extent.rates:
                for together, (client, counters) in ((1, alone), (TOGETHER, grouped)):
                    result = offer(client, counters, made, rate, extent.offered_s)
                    took_s, offered, arrived, dropped, left_out = result
                    rows = arrived * BATCH
                    yield Row(
                        samples=samples,
                        together=together,
                        offered_per_s=rate,
                        sent_per_s=offered * BATCH / extent.offered_s,
                        dropped_share=dropped / offered,
                        scored_per_s=(rows - left_out) / took_s,
                        left_out_share=left_out / max(1, rows),
                    )


def limits(rows: list[Row]) -> dict[tuple[int, int], float]:
    """The highest rate up to which no batch was dropped, for each number of samples and of batches together."""
    found: dict[tuple[int, int], float] = {}
    dropped: set[tuple[int, int]] = set()
    for row in rows:
        key = row.samples, row.together
        if row.dropped_share:
            dropped.add(key)
        elif key not in dropped:
            found[key] = row.offered_per_s
    return found


def run(arguments: argparse.Namespace, console: Console) -> None:
    extent = QUICK if arguments.quick else LARGE if arguments.large else FULL
    rows = list(measure(extent))
    headings = ("samples", "together", "offered/s", "batches dropped", "scored/s", "rows left out")
    table = plain_table("Batches of 128 samples; an embedding has 64 numbers", *headings)
    for row in rows:
        shares = f"{row.dropped_share:.1%}", f"{row.scored_per_s:,.0f}", f"{row.left_out_share:.1%}"
        table.add_row(f"{row.samples:,}", str(row.together), f"{row.offered_per_s:,.0f}", *shares)
    console.print(table)
    for (samples, together), rate in limits(rows).items():
        console.print(
            f"{samples:,} samples, up to {together} together: no batch is dropped at {rate:,.0f} samples a second"
        )
    if arguments.json is not None:
        save(arguments.json, {"machine": machine(), "rows": [asdict(row) for row in rows]})


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--large", action="store_true", help="measure a list of a million samples too")
    arguments = parser.parse_args()
    if arguments.quick and arguments.large:
        parser.error("choose --quick or --large, not both")
    return exit_status("saturation", lambda: run(arguments, Console()), "interrupted")


if __name__ == "__main__":
    sys.exit(main())
