"""Archives as directories: what an index costs, and epochs over a tar beside the same files loose, and WebDataset.

    .venv-dev/bin/python -m benchmarks.serving.archives --json FILE     six minutes
    .venv-dev/bin/python -m benchmarks.serving.archives --quick         a minute, without WebDataset

**Index**: a tar of a million members of 100 bytes on the local disk is indexed by the process that does so for a mount,
beside Python's tarfile, which lists the same tar; then paths are looked up in the index in a random order.

**First entry**: 12,000 members of 1,000 bytes, 10 ms away: the time until a mount has listed a tar that it does not
know yet, beside a walk from header to header (of some of them), which is what tar(1) would do.

**Epochs**: two, each in a new order, by the loader of `streaming_formats` (two workers, here with batches of 16). The
same samples lie loose, in one tar, and in one zip, in a mount with opens or with -o immutable, all with a plan. "Pool"
draws by a PoolSampler whose pool has half as many samples as a cache of a fifth. WebDataset reads shards of 4 MB from
the same slow source by itself. "Reads" are requests for the bytes of samples, in both epochs together, and "bytes" what
came, each for a sample: where a cache of a fifth is used as well as can be, 1.8. What the index takes is in "start".

    remote    photos 20 ms away, at 200 MB/s, decoded; a cache that holds everything
    line      photos 20 ms away, at 25 MB/s, decoded; a cache that holds a fifth
    requests  members of 8 kB 50 ms away, a mount that may make 8 requests at a time, not decoded; a fifth

Where the cache holds a fifth, the kernel forgets what the loader has read. Systems take turns, each round in another
order, each with an empty cache. Ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import resource
import statistics
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common.command import add_data, add_names, add_numbers, command_line
from benchmarks.common.images import HELP, make_images
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.mounts import counts, mounted
from benchmarks.common.results import machine, plain_table, save, wide_console
from benchmarks.serving.format_loaders import SHARD_BYTES, Task
from benchmarks.serving.peers import python_of_peers
from benchmarks.serving.streaming_formats import FOLDERS, Reading, loaders, read
from spiderfs.archives.index import ArchiveIndex
from spiderfs.archives.indexer_process import Indexers
from spiderfs.sources.client import SourceLimits
from spiderfs.sources.local import LocalSource
from spiderfs.sources.slow import SlowSettings, SlowSource
from spiderfs.sources.source import Version

TABLE_WIDTH = 120
ROOMY = 2.0
ENTRY_LATENCY_MS, ENTRY_BYTES, HEADERS = 10.0, 1000, 300
LOOK_UPS = 100_000
OLD_S = 1_700_000_000


MEMBER_BYTES = 8000
POOL = 0.1
# Small, so that what the loader's workers have in hand is little beside a fifth of some hundred photos.
BATCH = 16


@dataclass(frozen=True)
class Extent:
    images: int
    samples: int
    """Small ones, of which many are read."""
    rounds: int
    members: int
    """Of the tar that is indexed."""
    entered: int
    """Members of the tar that is entered."""


FULL = Extent(images=1_000, samples=3_000, rounds=1, members=1_000_000, entered=12_000)
QUICK = Extent(images=200, samples=400, rounds=1, members=20_000, entered=2_000)


@dataclass(frozen=True)
class System:
    data: str
    """Where the samples lie, in the mount's source: a directory or an archive. WebDataset has shards."""
    beside: str = ""
    """The system whose rates its own are compared with."""
    options: str = ""
    loader: str = "files"
    pool: float | None = None


SYSTEMS = {
    "loose": System("loose"),
    "tar": System("packed.tar", "loose"),
    "zip": System("packed.zip", "loose"),
    "tar, pool": System("packed.tar", "loose", pool=POOL),
    "loose, immutable": System("loose", "", ",immutable=on"),
    "tar, immutable": System("packed.tar", "loose, immutable", ",immutable=on"),
    "tar, pool, immutable": System("packed.tar", "loose, immutable", ",immutable=on", pool=POOL),
    "webdataset": System("webdataset", "", loader="webdataset"),
}


