"""How fast a training may be before rows are left out, how old scores become then, and how right they are.

    .venv-dev/bin/python -m benchmarks.training.saturation [--quick] [--large] [--json FILE]

A client of the hook sends batches of 128 samples at growing rates to a hook server with a scorer, in a process of its
own whose index is filled first. The samples come in the order of epochs, a new one each time. --large measures
a list of a million samples of a thousand classes in place of the others; there 5,000 samples a second are offered for
two epochs and a bit, some eight minutes.

"Every" is how many epochs pass between two scores of a sample, as far as rows left out say it. After each rate,
the scores of some samples are compared with exact ones, which an exact search for their neighbours yields.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import multiprocessing.connection
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple

import numpy as np
import trio
from rich.console import Console

from benchmarks.common.command import command_line
from benchmarks.common.embeddings import Embeddings
from benchmarks.common.interruption import exit_status
from benchmarks.common.results import machine, plain_table, save, wide_console
from benchmarks.engine.scorer import correlation, exact
from benchmarks.fakes import MemoryContent, MemorySource
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.connection.hook_server import HookServer, listen
from spiderfs.daemon.training.service import Training
from spiderfs.daemon.training.trainer import Declared, SampleList, Trainer
from spiderfs.metrics import Counters, SharedCounters
from spiderfs.options.model import Options
from spiderfs.protocol import Batch, Hello
from spiderfs.scorer.index import normalised
from spiderfs.scorer.scorer import Scorer
from spiderfs.scorer.scoring import ScorerOptions
from spiderfs.shared.attached_trainers import publish_trainers
from spiderfs.sources.client import SourceClient, SourceLimits
from spiderfs.store.records import LmdbRecords
from spiderfs.vfs.catalogue import TABLES, Catalogue
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.fetcher import Episode, Fetcher
from spiderfs.vfs.lister import Lister
from spiderfs.vfs.on_demand import Supply
from trainer_hook import Declaration, HookClient

BATCH = 128
DIMENSION = 64
NAME = "train"
PATIENCE_S = 3600.0
SAMPLES_OF_A_CLASS = 1000
COMPARED = 500
FILLED_AT_ONCE = 8192
# The samples that find the radius, which stays then.
RADIUS_ROWS = 1024
TABLE_WIDTH = 100


@dataclass(frozen=True)
class Extent:
    samples: tuple[int, ...]
    offered_s: float
    rates: tuple[int, ...] = (1000, 2000, 5000, 10_000, 20_000)
    # Offer this rate for two epochs and a bit, of the longest list.
    whole_epochs_at: int | None = None


QUICK = Extent((10_000,), 2.0, (2000, 8000))
FULL = Extent((10_000, 50_000, 100_000), 10.0)
LARGE = Extent((1_000_000,), 10.0, (2000, 5000, 10_000), whole_epochs_at=5000)
WHOLE_EPOCHS = 2.2


@dataclass(frozen=True)
class Report:
    """What the daemon says of its scores."""

    left_out_share: float
    oldest_epochs: float
    correlation: float  # of the scores with exact ones (Spearman)
    recall: float
    bytes_per_sample: float


@dataclass(frozen=True)
class Row:
    samples: int
    offered_per_s: float
    seconds: float
    dropped_share: float  # of the batches, by the hook
    scored_per_s: float
    left_out_share: float  # of the rows that arrived
    scored_every_epochs: float
    oldest_epochs: float  # of all scores, since the index was filled
    correlation: float
    recall: float
    bytes_per_sample: float


def embeddings_of(samples: int) -> Embeddings:
    return Embeddings(samples, DIMENSION, max(10, samples // SAMPLES_OF_A_CLASS))


class FilledTraining(Training):
    """Has an index in which every sample is, as after an epoch."""

    async def samples(self, trainer: Trainer, samples: SampleList) -> Declared:
        declared = await super().samples(trainer, samples)
        scorer = self.trainers.job_dataset_of(trainer, samples.name).scoring_for("graph", DIMENSION, ScorerOptions())
        assert isinstance(scorer, Scorer)
        made = embeddings_of(len(samples))
        order = np.random.default_rng(0).permutation(len(samples))
        for start in range(0, len(samples), FILLED_AT_ONCE):
            ids = order[start : start + FILLED_AT_ONCE]
            await trio.to_thread.run_sync(scorer.index.update, ids, normalised(made.of(ids)))
        scorer.batch(order[:RADIUS_ROWS], made.of(order[:RADIUS_ROWS]))
        scorer.new_epoch()
        return declared

    def report(self) -> Report:
        (job_dataset,) = self.job_datasets
        scorer = job_dataset.scorings["graph"]
        assert isinstance(scorer, Scorer)
        rng = np.random.default_rng(0)
        ids = rng.choice(np.flatnonzero(scorer._scored), COMPARED, replace=False)
        return Report(
            job_dataset.thinning.left_out_share,
            job_dataset.thinning.ages().oldest,
            correlation(exact(scorer, ids), scorer.scores[ids]),
            scorer.recall(COMPARED, rng),
            scorer.index.bytes_per_sample,
        )


def _serve(
    place: Path, samples: int, counters: Counters, ready: Event, asked: multiprocessing.connection.Connection
) -> None:
    async def main() -> None:
        source = MemorySource()
        for number in range(samples):
            source.add(b"train/%07d" % number)
        for name in ("names", "source", "point"):
            (place / name).mkdir()
        records = LmdbRecords(place / "names", TABLES)
        catalogue = Catalogue(records)
        client = SourceClient(source, SourceLimits(), rng=random.Random(0), on_event=counters.add)
        lister, content = Lister(catalogue, client), MemoryContent()
        fetch_lock, full_disk = FetchLock(place / "fetch.lock"), Episode(place / "full-disk")
        fetcher = Fetcher(client, content, fetch_lock, full_disk, counters)
        supply = Supply(content, records, client, catalogue, lister, fetcher, counters)
        cache = CacheControl(content, "spider", 0.5, counters)
        cache.restore(0, None)
        options = Options(source=place / "source", mountpoint=place / "point", cache_dir=place / "cache")
        places = partial(publish_trainers, place / "trainers"), place / "scores"
        callbacks = lambda: None, lambda: True
        training = FilledTraining(supply, cache, *places, options, None, *callbacks)
        server = HookServer(training, counters.add)
        await lister.root()
        listener = listen(place / "hook.sock")

        async def report() -> None:
            while True:
                await trio.to_thread.run_sync(asked.recv, abandon_on_cancel=True)
                asked.send(await trio.to_thread.run_sync(training.report))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(report)
            ready.set()
            await server.serve(listener, place / "hook.sock")

    trio.run(main)


class Daemon(NamedTuple):
    """A daemon of its own that knows a list, and a client of the hook that is connected to it."""

    client: HookClient
    counters: SharedCounters
    embeddings: Embeddings
    asked: multiprocessing.connection.Connection

    def report(self) -> Report:
        self.asked.send(None)
        found = self.asked.recv()
        assert isinstance(found, Report)
        return found


@contextmanager
def connected(samples: int) -> Iterator[Daemon]:
    context = multiprocessing.get_context("fork")
    counters = SharedCounters(1)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        ready = context.Event()
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(place, samples, counters.row(0), ready, there), daemon=True)
        process.start()
        try:
            assert ready.wait(PATIENCE_S), "the daemon did not start"
            client = HookClient(lambda: place / "hook.sock", Hello("saturation", "saturation"))
            made = embeddings_of(samples)
            paths = [b"train/%07d" % number for number in range(samples)]
            client.declare(Declaration(NAME, NAME, paths, made.labels.astype(np.int32)))
            # The daemon takes the first batch once the list is known and the index is full.
            client.batch(partial(_given, next(batches(made))))
            _until(lambda: counters.totals()["hook_batches"] == 1)
            yield Daemon(client, counters, made, here)
            client.close()
        finally:
            process.kill()
            process.join()


def _given(made: Batch) -> Batch:
    return made


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def batches(made: Embeddings) -> Iterator[Batch]:
    """The batches of one epoch after another, each in a new order."""
    rng = np.random.default_rng(2)
    for step in itertools.count():
        order = rng.permutation(len(made.labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            ids = order[start : start + BATCH].astype(np.uint32)
            yield Batch(NAME, 0, step, ids, normalised(made.of(ids)).astype(np.float16), None)


def offer(daemon: Daemon, made: Iterator[Batch], rate: float, seconds: float) -> Row:
    """Send so many samples a second, and say what became of them."""
    names = ("hook_batches", "hook_rows_left_out")
    before, dropped_before = daemon.counters.totals(), daemon.client.counts["dropped"]
    offered = round(rate * seconds / BATCH)
    began = time.perf_counter()
    for number in range(offered):
        batch = next(made)
        delay_s = began + number * BATCH / rate - time.perf_counter()
        if delay_s > 0:
            time.sleep(delay_s)
        daemon.client.batch(partial(_given, batch))

    def learned() -> list[int]:
        after = daemon.counters.totals()
        return [after[name] - before[name] for name in names]

    _until(lambda: learned()[0] + daemon.client.counts["dropped"] - dropped_before == offered)
    # The daemon counts a batch when it begins with it, so the last call may not be finished.
    took_s = time.perf_counter() - began
    arrived, left_out = learned()
    report = daemon.report()
    rows = arrived * BATCH
    return Row(
        samples=len(daemon.embeddings.labels),
        offered_per_s=rate,
        seconds=took_s,
        dropped_share=(daemon.client.counts["dropped"] - dropped_before) / offered,
        scored_per_s=(rows - left_out) / took_s,
        left_out_share=left_out / max(1, rows),
        scored_every_epochs=offered * BATCH / max(1, rows - left_out),
        oldest_epochs=report.oldest_epochs,
        correlation=report.correlation,
        recall=report.recall,
        bytes_per_sample=report.bytes_per_sample,
    )


def measure(extent: Extent) -> Iterator[Row]:
    for samples in extent.samples:
        with connected(samples) as daemon:
            made = batches(daemon.embeddings)
            for rate in extent.rates:
                yield offer(daemon, made, rate, extent.offered_s)
            if extent.whole_epochs_at is not None:
                rate = extent.whole_epochs_at
                yield offer(daemon, made, rate, WHOLE_EPOCHS * samples / rate)


def run(arguments: argparse.Namespace, console: Console) -> None:
    extent = QUICK if arguments.quick else LARGE if arguments.large else FULL
    headings = ("samples", "offered/s", "dropped", "scored/s", "left out", "every", "oldest", "corr.", "recall")
    title = (
        "Batches of 128 samples, embeddings of 64 numbers: batches that were dropped, rows that were left out,\n"
        "epochs between two scores of a sample, epochs since the oldest score, correlation with exact scores"
    )
    table = plain_table(title, *headings)
    rows = []
    for row in measure(extent):
        rows.append(row)
        table.add_row(
            f"{row.samples:,}",
            f"{row.offered_per_s:,.0f}",
            f"{row.dropped_share:.1%}",
            f"{row.scored_per_s:,.0f}",
            f"{row.left_out_share:.1%}",
            f"{row.scored_every_epochs:.2f}",
            f"{row.oldest_epochs:.2f}",
            f"{row.correlation:.3f}",
            f"{row.recall:.3f}",
        )
        save(arguments.json, {"machine": machine(), "rows": [asdict(row) for row in rows]})
    console.print(table)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--large", action="store_true", help="measure a list of a million samples instead")
    arguments = parser.parse_args()
    if arguments.quick and arguments.large:
        parser.error("choose --quick or --large, not both")
    return exit_status("saturation", lambda: run(arguments, wide_console(TABLE_WIDTH)), "interrupted")


if __name__ == "__main__":
    sys.exit(main())
