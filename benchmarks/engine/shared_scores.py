"""One training on several nodes: how the scores of each node's manager rank the samples, with and without `cluster`.

    .venv-dev/bin/python -m benchmarks.engine.shared_scores --json FILE      two minutes
    .venv-dev/bin/python -m benchmarks.engine.shared_scores --quick          half a minute

Each node has a process with the manager's parts that learn, without a mount, and a rank of the training, whose batches
it receives. An epoch is one random order of all samples, of which each rank has every n-th. The embeddings are
synthetic (benchmarks/common/embeddings.py). The systems:

    one       one manager receives all ranks, at a fixed pace: without pauses a row takes less processor time
    own       each manager receives its own rank alone
    shared    the managers share rows and scores by a Redis server on this machine, at the same pace

`rank correlation` is Spearman's, of a manager's scores at the end with those of the system `one`; the least and the
mean of all nodes. `CPU` is the processor time of the manager that scores for all, in times of that one's.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import trio
from rich.console import Console
from scipy.stats import spearmanr

from benchmarks.common.command import command_line, main
from benchmarks.common.embeddings import Embeddings
from benchmarks.common.processes import forked
from benchmarks.common.redis_server import RedisServer
from benchmarks.common.results import plain_table
from benchmarks.fakes import MemoryContent
from spiderfs.cluster import Link
from spiderfs.core.feed import PolicyFeed
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.job_datasets.job_datasets import JobDataset, JobDatasets
from spiderfs.daemon.training.job_datasets.scoring import BatchScoring
from spiderfs.daemon.training.job_datasets.several_nodes import SeveralNodes
from spiderfs.daemon.training.job_datasets.trainers import Trainers
from spiderfs.daemon.training.trainer import KnownList, SampleList, Trainer
from spiderfs.metrics import SharedCounters
from spiderfs.options.model import Options
from spiderfs.options.types import CacheDirectories
from spiderfs.protocol import Batch, Hello

WIDTH, CLASSES = 64, 20
ONE, OWN, SHARED = "one", "own", "shared"
NODES = (2, 4, 8)
# What is on its way when the last batch has been sent has this long to arrive.
PATIENCE_S, SETTLE_S = 60.0, 1.5


@dataclass(frozen=True)
class Extent:
    samples: int = 4_000
    epochs: int = 3
    step: int = 512
    """Rows of all ranks' batches together."""
    rows_per_s: int = 1_000


QUICK = Extent(samples=2_000, epochs=2, rows_per_s=1_500)


class Step(NamedTuple):
    """The batches of all ranks: rank r of n has every n-th row from r."""

    ends_epoch: bool
    indices: npt.NDArray[np.uint32]
    embeddings: npt.NDArray[np.float16]


class TrainingData(NamedTuple):
    """The label of each sample, and what all ranks train on."""

    labels: npt.NDArray[np.int32]
    steps: list[Step]


class Learned(NamedTuple):
    scores: npt.NDArray[np.float32]
    cpu_s: float
    counts: dict[str, int]


def made_training(extent: Extent) -> TrainingData:
    rng, made = np.random.default_rng(0), Embeddings(extent.samples, WIDTH, CLASSES)
    steps = []
    for epoch in range(extent.epochs):
        order = rng.permutation(extent.samples).astype(np.uint32)
        for first in range(0, extent.samples, extent.step):
            indices = order[first : first + extent.step]
            embeddings = made.of(indices, epoch).astype(np.float16)
            steps.append(Step(first + extent.step >= extent.samples, indices, embeddings))
    return TrainingData(made.labels.astype(np.int32), steps)


