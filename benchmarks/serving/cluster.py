"""Nodes whose caches act as one, against nodes that know nothing of each other: real mounts, real nginx.

    .venv-dev/bin/python -m benchmarks.serving.cluster --json docs/results/cluster.json     twelve minutes
    .venv-dev/bin/python -m benchmarks.serving.cluster --quick                              a minute, for a look

All nodes are on this machine, each a host of its own behind a link of 1 Gbit/s (benchmarks/common/network.py), without
more delay than the machine has itself; who may make no network takes the loopback. Each node is a mount with nginx over
it (docs/examples/nginx-peers.conf). Each caches a fifth of the files, and in each epoch reads its part of one random
order, without a plan, as the ranks of a training do. The systems take turns:

    apart     mounts of their own
    homes     -o peers=...: each file is kept at its home, of which the others ask it
    immutable the same with -o immutable; what a home is asked for stays in its page cache too, so memory adds to caches

First the source is a directory whose every answer takes `--latency-ms`. A figure is what all nodes read from it, as a
share of the files' bytes: in the first epoch, and the mean of the later ones. Without plans caches alone cannot be
below 1 - n c, which is 0.4 for three nodes and 0.2 for four, and nodes apart not below 0.8.

Then the source is a bucket which gives all nodes together RATE bytes a second, that one alone uses up (`one`). A figure
is how many samples a second all nodes together read in the later epochs. Systems are those of the first part, and with
-planned the same with each rank's plans of this epoch and the next.

Then the bucket has one large file, and gives LARGE_RATE; four nodes begin at once to read all of it in order. Figures
are what the bucket gave, as a multiple of the file, and when the last node was ready, as a multiple of one node alone.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console

from benchmarks import tables
from benchmarks.common.command import add_names, command_line, main
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.mounts import WORKER_PATIENCE_S, mounted
from benchmarks.common.network import Host, NoNetwork, network
from benchmarks.common.results import plain_table
from benchmarks.common.sources import BUCKET, make_older
from benchmarks.common.web_server import free_port, web_server
from benchmarks.serving.paced_store import Objects, PacedStore, paced_store
from spiderfs.protocol import EpochEnd, Hello, Plan
from trainer_hook import Declaration, HookClient
from trainer_hook.connection.client import socket_finder

NODES, MORE_NODES, CACHED, READERS = 3, 4, 0.2, 4
FILE_BYTES = 100_000
# Who fetches ahead reads more and smaller files: what is under way takes room of a cache, and should be a small part.
RATE_FILES, SMALL_BYTES = 1.2, 20_000
PATIENCE_S = 600.0
SYSTEMS = ("apart", "homes", "immutable")
RATE, RATE_AIM = 3_000_000, 2.5
TIMEOUT_S = 1
NGINX_WORKERS = 32  # as in the example
LARGE_RATE, LARGE_AIMS = 200_000_000, (1.05, 1.4)
PARTS, QUICK_PARTS = ("epochs", "more", "rates", "large"), ("epochs", "large")
RATED = ("one", *SYSTEMS, "apart-planned", "homes-planned")


@dataclass(frozen=True)
class Extent:
    files: int
    epochs: int
    rounds: int
    latency_ms: int
    large_mib: int


class Epoch(NamedTuple):
    """What all nodes read from the source in an epoch, and how long it took."""

    origin_bytes: int
    seconds: float


class Machines(NamedTuple):
    """The hosts that nodes may be, and one with the servers of the source and of Redis; empty directories for each."""

    servers: Host
    hosts: list[Host]
    scratch: Path


# The orders in which a node reads, one for each epoch.
Orders = list[npt.NDArray[np.uint32]]
# For each system and figure a value of each round.
Figures = dict[str, dict[str, list[float]]]

FULL = Extent(files=1_200, epochs=3, rounds=2, latency_ms=20, large_mib=512)
QUICK = Extent(files=150, epochs=3, rounds=1, latency_ms=20, large_mib=64)


@contextlib.contextmanager
def machines() -> Iterator[Machines]:
    with contextlib.ExitStack() as stack:
        try:
            servers, *hosts = stack.enter_context(network(1 + MORE_NODES))
        except NoNetwork as exc:
            print(f"all nodes are on the loopback, for no network can be made: {exc}")
            servers, *hosts = (Host(f"127.0.0.{number + 2}") for number in range(1 + MORE_NODES))
        yield Machines(servers, hosts, stack.enter_context(scratch_directory("cluster")))


@contextlib.contextmanager
def nodes(
    site: Machines, system: str, source: Path | PacedStore, capacity: int, latency_ms: int, count: int = NODES
) -> Iterator[list[Path]]:
    """The mount points of so many nodes with empty caches."""
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(scratch_directory(system)))
        common = "immutable" if system.startswith("immutable") else "immutable=off"
        root: Path | str = source if isinstance(source, Path) else f"s3://{BUCKET}"
        if isinstance(source, PacedStore):
            common += f",source.endpoint={source.url},source.anonymous"
        hosts, points, ports = site.hosts[:count], [], []
        for host in hosts:
            with host.entered():
                ports.append(free_port())
        urls = [f"http://{host.address}:{port}" for host, port in zip(hosts, ports, strict=True)]
        for host, port, url in zip(hosts, ports, urls, strict=True):
            own, options = place / host.address, common
            if "apart" not in system and count > 1:
                options += f",peers={'+'.join(urls)},peer_timeout={TIMEOUT_S}s"
                # On a network each finds out which one it is.
                options += "" if host.is_apart else f",peer_self={url}"
            with host.entered():
                points.append(stack.enter_context(mounted(root, own, capacity, latency_ms, options)))
                stack.enter_context(web_server(points[-1], own, port, NGINX_WORKERS, host.address))
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


def made(source: Path, count: int, size: int) -> list[str]:
    """The names of so many new files of this size."""
    rng, names = random.Random(0), [f"{number:05}.jpg" for number in range(count)]
    source.mkdir()
    for name in names:
        (source / name).write_bytes(rng.randbytes(size))
        make_older(source / name)
    return names


def orders_of_ranks(count: int, files: int, epochs: int, seed: int) -> list[Orders]:
    """One random order for each epoch (and for one more), of which each node reads every n-th file."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(files).astype(np.uint32) for _ in range(epochs + 1)]
    return [[order[number::count] for order in orders] for number in range(count)]


