"""One training on several nodes: how the scores of each node's manager rank the samples, with and without `cluster`.

    .venv/bin/python -m benchmarks.engine.shared_scores --json FILE      three minutes
    .venv/bin/python -m benchmarks.engine.shared_scores --quick          half a minute

Each node has a process with the manager's parts that learn, without a mount, and a rank of the training, whose batches
it is told at a fixed pace. An epoch is one random order of all samples, of which each rank has every n-th. The
embeddings are synthetic (benchmarks/common/embeddings.py). The systems:

    own       each manager hears its own rank alone
    shared    the managers share rows and scores by a Redis server on this machine

`rank correlation` is Spearman's, of a manager's scores at the end with those of one manager that hears all ranks; the
least and the mean of all nodes. `CPU` is the processor time a row of the manager that scores for all, in times of that
one's.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
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

from benchmarks.common.command import command_line
from benchmarks.common.embeddings import Embeddings
from benchmarks.common.interruption import exit_status
from benchmarks.common.redis_server import RedisServer
from benchmarks.common.results import machine, plain_table, save
from spiderfs.core.learning.teaching import Teaching
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.courses.courses import Course, Courses
from spiderfs.daemon.training.courses.scoring import BatchScoring
from spiderfs.daemon.training.courses.several_nodes import SeveralNodes
from spiderfs.daemon.training.courses.trainers import Trainers
from spiderfs.daemon.training.trainer import KnownList, SampleList, Trainer
from spiderfs.metrics import SharedCounters
from spiderfs.options.model import Options
from spiderfs.protocol import Batch, Hello
from spiderfs.testing import MemoryContent

WIDTH, CLASSES = 64, 20
OWN, SHARED = "own", "shared"
NODES = (2, 4, 8)
# What is on its way when the last batch has been sent has this long to arrive.
PATIENCE_S, SETTLE_S = 60.0, 1.5


@dataclass(frozen=True)
class Extent:
    samples: int = 10_000
    epochs: int = 3
    step: int = 512
    """Rows of all ranks' batches together."""
    rows_per_s: int = 1_500


QUICK = Extent(samples=2_000, epochs=2)


class Step(NamedTuple):
    """The batches of all ranks: rank r of n has every n-th row from r."""

    ends_epoch: bool
    indices: npt.NDArray[np.uint32]
    embeddings: npt.NDArray[np.float16]


class Learned(NamedTuple):
    scores: npt.NDArray[np.float32]
    cpu_s: float
    counts: dict[str, int]


def steps_of(extent: Extent) -> tuple[npt.NDArray[np.int32], list[Step]]:
    """The label of each sample, and what all ranks train on."""
    rng, made = np.random.default_rng(0), Embeddings(extent.samples, WIDTH, CLASSES)
    steps = []
    for epoch in range(extent.epochs):
        order = rng.permutation(extent.samples).astype(np.uint32)
        for first in range(0, extent.samples, extent.step):
            indices = order[first : first + extent.step]
            embeddings = made.of(indices, epoch).astype(np.float16)
            steps.append(Step(first + extent.step >= extent.samples, indices, embeddings))
    return made.labels.astype(np.int32), steps


