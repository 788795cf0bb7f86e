"""What it costs a home to receive the plans of jobs on other nodes, with `peers` and `cluster`, at full size.

    .venv-dev/bin/python -m benchmarks.engine.remote_plans --json FILE      ten minutes, and 8 GB of memory
    .venv-dev/bin/python -m benchmarks.engine.remote_plans --quick          half a minute

One process is a home: it has the manager's parts that share plans, without a mount, a cache that is full, and readers
of its own. Another one has those of all other nodes. Both talk by a Redis server on this machine. All readers publish
an epoch at the same time, and then the next one. The readers:

    ranks    of one training: each reads its share of all samples
    jobs     each reads all samples, in an order of its own

`counts after` is the time from the first word until the home knows all plans. `longest gap` is the longest processor
time for which the home's event loop did nothing else, such as answer a trainer; `memory` is what the home's process
took more than before it received anything, at the end; `CPU` is what the home took for each draw of its samples that it
received. `Redis` is what the server took, at most, and `sent` what it was given by all nodes. `lost` are the plans of
other nodes that the home should have received and has not.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import trio
from rich.console import Console

from benchmarks.common.command import command_line, main
from benchmarks.common.processes import forked
from benchmarks.common.redis_server import RedisServer
from benchmarks.common.results import plain_table
from spiderfs.cluster import Link, Stream
from spiderfs.core.engine import Engine
from spiderfs.core.homes import Homes
from spiderfs.daemon.training.job_datasets.job_datasets import JobDataset, JobDatasets
from spiderfs.daemon.training.job_datasets.several_nodes import RemotePlans, SeveralNodes
from spiderfs.daemon.training.job_datasets.trainers import Trainers
from spiderfs.daemon.training.trainer import KnownList, SampleList
from spiderfs.metrics import SharedCounters
from spiderfs.policies.spider import Spider
from spiderfs.protocol import Plan

RANKS, JOBS = "ranks", "jobs"
LIST = "train"
_SPREAD = 0x9E3779B97F4A7C15
# The share of all samples that the cache of a node holds.
CACHED = 0.1
# Nothing is received for so long: then nothing more comes.
QUIET_S, PATIENCE_S = 15.0, 300.0
# The home's loop is looked at this often.
TICK_S = 0.002


@dataclass(frozen=True)
class Setting:
    samples: int
    readers: int
    kind: str
    nodes: int = 8

    @property
    def draws(self) -> int:
        """Of each reader in an epoch."""
        return self.samples // self.readers if self.kind == RANKS else self.samples


FULL = tuple(
    Setting(samples, readers, kind) for samples in (1_300_000, 10_000_000) for readers, kind in ((64, RANKS), (8, JOBS))
)
QUICK = (Setting(200_000, 8, RANKS), Setting(200_000, 64, RANKS), Setting(200_000, 8, JOBS))


class Reader(NamedTuple):
    number: int
    orders: Sequence[npt.NDArray[np.uint32]]
    """By epoch."""


class Node:
    """The parts of a manager that share plans, and the readers on its node."""

    def __init__(self, place: Path, number: int, setting: Setting, server: str, known: KnownList) -> None:
        self.counters = SharedCounters(1)
        row = self.counters.row(0)
        self.number, self.list, self._setting = number, known, setting
        self.homes = Homes({name_of(node): 1.0 for node in range(setting.nodes)}, name_of(number))
        self.engine: Any = Engine(Spider(), int(setting.samples * CACHED), homes=self.homes)
        self.job_datasets = JobDatasets()
        self.job_datasets.put(JobDataset(1, "job", known, place))
        link = Link(server, row)
        self.nodes = SeveralNodes(link, self.job_datasets, Trainers(lambda attached: None, lambda: False), row)
        self._link, self._row = link, row
        self.share(self.engine)

    def share(self, engine: Any) -> None:
        self.plans = RemotePlans(self._link, self.homes, engine, self.job_datasets, self._row, lambda: True)

    async def run(self) -> None:
        await self.nodes.run(SimpleNamespace(scoring=""), trio.lowlevel.checkpoint, self.plans)

    def readers(self) -> list[Reader]:
        """Those on this node, each with two epochs."""
        setting, count = self._setting, self._setting.readers
        its = range(self.number, count, setting.nodes)
        if setting.kind == RANKS:
            whole = [np.random.default_rng(epoch).permutation(setting.samples).astype(np.uint32) for epoch in (0, 1)]
            return [Reader(rank, [order[rank::count][: setting.draws].copy() for order in whole]) for rank in its]
        made = (np.random.default_rng(100 + job) for job in its)
        return [
            Reader(job, [rng.permutation(setting.samples).astype(np.uint32) for _ in (0, 1)])
            for job, rng in zip(its, made, strict=True)
        ]

    async def publish(self, readers: Sequence[Reader], epoch: int) -> None:
        for reader in readers:
            plan = Plan(LIST, epoch, 0, True, reader.orders[epoch])
            await self.plans.send(reader.number, self.list, plan)

    def count(self, name: str) -> int:
        return self.counters.totals()[f"cluster_{name}"]


def name_of(node: int) -> str:
    return f"http://n{node}:8443"


def made_list(samples: int) -> KnownList:
    text = b"".join(b"train/%d\0" % number for number in range(samples))
    keys = np.arange(1, samples + 1, dtype=np.uint64) * np.uint64(_SPREAD) >> np.uint64(1)
    return KnownList("list", SampleList(LIST, "train", text, np.zeros(samples, np.int32)), keys)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Gaps:
    """The longest processor time for which an event loop did nothing else."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        while True:
            # Of this thread: two cores have to do for a whole cluster here.
            before_s = time.thread_time()
            await trio.sleep(TICK_S)
            self.longest_s = max(self.longest_s, time.thread_time() - before_s)


