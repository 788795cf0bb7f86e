"""How a first and a second epoch through a mount compare with streaming formats, which need a conversion.

    .venv-dev/bin/python -m benchmarks.serving.streaming_formats                 twenty minutes
    .venv-dev/bin/python -m benchmarks.serving.streaming_formats --quick         under a minute, without peers

1,000 photos in 100 folders are read twice, each time in a new order, by a loader with two workers that decode, crop to
224 x 224 and flip alike (`benchmarks.serving.format_loaders`). Nothing is trained. The cases:

    remote   a simulated source, 20 ms away, that gives 200 MB/s
    fifth    the same, and a cache that holds a fifth of the bytes
    local    photos on the local disk, without delay: plain files alone

Systems take turns round by round, each in a process of its own with an empty cache, and each has the line alone:

    direct               plain files: the loader's workers ask the slow source, a file at a time
    spiderfs, planned    a mount of the source; the loader lists it as ImageFolder does, and has published its plan
    immutable planned    the same with -o immutable
    spdl                 plain files: SPDL's loader, whose 32 threads ask the slow source
    spdl immutable       the same loader over a mount, without a plan
    mosaicml, litdata, webdataset
                         converted beforehand to shards of 4 MB, which each gets from the slow source by its own support
                         for remote stores, a shard a request. WebDataset shuffles shards and a buffer alone.
    FFCV                 is left out: its package is source, which a C++ compiler has to build against OpenCV

All are delayed by the same code (`spiderfs.sources.slow`), in the process that asks: no server takes processor time.
A mount lies there before the process begins, as mounts do; its cache is empty. "Start" is the time until the loader
knows its samples and the plan is published, "whole" that from the start of the process to the end of the first epoch.
In "fifth" mounts get a capacity of a fifth, formats a limit on their cache; the loader has the kernel forget each photo
that it has read from a mount, since pages are no part of a capacity. A ratio is the median of the ratios within a
round.

Formats and loaders have an environment of their own, .peers, which benchmarks/install-peers makes. With --quick the
loaders run in .venv-dev instead, unless --systems names a peer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from benchmarks import tables
from benchmarks.common.command import add_data, add_names, command_line, main
from benchmarks.common.images import HELP, make_images
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.mounts import mounted
from benchmarks.common.results import turns
from benchmarks.serving.format_loaders import FORMATS, SHARD_BYTES, Task
from benchmarks.serving.peers import python_of_peers
from spiderfs.sources.slow import SlowSettings

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = 100
# Of all photos: more than they are, so that nothing is evicted.
ROOMY = 2.0
# A loader that has not read two epochs after so long has hung.
PATIENCE_S = 180.0


@dataclass(frozen=True)
class Extent:
    images: int
    rounds: int


FULL, QUICK = Extent(1_000, rounds=3), Extent(200, rounds=1)


@dataclass(frozen=True)
class Case:
    latency_ms: float = 0.0
    bytes_per_s: int = 0  # 0 is unlimited
    cached_share: float | None = None


CASES = {
    "remote": Case(20.0, 200_000_000),
    "fifth": Case(20.0, 200_000_000, cached_share=0.2),
    "local": Case(),
}


@dataclass(frozen=True)
class System:
    loader: str = "files"
    mount_options: str | None = None
    """None if there is no mount."""
    planned: bool = False


SYSTEMS = {
    "direct": System(),
    "spiderfs": System(mount_options=""),
    "planned": System(mount_options="", planned=True),
    "immutable planned": System(mount_options=",immutable=on", planned=True),
    "spdl": System("spdl"),
    "spdl immutable": System("spdl", mount_options=",immutable=on"),
    **{name: System(name) for name in FORMATS},
}
WITHOUT_PEERS = tuple(name for name, system in SYSTEMS.items() if system.loader == "files")


@dataclass(frozen=True)
class Reading:
    """What one process of a loader did, or with what words it refused."""

    start_s: float = 0.0
    first: float = 0.0
    """Images a second, of an epoch."""
    second: float = 0.0
    whole_s: float = 0.0
    refused: str = ""


@dataclass(frozen=True)
class Data:
    photos: Path
    total_bytes: int
    images: int
    shards: Path
    """With a directory for each format."""


def measured(system: System, case: Case, data: Data, scratch: Path, python: Path) -> Reading:
    """Two epochs of a system with an empty cache; `scratch` does not exist yet."""
    most_bytes = None if case.cached_share is None else int(case.cached_share * data.total_bytes)
    cache = scratch / "cache"
    photos = data.shards / system.loader if system.loader in FORMATS else data.photos
    task = Task(system.loader, str(photos), str(cache), planned=system.planned)
    if system.mount_options is not None:
        capacity = most_bytes or int(ROOMY * data.total_bytes)
        options = f"source.bandwidth={case.bytes_per_s or 'unlimited'}{system.mount_options}"
        with mounted(photos, scratch, capacity, case.latency_ms, options) as mount:
            return read(replace(task, data=str(mount), drops_pages=most_bytes is not None), data.images, python)
    cache.mkdir(parents=True)
    if not case.latency_ms:
        return read(task, data.images, python)
    faults = scratch / "faults"
    SlowSettings.create(faults, latency_ms=case.latency_ms, bandwidth=case.bytes_per_s).close()
    return read(replace(task, faults=str(faults), most_bytes=most_bytes), data.images, python)


def read(task: Task, images: int, python: Path) -> Reading:
    """Run the loader of a task; raises RuntimeError if plain files or a mount do not give every image twice."""
    began_s = time.monotonic()
    try:
        times = loaders(python, "read", json.dumps(asdict(task)))
    except RuntimeError as error:
        if task.loader not in FORMATS:
            raise
        return Reading(refused=str(error))
    if times["images"] != [images, images]:
        raise RuntimeError(f"the loader of {task.loader} gave {times['images']} images, and not {images} each time")
    imported_s, ready_s, (first_s, second_s) = times["imported_s"], times["ready_s"], times["ends_s"]
    return Reading(
        ready_s - imported_s,
        images / (first_s - ready_s),
        images / (second_s - first_s),
        first_s - began_s,
    )


def loaders(python: Path, *words: str) -> dict[str, Any]:
    """What `benchmarks.serving.format_loaders` answers; raises RuntimeError with the last line of what it says."""
    command = [str(python), "-m", "benchmarks.serving.format_loaders", *words]
    pipe = subprocess.PIPE
    # Formats leave locks and shards among the temporary files. A session of its own, so that a loader that hangs ends
    # with its workers.
    with (
        TemporaryDirectory(prefix="spiderfs-", ignore_cleanup_errors=True) as temporary,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": temporary},
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            said, errors = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"did not end in {PATIENCE_S:.0f} s") from error
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise RuntimeError(([line for line in errors.splitlines() if line.strip()] or ["no word"])[-1].strip())
    answer: dict[str, Any] = json.loads(said.splitlines()[-1])
    return answer


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    count, rounds = arguments.extent.images, arguments.extent.rounds
    systems = arguments.systems or (WITHOUT_PEERS if arguments.quick else tuple(SYSTEMS))
    cases = arguments.cases or (("remote",) if arguments.quick else tuple(CASES))
    formats = [name for name in systems if name in FORMATS]
    needs_peers = not arguments.quick or any(name not in WITHOUT_PEERS for name in systems)
    python = python_of_peers() if needs_peers else Path(sys.executable)
    figures: dict[str, dict[str, list[Reading]]] = {}
    with scratch_directory("formats") as scratch:
        names = make_images(scratch / "photos", arguments.data, count, -(-count // FOLDERS))
        total_bytes = sum((scratch / "photos" / name).stat().st_size for name in names)
        data = Data(scratch / "photos", total_bytes, count, scratch / "shards")
        data.shards.mkdir()
        converted = {}
        for name in formats:
            converted[name] = loaders(python, "convert", name, str(data.photos), str(data.shards / name))
            console.log(f"{name} {converted[name]['version']}: converted in {converted[name]['seconds']:.1f} s")
        os.sync()
        for case in cases:
            those = systems if CASES[case].latency_ms else [system for system in systems if system == "direct"]
            for number, system in turns(those, rounds):
                place = scratch / f"{case}-{number}-{system.replace(' ', '-')}"
                reading = measured(SYSTEMS[system], CASES[case], data, place, python)
                figures.setdefault(case, {}).setdefault(system, []).append(reading)
            figures[case] = {system: figures[case][system] for system in those}
    result = {
        "images": count,
        "bytes": total_bytes,
        "shard_bytes": SHARD_BYTES,
        "converted": converted,
        "cases": {case: asdict(CASES[case]) for case in figures},
        "readings": {
            case: {system: [asdict(one) for one in found] for system, found in of_case.items()}
            for case, of_case in figures.items()
        },
    }
    print(tables.streaming_formats(result))
    for case, of_case in figures.items():
        for system, found in of_case.items():
            if words := {one.refused for one in found} - {""}:
                console.print(f"{case}, {system}: {words}", highlight=False)
    return result


if __name__ == "__main__":
    program = command_line(__doc__, FULL, QUICK)
    add_data(program, HELP)
    add_names(program, "--systems", SYSTEMS, "systems (default all, quick those without peers)")
    add_names(program, "--cases", CASES, "cases (default all, quick remote)")
    main(run, program)
