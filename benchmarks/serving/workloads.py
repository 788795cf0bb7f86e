"""How fast mounts serve other things than warm small files, and what they cost while no one uses them.

    .venv-dev/bin/python -m benchmarks.serving.workloads scan os.walk and stat, and an index like ImageFolder's
    .venv-dev/bin/python -m benchmarks.serving.workloads large   one file from end to end: cold, cached, from memory
    .venv-dev/bin/python -m benchmarks.serving.workloads far     one file 20 ms away: from end to end, and at random
    .venv-dev/bin/python -m benchmarks.serving.workloads folders 1,000 folders, 20 ms away: the first walk
    .venv-dev/bin/python -m benchmarks.serving.workloads epoch   every file once, by 8 loader workers, 5 ms away
    .venv-dev/bin/python -m benchmarks.serving.workloads start   the first seconds of a plan, 20 and 50 ms away
    .venv-dev/bin/python -m benchmarks.serving.workloads pushed  the wait for files that a plan had fetched in time
    .venv-dev/bin/python -m benchmarks.serving.workloads workers 1, 2 and 4 workers of the mount, 1 to 16 readers
    .venv-dev/bin/python -m benchmarks.serving.workloads idle    processor time, wakings and memory when no one reads

With --quick each takes less than a minute.
The systems take turns round by round; a ratio is the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import tables
from benchmarks.common.command import command_line, main
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.mounts import counts, stats
from benchmarks.common.results import plain_table
from benchmarks.common.sources import make_older, write_patterned
from benchmarks.common.walking import index, walk
from benchmarks.serving import process_cost
from benchmarks.serving.peers import Mounted, install_missing, mounted, served
from benchmarks.serving.readers import READ_BYTES, open_read_close, read_all
from benchmarks.serving.serve import drop_pages, made_files, paths_below
from spiderfs import client
from spiderfs.protocol import Decoder, Hello, Message, Ok, Plan, Progress, Samples, encode
from spiderfs.protocol.requests import SCHEME
from spiderfs.sources.local import LocalSource
from spiderfs.sources.slow import SlowSettings, SlowSource
from spiderfs.sources.source import Version
from spiderfs.store.store import BLOCK_BYTES

Figures = dict[str, dict[str, list[float]]]
"""One figure for each round, by system and by what was measured."""
Come = Callable[[int, int], None]
"""Called with how many files were handed to readers, and how many of them were read."""
PEERS = ("native", "bindfs", "rclone", "spiderfs", "immutable")
# Of each system in `epoch` how it is mounted, and whether the mount gets a plan.
EPOCHS = {
    "spiderfs": ("spiderfs", "", False),
    "planned": ("spiderfs", "", True),
    "immutable": ("immutable", "", False),
    "immutable planned": ("immutable", "", True),
    "immutable planned to a fifth": ("immutable", ",capacity=20%", True),
}
PLANNED = ("planned", "immutable planned")
SERVED = "benchmark"
LOADERS = 8
# Files that each of them has been given beside the one that it reads; how often they report to the mount how far they
# are.
IN_HAND = 2
REPORTED_EVERY_S = 0.05
LATENCY_MS = 5
# How far away the source of `start` is, and how many bytes a second it gives (0: as many as are asked for).
STARTS = {"20 ms": (20, 0), "50 ms": (50, 0), "20 ms, 10 MB/s": (20, 10_000_000)}
START_FILE_BYTES = 16_000
FOLDERS_AWAY_MS = FAR_MS = 20
# Of `far`: the file that is read at random, mostly a hole; its reads, how many bytes each has, and how many wait at a
# time. The peer that reads from end to end asks for as many blocks at a time as the default of read_ahead.
SPARSE_BYTES = 64 << 30
RANDOM_READS, RANDOM_BYTES = 512, 128 << 10
AT_A_TIME = 8
# Threads that no one needs end within 10 s; then all mounts are watched for a while.
AT_REST_S = 15.0
IDLE_S = 10.0
IDLE_FILE_BYTES = 10_000
PACE_S = 0.004
REPORTED_FILES = round(REPORTED_EVERY_S / PACE_S)


def scan(scratch: Path, extent: int, rounds: int, say: Callable[[str], None]) -> Figures:
    """Seconds to look at all names; the files are empty, since no one opens them."""
    root = scratch / "source"
    for number in range(extent):
        directory = root / f"{number // 1000:03d}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{number:06d}.jpg").touch()
    figures: Figures = {}
    with ExitStack() as stack:
        peers = [stack.enter_context(mounted(name, root, scratch / "peers")) for name in PEERS]
        for peer in peers:
            figures[peer.name] = {"first": [seconds(walk, peer.root)], "walk": [], "index": []}
        for number in range(rounds):
            for peer in peers:
                figures[peer.name]["walk"].append(seconds(walk, peer.root))
                figures[peer.name]["index"].append(seconds(index, peer.root))
            say(f"round {number + 1} of {rounds}")
    return figures


def seconds(function: Callable[[Path], object], root: Path) -> float:
    begin = time.perf_counter()
    function(root)
    return time.perf_counter() - begin


def folders(scratch: Path, extent: int, rounds: int, say: Callable[[str], None]) -> Figures:
    """Seconds to walk folders of three files, 20 ms away.

    In "direct", the same slow source is asked for one folder after another.
    """
    root = scratch / "source"
    for number in range(extent):
        directory = root / f"n{number * 7919 % 100_000:05d}"
        directory.mkdir(parents=True)
        for name in ("a.jpg", "b.jpg", "c.jpg"):
            (directory / name).touch()
        # Not even the coarsest clock of a source may have given a later change the same time.
        make_older(directory)
    make_older(root)
    faults = SlowSettings.create(scratch / "faults", latency_ms=FOLDERS_AWAY_MS)
    source = SlowSource(LocalSource(os.fspath(root)), faults)
    figures: Figures = {}
    for number in range(rounds):
        direct = seconds(lambda _: [list(source.scan(name)) for name, _ in source.scan(b"") if name != b"."], root)
        figures.setdefault("direct", {}).setdefault("walk", []).append(direct)
        for system in ("spiderfs", "immutable"):
            with mounted(system, root, scratch / f"{system}-{number}", f"source.latency_ms={FOLDERS_AWAY_MS}") as peer:
                figures.setdefault(system, {}).setdefault("walk", []).append(seconds(walk, peer.root))
        say(f"round {number + 1} of {rounds}")
    return figures


def large(scratch: Path, extent: int, rounds: int, say: Callable[[str], None]) -> Figures:
    """Bytes per second of a file of `extent` MiB; the source itself is in memory throughout."""
    root = scratch / "source"
    root.mkdir()
    write_patterned(root / "file", extent << 20)
    os.sync()
    figures: Figures = {}
    with ExitStack() as stack:
        peers = [stack.enter_context(mounted(name, root, scratch / "peers")) for name in PEERS]
        for peer in peers:
            figures[peer.name] = {"cold": [rate(peer.root / "file")]}
        rate(root / "file")
        for number in range(rounds):
            for peer in peers:
                if peer.name != "native":
                    drop_pages([os.fsencode(peer.root / "file")])
                    figures[peer.name].setdefault("cache", []).append(rate(peer.root / "file"))
                    # rclone and bindfs may have pushed the source's pages out of memory.
                    rate(root / "file")
                figures[peer.name].setdefault("memory", []).append(rate(peer.root / "file"))
            say(f"round {number + 1} of {rounds}")
    return figures


def far(scratch: Path, extent: int, rounds: int, say: Callable[[str], None]) -> Figures:
    """Bytes a second of a file of `extent` MiB, random reads of 128 KiB a second, bytes asked / fetched; 20 ms away.

    "direct" asks the same slow source itself: for blocks in order, 8 at a time, and for what is read at random.
    Each round has a mount without a cache. Those who read at random are 8, in a file of 64 GiB.
    """
    root = scratch / "source"
    root.mkdir()
    (root / "file").write_bytes(os.urandom(extent << 20))
    with open(root / "sparse", "wb") as file:
        file.truncate(SPARSE_BYTES)
    versions = {}
    for name in ("file", "sparse"):
        make_older(root / name)
        found = os.stat(root / name)
        versions[name] = Version(found.st_size, found.st_mtime_ns)
    os.sync()
    source = SlowSource(LocalSource(os.fspath(root)), SlowSettings.create(scratch / "faults", latency_ms=FAR_MS))

    def ask(name: str, size: int, offset: int) -> int:
        return len(source.read(name.encode(), offset, size, versions[name]))

    figures: Figures = {}
    asked = RANDOM_READS * RANDOM_BYTES
    for number in range(rounds):
        generator = random.Random(number)
        offsets = [generator.randrange((SPARSE_BYTES - RANDOM_BYTES) // 4096) * 4096 for _ in range(RANDOM_READS)]
        row = figures.setdefault("direct", {"in order": [], "random": [], "asked/fetched": []})
        blocks = range(0, extent << 20, BLOCK_BYTES)
        row["in order"].append(BLOCK_BYTES * a_second(partial(ask, "file", BLOCK_BYTES), blocks))
        row["random"].append(a_second(partial(ask, "sparse", RANDOM_BYTES), offsets))
        row["asked/fetched"].append(1.0)
        for system in ("spiderfs", "immutable"):
            row = figures.setdefault(system, {"in order": [], "random": [], "asked/fetched": []})
            with mounted(system, root, scratch / f"{system}-{number}", f"source.latency_ms={FAR_MS}") as peer:
                walk(peer.root)
                row["in order"].append(rate(peer.root / "file"))
                before = counts(peer.root)["origin_bytes"]
                descriptor = os.open(peer.root / "sparse", os.O_RDONLY)
                row["random"].append(a_second(partial(read_at, descriptor), offsets))
                os.close(descriptor)
                row["asked/fetched"].append(asked / (counts(peer.root)["origin_bytes"] - before))
        say(f"round {number + 1} of {rounds}")
    return figures


def a_second(read: Callable[[int], int], offsets: Sequence[int]) -> float:
    """How many of these reads are made a second, AT_A_TIME side by side."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for size in pool.map(read, offsets):
            assert size, "a read past the end"
    return len(offsets) / (time.perf_counter() - begin)