async def _home(parent: Connection, place: Path, setting: Setting, server: str, known: KnownList) -> None:
    node = Node(place, 0, setting, server, known)
    ours = [key for key in known.keys if not node.homes.is_remote(key)]
    node.engine.restore([(key, 1, node.engine.policy.foreseen) for key in ours[: node.engine.budget_bytes]], {})
    readers, ask = node.readers(), partial(trio.to_thread.run_sync, parent.recv)
    remote = setting.readers - len(readers)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.run)
        await trio.sleep(1.0)
        before, found = resident_bytes(), dict[str, float]()

        async def measured(what: str, act: Callable[[], Any], draws: int) -> None:
            gaps, cpu_s = Gaps(), time.process_time()
            with trio.CancelScope() as watching:
                nursery.start_soon(_within, watching, gaps)
                began_s = time.monotonic()
                await act()
                found[f"{what}_s"] = round(time.monotonic() - began_s, 3)
            watching.cancel()
            found[f"{what}_gap_s"] = round(gaps.longest_s, 4)
            found[f"{what}_cpu_us"] = round(1e6 * (time.process_time() - cpu_s) / max(1, draws), 3)
            found[f"{what}_memory"] = resident_bytes() - before

        its_draws = remote * setting.draws // setting.nodes
        for epoch in (0, 1):
            parent.send("receive")
            began_s = await ask()

            async def received(epoch: int = epoch) -> None:
                want, last, last_s = (1 + epoch) * remote, -1, time.monotonic()
                while (count := node.count("plans_received")) < want and time.monotonic() < last_s + QUIET_S:
                    if count != last:
                        last, last_s = count, time.monotonic()
                    await trio.sleep(0.01)

            await measured(f"received_{epoch}", received, its_draws)
            found[f"counts_after_{epoch}_s"] = round(time.monotonic() - began_s, 3)
            # It ranks its members after it has counted.
            await trio.sleep(0.5)
        found["lost"] = 2 * remote - node.count("plans_received")
        ranked_s = time.monotonic()
        node.engine.rerank()
        found["rerank_s"] = round(time.monotonic() - ranked_s, 3)
        parent.send(found)
        nursery.cancel_scope.cancel()


