"""How fast a warm cache serves: spiderfs, with and without `immutable`, beside the bare disk, bindfs and rclone.

    .venv-dev/bin/python -m benchmarks.serving.serve             the whole measurement, about a quarter of an hour
    .venv-dev/bin/python -m benchmarks.serving.serve --quick     under a minute, for a look

All systems are mounted at the same time over the same files. They take turns round by round, so that other load on the
machine falls on all of them alike, and each round begins with another system. A ratio is the median of the ratios
within a round. Each system has served every file once before the clock runs, so its cache is warm. In a run every
reader process opens, reads and closes every file once, in an order of its own. "Dropped": before each run the kernel
forgets the pages that it has of a mount, so that each system answers from its own cache, and bindfs from the page cache
of the disk. The last part opens small files through spiderfs a million times and watches its memory.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.common.command import add_data, add_names, add_numbers, command_line
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.results import machine, plain_table, save, wide_console
from benchmarks.common.sources import write
from benchmarks.serving import process_cost
from benchmarks.serving.peers import PEERS, Mounted, install_missing, mounted, version
from benchmarks.serving.readers import read_all

MIB = 1 << 20
READER_COUNTS = (1, 4)
# Over a million opens this is 8 bytes for each open, less than any leak could be.
FLAT_GROWTH_BYTES = 8 * MIB
SOAK_SAMPLES = 20
TABLE_WIDTH = 100


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    file_sets: tuple[tuple[int, int], ...]  # (number of files, bytes of each)
    rounds: int
    opens: int  # over which spiderfs' memory is watched; 0 leaves that part out


FULL = Extent(((2_000, 112_000), (20_000, 2_000)), rounds=5, opens=1_000_000)
QUICK = Extent(((500, 112_000), (2_000, 2_000)), rounds=2, opens=20_000)


class Target(NamedTuple):
    """How many times as fast as a peer a system must be."""

    system: str
    peer: str
    dropped: bool  # whether the pages of the mounts were dropped
    times: float
    readers: int | None = None  # None: any number


TARGETS = (
    Target("spiderfs", "bindfs", False, 1.5, readers=1),
    Target("spiderfs", "bindfs", False, 1.2, readers=4),
    Target("spiderfs", "rclone", False, 8.0),
    Target("spiderfs", "native", False, 0.25, readers=4),
    Target("immutable", "native", False, 0.6),
    Target("immutable", "bindfs", False, 3.0),
    Target("immutable", "bindfs", True, 1.3),
    Target("immutable", "spiderfs", True, 1.4),
)
# spiderfs as it is mounted here; each is compared with those before it, and with all other systems.
OWN = ("spiderfs", "immutable")
# Of the daemon of an immutable mount, for 1,000 warm files.
MOST_CPU_MS = 1.0


@dataclass(frozen=True)
class FileSet:
    name: str
    root: Path
    names: list[bytes]  # below root
    total_bytes: int


@dataclass(frozen=True)
class Run:
    """One peer in one round: its rate, its latencies and its cost."""

    round: int
    files_per_s: float
    p50_us: float
    p99_us: float
    daemon_cpu_s_per_1000: float
    client_cpu_s_per_1000: float
    daemon_pss_bytes: int
    daemon_anonymous_bytes: int


@dataclass(frozen=True)
class Case:
    file_set: str
    readers: int
    dropped: bool
    runs: dict[str, list[Run]]  # by peer

    def median(self, peer: str, field: str) -> float:
        return float(statistics.median(getattr(run, field) for run in self.runs[peer]))

    @property
    def title(self) -> str:
        return f"{self.file_set}, {self.readers} reader{'s' * (self.readers > 1)}{', dropped' * self.dropped}"

    def ratio(self, system: str, peer: str) -> float:
        """How many times as fast as the peer a system is: the median of the ratios within the rounds."""
        pairs = zip(self.runs[system], self.runs[peer], strict=True)
        return statistics.median(ours.files_per_s / theirs.files_per_s for ours, theirs in pairs)


@dataclass(frozen=True)
class Verdict:
    case: str
    what: str
    figure: float
    target: str
    word: str


@dataclass(frozen=True)
class Soak:
    """Memory of the spiderfs processes against the number of files opened so far."""

    opens: list[int]
    pss_bytes: list[int]
    anonymous_bytes: list[int]
    files_per_s: float

    @property
    def growth_bytes(self) -> int:
        """The growth of the heap after a tenth of the opens, in which the daemon's own caches fill."""
        return self.anonymous_bytes[-1] - self.anonymous_bytes[len(self.opens) // 10]


def made_files(root: Path, count: int, size: int) -> FileSet:
    """Files of random bytes, 1,000 to a directory."""
    random = np.random.default_rng(count)
    names = []
    for number in range(count):
        name = f"{number // 1000:03d}/{number:06d}"
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, random.bytes(size))
        names.append(os.fsencode(name))
    return FileSet(f"{count:,} x {size / 1000:g} kB", root, names, count * size)