class Node:
    """The part of a manager that learns, and one rank."""

    def __init__(self, place: Path, server: str, rank: int, nodes: int, labels: npt.NDArray[np.int32]) -> None:
        self.counters = SharedCounters(1)
        row, count = self.counters.row(0), len(labels)
        options = Options(source=place / "source", mountpoint=place / "point", cache_dir=place / "cache")
        cache = CacheControl(MemoryContent(), options.policy, options.large_share, row)
        cache.restore(count // 5, None)
        courses, trainers = Courses(), Trainers(lambda attached: None, lambda: False)
        self.nodes = SeveralNodes(server, courses, trainers, row)
        self.scoring = BatchScoring(
            cache, Teaching(cache.engine, cache.size_of), courses, row, place / "scores", options, None, self.nodes
        )
        samples = SampleList("train", "train", b"".join(b"%d\0" % number for number in range(count)), labels)
        known = KnownList("list", samples, np.arange(1, count + 1, dtype=np.uint64))
        self.course = Course(1, f"job-{nodes}", known, place / "scores")
        courses.put(self.course)
        trainer = Trainer(os.getpid(), 0, Hello("benchmark", self.course.job_id, None, rank, nodes))
        trainers.attach(trainer)
        trainers.declare(trainer, "train", self.course, True)
        self._number = trainers.number_of(trainer)
        self._rank, self._ranks = rank, nodes

    async def learn(self, steps: Sequence[Step], began: float, steps_per_s: float) -> None:
        """Hear this rank's batches, at this pace from the time `began` on."""
        for number, step in enumerate(steps):
            await trio.sleep(max(0.0, began + number / steps_per_s - time.monotonic()) if steps_per_s else 0)
            its = slice(self._rank, None, self._ranks)
            batch = Batch("train", 0, number, step.indices[its], step.embeddings[its])
            await self.scoring.learn(self._number, self.course, [batch])
            if step.ends_epoch:
                await self.scoring.new_epoch([self.course])

    def count(self, name: str) -> int:
        return self.counters.totals()[name]

    def learned(self, cpu_s: float) -> Learned:
        scoring = self.scoring.of(self.course)
        assert scoring is not None
        counts = {name: count for name, count in self.counters.totals().items() if name.startswith(("cluster", "hook"))}
        return Learned(scoring.to_draw_by(), cpu_s, counts)


def _serve(
    told: Connection,
    extent: Extent,
    server: str,
    rank: int,
    nodes: int,
    labels: npt.NDArray[np.int32],
    steps: list[Step],
) -> None:
    """A node's process: it learns when it is told to begin, and tells what it has learned when it is told to end."""

    async def main(place: Path) -> None:
        node = Node(place, server, rank, nodes, labels)
        await node.scoring.introduce(node.course)
        told.send(None)
        began = await trio.to_thread.run_sync(told.recv)
        before_s = time.process_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.nodes.run, node.scoring, trio.lowlevel.checkpoint)
            paced = server or nodes == 1
            await node.learn(steps, began, extent.rows_per_s / extent.step if paced else 0)
            if server and rank == 0:
                others = sum(len(step.indices) - len(step.indices[::nodes]) for step in steps)
                with trio.move_on_after(PATIENCE_S):
                    while node.count("cluster_rows_heard") < others:
                        await trio.sleep(0.05)
            told.send(None)
            await trio.to_thread.run_sync(told.recv)
            nursery.cancel_scope.cancel()
        told.send(node.learned(time.process_time() - before_s))

    with tempfile.TemporaryDirectory() as place:
        trio.run(main, Path(place))


def learned_by(
    extent: Extent, system: str, nodes: int, labels: npt.NDArray[np.int32], steps: list[Step]
) -> list[Learned]:
    """What the manager of each node has learned at the end."""
    forking = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        server = ""
        if system == SHARED:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = stack.enter_context(RedisServer(place)).url
        talks = []
        for rank in range(nodes):
            talk, told = forking.Pipe()
            process = forking.Process(
                target=_serve, args=(told, extent, server, rank, nodes, labels, steps), daemon=True
            )
            process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)
            talks.append(talk)
            told.close()
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


def run(extent: Extent, console: Console) -> dict[str, object]:
    labels, steps = steps_of(extent)
    rows = extent.samples * extent.epochs
    with console.status("one manager that hears all"):
        (one,) = learned_by(extent, OWN, 1, labels, steps)
    table = plain_table(
        f"{extent.samples:,} samples, {extent.epochs} epochs, {extent.rows_per_s:,} rows/s",
        *("nodes", "system", "rank correlation, least", "mean", "CPU", "rows lost"),
        words=("system",),
    )
    runs: list[dict[str, Any]] = []
    for system in (OWN, SHARED):
        for nodes in NODES:
            with console.status(f"{system}, {nodes} nodes"):
                learned = learned_by(extent, system, nodes, labels, steps)
            found = [float(spearmanr(node.scores, one.scores).statistic) for node in learned]
            cpu = round(learned[0].cpu_s / one.cpu_s, 3) if system == SHARED else None
            lost = sum(node.counts["cluster_rows_lost"] + node.counts["hook_rows_left_out"] for node in learned)
            runs.append(
                {
                    "system": system,
                    "nodes": nodes,
                    "correlations": [round(value, 4) for value in found],
                    "cpu": cpu,
                    "lost": lost,
                }
            )
            cells = (f"{min(found):.3f}", f"{np.mean(found):.3f}", "" if cpu is None else f"{cpu:.2f}", str(lost))
            table.add_row(str(nodes), system, *cells)
    console.print(table)
    return {"extent": asdict(extent), "one_cpu_us_a_row": round(1e6 * one.cpu_s / rows, 1), "runs": runs}


def main() -> int:
    arguments = command_line(__doc__).parse_args()

    def measure() -> None:
        save(arguments.json, {"machine": machine()} | run(QUICK if arguments.quick else Extent(), Console()))

    return exit_status("shared_scores", measure, "interrupted")


if __name__ == "__main__":
    sys.exit(main())
