"""Runs the benchmarks that documents quote, keeps their results, and writes the tables of the documents from these.

    .venv-dev/bin/python -m benchmarks.all --list                   which there are, and how old their results are
    .venv-dev/bin/python -m benchmarks.all --quick                  check that the kept figures are still true
    .venv-dev/bin/python -m benchmarks.all --data DIR --photos DIR  measure everything; takes hours
    .venv-dev/bin/python -m benchmarks.all --only epoch idle        measure some
    .venv-dev/bin/python -m benchmarks.all --tables                 measure nothing, only write the tables

One benchmark runs at a time, first those that need a quiet machine. These wait until other processes are quiet. If they
stay busy, a full run leaves the benchmark out, and a quick run does not judge its times. A result that was measured
beside other processes is kept with their load.

A run that was interrupted continues with the same command and the same commit. `--out` keeps results, logs and the
state. A full run copies its results to docs/results and writes the tables. A quick run compares each figure with the
kept one and exits with 1 if a ratio is outside its bounds.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import resource
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks import tables
from benchmarks.common.command import add_data, add_minutes
from benchmarks.common.interruption import LEFT, exit_status
from benchmarks.common.results import ROOT, commit, plain_table, save, wide_console
from benchmarks.serving.process_cost import TICKS_PER_SECOND, cpu_seconds, process_tree
from spiderfs.linux.mounts import mounts

Result = dict[str, Any]

# Cores that other processes use, on average. Below, they do not change what a benchmark measures.
QUIET_CORES = 0.25
QUIET_SAMPLE_S = 2.0
QUIET_PATIENCE_S, QUICK_PATIENCE_S = 300.0, 10.0
# A benchmark that takes so many times what is expected hangs.
TIMEOUT_FACTOR = 4.0
END_PATIENCE_S = 30.0
POLL_S = 0.1
# Of the ratio of a quick figure to the kept one: quick runs are small, and machines differ.
BOUNDS = (0.5, 2.0)
PR_SET_CHILD_SUBREAPER = 36
GPU = Path("/dev/nvidia0")
TABLE = Path(__file__).with_suffix(".toml")
OUT = Path.home() / ".cache/spiderfs-benchmarks"


@dataclass(frozen=True)
class Figure:
    """One figure of a result, as a path through it, and how far a quick run may be from the kept figure."""

    of: list[str | int]
    over: list[str | int] = field(default_factory=list)
    bounds: tuple[float, float] = BOUNDS
    timed: bool = True
    """Whether a busy machine changes it."""

    def __str__(self) -> str:
        return " / ".join(" ".join(map(str, path)) for path in (self.of, self.over) if path)

    def value(self, result: Result) -> float:
        ours, theirs = numbers(result, self.of), numbers(result, self.over) if self.over else [1.0]
        return statistics.median(one / other for one, other in zip(ours, itertools.cycle(theirs), strict=False))


def numbers(found: Any, path: Sequence[str | int]) -> list[float]:
    """The numbers at the end of a path, which goes through all elements of a list on its way."""
    if not path:
        return list(map(float, found)) if isinstance(found, list) else [float(found)]
    step, *rest = path
    if isinstance(found, dict) or isinstance(step, int):
        return numbers(found[step], rest)
    if step == "later":
        return numbers(found[1:], rest)
    key, chosen, value = step.partition("=")
    if chosen:
        return numbers([one for one in found if str(one[key]) == value], rest)
    return [number for one in found for number in numbers(one, path)]


@dataclass(frozen=True)
class Benchmark:
    """A row of all.toml, which explains the fields."""

    name: str
    run: str
    minutes: float
    quick: str | None = None
    quiet: bool = True
    needs: str = ""
    figures: tuple[Figure, ...] = ()

    def expected(self, quick: bool) -> float:
        return 1.0 if quick else self.minutes


def table_of_benchmarks(path: Path = TABLE) -> list[Benchmark]:
    rows = tomllib.loads(path.read_text())
    return [
        Benchmark(name, **row | {"figures": tuple(Figure(**figure) for figure in row.get("figures", ()))})
        for name, row in rows.items()
    ]


# -- whose load it is


def busy_seconds() -> float:
    """Processor time that the machine has spent since boot, time that its host took (steal) included."""
    user, nice, system, _idle, _iowait, *others = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return sum((user, nice, system, *others[:3])) / TICKS_PER_SECOND


def own_seconds() -> float:
    """Processor time of this process, of its ended children, and of its descendants."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return cpu_seconds(process_tree(os.getpid())) + used.ru_utime + used.ru_stime