def read_at(descriptor: int, offset: int) -> int:
    return len(os.pread(descriptor, RANDOM_BYTES, offset))


def rate(path: Path) -> float:
    buffer = bytearray(READ_BYTES)
    descriptor = os.open(path, os.O_RDONLY)
    begin = time.perf_counter()
    total = 0
    while count := os.readv(descriptor, (buffer,)):
        total += count
    took = time.perf_counter() - begin
    os.close(descriptor)
    return total / took


def epoch(scratch: Path, extent: int, rounds: int, say: Callable[[str], None]) -> Figures:
    """Files per second, and microseconds of the daemon's processor time for each file.

    In "direct", the same loader workers ask the same slow source themselves, once for each file; the processor time
    there is their own, so the last column says what multiple of it a mount's daemon needs. A mount that is
    "planned" gets the order when the epoch begins. "served planned" has no mount: `spiderfs.client` reads. All systems
    know names and attributes beforehand, as from an index.
    """
    files = made_files(scratch / "source", extent, 112_000)
    os.sync()
    names = [os.fsdecode(name) for name in files.names]
    versions = {name: Version((found := os.stat(files.root / name)).st_size, found.st_mtime_ns) for name in names}
    faults = SlowSettings.create(scratch / "faults", latency_ms=LATENCY_MS)
    source = SlowSource(LocalSource(os.fspath(files.root)), faults)
    figures: Figures = {"direct": {"epoch": [], "cpu_us": []}}
    for number in range(rounds):
        random.Random(number).shuffle(names)
        before_s = children_seconds()
        direct = loaders(names, lambda name: len(source.read(name.encode(), 0, versions[name].size, versions[name])))
        figures["direct"]["epoch"].append(direct)
        figures["direct"]["cpu_us"].append((children_seconds() - before_s) / len(names) * 1e6)
        for system, (mount, options, planned) in EPOCHS.items():
            # A Unix socket lies below it, whose path may have 107 bytes.
            place = scratch / f"{list(EPOCHS).index(system)}-{number}"
            with (
                mounted(mount, files.root, place, f"source.latency_ms={LATENCY_MS}{options}") as peer,
                ExitStack() as stack,
            ):
                walk(peer.root)
                before_s = process_cost.cpu_seconds(peer.processes())
                come = stack.enter_context(published(peer.root, names)) if planned else None
                row = figures.setdefault(system, {"epoch": [], "cpu_us": []})
                row["epoch"].append(loaders(names, reading(peer), come))
                # What pushes ahead is a process that begins with the plan.
                row["cpu_us"].append((process_cost.cpu_seconds(peer.processes()) - before_s) / len(names) * 1e6)
        with served(SERVED, files.root, scratch / f"s-{number}", f"source.latency_ms={LATENCY_MS}") as pid:
            url = f"{SCHEME}{SERVED}"
            for name in names:
                client.stat(f"{url}/{name}")
            before_s = process_cost.cpu_seconds(process_cost.process_tree(pid))
            with published_at(client.read_bytes(f"{url}/.spiderfs/hook"), [names]) as begin:
                row = figures.setdefault("served planned", {"epoch": [], "cpu_us": []})
                read = partial(_read_served, url)
                row["epoch"].append(loaders(names, read, begin(0)))
                cost_s = process_cost.cpu_seconds(process_cost.process_tree(pid)) - before_s
                row["cpu_us"].append(cost_s / len(names) * 1e6)
        say(f"round {number + 1} of {rounds}")
    ratio = tables.rounds(figures["served planned"]["epoch"], figures["planned"]["epoch"])
    say(f"served planned / planned: {ratio:.2f}")
    return figures