def train(point: Path, number: int, names: list[str], orders: Orders, size: int, plans: bool, apart: Barrier) -> None:
    """A training on this node, which publishes its plans if it has any."""
    client = None
    if plans:
        client = HookClient(socket_finder(point, None), Hello("benchmark", f"job-{number}"))
        client.declare(Declaration("train", "train", [name.encode() for name in names], np.zeros(len(names), np.int32)))
    with contextlib.closing(client) if client else contextlib.nullcontext(), ThreadPoolExecutor(READERS) as readers:
        for epoch, order in enumerate(orders[:-1]):
            if client:
                client.plan(Plan("train", epoch, 0, True, order))
                client.plan(Plan("train", epoch + 1, 0, False, orders[epoch + 1]))
            paths = [point / names[index] for index in order]
            for taken, _ in enumerate(readers.map(read, paths, itertools.repeat(size)), 1):
                if client:
                    client.set_progress("train", min(taken + READERS, len(paths)), taken)
            if client:
                client.epoch_end(EpochEnd(epoch))
            # What an epoch took is read between the two.
            apart.wait(PATIENCE_S)
            apart.wait(PATIENCE_S)


def trained(
    points: Sequence[Path], names: list[str], orders: list[Orders], size: int, plans: bool
) -> tuple[list[Epoch], dict[str, int]]:
    """The epochs of a training on each node, and the figures after them.

    A training is a process of its own: what the children of a process open counts as its reads, and nginx is one of
    ours.
    """
    forking = multiprocessing.get_context("fork")
    apart = forking.Barrier(len(points) + 1)
    trainings = [
        forking.Process(target=train, args=(point, number, names, orders[number], size, plans, apart), daemon=True)
        for number, point in enumerate(points)
    ]
    epochs, counted = [], figures(points)
    try:
        for process in trainings:
            process.start()
        for _ in orders[0][:-1]:
            began, before = time.perf_counter(), counted
            apart.wait(PATIENCE_S)
            took_s, counted = time.perf_counter() - began, figures(points)
            epochs.append(Epoch(counted["origin"] - before["origin"], took_s))
            apart.wait(PATIENCE_S)
    finally:
        for process in trainings:
            process.join(WORKER_PATIENCE_S)
            process.terminate()
            process.join()
    return epochs, counted


def measure(
    site: Machines,
    extent: Extent,
    systems: Sequence[str],
    source: Path | PacedStore,
    names: list[str],
    count: int = NODES,
) -> Figures:
    """What each system reads from the source, as a share of what is read, and how many samples a second are read."""
    size = SMALL_BYTES if isinstance(source, PacedStore) else FILE_BYTES
    latency_ms = extent.latency_ms if isinstance(source, Path) else 0
    found: Figures = {system: {} for system in systems}
    for turn in range(extent.rounds):
        for place in range(len(systems)):
            system = systems[(turn + place) % len(systems)]
            here = 1 if system == "one" else count
            orders = orders_of_ranks(here, len(names), extent.epochs, turn)
            plans = system.endswith("planned")
            with nodes(site, system, source, int(len(names) * size * CACHED), latency_ms, here) as points:
                epochs, counted = trained(points, names, orders, size, plans)
            shares = [epoch.origin_bytes / (len(names) * size) for epoch in epochs]
            values = {
                "first": round(shares[0], 4),
                "later": round(statistics.fmean(shares[1:]), 4),
                "samples_s": round(len(names) * len(epochs[1:]) / sum(epoch.seconds for epoch in epochs[1:]), 1),
                "peer_bytes": counted["peers"],
                "timeouts": counted["timeouts"],
            }
            for name, value in values.items():
                found[system].setdefault(name, []).append(value)
    return found


