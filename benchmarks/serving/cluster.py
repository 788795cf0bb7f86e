"""Three nodes whose caches act as one, against three nodes that know nothing of each other: real mounts, real nginx.

    .venv/bin/python -m benchmarks.serving.cluster --json docs/results/cluster.json     nine minutes
    .venv/bin/python -m benchmarks.serving.cluster --quick                              a minute, for a look

All nodes are mounts on this machine, each with nginx over it (docs/examples/nginx-peers.conf), of one directory whose
every answer takes `--latency-ms`. Each caches a fifth of the files, and in each epoch reads every third file of one
random order, without a plan, as the ranks of a training do. The systems take turns:

    apart     mounts of their own
    homes     -o peers=...: each file is kept at its home, of which the others ask it
    immutable the same with -o immutable; what a home is asked for stays in its page cache too, so memory adds to caches

A figure is what all nodes read from the source, as a share of the files' bytes: in the first epoch, and the mean of the
later ones. Without plans caches alone cannot be below 1 - n c = 0.4, and nodes apart not below 0.8.

Then three jobs, one on each node, each read all files in each epoch, in orders of their own, by plans that they publish
(trainer_hook's client) and with the next epoch's known:

    jobs-apart    mounts of their own
    jobs-homes    -o peers=...
    jobs-cluster  -o peers=...,cluster=...: each home knows the plans of all jobs, by a Redis server on this machine

A figure is what all nodes read from the source, as a share of what the jobs read.

Then one node reads files that its peer has cached, one at a time, and others from the source: the times of both.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from benchmarks.common.command import add_numbers, command_line
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.mounts import WORKER_PATIENCE_S, mounted
from benchmarks.common.redis_server import RedisServer
from benchmarks.common.results import machine, plain_table, save
from benchmarks.common.sources import make_older
from benchmarks.common.web_server import free_port, web_server
from spiderfs.protocol import EpochEnd, Hello, Plan
from trainer_hook import Client, Declaration
from trainer_hook.connection.mounts import socket_finder

NODES, CACHED, READERS = 3, 0.2, 4
FILE_BYTES = 100_000
# Jobs read more and smaller files: what is under way takes room of a cache, and should be a small part of it.
JOB_FILES, JOB_FILE_BYTES = 3, 20_000
FEW_FETCHES = ",fetches=16"
PATIENCE_S = 120.0
SYSTEMS = {"apart": "", "homes": "", "immutable": "immutable"}
JOBS = ("jobs-apart", "jobs-homes", "jobs-cluster")


class Extent(NamedTuple):
    files: int
    epochs: int
    rounds: int
    latency_ms: int


# For each system and figure a value of each round.
Figures = dict[str, dict[str, list[float]]]


FULL = Extent(files=1_200, epochs=4, rounds=3, latency_ms=20)
QUICK = Extent(files=300, epochs=3, rounds=1, latency_ms=20)


@contextlib.contextmanager
def nodes(source: Path, place: Path, count: int, capacity: int, latency_ms: int, system: str) -> Iterator[list[Path]]:
    """The mount points of so many nodes with empty caches."""
    ports = [free_port() for _ in range(count)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with contextlib.ExitStack() as stack:
        points = []
        place.mkdir()
        server = stack.enter_context(RedisServer(place)).url if system == "jobs-cluster" else ""
        for number, (port, url) in enumerate(zip(ports, urls, strict=True)):
            own = place / f"node{number}"
            options = SYSTEMS.get(system) or "immutable=off"
            if system in JOBS:
                options += FEW_FETCHES
            if not system.endswith("apart"):
                options += f",peers={'+'.join(urls)},peer_self={url},peer_timeout=1s"
            if server:
                options += f",cluster={server}"
            points.append(stack.enter_context(mounted(source, own, capacity, latency_ms, options)))
            stack.enter_context(web_server(points[-1], own, port))
        yield points


def figures(points: Sequence[Path]) -> dict[str, int]:
    """Sums over the nodes: bytes from the source and from peers, and questions that peers did not answer in time."""
    found = [json.loads((point / ".spiderfs/stats.json").read_bytes()) for point in points]
    peers = [peer for stats in found for peer in stats["peers"].values()]
    return {
        "origin": sum(stats["metrics"]["origin_bytes"] for stats in found),
        "peers": sum(peer["bytes"] for peer in peers),
        "timeouts": sum(peer["timeouts"] for peer in peers),
    }


def read(path: Path, size: int = FILE_BYTES) -> float:
    began = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        assert len(file.readall()) == size
        took_s = time.perf_counter() - began
        # Each epoch asks the mount, and not the page cache.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return took_s


def epoch(points: Sequence[Path], names: list[str], readers: ThreadPoolExecutor) -> None:
    tasks = [point / name for number, point in enumerate(points) for name in names[number :: len(points)]]
    # The nodes read side by side.
    tasks = [
        task for rank in range(-(-len(names) // len(points))) for task in tasks[rank :: -(-len(names) // len(points))]
    ]
    list(readers.map(read, tasks))


def made(source: Path, count: int, size: int) -> list[str]:
    """The names of so many new files of this size."""
    rng, names = random.Random(0), [f"{number:05}.jpg" for number in range(count)]
    source.mkdir()
    for name in names:
        (source / name).write_bytes(rng.randbytes(size))
        make_older(source / name)
    return names


def measure_epochs(extent: Extent, source: Path, names: list[str], scratch: Path) -> Figures:
    names_of_figures = ("first", "later", "seconds", "peer_bytes", "timeouts")
    found: Figures = {system: {name: [] for name in names_of_figures} for system in SYSTEMS}
    size = len(names) * FILE_BYTES
    turns = list(SYSTEMS)
    with ThreadPoolExecutor(NODES * READERS) as readers:
        for turn in range(extent.rounds):
            for system in turns[turn % len(turns) :] + turns[: turn % len(turns)]:
                place = scratch / f"{system}{turn}"
                with nodes(source, place, NODES, int(size * CACHED), extent.latency_ms, system) as points:
                    orders, told = random.Random(turn), [figures(points)]
                    began = time.perf_counter()
                    for _ in range(extent.epochs):
                        epoch(points, orders.sample(names, len(names)), readers)
                        told.append(figures(points))
                    took_s = time.perf_counter() - began
                shares = [
                    round((after["origin"] - before["origin"]) / size, 4) for before, after in itertools.pairwise(told)
                ]
                later = statistics.fmean(shares[1:])
                found[system]["first"].append(shares[0])
                found[system]["later"].append(round(later, 4))
                found[system]["seconds"].append(round(took_s, 2))
                found[system]["peer_bytes"].append(told[-1]["peers"])
                found[system]["timeouts"].append(told[-1]["timeouts"])
    return found


def job(point: Path, number: int, names: list[str], epochs: int, apart: Barrier) -> None:
    """A training on this node, which reads all files in each epoch and publishes its plans."""
    rng = np.random.default_rng(number)
    orders = [rng.permutation(len(names)).astype(np.uint32) for _ in range(epochs + 1)]
    client = Client(socket_finder(point, None), Hello("benchmark", f"job-{number}"))
    client.declare(Declaration("train", "train", [name.encode() for name in names], np.zeros(len(names), np.int32)))
    with contextlib.closing(client), ThreadPoolExecutor(READERS) as readers:
        for epoch, order in enumerate(orders[:-1]):
            client.plan(Plan("train", epoch, 0, True, order))
            client.plan(Plan("train", epoch + 1, 0, False, orders[epoch + 1]))
            paths = [point / names[index] for index in order]
            for taken, _ in enumerate(readers.map(read, paths, itertools.repeat(JOB_FILE_BYTES)), 1):
                client.set_progress("train", min(taken + READERS, len(names)), taken)
            client.epoch_end(EpochEnd(epoch))
            # The bytes of each epoch are told between the two.
            apart.wait(PATIENCE_S)
            apart.wait(PATIENCE_S)


def job_shares(extent: Extent, points: Sequence[Path], names: list[str]) -> list[float]:
    """What the nodes read from the source in each epoch of their jobs, as a share of what the jobs read.

    A job is a process of its own: what the children of a process open counts as its reads, and nginx is one of ours.
    """
    forking = multiprocessing.get_context("fork")
    apart = forking.Barrier(len(points) + 1)
    jobs = [
        forking.Process(target=job, args=(point, number, names, extent.epochs, apart), daemon=True)
        for number, point in enumerate(points)
    ]
    told = [figures(points)["origin"]]
    try:
        for process in jobs:
            process.start()
        for _ in range(extent.epochs):
            apart.wait(PATIENCE_S)
            told.append(figures(points)["origin"])
            apart.wait(PATIENCE_S)
    finally:
        for process in jobs:
            process.join(WORKER_PATIENCE_S)
            process.terminate()
            process.join()
    size = len(points) * len(names) * JOB_FILE_BYTES
    return [(after - before) / size for before, after in itertools.pairwise(told)]


def measure_jobs(extent: Extent, source: Path, names: list[str], scratch: Path) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {system: {"first": [], "later": []} for system in JOBS}
    capacity = int(len(names) * JOB_FILE_BYTES * CACHED)
    for turn in range(extent.rounds):
        for system in JOBS[turn % len(JOBS) :] + JOBS[: turn % len(JOBS)]:
            with nodes(source, scratch / f"{system}{turn}", NODES, capacity, extent.latency_ms, system) as points:
                first, *later = job_shares(extent, points, names)
            found[system]["first"].append(round(first, 4))
            found[system]["later"].append(round(statistics.fmean(later), 4))
    return found


def measure_waits(extent: Extent, source: Path, names: list[str], scratch: Path) -> dict[str, float]:
    """Medians, in milliseconds, of reads from a peer that has the file cached, and from the source."""
    capacity = 4 * len(names) * FILE_BYTES
    with nodes(source, scratch / "waits", 2, capacity, extent.latency_ms, "immutable") as (first, second):
        for name in names:
            read(first / name)
        times = [1000 * read(second / name) for name in names]
    # What the peer had takes less than one answer of the source.
    peer = [took for took in times if took < extent.latency_ms]
    return {
        "peer_ms": round(statistics.median(peer), 3),
        "source_ms": round(statistics.median(took for took in times if took >= extent.latency_ms), 3),
        "from_peer_share": round(len(peer) / len(times), 3),
    }


def run(extent: Extent, console: Console) -> dict[str, Any]:
    with scratch_directory("cluster") as scratch:
        source, small = scratch / "source", scratch / "small"
        names = made(source, extent.files, FILE_BYTES)
        epochs = measure_epochs(extent, source, names, scratch)
        jobs = measure_jobs(extent, small, made(small, JOB_FILES * extent.files, JOB_FILE_BYTES), scratch)
        waits = measure_waits(extent, source, names[:300], scratch)
    title = f"{NODES} nodes, {CACHED:.0%} of {extent.files:,} files on each, a source {extent.latency_ms} ms away"
    table = plain_table(title, "", "first epoch", "later epochs", "seconds", "timeouts")
    for system, rows in epochs.items():
        medians = [statistics.median(rows[name]) for name in ("first", "later", "seconds", "timeouts")]
        table.add_row(system, f"{medians[0]:.3f}", f"{medians[1]:.3f}", f"{medians[2]:.1f}", f"{medians[3]:.0f}")
    console.print(table)
    table = plain_table("a job on each node, all files for each", "", "first epoch", "later epochs")
    for system, shares in jobs.items():
        table.add_row(system, *(f"{statistics.median(shares[name]):.3f}" for name in ("first", "later")))
    console.print(table)
    peer_ms, source_ms = waits["peer_ms"], waits["source_ms"]
    console.print(
        f"a read: {peer_ms:.2f} ms from a peer, {source_ms:.1f} ms from the source ({peer_ms / source_ms:.3f})"
    )
    return {"extent": extent._asdict(), "epochs": epochs, "jobs": jobs, "waits": waits}


def main() -> int:
    parser = command_line(__doc__)
    add_numbers(parser, FULL, QUICK, **{name: name for name in Extent._fields})
    arguments = parser.parse_args()
    chosen = {name: value for name in Extent._fields if (value := getattr(arguments, name)) is not None}
    extent = (QUICK if arguments.quick else FULL)._replace(**chosen)

    def measure() -> None:
        save(arguments.json, {"machine": machine()} | run(extent, Console()))

    return exit_status("cluster", measure, "interrupted")


if __name__ == "__main__":
    sys.exit(main())
