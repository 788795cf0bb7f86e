"""Archives as directories: what an index costs, and epochs over a tar or a zip beside the same files loose.

    .venv/bin/python -m benchmarks.serving.archives --json FILE     some ten minutes
    .venv/bin/python -m benchmarks.serving.archives --quick         under a minute, without WebDataset

**Index**: a tar of a million members of 100 bytes on the local disk is indexed by the process that does so for a mount,
beside Python's tarfile, which lists the same tar; then paths are looked up in the index in a random order.

**First entry**: 12,000 members of 1,000 bytes, 10 ms away: the time until a mount has listed a tar that it does not
know yet, beside a walk from header to header (of 1,000 of them), which is what tar(1) would do.

**Epochs**: photos in folders are read twice, in a new order each time, by the loader of `streaming_formats` (two
workers that decode). The same photos lie loose, in one tar, and in one zip, in a mount with opens or with -o
immutable, all with a plan. WebDataset reads shards of 4 MB from the same slow source
by itself. "Reads" are requests for bytes in both epochs, and "bytes" what came, each for a photo; the index counts.

    remote   20 ms away, 200 MB/s, a cache that holds everything
    fifth    the same, and a cache that holds a fifth of the bytes; the kernel forgets what the loader has read

Systems take turns, each round in another order, each with an empty cache. Ratios are medians of the ratios within a
round.
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
from benchmarks.serving.streaming_formats import CASES, FOLDERS, Reading, loaders, read
from spiderfs.archives.index import Index
from spiderfs.archives.indexer_process import Indexers
from spiderfs.sources.faults import FaultState, SlowSource
from spiderfs.sources.local import LocalSource
from spiderfs.sources.source import Version

TABLE_WIDTH = 120
ROOMY = 2.0
ENTRY_LATENCY_MS, ENTRY_BYTES, HEADERS = 10.0, 1000, 1000
LOOK_UPS = 100_000
OLD_S = 1_700_000_000


@dataclass(frozen=True)
class Extent:
    images: int
    rounds: int
    members: int
    """Of the tar that is indexed."""
    entered: int
    """Members of the tar that is entered."""


FULL = Extent(images=1_000, rounds=3, members=1_000_000, entered=12_000)
QUICK = Extent(images=200, rounds=1, members=20_000, entered=2_000)


@dataclass(frozen=True)
class System:
    data: str
    """Where the photos lie, in the mount's source: a directory or an archive. WebDataset has shards."""
    options: str = ""
    loader: str = "files"