class Load:
    """The cores that other processes use on average from now on."""

    def __init__(self) -> None:
        self._began_s, self._busy_s, self._own_s = time.monotonic(), busy_seconds(), own_seconds()

    def others(self) -> float:
        elapsed = max(time.monotonic() - self._began_s, 1 / TICKS_PER_SECOND)
        return max(0.0, busy_seconds() - self._busy_s - (own_seconds() - self._own_s)) / elapsed


def wait_until_quiet(patience_s: float) -> float:
    """Wait until other processes use less than QUIET_CORES, at most so long; returns what they used at last."""
    ends_at = time.monotonic() + patience_s
    while True:
        load = Load()
        time.sleep(QUIET_SAMPLE_S)
        others = load.others()
        if others < QUIET_CORES or time.monotonic() >= ends_at:
            return others


# -- one benchmark


@contextmanager
def adopting() -> Iterator[None]:
    """Make orphans below this process its children, so that daemons of mounts can be counted, reaped and ended."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


def children() -> set[int]:
    """The children of this process that it has not reaped."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):
            found.update(map(int, Path(f"/proc/self/task/{thread}/children").read_text().split()))
    return found


def reap(adopted: Iterable[int]) -> None:
    for pid in adopted:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def wait(process: subprocess.Popen[bytes], older: Collection[int], ends_at: float) -> int | None:
    """The exit status of a process, or None if it has not ended in time; orphans below it are reaped meanwhile."""
    while (status := process.poll()) is None and time.monotonic() < ends_at:
        reap(children().difference(older, (process.pid,)))
        time.sleep(POLL_S)
    return status


def end(process: subprocess.Popen[bytes], older: Collection[int]) -> int:
    """End a benchmark and all that it started, each by its id; returns how many processes it had left behind."""
    if process.poll() is None:
        process.terminate()
        wait(process, older, time.monotonic() + END_PATIENCE_S)
    ends_at = time.monotonic() + (END_PATIENCE_S if process.poll() is not None else 0.0)
    left: set[int] = set()
    while started := children().difference(older):
        if time.monotonic() >= ends_at:
            tree = {pid for child in started for pid in process_tree(child)}
            left |= tree
            for pid in tree:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.poll()
        reap(started.difference((process.pid,)))
        time.sleep(POLL_S)
    return len(left)


class Settings(NamedTuple):
    """What all benchmarks of a run share."""

    out: Path
    quick: bool
    data: Path | None = None
    photos: Path | None = None
    results: Path = tables.RESULTS
    package: str = "benchmarks"
    patience_s: float = QUIET_PATIENCE_S

    def file(self, benchmark: Benchmark) -> Path:
        return self.out / f"{benchmark.name}.json"


def command_of(benchmark: Benchmark, settings: Settings) -> list[str]:
    module, *arguments = shlex.split(benchmark.run.format(cores=os.cpu_count(), out=settings.out))
    if settings.quick:
        arguments = [*shlex.split(benchmark.quick or ""), "--quick"]
    given = {"data": settings.data, "gpu": settings.data, "photos": settings.photos}.get(benchmark.needs)
    arguments += ["--data", os.fspath(given)] if given is not None else []
    file = os.fspath(settings.file(benchmark))
    return [sys.executable, "-m", f"{settings.package}.{module}", *arguments, "--json", file]