def measure_rates(site: Machines, extent: Extent) -> Figures:
    names = [f"{number:05}.jpg" for number in range(int(RATE_FILES * extent.files))]
    with contextlib.ExitStack() as stack:
        with site.servers.entered():
            objects = Objects(names, SMALL_BYTES)
            store = stack.enter_context(paced_store(objects, extent.latency_ms, site.servers.address))
        store.bytes_per_s = RATE
        store.asked()
        return measure(site, extent, RATED, store, names)


def measure_large(site: Machines, extent: Extent) -> dict[str, dict[str, list[float]]]:
    size, found = extent.large_mib << 20, dict[str, dict[str, list[float]]]()

    def read_all(point: Path) -> None:
        with open(point / "large", "rb", buffering=0) as file:
            assert sum(iter(lambda: len(file.read(1 << 20)), 0)) == size

    with contextlib.ExitStack() as stack:
        with site.servers.entered():
            objects = Objects([], 0, {"large": size})
            store = stack.enter_context(paced_store(objects, extent.latency_ms, site.servers.address))
        store.bytes_per_s = LARGE_RATE
        for _ in range(extent.rounds):
            for system, count in (("one", 1), ("apart", MORE_NODES), ("homes", MORE_NODES)):
                with nodes(site, system, store, 2 * size, 0, count) as points, ThreadPoolExecutor(count) as threads:
                    store.asked()
                    began = time.perf_counter()
                    list(threads.map(read_all, points))
                    row = found.setdefault(system, {"source": [], "seconds": []})
                    row["seconds"].append(round(time.perf_counter() - began, 3))
                    row["source"].append(round(store.asked().given_bytes / size, 4))
    return found


def show_large(found: dict[str, dict[str, list[float]]], extent: Extent, console: Console) -> None:
    title = f"{MORE_NODES} nodes read {extent.large_mib} MiB of {LARGE_RATE / 1e6:g} MB/s for all"
    table = plain_table(title, "", "x file from the source", "last ready, s", "x one")
    alone = statistics.median(found["one"]["seconds"])
    for system, row in found.items():
        source, last = statistics.median(row["source"]), statistics.median(row["seconds"])
        aims = LARGE_AIMS if system == "homes" else (None, None)
        cells = (tables.aimed(figure, aim, most=True) for figure, aim in zip((source, last / alone), aims, strict=True))
        from_source, of_one = cells
        table.add_row(system, from_source, f"{last:.2f}", of_one)
    console.print(table)


def show(title: str, found: Figures, base: str, console: Console, aim: float | None = None) -> None:
    table = plain_table(title, "", "first epoch", "later epochs", "samples/s", f"x {base}", "not in time")
    medians = {
        system: {name: statistics.median(values) for name, values in rows.items()} for system, rows in found.items()
    }
    for system, row in medians.items():
        ratio = row["samples_s"] / medians[base]["samples_s"]
        cells = (f"{row['first']:.3f}", f"{row['later']:.3f}", f"{row['samples_s']:.0f}", tables.aimed(ratio, aim))
        table.add_row(system, *cells, f"{row['timeouts']:.0f}")
    console.print(table)


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent: Extent = arguments.extent
    parts = arguments.parts or (QUICK_PARTS if arguments.quick else PARTS)
    # What is not measured again stays.
    found: dict[str, Any] = {}
    if arguments.json is not None and arguments.json.exists():
        found = json.loads(arguments.json.read_text())
        del found["machine"]
    found["extent"] = asdict(extent)
    with machines() as site:
        found["network"] = site.servers.is_apart
        source = site.scratch / "source"
        names = made(source, extent.files, FILE_BYTES)
        cached = f"{CACHED:.0%} of the files cached on each, a source"
        for part, count, systems in (("epochs", NODES, SYSTEMS), ("more", MORE_NODES, SYSTEMS[:2])):
            if part in parts:
                found[part] = measure(site, extent, systems, source, names, count)
                show(f"{count} nodes, {cached} {extent.latency_ms} ms away", found[part], "apart", console)
        if "rates" in parts:
            found["rates"] = measure_rates(site, extent)
            show(f"{NODES} nodes, {cached} of {RATE / 1e6:g} MB/s for all", found["rates"], "apart", console, RATE_AIM)
        if "large" in parts:
            found["large"] = measure_large(site, extent)
            show_large(found["large"], extent, console)
    return found


if __name__ == "__main__":
    program = command_line(__doc__, FULL, QUICK)
    add_names(program, "--parts", PARTS, f"what is measured (default all, quick {','.join(QUICK_PARTS)})")
    main(run, program)
