"""A mount over a bucket that answers after some milliseconds, beside obstore alone and what else mounts or reads one.

    .venv-dev/bin/python -m benchmarks.serving.object_store --json FILE     some twenty minutes
    .venv-dev/bin/python -m benchmarks.serving.object_store --quick         under a minute, without peers

The store is this benchmark's own (`paced_store`), in a process of its own: it answers each request after `--latency-ms`
and counts what it is asked. A loader with eight workers reads all objects in two epochs, each in a new order
(`object_readers`). Nothing is decoded. The systems, of which all but obstore have a cache for a fifth of the bytes:

    obstore              the loader's workers GET the objects, whose keys they know
    opened, immutable    a mount, whose files the workers open; immutable is -o immutable
    planned              the same, and the loader has published its plan
    rclone, s3fs         their mounts, with their cache for whole files; rclone does not ask for each file's own time

Systems take turns, each round in another order, each with an empty cache. A loader that reads a mount has the kernel
forget what it read. "Share" is what the store gave, of the bytes of all objects; no one who knows the next epoch needs
less than the share that is not cached, which is what MIN fetches. With a plan an immutable mount fetches up to two
seconds ahead, here often all of the next epoch: what it gets so counts for the epoch before, and the two are to be
added up. Ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import tables
from benchmarks.common import mounts
from benchmarks.common.command import add_names, command_line, main
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.results import turns
from benchmarks.common.sources import BUCKET
from benchmarks.serving.object_readers import Task
from benchmarks.serving.paced_store import Asked, Objects, PacedStore, paced_store
from benchmarks.serving.peers import install_missing, shown

ROOT = Path(__file__).resolve().parents[2]
OBJECT_BYTES = 110_000
CACHED = 0.2
EPOCHS = ("first", "later")


@dataclass(frozen=True)
class Extent:
    objects: int
    rounds: int
    latency_ms: int


FULL = Extent(objects=3_000, rounds=3, latency_ms=20)
QUICK = Extent(objects=600, rounds=1, latency_ms=20)


@dataclass(frozen=True)
class System:
    loader: str = "files"
    options: str | None = None
    """Of a mount of spiderfs."""
    planned: bool = False
    peer: bool = False


SYSTEMS = {
    "obstore": System("obstore"),
    "opened": System(options=""),
    "immutable": System(options="immutable"),
    "planned": System(options="", planned=True),
    "immutable planned": System(options="immutable", planned=True),
    "rclone": System(peer=True),
    "s3fs": System(peer=True),
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


# -- who shows the bucket


def mounted(prefix: str, place: Path, url: str, capacity: int, options: str = "") -> AbstractContextManager[Path]:
    """A mount of what lies below a prefix."""
    given = f"source.endpoint={url},source.anonymous,{options}"
    return mounts.mounted(f"s3://{BUCKET}/{prefix}", place, capacity, 0, given)


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


def measure_epochs(name: str, extent: Extent, store: PacedStore, place: Path) -> list[Epoch]:
    """Two epochs of a system whose cache is empty."""
    system, keys = SYSTEMS[name], keys_of(extent)
    place.mkdir()
    capacity = int(CACHED * OBJECT_BYTES * extent.objects)
    shows: Any = nullcontext(place)
    if system.options is not None:
        shows = mounted("objects", place, store.url, capacity, system.options)
    elif system.loader == "files":
        shows = peer_mounted(name, "objects", place, store.url, capacity)
    with shows as root:
        task = Task(
            system.loader,
            keys,
            "objects/",
            store.url,
            str(root),
            system.planned,
        )
        return [_epoch(said, asked, extent) for said, asked in _read(task, store)]


def _read(task: Task, store: PacedStore) -> list[tuple[dict[str, Any], Asked]]:
    """What a loader says of each epoch, and what the store was asked meanwhile; raises RuntimeError if it fails."""
    command = [sys.executable, "-m", "benchmarks.serving.object_readers", json.dumps(asdict(task))]
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


# -- the measurement


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent = arguments.extent
    names = arguments.systems or list(WITHOUT_PEERS if arguments.quick else SYSTEMS)
    # No setting of this user changes what is measured.
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    install_missing([name for name in names if SYSTEMS[name].peer])
    objects = Objects(keys_of(extent), OBJECT_BYTES)
    figures: Figures = {name: [] for name in names}
    with scratch_directory("object_store") as scratch, paced_store(objects, extent.latency_ms) as store:
        for turn, name in turns(names, extent.rounds):
            place = scratch / re.sub(r"\W+", "-", f"{turn} {name}")
            figures[name].append(measure_epochs(name, extent, store, place))
    found = {name: [[asdict(epoch) for epoch in one] for one in rounds] for name, rounds in figures.items()}
    result = {"extent": asdict(extent), "cases": {"far": found}}
    print(tables.object_store(result))
    return result


if __name__ == "__main__":
    program = command_line(__doc__, FULL, QUICK)
    add_names(program, "--systems", SYSTEMS, "systems (default all, quick without peers)")
    main(run, program)