def measure(benchmark: Benchmark, settings: Settings) -> dict[str, Any]:
    """Run a benchmark; the record says how it ended, how long it took and what others did meanwhile."""
    os.sync()
    others = wait_until_quiet(settings.patience_s) if benchmark.quiet else 0.0
    record: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "commit": commit()}
    if benchmark.quiet and others >= QUIET_CORES and not settings.quick:
        return record | {"status": f"refused: other processes use {others:.2f} cores", "others_cores": round(others, 3)}
    timeout_s = TIMEOUT_FACTOR * 60 * benchmark.expected(settings.quick)
    log, began_s = settings.out / f"{benchmark.name}.log", time.monotonic()
    with (
        adopting(),
        tempfile.TemporaryDirectory(prefix="sf.", ignore_cleanup_errors=True) as scratch,
        open(log, "wb") as to,
    ):
        older, load = children(), Load()
        # Threads of numpy would take the cores from what is measured.
        environment = os.environ | {"TMPDIR": scratch, "OPENBLAS_NUM_THREADS": "1"}
        # In a session of its own: Ctrl-C reaches this process alone, which ends the benchmark.
        process = subprocess.Popen(
            command_of(benchmark, settings),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=to,
            stderr=to,
            start_new_session=True,
        )
        try:
            status = wait(process, older, began_s + timeout_s)
        finally:
            left = end(process, older)
            others = load.others()
            for mount in [mount.mountpoint for mount in mounts() if mount.mountpoint.is_relative_to(scratch)]:
                left += 1
                subprocess.run(["fusermount3", "-u", "-z", mount], check=False)
    word = "measured"
    if status is None:
        word = f"timed out after {timeout_s / 60:.0f} minutes"
    elif status:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
        word = f"failed with {status}: {lines[-1].strip()}"
    elif left:
        word = f"left {left} processes or mounts behind"
    elif not settings.file(benchmark).exists():
        word = "wrote no result"
    record |= {"status": word, "seconds": round(time.monotonic() - began_s, 1), "others_cores": round(others, 3)}
    return record | {"loaded": benchmark.quiet and others >= QUIET_CORES}


# -- figures and results


def untrue(benchmark: Benchmark, settings: Settings, loaded: bool) -> Iterator[str]:
    """A line for each figure of a quick run that is too far from the kept one; times on a busy machine do not count."""
    figures = [figure for figure in benchmark.figures if not (figure.timed and loaded)]
    paths = (settings.file(benchmark), settings.results / f"{benchmark.name}.json")
    new, kept = (json.loads(path.read_text()) for path in paths) if figures else ({}, {})
    for figure in figures:
        (found, before), (low, high) = map(figure.value, (new, kept)), figure.bounds
        if not low * before <= found <= high * before:
            yield f"{benchmark.name}: {figure} is {found:.3g}, kept {before:.3g} (allowed {low:g} to {high:g} x)"


def keep(benchmark: Benchmark, record: dict[str, Any], settings: Settings) -> None:
    """Copy a result, with the load it was measured under, and its pictures to where documents find them."""
    result = json.loads(settings.file(benchmark).read_text())
    load = {name: record[name] for name in ("others_cores", "seconds", "loaded") if name in record}
    result["machine"] = result.get("machine", {}) | load | {"command": benchmark.run}
    save(settings.results / f"{benchmark.name}.json", result)
    for picture in settings.out.glob("*.png"):
        shutil.move(picture, settings.results / picture.name)


# -- the run


class State:
    """What a run has measured so far, in a file beside its results."""

    def __init__(self, settings: Settings, names: Collection[str]) -> None:
        self._path = settings.out / "state.json"
        begun = {"quick": settings.quick, "commit": commit()}
        kept = json.loads(self._path.read_text()) if self._path.exists() else {}
        continued = kept.items() >= begun.items()
        self.records: dict[str, dict[str, Any]] = kept["records"] if continued else {}
        # What is complete begins again; so does what another commit began, which a benchmark would else continue.
        if not continued or all(map(self.has, names)):
            for name in names:
                self.records.pop(name, None)
                (settings.out / f"{name}.json").unlink(missing_ok=True)
        self._begun = begun

    def has(self, name: str) -> bool:
        return self.records.get(name, {}).get("status") == "measured"

    def add(self, name: str, record: dict[str, Any]) -> None:
        self.records[name] = record
        save(self._path, self._begun | {"records": self.records})


def ordered(benchmarks: Iterable[Benchmark]) -> list[Benchmark]:
    """Those that need a quiet machine first: what is measured before them still writes for a while."""
    return sorted(benchmarks, key=lambda benchmark: not benchmark.quiet)


def lacking(benchmark: Benchmark, settings: Settings) -> str:
    """Why a benchmark cannot run here; empty if it can."""
    if settings.quick and benchmark.quick is None:
        return "no quick run"
    if benchmark.needs in ("data", "gpu") and settings.data is None:
        return "needs --data DIR"
    if benchmark.needs in ("gpu", "gpu alone") and not GPU.exists():
        return "needs a GPU"
    if benchmark.needs == "peers" and settings.quick and not (shutil.which("bindfs") and shutil.which("rclone")):
        return "needs benchmarks/install-peers"
    if benchmark.needs == "photos" and settings.photos is None and not settings.quick:  # which makes photos up
        return "needs --photos DIR"
    return ""