def found_files(root: Path) -> FileSet:
    paths = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    names = [os.fsencode(path.relative_to(root)) for path in paths]
    return FileSet(f"{len(names):,} of {root}", root, names, sum(path.stat().st_size for path in paths))


def drop_pages(paths: Iterable[bytes]) -> None:
    """Have the kernel forget the pages that it has of these files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(peer: Mounted, files: FileSet, readers: int, round_number: int) -> Run:
    """Measure one run; raises RuntimeError if the peer served a wrong number of bytes."""
    processes = peer.processes()
    cpu_before = process_cost.cpu_seconds(processes)
    reading = read_all(paths_below(peer, files), readers, seed=round_number)
    daemon_cpu_s = process_cost.cpu_seconds(processes) - cpu_before
    if reading.read_bytes != readers * files.total_bytes:
        raise RuntimeError(f"{peer.name} served {reading.read_bytes} bytes, not {readers * files.total_bytes}")
    memory = process_cost.memory(processes)
    return Run(
        round=round_number,
        files_per_s=reading.files / reading.wall_s,
        p50_us=reading.percentile_us(50),
        p99_us=reading.percentile_us(99),
        daemon_cpu_s_per_1000=daemon_cpu_s / reading.files * 1000,
        client_cpu_s_per_1000=reading.cpu_s / reading.files * 1000,
        daemon_pss_bytes=memory.pss_bytes,
        daemon_anonymous_bytes=memory.anonymous_bytes,
    )


def compared(
    peers: list[Mounted], files: FileSet, readers: int, dropped: bool, rounds: int, progress: Progress
) -> Case:
    """Let the systems take turns; `dropped` leaves native out, whose pages the others need."""
    taking_part = [peer for peer in peers if not (dropped and peer.pid is None)]
    case = Case(files.name, readers, dropped, {peer.name: [] for peer in taking_part})
    task = progress.add_task(case.title, total=rounds * len(taking_part))
    for number in range(1, rounds + 1):
        # The system that comes after native is some 5 % slower than it is somewhere else in a round.
        first = number % len(taking_part)
        for peer in taking_part[first:] + taking_part[:first]:
            if dropped:
                drop_pages(paths_below(peer, files))
            case.runs[peer.name].append(measure(peer, files, readers, number))
            progress.advance(task)
    return case


def paths_below(peer: Mounted, files: FileSet) -> list[bytes]:
    root = os.fsencode(peer.root)
    return [root + b"/" + name for name in files.names]


def soak(peer: Mounted, files: FileSet, opens: int, progress: Progress) -> Soak:
    """Open, read and close files again and again, and look at the daemon's memory in between."""
    task = progress.add_task(f"{opens:,} opens on {peer.name}", total=opens)
    names = paths_below(peer, files)
    done, counts, samples = 0, [], []
    busy_s = 0.0
    while done < opens:
        # A part of the files at a time, so that memory is looked at often enough however many files there are.
        names = names[len(names) // 2 :] + names[: len(names) // 2]
        reading = read_all(names[: max(1, min(opens // SOAK_SAMPLES, opens - done))], 1, seed=done)
        done += reading.files
        busy_s += reading.wall_s
        counts.append(done)
        samples.append(process_cost.memory(peer.processes()))
        progress.update(task, completed=done)
    return Soak(
        opens=counts,
        pss_bytes=[sample.pss_bytes for sample in samples],
        anonymous_bytes=[sample.anonymous_bytes for sample in samples],
        files_per_s=done / busy_s,
    )


def judge(case: Case) -> Iterator[Verdict]:
    """Each way to mount spiderfs against each other system, with a word where there is a target."""
    for number, system in enumerate(OWN):
        if system not in case.runs:
            continue
        for peer in (peer for peer in case.runs if peer not in OWN[number:]):
            ratio = case.ratio(system, peer)
            asked = (system, peer, case.dropped)
            wanted = [row.times for row in TARGETS if row[:3] == asked and row.readers in (None, case.readers)]
            target = f">= {wanted[0]:g}" if wanted else "-"
            yield Verdict(case.title, f"{system} / {peer}", ratio, target, word_for(ratio, *wanted[:1]))
        if system == "immutable" and not case.dropped:
            cost_ms = case.median(system, "daemon_cpu_s_per_1000") * 1000
            word = word_for(-cost_ms, -MOST_CPU_MS)
            yield Verdict(case.title, "daemon CPU, ms per 1,000 files", cost_ms, f"<= {MOST_CPU_MS:g}", word)


def word_for(figure: float, least: float | None = None) -> str:
    return "-" if least is None else "reached" if figure >= least else "missed"


def case_table(case: Case) -> Table:
    table = plain_table(case.title, "", "files/s", "spread", "p50 us", "p99 us", "daemon", "client", "MiB")
    for peer, runs in case.runs.items():
        rates = [run.files_per_s for run in runs]
        resident, heap = (case.median(peer, f"daemon_{kind}_bytes") / MIB for kind in ("pss", "anonymous"))
        table.add_row(
            peer,
            f"{statistics.median(rates):,.0f}",
            f"{min(rates) / 1000:.3g}k-{max(rates) / 1000:.3g}k",
            f"{case.median(peer, 'p50_us'):,.0f}",
            f"{case.median(peer, 'p99_us'):,.0f}",
            f"{case.median(peer, 'daemon_cpu_s_per_1000'):.3f}",
            f"{case.median(peer, 'client_cpu_s_per_1000'):.3f}",
            f"{resident:,.0f}/{heap:,.0f}" if peer != "native" else "-",
        )
    return table


def verdict_table(verdicts: list[Verdict]) -> Table:
    words = ("files", "what", "")
    table = plain_table("Targets", "files", "what", "measured", "target", "", words=words)
    for verdict in verdicts:
        style = {"reached": "green", "missed": "red", "-": ""}[verdict.word]
        table.add_row(verdict.case, verdict.what, f"{verdict.figure:.2f}", verdict.target, verdict.word, style=style)
    return table


def run(arguments: argparse.Namespace, console: Console) -> dict[str, object]:
    extent = QUICK if arguments.quick else FULL
    rounds = arguments.rounds or extent.rounds
    opens = extent.opens if arguments.opens is None else arguments.opens
    cases: list[Case] = []
    soaked: Soak | None = None
    with scratch_directory("serve") as scratch, Progress(console=console, transient=True) as progress:
        sources = scratch / "src"
        if arguments.data is not None:
            file_sets = [found_files(arguments.data)]
        else:
            file_sets = [made_files(sources / str(size), count, size) for count, size in extent.file_sets]
            # Otherwise the disk still writes during the first rounds, which made them 30 % slower.
            os.sync()
        for files in file_sets:
            own_scratch = scratch / f"set-{file_sets.index(files)}"
            with ExitStack() as stack:
                peers = [stack.enter_context(mounted(name, files.root, own_scratch)) for name in arguments.peers]
                warming = progress.add_task(f"warming {files.name}", total=len(peers))
                for peer in peers:
                    read_all(paths_below(peer, files), 1, seed=0)
                    progress.advance(warming)
                # rclone removes what it has copied from the page cache, which native and bindfs need: native fell from
                # 190,000 to 16,000 files/s in its first round. Reading the source once more puts the files back.
                read_all(paths_below(Mounted("native", files.root, None), files), 1, seed=0)
                # Files of 2 kB are left out: a READ of one costs what an open of one costs.
                kinds = (False, True) if files is file_sets[0] else (False,)
                for dropped, readers in itertools.product(kinds, READER_COUNTS):
                    case = compared(peers, files, readers, dropped, rounds, progress)
                    cases.append(case)
                    console.print(case_table(case))
                if opens and files is file_sets[-1] and "spiderfs" in arguments.peers:
                    soaked = soak(peers[arguments.peers.index("spiderfs")], files, opens, progress)
    verdicts = [verdict for case in cases for verdict in judge(case)]
    console.print("daemon, client: CPU seconds per 1,000 files; MiB: the daemon's memory, resident/of it heap")
    if verdicts:
        console.print(verdict_table(verdicts))
    if soaked is not None:
        flat = "flat" if soaked.growth_bytes <= FLAT_GROWTH_BYTES else "NOT flat"
        console.print(
            f"memory over {soaked.opens[-1]:,} opens at {soaked.files_per_s:,.0f} files/s: "
            f"heap {soaked.anonymous_bytes[0] / MIB:.1f} -> {soaked.anonymous_bytes[-1] / MIB:.1f} MiB, "
            f"all resident {soaked.pss_bytes[0] / MIB:.1f} -> {soaked.pss_bytes[-1] / MIB:.1f} MiB; "
            f"heap growth after the first tenth {soaked.growth_bytes / MIB:+.2f} MiB: {flat}"
        )
    return {
        "machine": machine(),
        "versions": {name: version(name) for name in arguments.peers},
        "rounds": rounds,
        "cases": [asdict(case) for case in cases],
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "soak": None if soaked is None else asdict(soaked) | {"growth_bytes": soaked.growth_bytes},
    }


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    add_data(parser, "serve the files in DIR, in place of files that are made for the run")
    add_numbers(parser, FULL, QUICK, rounds="rounds", opens="opens")
    add_names(parser, "--peers", PEERS, "systems to measure (default all)", default=PEERS)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()

    def measure_all() -> None:
        install_missing(arguments.peers)
        save(arguments.json, run(arguments, wide_console(TABLE_WIDTH)))

    return exit_status("serve", measure_all, "interrupted; everything is unmounted")


if __name__ == "__main__":
    sys.exit(main())
