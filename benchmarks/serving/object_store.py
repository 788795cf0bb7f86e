"""A mount over a bucket that answers after some milliseconds, beside obstore alone and what else mounts or reads one.

    .venv-dev/bin/python -m benchmarks.serving.object_store --json FILE     some twenty minutes
    .venv-dev/bin/python -m benchmarks.serving.object_store --quick         under a minute, without peers

The store is this benchmark's own (`paced_store`), in a process of its own: it answers each request after `--latency-ms`
and counts what it is asked. A loader with eight workers, or two, reads all objects in two epochs, each in a new order
(`object_readers`). Nothing is decoded. The systems, of which all but obstore have a cache for a fifth of the bytes:

    obstore              the loader's workers GET the objects, whose keys they know
    opened, immutable    a mount, whose files the workers open; immutable is -o immutable
    planned              the same, and the loader has published its plan
    planned, 2 workers   the same with two workers, as LitData's has
    rclone, s3fs         their mounts, with their cache for whole files; rclone does not ask for each file's own time
    litdata              StreamingRawDataset, two workers; it keeps nothing

    far      20 ms away
    narrow   the same, and the line gives 100 MB/s

Systems take turns, each round in another order, each with an empty cache. A loader that reads a mount has the kernel
forget what it read. "Share" is what the store gave, of the bytes of all objects; no one who knows the next epoch needs
less than the share that is not cached, which is what MIN fetches. With a plan an immutable mount fetches up to two
seconds ahead, here often all of the next epoch: what it gets so counts for the epoch before, and the two are to be
added up. Ratios are medians of the ratios within a round.

Then find(1) lists a tree of directories, first, again, and after a remount, beside `rclone lsf -R`; and an object of
1 GiB is read in order and at random places, beside eight threads of obstore.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.common.command import add_names, add_numbers, command_line
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.mounts import is_mounted, spiderfs
from benchmarks.common.results import Verdict, machine, plain_table, save, verdict_table, wide_console
from benchmarks.serving.object_readers import Task
from benchmarks.serving.paced_store import BUCKET, Asked, Objects, PacedStore, paced_store
from benchmarks.serving.peers import install_missing, python_of_peers, shown

ROOT = Path(__file__).resolve().parents[2]
TABLE_WIDTH = 130
OBJECT_BYTES, LARGE_BYTES, LARGE_KEY = 110_000, 1 << 30, "large/one.bin"
CACHED = 0.2
READS, READ_BYTES, PART_BYTES, PARTS = 200, 128 << 10, 8 << 20, 8
EPOCHS = ("first", "later")


class Extent(NamedTuple):
    objects: int
    rounds: int
    latency_ms: int
    directories: int
    names: int


FULL = Extent(objects=3_000, rounds=3, latency_ms=20, directories=100, names=1_000)
QUICK = Extent(objects=600, rounds=1, latency_ms=20, directories=20, names=200)
CASES = {"far": 0, "narrow": 100_000_000}
"""Bytes a second of the line; 0 is unlimited."""


@dataclass(frozen=True)
class System:
    loader: str = "files"
    options: str | None = None
    """Of a mount of spiderfs."""
    planned: bool = False
    workers: int = 8
    peer: bool = False


SYSTEMS = {
    "obstore": System("obstore"),
    "opened": System(options=""),
    "immutable": System(options=",immutable"),
    "planned": System(options="", planned=True),
    "immutable planned": System(options=",immutable", planned=True),
    "planned, 2 workers": System(options="", planned=True, workers=2),
    "rclone": System(peer=True),
    "s3fs": System(peer=True),
    "litdata": System("litdata", workers=2, peer=True),
}
WITHOUT_PEERS = tuple(name for name, system in SYSTEMS.items() if not system.peer)


@dataclass(frozen=True)
class Epoch:
    files_s: float
    """Files a second."""
    share: float
    """Of the bytes of all objects, what the store gave."""
    requests: float
    """For each object, of any kind."""


def keys_of(extent: Extent) -> list[str]:
    return [f"objects/{number:06}.jpg" for number in range(extent.objects)]


def tree_of(extent: Extent) -> list[str]:
    return [f"tree/{folder:04}/{name:05}.jpg" for folder in range(extent.directories) for name in range(extent.names)]


# -- who shows the bucket


@contextmanager
def mounted(prefix: str, place: Path, url: str, options: str) -> Iterator[Path]:
    """A mount of what lies below a prefix; its cache stays in `place`."""
    mount = place / "mnt"
    mount.mkdir(parents=True, exist_ok=True)
    given = f"cache_dir={place / 'cache'},log_file={place / 'log'},source.endpoint={url},source.anonymous{options}"
    try:
        spiderfs("mount", f"s3://{BUCKET}/{prefix}", mount, "-o", given)
        yield mount
    finally:
        if is_mounted(mount):
            spiderfs("umount", mount)


@contextmanager
def peer_mounted(name: str, prefix: str, place: Path, url: str, capacity: int) -> Iterator[Path]:
    mount, cache = place / "mnt", place / "cache"
    cache.mkdir(parents=True)
    if name == "rclone":
        # By default rclone looks once a minute at how large its cache is.
        limits = ["--vfs-cache-max-size", f"{capacity}B", "--vfs-cache-poll-interval", "1s"]
        kept = ["--vfs-cache-mode", "full", "--cache-dir", str(cache), *limits, "--use-server-modtime"]
        command = ["rclone", "mount", f"{remote(url)}/{prefix}", str(mount), "--config", "", "--read-only", *kept]
    else:
        # s3fs has no limit for its cache: it is given how much of the disk has to stay free.
        options = f"url={url},use_path_request_style,public_bucket=1,ro,listobjectsv2,use_cache={cache},del_cache"
        command = ["s3fs", f"{BUCKET}:/{prefix}", str(mount), "-f", "-o", options]
    with shown(name, command, mount, place / "log"):
        yield mount


def remote(url: str) -> str:
    """How rclone names the bucket."""
    return f':s3,provider=Other,endpoint="{url}",list_version=2:{BUCKET}'


# -- epochs


def measure_epochs(
    name: str, extent: Extent, store: PacedStore, place: Path, python: Callable[[System], Path]
) -> list[Epoch]:
    """Two epochs of a system whose cache is empty."""
    system, keys = SYSTEMS[name], keys_of(extent)
    place.mkdir()
    capacity = int(CACHED * OBJECT_BYTES * extent.objects)
    shows: Any = nullcontext(place)
    if system.options is not None:
        shows = mounted("objects", place, store.url, f",capacity={capacity}{system.options}")
    elif system.loader == "files":
        shows = peer_mounted(name, "objects", place, store.url, capacity)
    with shows as root:
        task = Task(
            system.loader,
            keys,
            "objects/",
            OBJECT_BYTES,
            system.workers,
            store.url,
            BUCKET,
            str(root),
            system.planned,
        )
        return [_epoch(said, asked, extent) for said, asked in _read(python(system), task, store)]


def _read(python: Path, task: Task, store: PacedStore) -> list[tuple[dict[str, Any], Asked]]:
    """What a loader says of each epoch, and what the store was asked meanwhile; raises RuntimeError if it fails."""
    command = [str(python), "-m", "benchmarks.serving.object_readers", json.dumps(asdict(task))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline()]
            found = []
            store.asked()
            for _ in EPOCHS:
                process.stdin.write("\n")
                process.stdin.flush()
                lines.append(process.stdout.readline())
                if not lines[-1]:
                    raise RuntimeError(f"the loader {task.loader} ended before its epoch did")
                found.append((json.loads(lines[-1]), store.asked()))
            return found
        finally:
            process.stdin.close()
            # A mount is in use as long as a worker of the loader lives.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
                while True:
                    os.killpg(process.pid, 0)
                    time.sleep(0.01)


def _epoch(said: dict[str, Any], asked: Asked, extent: Extent) -> Epoch:
    total_bytes = extent.objects * OBJECT_BYTES
    if (said["objects"], said["bytes"]) != (extent.objects, total_bytes):
        raise RuntimeError(f"a loader read {said['objects']} objects and {said['bytes']} bytes, not all of them")
    requests = asked.gets + asked.lists + asked.heads
    return Epoch(extent.objects / said["took_s"], asked.given_bytes / total_bytes, requests / extent.objects)


Figures = dict[str, list[list[Epoch]]]


def ratios(figures: Figures, one: str, other: str, epoch: int) -> list[float]:
    return [
        ours[epoch].files_s / theirs[epoch].files_s
        for ours, theirs in zip(figures.get(one, []), figures.get(other, []), strict=False)
    ]


def show_epochs(case: str, figures: Figures, extent: Extent, console: Console) -> None:
    line = f", {CASES[case] / 1e6:g} MB/s" if CASES[case] else ""
    title = f"{case}: {extent.objects:,} objects of {OBJECT_BYTES // 1000} kB, {extent.latency_ms} ms away{line}"
    headings = [text for epoch in EPOCHS for text in (f"{epoch}, files/s", "x obstore", "share", "requests")]
    table = plain_table(title, "", *headings)
    for name, rounds in figures.items():
        cells = []
        for number in range(len(EPOCHS)):
            epochs = [found[number] for found in rounds]
            of_obstore = ratios(figures, name, "obstore", number)
            cells += [
                f"{statistics.median(epoch.files_s for epoch in epochs):,.0f}",
                f"{statistics.median(of_obstore):.2f}" if of_obstore else "",
                f"{statistics.median(epoch.share for epoch in epochs):.2f}",
                f"{statistics.median(epoch.requests for epoch in epochs):.2f}",
            ]
        table.add_row(name, *cells)
    console.print(table)


AIMS = (
    ("far", "opened", "obstore", 0, 0.95),
    ("far", "planned", "obstore", 0, 3.5),
    ("far", "opened", "rclone", 0, 1.8),
    ("far", "planned", "rclone", 0, 5.0),
    ("far", "planned", "rclone", 1, 8.0),
    ("far", "planned, 2 workers", "litdata", 0, 0.95),
    ("far", "planned, 2 workers", "litdata", 1, 0.8),
    ("narrow", "planned, 2 workers", "litdata", 1, 1.2),
)


def verdicts(cases: dict[str, Figures]) -> list[Verdict]:
    found = []
    for case, ours, theirs, epoch, aim in AIMS:
        if measured := ratios(cases.get(case, {}), ours, theirs, epoch):
            what = f"{case}, {EPOCHS[epoch]} epoch: {ours}, x {theirs}"
            found.append(Verdict(what, f">= {aim}", measured, statistics.median(measured) >= aim))
    return found


# -- names, and a large object


def walk_s(command: list[str], names: int) -> float:
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, check=True)
    took_s = time.perf_counter() - begin
    if done.stdout.count(b"\n") != names:
        raise RuntimeError(f"{command[0]} listed {len(done.stdout.splitlines())} names, not {names}")
    return took_s


def measure_walks(extent: Extent, store: PacedStore, scratch: Path, peers: bool) -> dict[str, tuple[float, Asked]]:
    names, found = extent.directories * extent.names, {}
    for walks in (("first", "again"), ("after a remount",)):
        with mounted("tree", scratch / "walked", store.url, "") as mount:
            for walk in walks:
                store.asked()
                found[walk] = walk_s(["find", str(mount), "-type", "f", "-printf", "%s\n"], names), store.asked()
    if peers:
        command = ["rclone", "lsf", "-R", "--files-only", "--format", "ps", f"{remote(store.url)}/tree", "--config", ""]
        found["rclone lsf -R"] = walk_s(command, names), store.asked()
    return found


def measure_large(store: PacedStore, scratch: Path) -> dict[str, tuple[float, Asked]]:
    """Seconds, and what the store gave, for a large object: by obstore, in order, and at random places of a mount."""
    found = {}
    store.asked()
    command = [sys.executable, "-m", "benchmarks.serving.object_store", "--download", store.url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found[f"obstore, {PARTS} parts at a time"] = float(done.stdout), store.asked()
    with mounted("large", scratch / "in order", store.url, "") as mount:
        store.asked()
        begin = time.perf_counter()
        with open(mount / "one.bin", "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
        found["a mount, in order"] = time.perf_counter() - begin, store.asked()
    with mounted("large", scratch / "at random", store.url, "") as mount:
        places = random.Random(2).sample(range(LARGE_BYTES // READ_BYTES), READS)
        store.asked()
        begin = time.perf_counter()
        descriptor = os.open(mount / "one.bin", os.O_RDONLY)
        try:
            for place in places:
                if len(os.pread(descriptor, READ_BYTES, place * READ_BYTES)) != READ_BYTES:
                    raise RuntimeError("a read of the large object was short")
        finally:
            os.close(descriptor)
        found["a mount, at random"] = time.perf_counter() - begin, store.asked()
    return found


def download(url: str) -> None:
    """Print how long obstore takes for the large object; in a process of its own, for its client survives no fork."""
    import obstore
    from obstore.store import S3Store

    options: Any = {"allow_http": True}
    bucket = S3Store(BUCKET, endpoint=url, region="us-east-1", skip_signature=True, client_options=options)
    begin = time.perf_counter()
    with ThreadPoolExecutor(PARTS) as threads:
        parts = threads.map(
            lambda at: len(obstore.get_range(bucket, LARGE_KEY, start=at, length=PART_BYTES)),
            range(0, LARGE_BYTES, PART_BYTES),
        )
    assert sum(parts) == LARGE_BYTES
    print(time.perf_counter() - begin)


def show_rest(
    extent: Extent, walks: dict[str, tuple[float, Asked]], large: dict[str, tuple[float, Asked]], console: Console
) -> None:
    title = f"A walk of {extent.directories} directories of {extent.names:,} names"
    table = plain_table(title, "", "s", "requests")
    for walk, (took_s, asked) in walks.items():
        table.add_row(walk, f"{took_s:.2f}", str(asked.lists + asked.gets + asked.heads))
    console.print(table)
    table = plain_table(f"An object of {LARGE_BYTES >> 30} GiB", "", "s", "MB/s", "given / asked")
    for how, (took_s, asked) in large.items():
        asked_bytes = READS * READ_BYTES if "random" in how else LARGE_BYTES
        rate = asked_bytes / took_s / 1e6
        table.add_row(how, f"{took_s:.2f}", f"{rate:.0f}", f"{asked.given_bytes / asked_bytes:.2f}")
    console.print(table)


# -- the measurement


def run(extent: Extent, names: list[str], cases: list[str], console: Console) -> dict[str, Any]:
    peers = [name for name in names if SYSTEMS[name].peer]
    install_missing(peers)
    of_peers = python_of_peers() if "litdata" in names else Path(sys.executable)

    def python(system: System) -> Path:
        return of_peers if system.loader == "litdata" else Path(sys.executable)

    objects = Objects([*keys_of(extent), *tree_of(extent)], OBJECT_BYTES, {LARGE_KEY: LARGE_BYTES})
    figures: dict[str, Figures] = {case: {name: [] for name in names} for case in cases}
    with scratch_directory("object_store") as scratch, paced_store(objects, extent.latency_ms) as store:
        for case in cases:
            store.bytes_per_s = CASES[case]
            for turn in range(extent.rounds):
                first = turn % len(names)
                for name in names[first:] + names[:first]:
                    place = scratch / re.sub(r"\W+", "-", f"{case} {turn} {name}")
                    figures[case][name].append(measure_epochs(name, extent, store, place, python))
                console.log(f"{case}: round {turn + 1} of {extent.rounds}")
            show_epochs(case, figures[case], extent, console)
        store.bytes_per_s = 0
        walks = measure_walks(extent, store, scratch, "rclone" in names)
        large = measure_large(store, scratch)
    show_rest(extent, walks, large, console)
    if judged := verdicts(figures):
        console.print(verdict_table("aims", judged, [".2f"] * len(judged)))
    return {
        "extent": extent._asdict(),
        "cases": {
            case: {name: [[asdict(epoch) for epoch in one] for one in rounds] for name, rounds in found.items()}
            for case, found in figures.items()
        },
        "walks": {walk: {"seconds": took_s} | asked._asdict() for walk, (took_s, asked) in walks.items()},
        "large": {how: {"seconds": took_s} | asked._asdict() for how, (took_s, asked) in large.items()},
    }


def main() -> int:
    parser = command_line(__doc__)
    add_numbers(parser, FULL, QUICK, **{name: name for name in Extent._fields})
    add_names(parser, "--systems", SYSTEMS, "systems (default all, quick without peers)")
    add_names(parser, "--cases", CASES, "cases (default all, quick far)")
    parser.add_argument("--download", metavar="URL", help="say how long obstore takes for the large object; then end")
    arguments = parser.parse_args()
    if arguments.download:
        download(arguments.download)
        return 0
    chosen = {name: value for name in Extent._fields if (value := getattr(arguments, name)) is not None}
    extent = (QUICK if arguments.quick else FULL)._replace(**chosen)
    systems = arguments.systems or list(WITHOUT_PEERS if arguments.quick else SYSTEMS)
    cases = arguments.cases or (["far"] if arguments.quick else list(CASES))

    def measure() -> None:
        result = run(extent, systems, cases, wide_console(TABLE_WIDTH))
        save(arguments.json, {"machine": machine()} | result)

    # No setting of this user changes what is measured.
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    return exit_status("object_store", measure, "interrupted")


if __name__ == "__main__":
    sys.exit(main())