SYSTEMS = {
    "loose": System("photos"),
    "tar": System("photos.tar"),
    "zip": System("photos.zip"),
    "loose, immutable": System("photos", ",immutable=on"),
    "tar, immutable": System("photos.tar", ",immutable=on"),
    "webdataset": System("webdataset", loader="webdataset"),
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
        indexers = Indexers(64, 30.0)
        indexers.index("tar", b"members.tar", Version(tar.stat().st_size, OLD_S * 10**9), from_file, to)
        took_s = time.perf_counter() - began_s
        peak_bytes = peak_of_indexer()
        indexers.close()
        cpu_s = cpu_of_children_s() - before_s
    began_s = time.perf_counter()
    index = Index(to)
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
    faults = FaultState.in_memory(latency_ms=ENTRY_LATENCY_MS)
    slow = SlowSource(LocalSource(str(source)), faults)
    version = slow.stat(b"set.tar").version
    began_s = time.perf_counter()
    for number in range(HEADERS):
        slow.read(b"set.tar", number * (512 + 1024), 512, version)
    return {"listed_s": listed_s, "header_s": (time.perf_counter() - began_s) / HEADERS}


# -- epochs


def pack(source: Path, names: list[str]) -> None:
    """The photos in one tar and one zip beside them, in the order of their names."""
    with (
        tarfile.open(source / "photos.tar", "w") as tar,
        zipfile.ZipFile(source / "photos.zip", "w", zipfile.ZIP_STORED) as packed,
    ):
        for name in sorted(names):
            content = (source / "photos" / name).read_bytes()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
            packed.writestr(zipfile.ZipInfo(name), content)
    for path in source.rglob("*"):
        os.utime(path, (OLD_S, OLD_S))


@dataclass(frozen=True)
class Epochs:
    reading: Reading
    reads: float = 0.0
    bytes: float = 0.0
    """Each as a share of those of all photos."""


def measure_epochs(system: System, case: str, source: Path, images: int, scratch: Path, python: Path) -> Epochs:
    slow = CASES[case]
    total = sum(path.stat().st_size for path in (source / "photos").rglob("*.jpg"))
    most_bytes = None if slow.cached_share is None else int(slow.cached_share * total)
    if system.loader != "files":
        (scratch / "cache").mkdir(parents=True)
        faults = scratch / "faults"
        FaultState.create(faults, latency_ms=slow.latency_ms, bandwidth=slow.bytes_per_s).close()
        task = Task(system.loader, str(source.parent / system.data), str(scratch / "cache"), str(faults), most_bytes)
        return Epochs(read(task, images, python))
    options = f"source.bandwidth={slow.bytes_per_s},archives=tar+zip{system.options}"
    capacity = most_bytes or int(ROOMY * total)
    with mounted(source, scratch, capacity, slow.latency_ms, options) as mount:
        data, cache = str(mount / system.data), str(scratch / "cache")
        task = Task("files", data, cache, planned=True, drops_pages=most_bytes is not None)
        reading = read(task, images, python)
        counted = counts(mount)
        return Epochs(reading, counted["origin_reads"] / images, counted["origin_bytes"] / total)


def ratio_to_loose(found: dict[str, list[Epochs]], system: str, field: str) -> float | None:
    loose = "loose, immutable" if system.endswith("immutable") else "loose"
    if system == loose or loose not in found:
        return None
    pairs = zip(found[system], found[loose], strict=True)
    ratios = [getattr(one.reading, field) / getattr(other.reading, field) for one, other in pairs]
    return float(statistics.median(ratios))


def show_epochs(case: str, found: dict[str, list[Epochs]], console: Console) -> None:
    headings = ("start s", "first, images/s", "x loose", "second", "x loose", "reads", "bytes")
    table = plain_table(case, "", *headings)
    for system, rounds in found.items():
        if refused := {one.reading.refused for one in rounds} - {""}:
            console.print(f"{system}: {refused}")
            continue
        cells = [f"{statistics.median(one.reading.start_s for one in rounds):.2f}"]
        for field in ("first", "second"):
            ratio = ratio_to_loose(found, system, field)
            cells.append(f"{statistics.median(getattr(one.reading, field) for one in rounds):,.0f}")
            cells.append("" if ratio is None else f"{ratio:.2f}")
        for field in ("reads", "bytes"):
            figure = statistics.median(getattr(one, field) for one in rounds)
            cells.append(f"{figure:.2f}" if figure else "")
        table.add_row(system, *cells)
    console.print(table)


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent = QUICK if arguments.quick else FULL
    images, rounds = arguments.images or extent.images, arguments.rounds or extent.rounds
    systems = arguments.systems or [name for name in SYSTEMS if name != "webdataset" or not arguments.quick]
    python = python_of_peers() if "webdataset" in systems else Path(sys.executable)
    epochs: dict[str, dict[str, list[Epochs]]] = {case: {} for case in ("remote", "fifth")}
    with scratch_directory("archives") as scratch:
        index = measure_index(scratch, arguments.members or extent.members)
        entry = measure_entry(scratch, extent.entered)
        table = plain_table("index", "", "", words=("",))
        for name, figure in {**index, **entry}.items():
            table.add_row(name, f"{figure:,.4g}")
        console.print(table)
        source = scratch / "source"
        names = make_images(source / "photos", arguments.data, images, -(-images // FOLDERS))
        pack(source, names)
        if "webdataset" in systems:
            loaders(python, "convert", "webdataset", str(source / "photos"), str(scratch / "webdataset"))
        for case, found in epochs.items():
            for number in range(rounds):
                first = number % len(systems)
                for name in systems[first:] + systems[:first]:
                    place = scratch / f"{case}-{number}-{name.replace(', ', '-')}"
                    measured = measure_epochs(SYSTEMS[name], case, source, images, place, python)
                    found.setdefault(name, []).append(measured)
                console.log(f"{case}: round {number + 1} of {rounds}")
            epochs[case] = {name: found[name] for name in systems}
            show_epochs(case, epochs[case], console)
    return {
        "machine": machine(),
        "images": images,
        "members": arguments.members or extent.members,
        "entered": extent.entered,
        "shard_bytes": SHARD_BYTES,
        "index": index,
        "entry": entry,
        "epochs": {
            case: {name: _figures(measured) for name, measured in found.items()} for case, found in epochs.items()
        },
    }


def _figures(measured: list[Epochs]) -> dict[str, list[float]]:
    """What is kept of a system: a list with a figure for each round."""
    readings = {
        name: [round(getattr(one.reading, name), 2) for one in measured] for name in ("start_s", "first", "second")
    }
    return readings | {name: [round(getattr(one, name), 3) for one in measured] for name in ("reads", "bytes")}


def main() -> int:
    parser = command_line(__doc__)
    add_data(parser, HELP)
    add_numbers(parser, FULL, QUICK, images="images", rounds="rounds", members="members")
    add_names(parser, "--systems", SYSTEMS, "systems (default all, quick without WebDataset)")
    arguments = parser.parse_args()

    def measure_all() -> None:
        save(arguments.json, run(arguments, wide_console(TABLE_WIDTH)))

    return exit_status("archives", measure_all, "interrupted; everything is unmounted and deleted")


if __name__ == "__main__":
    sys.exit(main())