def _read_served(url: str, name: str) -> int:
    return len(client.read_bytes(f"{url}/{name}"))


def children_seconds() -> float:
    """The processor time of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start(scratch: Path, extent: int, rounds: int, say: Callable[[str], None]) -> Figures:
    """Files in the first second of a plan, files a second from then on, and the most that were fetched at a time.

    "bound" is what the source gives: as many files as are fetched at a time in each latency, or what the line carries.
    The table is to be read by rows, not by columns: each system has its own bound.
    """
    files = made_files(scratch / "source", extent, START_FILE_BYTES)
    os.sync()
    names = [os.fsdecode(name) for name in files.names]
    figures: Figures = {}
    for number in range(rounds):
        random.Random(number).shuffle(names)
        for where, (latency_ms, bandwidth) in STARTS.items():
            for system in PLANNED:
                mount, _, _ = EPOCHS[system]
                place = scratch / f"{PLANNED.index(system)}-{latency_ms}-{bandwidth}-{number}"
                options = f"source.latency_ms={latency_ms},source.bandwidth={bandwidth}"
                with mounted(mount, files.root, place, options) as peer:
                    walk(peer.root)
                    before_s = process_cost.cpu_seconds(peer.processes())
                    with published(peer.root, names) as come:
                        ended = ends_of_reads(names, reading(peer), come)
                        at_a_time = stats(peer.root)["fetches_ahead"]["limit"]
                    row = figures.setdefault(f"{system}, {where}", {})
                    later = [end for end in ended if end > 1]
                    bound = bandwidth / START_FILE_BYTES if bandwidth else at_a_time / latency_ms * 1000
                    row.setdefault("first second", []).append(len(ended) - len(later))
                    row.setdefault("later", []).append(len(later) / (max(ended) - 1) if later else 0.0)
                    row.setdefault("at a time", []).append(at_a_time)
                    row.setdefault("bound", []).append(bound)
                    cost = (process_cost.cpu_seconds(peer.processes()) - before_s) / len(names) * 1e6
                    row.setdefault("daemon_us", []).append(cost)
        say(f"round {number + 1} of {rounds}")
    return figures


@contextmanager
def published(mount: Path, order: list[str]) -> Iterator[Come]:
    """Make this process a trainer that has published in which order it, or its children, will read these files.

    The function that this gives reports how many files were handed to readers, and how many of these were read.
    """
    with published_epochs(mount, [order]) as begin:
        yield begin(0)


def published_epochs(mount: Path, orders: list[list[str]]) -> AbstractContextManager[Callable[[int], Come]]:
    """Publish the orders of several epochs of the same files; call what this gives when an epoch begins."""
    return published_at((mount / ".spiderfs" / "hook").read_bytes(), orders)


@contextmanager
def published_at(hook_file: bytes, orders: list[list[str]]) -> Iterator[Callable[[int], Come]]:
    """Publish them at the socket that the content of `.spiderfs/hook` names; else as `published_epochs`.

    A client of the hook protocol needs no more; trainer_hook does it for PyTorch (docs/reference/hook-protocol.md).
    """
    names = {name: index for index, name in enumerate(orders[0])}
    paths = b"".join(os.fsencode(name) + b"\0" for name in names)
    indices = [np.array([names[name] for name in order], np.uint32) for order in orders]
    decoder = Decoder()
    with socket.socket(socket.AF_UNIX) as hook:

        def send(message: Message) -> None:
            hook.sendall(encode(message))

        def receive() -> None:
            while not (answers := decoder.feed(hook.recv(1 << 16))):
                pass
            if not isinstance(answers[0], Ok):
                raise RuntimeError(f"the mount refused the plan: {answers[0]}")

        def begin(epoch: int) -> Come:
            send(Plan("train", epoch, 0, True, indices[epoch]))
            for later in range(epoch + 1, len(orders)):
                send(Plan("train", later, 0, False, indices[later]))
            return lambda dispatched, taken: send(Progress("train", epoch, dispatched, taken))

        hook.connect(os.fsdecode(hook_file.rstrip(b"\n")))
        send(Hello("workloads", "workloads"))
        receive()
        send(Samples("train", "train", len(names), 0, np.zeros(len(names), np.int32), np.frombuffer(paths, np.uint8)))
        receive()
        yield begin


def pushed(scratch: Path, extent: int, rounds: int, say: Callable[[str], None]) -> Figures:
    """Microseconds that a reader waits for a file that was fetched ahead in time; it reads one every 4 ms.

    "native" is the page cache. The reader has published in which order it reads; all names are known beforehand.
    """
    files = made_files(scratch / "source", extent, 112_000)
    os.sync()
    names = [os.fsdecode(name) for name in files.names]
    native = Mounted("native", files.root, None)
    read_all(paths_below(native, files), 1, seed=0)
    figures: Figures = {}
    for number in range(rounds):
        random.Random(number).shuffle(names)
        paced(names, reading(native), figures.setdefault("native", {}))
        for system in ("spiderfs", "immutable"):
            place = scratch / f"{system}-{number}"
            with mounted(system, files.root, place, f"source.latency_ms={LATENCY_MS}") as peer:
                walk(peer.root)
                with published(peer.root, names) as come:
                    paced(names, reading(peer), figures.setdefault(system, {}), come)
        say(f"round {number + 1} of {rounds}")
    return figures


def paced(names: list[str], read: Callable[[str], int], row: dict[str, list[float]], come: Come | None = None) -> None:
    """Read a file every PACE_S; add the median wait, and that which one read in ten exceeds. `come`: see `loaders`."""
    waits = []
    begin = time.perf_counter()
    for number, name in enumerate(names):
        if come is not None and number % REPORTED_FILES == 0:
            come(min(number + REPORTED_FILES, len(names)), number)
        time.sleep(max(0.0, begin + number * PACE_S - time.perf_counter()))
        asked = time.perf_counter()
        read(name)
        waits.append(time.perf_counter() - asked)
    for percent in (50, 90):
        row.setdefault(f"p{percent}", []).append(float(np.percentile(waits, percent)) * 1e6)


def reading(peer: Mounted, read: Callable[[bytes], int] = open_read_close) -> Callable[[str], int]:
    return lambda name: read(os.fsencode(peer.root / name))


def loaders(names: list[str], read: Callable[[str], int], come: Come | None = None, processes: int = LOADERS) -> float:
    """Files per second of processes that read a part of the names each; `come` is called with how far they are."""
    return len(names) / max(ends_of_reads(names, read, come, processes))


def ends_of_reads(
    names: list[str], read: Callable[[str], int], come: Come | None = None, count: int = LOADERS
) -> list[float]:
    """When each read ended, in seconds after the first began."""
    context = multiprocessing.get_context("fork")
    barrier, results, counts = context.Barrier(count), context.SimpleQueue(), context.RawArray("Q", count)

    def load(start: int) -> None:
        own = names[start::count]
        barrier.wait()
        times = [time.monotonic()]
        for name in own:
            read(name)
            times.append(time.monotonic())
            counts[start] += 1
        results.put(times)

    processes = [context.Process(target=load, args=(start,)) for start in range(count)]
    for process in processes:
        process.start()
    found: list[list[float]] = []
    while len(found) < count:
        if come is not None and results.empty():
            read_now = list(counts)
            come(min(count * (max(read_now) + IN_HAND), len(names)), count * min(read_now))
            time.sleep(REPORTED_EVERY_S)
        else:
            # At once: a full pipe holds up the readers.
            found.append(results.get())
    for process in processes:
        process.join()
    begin = min(times[0] for times in found)
    return [end - begin for times in found for end in times[1:]]


def workers(scratch: Path, extent: int, rounds: int, say: Callable[[str], None]) -> Figures:
    """Warm files of 112 kB per second, and microseconds of the daemon's processor time for each file."""
    files = made_files(scratch / "source", extent, 112_000)
    os.sync()
    figures: Figures = {}
    with ExitStack() as stack:
        peers = {
            f"{count} workers": stack.enter_context(
                mounted("spiderfs", files.root, scratch / str(count), f"workers={count}")
            )
            for count in (1, 2, 4)
        }
        for peer in peers.values():
            read_all(paths_below(peer, files), 1, seed=0)
        for number in range(rounds):
            for name, peer in peers.items():
                row = figures.setdefault(name, {})
                for readers in (1, 2, 4, 8, 16):
                    processes = peer.processes()
                    before = process_cost.cpu_seconds(processes)
                    found = read_all(paths_below(peer, files), readers, seed=number + 1)
                    cost = (process_cost.cpu_seconds(processes) - before) / found.files * 1e6
                    row.setdefault(f"{readers} readers", []).append(found.files / found.wall_s)
                    row.setdefault(f"{readers} readers daemon_us", []).append(cost)
            say(f"round {number + 1} of {rounds}")
    return figures


