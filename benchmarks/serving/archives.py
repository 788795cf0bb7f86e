"""Archives as directories: epochs over a tar beside the same files loose, by mounts with a plan.

    .venv-dev/bin/python -m benchmarks.serving.archives --json FILE     six minutes
    .venv-dev/bin/python -m benchmarks.serving.archives --quick         a minute

Two epochs, each in a new order, by the loader of `streaming_formats` (two workers, here with batches of 16). "Pool"
draws by a PoolSampler whose pool has half as many samples as a cache of a fifth. "Reads" are requests for the bytes of
samples, in both epochs together, and "bytes" what came, each for a sample: where a cache of a fifth is used as well as
can be, 1.8. What the index takes is in "start".

    remote    photos 20 ms away, at 200 MB/s, decoded; a cache that holds everything
    requests  members of 8 kB 50 ms away, a mount that may make 8 requests at a time, not decoded; a fifth

Where the cache holds a fifth, the kernel forgets what the loader has read. Systems take turns, each round in another
order, each with an empty cache. Ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import tables
from benchmarks.common.command import add_data, add_names, command_line, main
from benchmarks.common.images import HELP, make_images
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.mounts import counts, mounted
from benchmarks.common.results import turns
from benchmarks.serving.format_loaders import Task
from benchmarks.serving.streaming_formats import FOLDERS, read

ROOMY = 2.0
OLD_S = 1_700_000_000
MEMBER_BYTES = 8000
# Small, so that what the loader's workers have in hand is little beside a fifth of some hundred photos.
BATCH = 16


@dataclass(frozen=True)
class Extent:
    images: int
    samples: int
    """Small ones, of which many are read."""
    rounds: int


FULL = Extent(images=1_000, samples=3_000, rounds=1)
QUICK = Extent(images=200, samples=400, rounds=1)


@dataclass(frozen=True)
class System:
    data: str
    """Where the samples lie, in the mount's source: a directory or an archive."""
    beside: str = "loose"
    """The system whose rates its own are compared with."""
    options: str = ""
    pool: float | None = None


SYSTEMS = {
    "loose": System("loose"),
    "tar": System("packed.tar"),
    "tar, pool": System("packed.tar", pool=0.1),
    "loose, immutable": System("loose", "loose, immutable", ",immutable=on"),
    "tar, immutable": System("packed.tar", "loose, immutable", ",immutable=on"),
    "tar, pool, immutable": System("packed.tar", "loose, immutable", ",immutable=on", pool=0.1),
}


@dataclass(frozen=True)
class Case:
    latency_ms: float
    systems: tuple[str, ...] = tuple(SYSTEMS)
    cached_share: float | None = None
    photos: bool = True
    """Whether the samples are photos, which are decoded."""
    options: str = ""


CASES = {
    "remote": Case(20.0, ("loose", "tar", "loose, immutable", "tar, immutable")),
    "requests": Case(50.0, cached_share=0.2, photos=False, options=",fetches=8"),
}


def make_members(root: Path, count: int) -> None:
    """Files that no two of are alike, below `root`."""
    bytes_of = random.Random(1).randbytes
    for number in range(count):
        path = root / f"{number % FOLDERS:03d}/{number:06d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes_of(MEMBER_BYTES))


def pack(source: Path) -> None:
    """The loose files in a tar beside them, in the order of their names."""
    with tarfile.open(source / "packed.tar", "w") as tar:
        for path in sorted(path for path in (source / "loose").rglob("*") if path.is_file()):
            # Members without times of less than a second, which would take a header each.
            member = tarfile.TarInfo(str(path.relative_to(source / "loose")))
            member.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(member, file)
    for path in source.rglob("*"):
        os.utime(path, (OLD_S, OLD_S))


def measure(system: System, case: Case, source: Path, samples: int, scratch: Path) -> dict[str, float]:
    """Two epochs; reads and bytes are shares of those of all samples."""
    total = sum(path.stat().st_size for path in (source / "loose").rglob("*") if path.is_file())
    capacity = int((case.cached_share or ROOMY) * total)
    options = f"source.bandwidth=200000000,archives=tar{case.options}{system.options}"
    with mounted(source, scratch, capacity, case.latency_ms, options) as mount:
        task = Task(
            "files",
            str(mount / system.data),
            str(scratch / "cache"),
            planned=True,
            pool=system.pool,
            decodes=case.photos,
            batch=BATCH,
            drops_pages=case.cached_share is not None,
        )
        reading = read(task, samples, Path(sys.executable))
        counted = counts(mount)
    of_source = {"reads": counted["origin_reads"] / samples, "bytes": counted["origin_bytes"] / total}
    return {field: getattr(reading, field) for field in ("start_s", "first", "second")} | of_source


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent: Extent = arguments.extent
    epochs: dict[str, dict[str, dict[str, float]]] = {}
    with scratch_directory("archives") as scratch:
        sources = {True: scratch / "photos", False: scratch / "small"}
        make_images(sources[True] / "loose", arguments.data, extent.images, -(-extent.images // FOLDERS))
        make_members(sources[False] / "loose", extent.samples)
        for source in sources.values():
            pack(source)
        for name in arguments.cases:
            case = CASES[name]
            found: dict[str, list[dict[str, float]]] = {system: [] for system in case.systems}
            for number, system in turns(found, extent.rounds):
                place = scratch / f"{name}-{number}-{system.replace(', ', '-')}"
                count = extent.images if case.photos else extent.samples
                found[system].append(measure(SYSTEMS[system], case, sources[case.photos], count, place))
            epochs[name] = {
                system: {field: round(tables.median(one[field] for one in rounds), 2) for field in rounds[0]}
                for system, rounds in found.items()
            }
            for system, of in epochs[name].items():
                for field in ("first", "second"):
                    rates = ([one[field] for one in found[which]] for which in (system, SYSTEMS[system].beside))
                    of[f"{field} x loose"] = round(tables.rounds(*rates), 2)
    result = {"extent": asdict(extent), "epochs": epochs}
    print(tables.archives(result))
    return result


if __name__ == "__main__":
    program = command_line(__doc__, FULL, QUICK)
    add_data(program, HELP)
    add_names(program, "--cases", CASES, "cases (default all)", CASES)
    main(run, program)