def run(chosen: list[Benchmark], settings: Settings, minutes: float, console: Console) -> tuple[list[str], bool]:
    """Measure what is left; returns a line for each benchmark or figure that failed, and whether something is left."""
    settings.out.mkdir(parents=True, exist_ok=True)
    for benchmark in chosen:
        if why := lacking(benchmark, settings):
            console.print(f"left out: {benchmark.name} ({why})", highlight=False)
    chosen = [benchmark for benchmark in ordered(chosen) if not lacking(benchmark, settings)]
    state = State(settings, [benchmark.name for benchmark in chosen])
    began_s, failures, left = time.monotonic(), list[str](), list[str]()
    for number, benchmark in enumerate(chosen, 1):
        name, expected = benchmark.name, benchmark.expected(settings.quick)
        if not state.has(name):
            passed = (time.monotonic() - began_s) / 60
            if number > 1 and passed + expected > minutes:
                left.append(name)
                continue
            console.print(f"{number} of {len(chosen)}: {name}, about {expected:g} minutes", highlight=False)
            state.add(name, measure(benchmark, settings))
        record = state.records[name]
        if not state.has(name):
            failures.append(f"{name}: {record['status']}")
        elif settings.quick:
            failures += untrue(benchmark, settings, record["loaded"])
        else:
            keep(benchmark, record, settings)
    table = plain_table("Measured", "", "seconds", "cores of others", " ", words=("", " "))
    for benchmark in chosen:
        record = state.records.get(benchmark.name, {})
        note = "on a busy machine" if record.get("loaded") else ""
        figures = [record.get(name, "") for name in ("seconds", "others_cores")]
        table.add_row(benchmark.name, *map(str, figures), f"{record.get('status', 'left')} {note}".strip())
    console.print(table)
    return failures, bool(left)


def listed(benchmarks: Iterable[Benchmark], settings: Settings, console: Console) -> None:
    """Print the benchmarks in their order, with the age of their kept results."""
    for benchmark in ordered(benchmarks):
        path = settings.results / f"{benchmark.name}.json"
        kept = tables.provenance(json.loads(path.read_text())) if path.exists() else "no result"
        words = [f"{benchmark.minutes:g} minutes", "quiet" * benchmark.quiet, "quick" * (benchmark.quick is not None)]
        words.append(f"needs {benchmark.needs}" if benchmark.needs else "")
        console.print(f"{benchmark.name}: {', '.join(filter(None, words))}; kept: {kept}", highlight=False)
        console.print(f"    {benchmark.run}", highlight=False, soft_wrap=True)


def main() -> int:
    benchmarks = table_of_benchmarks()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [benchmark.name for benchmark in benchmarks]
    parser.add_argument("--quick", action="store_true", help="measure less, and compare it with the kept results")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help="measure these")
    parser.add_argument("--list", action="store_true", help="list the benchmarks, and when their results were measured")
    parser.add_argument("--tables", action="store_true", help="measure nothing; write the tables of the documents")
    add_data(parser, "images for trainings: DIR holds train/CLASS/NAME and test/CLASS/NAME")
    add_data(parser, "photos, as of ImageNet", option="--photos")
    help_text = "keep results, logs and the state in DIR (default %(default)s)"
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=help_text)
    add_minutes(parser, "benchmark")
    arguments = parser.parse_args()
    out = arguments.out.absolute() / ("quick" if arguments.quick else "full")
    settings = Settings(out, arguments.quick, arguments.data, arguments.photos)
    if arguments.quick:
        settings = settings._replace(patience_s=QUICK_PATIENCE_S)
    chosen = [benchmark for benchmark in benchmarks if benchmark.name in arguments.only]
    console = wide_console()
    if arguments.list:
        listed(chosen, settings, console)
        return 0
    status = 0

    def measure_all() -> None:
        nonlocal status
        if not arguments.tables:
            failures, left = run(chosen, settings, arguments.minutes, console)
            for line in failures:
                print(line, file=sys.stderr)
            status = 1 if failures else LEFT if left else 0
        if not arguments.quick:
            for path in tables.write():
                console.print(f"written: {path}", highlight=False)

    ended = exit_status("all", measure_all, "interrupted; the same command continues")
    return ended or status


if __name__ == "__main__":
    sys.exit(main())