def idle(scratch: Path, extent: int, rounds: int, say: Callable[[str], None]) -> Figures:
    """Per cent of a core, wakings a second, and MB (PSS) of all processes of a mount whose files were all read once."""
    files = made_files(scratch / "source", extent, IDLE_FILE_BYTES)
    figures: Figures = {}
    with ExitStack() as stack:
        peers = {name: stack.enter_context(mounted(name, files.root, scratch / "peers")) for name in PEERS[1:]}
        other = mounted("spiderfs", files.root, scratch / "other", "binding=pyfuse3")
        peers["spiderfs, pyfuse3"] = stack.enter_context(other)
        for peer in peers.values():
            walk(peer.root)
            read_all(paths_below(peer, files), 1, seed=0)
        time.sleep(AT_REST_S)
        trees = {name: peer.processes() + process_cost.watchers(peer.pid or 0) for name, peer in peers.items()}
        for number in range(rounds):
            for name, found in process_cost.idle(trees, IDLE_S).items():
                row = figures.setdefault(name, {})
                row.setdefault("cpu percent", []).append(100 * found.cpu_share)
                row.setdefault("wakings/s", []).append(found.wakings_per_s)
                row.setdefault("pss MB", []).append(process_cost.pss_bytes(trees[name]) / 1e6)
            say(f"round {number + 1} of {rounds}")
    return figures