async def _within(scope: trio.CancelScope, gaps: Gaps) -> None:
    with trio.CancelScope() as own:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gaps.watch)
            while not scope.cancel_called:
                await trio.sleep(0.01)
            own.cancel()


async def _others(parent: Connection, place: Path, setting: Setting, server: str, known: KnownList) -> None:
    """All other nodes; what they say to each other is removed unread."""
    ask, stream = partial(trio.to_thread.run_sync, parent.recv, abandon_on_cancel=True), Stream(server)
    nodes = [Node(place, number, setting, server, known) for number in range(1, setting.nodes)]
    readers = {node.number: node.readers() for node in nodes}
    for node in nodes:
        # Of its own readers, of which it has none here, a node asks its engine alone how far they are.
        node.engine = SimpleNamespace(schedule=SimpleNamespace(readers={}), rank_some=lambda limit: False)
        node.share(node.engine)

    def drain() -> None:
        after = {f"spiderfs:plans:{name_of(node.number)}:{known.digest}": "0-0" for node in nodes}
        while not done:
            for key, messages in stream.read(after, 0.1).items():
                after[key] = messages[-1].number
                stream.remove(key, [message.number for message in messages])

    done: list[None] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, drain)
        for node in nodes:
            nursery.start_soon(node.nodes._link.run, dict, None)  # type: ignore[union-attr, arg-type]
            nursery.start_soon(node.plans.run)
        parent.send(None)
        while (what := await ask()) is not None:
            async with trio.open_nursery() as publishing:
                for node in nodes:
                    publishing.start_soon(node.publish, readers[node.number], what)
            parent.send(None)
        done.append(None)
        nursery.cancel_scope.cancel()


def measured_in(setting: Setting, known: KnownList) -> dict[str, Any]:
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(RedisServer(place))
        others, home = (forked(stack, act, place, setting, server.url, known) for act in (_others, _home))
        others.recv()
        for epoch in (0, 1):
            assert home.recv() == "receive"
            home.send(time.monotonic())
            others.send(epoch)
            others.recv()
        found = home.recv()
        others.send(None)
        counted = Stream(server.url)
        served = counted._redis.within(2.0).info()
        counted.close()
        return {
            **asdict(setting),
            **found,
            "redis_peak_bytes": served["used_memory_peak"],
            "sent_bytes": served["total_net_input_bytes"],
        }


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, object]:
    settings = QUICK if arguments.quick else FULL
    table = plain_table(
        f"{settings[0].nodes} nodes, a tenth cached on each",
        *("samples", "readers", "counts after", "longest gap", "memory", "CPU", "Redis", "sent", "lost"),
        words=("readers",),
    )
    runs = []
    for samples in sorted({setting.samples for setting in settings}):
        known = made_list(samples)
        for setting in (setting for setting in settings if setting.samples == samples):
            with console.status(f"{setting}"):
                one = measured_in(setting, known)
            runs.append(one)
            table.add_row(
                f"{samples:,}",
                f"{setting.readers} {setting.kind}",
                f"{one['counts_after_0_s']:.1f} s",
                f"{max(one['received_0_gap_s'], one['received_1_gap_s']) * 1000:.0f} ms",
                f"{one['received_1_memory'] / 2**20:.0f} MiB",
                f"{one['received_0_cpu_us']:.2f} us",
                f"{one['redis_peak_bytes'] / 2**20:.0f} MiB",
                f"{one['sent_bytes'] / 2**20:.0f} MiB",
                f"{one['lost']} of {2 * (setting.readers - setting.readers // setting.nodes)}",
            )
    console.print(table)
    return {"cached": CACHED, "runs": runs}


if __name__ == "__main__":
    main(measure, command_line(__doc__))