class Node:
    """The part of a manager that learns, and the ranks on its node."""

    def __init__(self, place: Path, server: str, ranks: Sequence[int], of: int, labels: npt.NDArray[np.int32]) -> None:
        self.counters = SharedCounters(1)
        row, count = self.counters.row(0), len(labels)
        cache_dir = CacheDirectories(place / "cache")
        options = Options(source=place / "source", mountpoint=place / "point", cache_dir=cache_dir)
        cache = CacheControl(MemoryContent(), options.policy, options.large_share, row)
        cache.restore(count // 5, None)
        job_datasets, trainers = JobDatasets(), Trainers(lambda attached: None, lambda: False)
        self.nodes = SeveralNodes(Link(server, row) if server else None, job_datasets, trainers, row)
        self.scoring = BatchScoring(
            cache,
            PolicyFeed(cache.engine, cache.size_of),
            job_datasets,
            row,
            place / "scores",
            options,
            None,
            self.nodes,
        )
        samples = SampleList("train", "train", b"".join(b"%d\0" % number for number in range(count)), labels)
        known = KnownList("list", samples, np.arange(1, count + 1, dtype=np.uint64))
        self.job_dataset = JobDataset(1, f"job-{of}", known, place / "scores")
        job_datasets.put(self.job_dataset)
        self._numbers, self._of, self._trainers, self._epoch = {}, of, list[Trainer](), 0
        for rank in ranks:
            trainer = Trainer(os.getpid(), 0, Hello("benchmark", self.job_dataset.job_id, None, rank, of))
            trainers.attach(trainer)
            self._trainers.append(trainer)
            trainers.declare(trainer, "train", self.job_dataset, True)
            self._numbers[rank] = trainers.number_of(trainer)

    async def learn(self, steps: Sequence[Step], began: float, steps_per_s: float) -> None:
        """Receive the batches of these ranks, at this pace from the time `began` on; 0 is as fast as they are
        learned."""
        for number, step in enumerate(steps):
            await trio.sleep(max(0.0, began + number / steps_per_s - time.monotonic()) if steps_per_s else 0)
            for rank, trainer in self._numbers.items():
                its = slice(rank, None, self._of)
                await self.nodes.until_in_turn(self.job_dataset.job_id, self._epoch)
                batch = Batch("train", self._epoch, number, step.indices[its], step.embeddings[its])
                await self.scoring.learn(trainer, self.job_dataset, [batch])
            if step.ends_epoch:
                await self._end_epoch()

    async def _end_epoch(self) -> None:
        """All ranks end an epoch, as `Training` has them do."""

        async def act() -> None:
            await self.scoring.new_epoch([self.job_dataset])

        for trainer in self._trainers:
            self.nodes.send_ended(trainer, self._epoch)
        await self.nodes.once_all_ended(self.job_dataset.job_id, self._epoch, act)
        self._epoch += 1

    def count(self, name: str) -> int:
        return self.counters.totals()[name]

    def learned(self, cpu_s: float) -> Learned:
        scoring = self.scoring.of(self.job_dataset)
        assert scoring is not None
        counts = {name: count for name, count in self.counters.totals().items() if name.startswith(("cluster", "hook"))}
        return Learned(scoring.to_draw_by(), cpu_s, counts)


async def _serve(
    parent: Connection, place: Path, extent: Extent, server: str, ranks: Sequence[int], of: int, training: TrainingData
) -> None:
    """A node's process: it learns from a message to begin on, and sends what it has learned after a message to end."""
    node = Node(place, server, ranks, of, training.labels)
    await node.scoring.introduce(node.job_dataset)
    parent.send(None)
    began = await trio.to_thread.run_sync(parent.recv)
    before_s = time.process_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.nodes.run, node.scoring, trio.lowlevel.checkpoint)
        paced = bool(server) or len(ranks) > 1
        await node.learn(training.steps, began, extent.rows_per_s / extent.step if paced else 0)
        if server and 0 in ranks:
            others = sum(len(step.indices) - len(step.indices[::of]) for step in training.steps)
            with trio.move_on_after(PATIENCE_S):
                while node.count("cluster_rows_received") < others:
                    await trio.sleep(0.05)
        parent.send(None)
        await trio.to_thread.run_sync(parent.recv)
        nursery.cancel_scope.cancel()
    parent.send(node.learned(time.process_time() - before_s))


def learned_by(extent: Extent, system: str, nodes: int, training: TrainingData) -> list[Learned]:
    """What the manager of each node has learned at the end."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(RedisServer(place)).url if system == SHARED else ""
        groups: list[Sequence[int]] = [range(nodes)] if system == ONE else [[rank] for rank in range(nodes)]
        talks = [
            forked(stack, _serve, place / str(ranks[0]), extent, server, ranks, nodes, training) for ranks in groups
        ]
        for talk in talks:
            talk.recv()
        began = time.monotonic()
        for talk in talks:
            talk.send(began)
        for talk in talks:
            talk.recv()
        # The last scores are on their way to the others.
        time.sleep(SETTLE_S if server else 0)
        for talk in talks:
            talk.send(None)
        return [talk.recv() for talk in talks]


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, object]:
    extent: Extent = arguments.extent
    training = made_training(extent)
    table = plain_table(
        f"{extent.samples:,} samples, {extent.epochs} epochs, {extent.rows_per_s:,} rows/s",
        *("nodes", "system", "rank correlation, least", "mean", "CPU", "rows lost"),
        words=("system",),
    )
    runs: list[dict[str, Any]] = []
    for nodes in NODES:
        with console.status(f"{nodes} nodes"):
            (one,) = learned_by(extent, ONE, nodes, training)
            for system in (OWN, SHARED):
                learned = learned_by(extent, system, nodes, training)
                found = [round(float(spearmanr(node.scores, one.scores).statistic), 4) for node in learned]
                cpu = round(learned[0].cpu_s / one.cpu_s, 3)
                lost = sum(node.counts["cluster_rows_lost"] + node.counts["hook_rows_left_out"] for node in learned)
                runs.append({"nodes": nodes, "system": system, "correlations": found, "cpu": cpu, "lost": lost})
                cells = (f"{min(found):.3f}", f"{np.mean(found):.3f}", f"{cpu:.2f}", str(lost))
                table.add_row(str(nodes), system, *cells)
    console.print(table)
    return {"extent": asdict(extent), "runs": runs}


if __name__ == "__main__":
    main(measure, command_line(__doc__, Extent(), QUICK))