class Workload(NamedTuple):
    measure: Callable[[Path, int, int, Callable[[str], None]], Figures]
    extent: int  # names, MiB or files
    quick_extent: int
    base: str  # the system that ratios are to, if there is one
    less_is_better: bool


WORKLOADS = {
    "scan": Workload(scan, 100_000, 5_000, "native", True),
    "folders": Workload(folders, 1000, 100, "direct", True),
    "large": Workload(large, 2048, 128, "native", False),
    "far": Workload(far, 256, 64, "direct", False),
    "epoch": Workload(epoch, 2000, 800, "direct", False),
    "start": Workload(start, 6000, 2000, "", False),
    "pushed": Workload(pushed, 1000, 300, "native", True),
    "workers": Workload(workers, 2000, 200, "1 workers", False),
    "idle": Workload(idle, 10_000, 1_000, "rclone", True),
}
ROUNDS, QUICK_ROUNDS = 5, 2


def figure_table(title: str, figures: Figures, workload: Workload) -> Table:
    table = plain_table(
        title, "system", "what", "median", "least", "most", f"x {workload.base}", words=("system", "what")
    )
    for system, rows in figures.items():
        for what, values in rows.items():
            base = figures.get(workload.base, {}).get(what, [])
            above, below = (base, values) if workload.less_is_better else (values, base)
            # An idle peer may use no processor time at all.
            ratio = tables.rounds(above, below) if above and below and all(below) else None
            cells = [f"{figure:,.4g}" for figure in (statistics.median(values), min(values), max(values))]
            table.add_row(system, what, *cells, "" if ratio is None else f"{ratio:.2f}")
    return table


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    if arguments.workload in ("scan", "large", "idle"):
        install_missing(PEERS)
    workload = WORKLOADS[arguments.workload]
    extent = arguments.extent or (workload.quick_extent if arguments.quick else workload.extent)
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    with scratch_directory("workloads") as scratch:
        figures = workload.measure(scratch, extent, rounds, console.log)
    title = f"{arguments.workload}: {(workload.measure.__doc__ or '').partition(chr(10))[0]}"
    console.print(figure_table(title, figures, workload))
    result = {"workload": arguments.workload, "extent": extent, "figures": figures}
    if arguments.workload in tables.TABLES:
        print(tables.TABLES[arguments.workload].of(result))
    return result


if __name__ == "__main__":
    program = command_line(__doc__)
    program.add_argument("workload", choices=WORKLOADS)
    program.add_argument("--extent", type=int, metavar="N", help="the number of names, MiB or files")
    program.add_argument("--rounds", type=int, metavar="N", help=f"default {ROUNDS}, quick {QUICK_ROUNDS}")
    main(measure, program)