@dataclass(frozen=True)
class Case:
    latency_ms: float
    bytes_per_s: int
    systems: tuple[str, ...]
    cached_share: float | None = None
    photos: bool = True
    """Whether the samples are photos, which are decoded."""
    options: str = ""


ALONE = ("loose", "tar", "zip", "loose, immutable", "tar, immutable", "webdataset")
POOLED = ("loose", "tar", "tar, pool", "tar, pool, immutable", "webdataset")
REQUESTS = ("loose", "tar", "tar, pool", "loose, immutable", "tar, immutable", "tar, pool, immutable")
CASES = {
    "remote": Case(20.0, 200_000_000, ALONE),
    "line": Case(20.0, 25_000_000, POOLED, cached_share=0.2),
    "requests": Case(50.0, 200_000_000, REQUESTS, cached_share=0.2, photos=False, options=",fetches=8"),
}


# -- the index


def headers(count: int, size: int) -> Iterator[bytes]:
    """Members of a tar with names such as ImageNet's, each with zeros as its bytes: tarfile would take minutes."""
    member = tarfile.TarInfo("n00000000/n00000000_00000000.JPEG")
    member.size, member.mtime = size, OLD_S
    template = bytearray(member.tobuf(tarfile.USTAR_FORMAT))
    content = bytes(-(-size // 512) * 512)
    for number in range(count):
        template[:33] = b"n%08d/n%08d_%08d.JPEG" % (number % 1000, number % 1000, number)
        template[148:156] = b" " * 8
        template[148:156] = b"%06o\0 " % sum(template)
        yield bytes(template) + content


def write_tar(path: Path, count: int, size: int) -> None:
    with path.open("wb") as file:
        file.writelines(headers(count, size))
        file.write(bytes(1024))
    os.utime(path, (OLD_S, OLD_S))


def cpu_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def peak_of_indexer() -> int:
    """The most memory that the process that makes indices has had (VmHWM, see proc_pid_status(5))."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            status = (process / "status").read_text()
            if f"PPid:\t{os.getpid()}\n" in status and b"indexer_process" in (process / "cmdline").read_bytes():
                return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    raise RuntimeError("the process that makes indices has ended")


def measure_index(scratch: Path, members: int) -> dict[str, float]:
    tar, to = scratch / "members.tar", scratch / "members.index"
    write_tar(tar, members, 100)
    with tar.open("rb") as file:

        def from_file(offset: int, length: int) -> bytes:
            return os.pread(file.fileno(), length, offset)

        before_s, began_s = cpu_of_children_s(), time.perf_counter()
        indexers = Indexers(SourceLimits())
        indexers.index("tar", b"members.tar", Version(tar.stat().st_size, OLD_S * 10**9), from_file, to)
        took_s = time.perf_counter() - began_s
        peak_bytes = peak_of_indexer()
        indexers.close()
        cpu_s = cpu_of_children_s() - before_s
    began_s = time.perf_counter()
    index = ArchiveIndex(to)
    opened_s = time.perf_counter() - began_s
    paths = [index.path(number) for number in random.Random(1).choices(range(members), k=LOOK_UPS)]
    began_s = time.perf_counter()
    found = sum(index.find(path) is not None for path in paths)
    looked_up_s = (time.perf_counter() - began_s) / LOOK_UPS
    assert found == LOOK_UPS
    began_s = time.process_time()
    with tarfile.open(tar) as listed:
        assert len(listed.getmembers()) == members
    tarfile_cpu_s = time.process_time() - began_s
    tar.unlink()
    return {
        "cpu_s": cpu_s,
        "took_s": took_s,
        "peak_bytes": peak_bytes,
        "disk_bytes": to.stat().st_size,
        "opened_s": opened_s,
        "look_up_us": looked_up_s * 1e6,
        "tarfile_cpu_s": tarfile_cpu_s,
    }


def measure_entry(scratch: Path, entered: int) -> dict[str, float]:
    """Seconds until a mount has listed a tar that it meets for the first time, and for each header one by one."""
    source = scratch / "entered"
    source.mkdir()
    write_tar(source / "set.tar", entered, ENTRY_BYTES)
    with mounted(source, scratch / "entry", 1 << 30, ENTRY_LATENCY_MS, "archives=tar") as mount:
        began_s = time.perf_counter()
        assert len(os.listdir(mount / "set.tar")) == min(entered, 1000)
        listed_s = time.perf_counter() - began_s
    faults = SlowSettings.in_memory(latency_ms=ENTRY_LATENCY_MS)
    slow = SlowSource(LocalSource(str(source)), faults)
    version = slow.stat(b"set.tar").version
    began_s = time.perf_counter()
    for number in range(HEADERS):
        slow.read(b"set.tar", number * (512 + 1024), 512, version)
    return {"listed_s": listed_s, "header_s": (time.perf_counter() - began_s) / HEADERS}


# -- epochs


def make_members(root: Path, count: int) -> list[str]:
    """Files that no two of are alike, below `root`; returns their names."""
    bytes_of = random.Random(1).randbytes
    names = [f"{number % FOLDERS:03d}/{number:06d}" for number in range(count)]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(bytes_of(MEMBER_BYTES))
    return names


def pack(source: Path, names: list[str]) -> None:
    """The loose files in one tar and one zip beside them, in the order of their names."""
    with (
        tarfile.open(source / "packed.tar", "w") as tar,
        zipfile.ZipFile(source / "packed.zip", "w", zipfile.ZIP_STORED) as packed,
    ):
        for name in sorted(names):
            content = (source / "loose" / name).read_bytes()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
            packed.writestr(zipfile.ZipInfo(name), content)
    for path in source.rglob("*"):
        os.utime(path, (OLD_S, OLD_S))


@dataclass(frozen=True)
class Epochs:
    """`reads` and `bytes` are of both epochs, each as a share of those of all samples."""

    reading: Reading
    reads: float = 0.0
    bytes: float = 0.0


def measure_epochs(system: System, case: Case, source: Path, samples: int, scratch: Path, python: Path) -> Epochs:
    total = sum(path.stat().st_size for path in (source / "loose").rglob("*") if path.is_file())
    most_bytes = None if case.cached_share is None else int(case.cached_share * total)
    if system.loader != "files":
        (scratch / "cache").mkdir(parents=True)
        faults = scratch / "faults"
        SlowSettings.create(faults, latency_ms=case.latency_ms, bandwidth=case.bytes_per_s).close()
        data, cache = str(source.parent / system.data), str(scratch / "cache")
        task = Task(system.loader, data, cache, str(faults), most_bytes, batch=BATCH)
        return Epochs(read(task, samples, python))
    options = f"source.bandwidth={case.bytes_per_s},archives=tar+zip{case.options}{system.options}"
    capacity = most_bytes or int(ROOMY * total)
    with mounted(source, scratch, capacity, case.latency_ms, options) as mount:
        task = Task(
            "files",
            str(mount / system.data),
            str(scratch / "cache"),
            planned=True,
            pool=system.pool,
            decodes=case.photos,
            batch=BATCH,
            drops_pages=most_bytes is not None,
        )
        reading = read(task, samples, python)
        counted = counts(mount)
        return Epochs(reading, counted["origin_reads"] / samples, counted["origin_bytes"] / total)


def ratio(found: dict[str, list[Epochs]], system: str, beside: str, field: str) -> float | None:
    if system == beside or beside not in found or any(one.reading.refused for one in found[beside]):
        return None
    pairs = zip(found[system], found[beside], strict=True)
    ratios = [getattr(one.reading, field) / getattr(other.reading, field) for one, other in pairs]
    return round(float(statistics.median(ratios)), 2)


def figures(found: dict[str, list[Epochs]]) -> dict[str, dict[str, float]]:
    """Of each system the medians, and ratios to the same files loose and to WebDataset."""
    shown = {}
    for name, rounds in found.items():
        if any(one.reading.refused for one in rounds):
            continue
        of = {
            field: round(statistics.median(getattr(one.reading, field) for one in rounds), 1)
            for field in ("start_s", "first", "second")
        }
        for label, beside in (("loose", SYSTEMS[name].beside), ("webdataset", "webdataset")):
            for field in ("first", "second"):
                if (found_ratio := ratio(found, name, beside, field)) is not None:
                    of[f"{field} x {label}"] = found_ratio
        of |= {name: round(statistics.median(getattr(one, name) for one in rounds), 2) for name in ("reads", "bytes")}
        shown[name] = of
    return shown


def show_epochs(case: str, found: dict[str, list[Epochs]], console: Console) -> None:
    ratios = [f"{field} x {label}" for label in ("loose", "webdataset") for field in ("first", "second")]
    headings = ("start s", "1st, 1/s", "2nd, 1/s", "x loose", "x loose", "x wds", "x wds", "reads", "bytes")
    table = plain_table(case, "", *headings)
    for system, of in figures(found).items():
        cells = [f"{of[ratio]:.2f}" if ratio in of else "" for ratio in ratios]
        rates = [f"{of['start_s']:.1f}", f"{of['first']:,.0f}", f"{of['second']:,.0f}"]
        table.add_row(
            system, *rates, *cells, *(f"{of[name]:.2f}" if of["reads"] else "" for name in ("reads", "bytes"))
        )
    console.print(table)
    for system, rounds in found.items():
        if refused := {one.reading.refused for one in rounds} - {""}:
            console.print(f"{system}: {refused}")


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent = QUICK if arguments.quick else FULL
    counts_of = {True: arguments.images or extent.images, False: arguments.samples or extent.samples}
    rounds, members = arguments.rounds or extent.rounds, arguments.members or extent.members
    systems = arguments.systems or [name for name in SYSTEMS if name != "webdataset" or not arguments.quick]
    python = python_of_peers() if "webdataset" in systems else Path(sys.executable)
    epochs: dict[str, dict[str, dict[str, float]]] = {}
    with scratch_directory("archives") as scratch:
        index, entry = measure_index(scratch, members), measure_entry(scratch, extent.entered)
        table = plain_table("index", "", "", words=("",))
        for name, figure in {**index, **entry}.items():
            table.add_row(name, f"{figure:,.4g}")
        console.print(table)
        sources = {True: scratch / "photos" / "source", False: scratch / "small" / "source"}
        pack(
            sources[True],
            make_images(sources[True] / "loose", arguments.data, counts_of[True], -(-counts_of[True] // FOLDERS)),
        )
        pack(sources[False], make_members(sources[False] / "loose", counts_of[False]))
        if "webdataset" in systems:
            loaders(python, "convert", "webdataset", str(sources[True] / "loose"), str(scratch / "photos/webdataset"))
        for case in arguments.cases or CASES:
            of = CASES[case]
            names = [name for name in of.systems if name in systems]
            found: dict[str, list[Epochs]] = {name: [] for name in names}
            for number in range(rounds):
                first = number % len(names)
                for name in names[first:] + names[:first]:
                    place = scratch / f"{case}-{number}-{name.replace(', ', '-')}"
                    measured = measure_epochs(
                        SYSTEMS[name], of, sources[of.photos], counts_of[of.photos], place, python
                    )
                    found[name].append(measured)
                console.log(f"{case}: round {number + 1} of {rounds}")
            show_epochs(case, found, console)
            epochs[case] = figures(found)
    return {
        "machine": machine(),
        "extent": {
            "images": counts_of[True],
            "samples": counts_of[False],
            "rounds": rounds,
            "members": members,
            "entered": extent.entered,
            "shard_bytes": SHARD_BYTES,
            "pool": POOL,
        },
        "index": {name: float(f"{figure:.4g}") for name, figure in index.items()},
        "entry": {name: float(f"{figure:.4g}") for name, figure in entry.items()},
        "epochs": epochs,
    }


def main() -> int:
    parser = command_line(__doc__)
    add_data(parser, HELP)
    add_numbers(parser, FULL, QUICK, images="images", samples="samples", rounds="rounds", members="members")
    add_names(parser, "--systems", SYSTEMS, "systems (default all, quick without WebDataset)")
    add_names(parser, "--cases", CASES, "cases (default all)")
    arguments = parser.parse_args()

    def measure_all() -> None:
        save(arguments.json, run(arguments, wide_console(TABLE_WIDTH)))

    return exit_status("archives", measure_all, "interrupted; everything is unmounted and deleted")


if __name__ == "__main__":
    sys.exit(main())
