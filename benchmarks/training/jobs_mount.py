"""Several trainings on one mount: what each fetches from a slow source, with exchange and without, and its time.

    .venv-dev/bin/python -m benchmarks.training.jobs_mount --json FILE     nine minutes on a quiet machine
    .venv-dev/bin/python -m benchmarks.training.jobs_mount --immutable     the same, of mounts with -o immutable
    .venv-dev/bin/python -m benchmarks.training.jobs_mount --quick         under a minute, for a look

Each training is a process with a PyTorch DataLoader of two workers. After each batch comes a step of fixed length in
which nothing is computed. What loaders have in hand must be far less than the cache holds, so batches are small: of 8
samples, and of 2 where 5 % are cached. The source answers 5 ms late. Each run has a mount of its own with an empty
cache; systems take turns, round by round:

    no sharing   the policy lru; nothing is published to the mount
    plan         trainer_hook.plan
    exchange     trainer_hook.plan(..., share=True)

`fetched` is what was read of the source for each sample that was read, in times of a sample's bytes: from the moment in
which the last training has ended its first epoch, which fills the cache, until the first one ends its last. `bound` is
(1 - c) / K for K equally fast trainings; c is what the sections of the cache hold at the end, for landing takes a part.
`waits` are opens that had to wait for the source, as a share of the samples read. `epoch, s` is the mean of the epochs
but the first, and `steps` says how many times their steps that is. In each epoch of each training every sample must be
read exactly once, or the benchmark fails.

`makespan` is the time of twelve trainings of two epochs each, two at a time, with steps of 0.2 to 1 of the usual
length, from a source that answers 10 ms late; there `fetched` counts all epochs.

An immutable mount does not see a read that the kernel's memory answers, and here everything would fit into that. So
with --immutable the loader's workers have the kernel forget each file that they have read.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path

from rich.console import Console

from benchmarks.common.command import add_names, add_numbers, command_line
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.mounts import counts, mounted, stats
from benchmarks.common.results import machine, plain_table, save, wide_console
from benchmarks.common.sources import write
from benchmarks.training.job_process import NUMBER_BYTES, Epoch, JobProcess, Order
from spiderfs.store.store import LANDING

TABLE_WIDTH = 120
LATENCY_MS, FAR_MS = 5.0, 10.0
SYSTEMS = ("no sharing", "plan", "exchange")
TRAININGS, AT_A_TIME, MAKESPAN_EPOCHS = 12, 2, 2
FASTEST_STEP = 0.2
BATCH = 8
FOLDERS = 10
CACHED = 0.2
MOST_JOBS = 4


@dataclass(frozen=True)
class Extent:
    files: int
    kilobytes: int
    epochs: int
    rounds: int
    step_us: int
    """The length of a step, for each sample of a batch."""


FULL = Extent(files=1_600, kilobytes=12, epochs=3, rounds=3, step_us=1_500)
QUICK = Extent(files=400, kilobytes=12, epochs=2, rounds=1, step_us=1_000)


@dataclass(frozen=True)
class Situation:
    """What is measured with each of these systems, once or in each round."""

    jobs: int
    systems: tuple[str, ...]
    labels: int = 10
    cached: float = CACHED
    paces: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    batch: int = BATCH
    timed: bool = False
    """Whether it is measured in each round, because its times are compared."""


SITUATIONS = {
    "1 job": Situation(1, SYSTEMS, timed=True),
    "2 jobs": Situation(2, SYSTEMS),
    "3 jobs": Situation(3, SYSTEMS, timed=True),
    "4 jobs": Situation(4, SYSTEMS),
    "2 jobs, 100 labels": Situation(2, ("exchange",), labels=100),
    "3 jobs, 100 labels": Situation(3, ("exchange",), labels=100),
    "4 jobs, 100 labels": Situation(4, ("exchange",), labels=100),
    "3 jobs, 1000 labels, 5 %": Situation(3, ("plan", "exchange"), labels=1_000, cached=0.05, batch=2),
    "3 jobs, 40 %": Situation(3, ("plan", "exchange"), cached=0.4),
    "3 jobs, paces 1, 0.8, 0.6": Situation(3, ("plan", "exchange"), paces=(1.0, 0.8, 0.6)),
}
MAKESPAN = "makespan"
QUICK_SITUATIONS = ("1 job", "3 jobs")


@dataclass(frozen=True)
class Found:
    """The figures of one run; see the module."""

    situation: str
    system: str
    jobs: int
    cached: float
    """The share of the data set's bytes that the cache holds at the end, landing left out."""
    fetched: float
    waits: float
    epoch_s: float
    steps_s: float
    """How long an epoch's steps take."""
    makespan_s: float = 0.0

    @property
    def bound(self) -> float:
        return (1 - self.cached) / self.jobs

    @property
    def over_bound(self) -> float:
        return self.fetched / self.bound


class Bench:
    """The source, and the processes in which trainings run."""

    def __init__(self, extent: Extent, immutable: bool, scratch: Path, processes: Sequence[JobProcess]) -> None:
        self._extent = extent
        self._immutable = immutable
        self._scratch = scratch
        self._processes = processes
        self._names = [f"{number % FOLDERS}/{number:05d}" for number in range(extent.files)]
        for folder in range(FOLDERS):
            (scratch / "source" / str(folder)).mkdir(parents=True)
        for number, name in enumerate(self._names):
            content = (b"%0*d" % (NUMBER_BYTES, number)).ljust(self._sample_bytes, b".")
            write(scratch / "source" / name, content)

    @property
    def _sample_bytes(self) -> int:
        return self._extent.kilobytes << 10

    @property
    def _steps_s(self) -> float:
        return self._extent.files * self._extent.step_us / 1e6

    @contextmanager
    def _mounted(self, cached: float, latency_ms: float) -> Iterator[Path]:
        capacity = int(cached * self._extent.files * self._sample_bytes)
        options = "policy=lru" + (",immutable" if self._immutable else "")
        with mounted(self._scratch / "source", self._scratch / "run", capacity, latency_ms, options) as mount:
            yield mount

    def _order(
        self, mount: Path, system: str, seed: int, labels: int, epochs: int, pace: float, batch: int = BATCH
    ) -> Order:
        step_s = batch * self._extent.step_us / 1e6 / pace
        return Order(mount, self._names, labels, system, seed, epochs, batch, step_s, self._immutable)

    def run(self, name: str, situation: Situation, system: str, seed: int) -> Found:
        """Run the trainings of a situation side by side."""
        slowest = min(situation.paces[: situation.jobs])
        with self._mounted(situation.cached, LATENCY_MS) as mount:
            orders = {}
            for number, pace in enumerate(situation.paces[: situation.jobs]):
                epochs = round(self._extent.epochs * pace / slowest)
                job = self._processes[number]
                seed_of_job = 100 * seed + number
                orders[job] = self._order(mount, system, seed_of_job, situation.labels, epochs, pace, situation.batch)
            for job, order in orders.items():
                job.prepare(order)
            for job in orders:
                job.ready()
            for job in orders:
                job.begin()
            done, begin, end = self._received(mount, orders)
            cached = self._cached(mount)
        reads = situation.batch * sum(begin.at_s < at_s <= end.at_s for epoch in done for at_s in epoch.taken_s)
        return Found(
            name,
            system,
            situation.jobs,
            cached,
            (end.origin_bytes - begin.origin_bytes) / self._sample_bytes / reads,
            (end.waits - begin.waits) / reads,
            statistics.fmean(epoch.lasted_s for epoch in done if epoch.number),
            self._steps_s,
        )

    def _received(self, mount: Path, orders: dict[JobProcess, Order]) -> tuple[list[Epoch], Moment, Moment]:
        """All epochs of these trainings, and the moments between which fetches count."""
        found: list[Epoch] = []
        begun: set[JobProcess] = set()
        running = dict(orders)
        begin = end = None
        while running:
            for job in with_results(running):
                epoch = job.receive()
                if epoch is None:
                    del running[job]
                    continue
                found.append(epoch)
                begun.add(job)
                if begin is None and len(begun) == len(orders):
                    begin = Moment.now(mount)
                if end is None and epoch.number == orders[job].epochs - 1:
                    end = Moment.now(mount)
        assert begin is not None
        assert end is not None
        return found, begin, end

    def makespan(self, system: str, seed: int) -> Found:
        """Run twelve trainings, two at a time."""
        waiting = deque(range(TRAININGS))
        running: dict[JobProcess, None] = {}
        done: list[Epoch] = []
        steps_s = []
        with self._mounted(CACHED, FAR_MS) as mount:
            began_s = time.monotonic()
            while waiting or running:
                for job in self._processes[:AT_A_TIME]:
                    if waiting and job not in running:
                        number = waiting.popleft()
                        step = FASTEST_STEP + (1 - FASTEST_STEP) * (5 * number % TRAININGS) / (TRAININGS - 1)
                        job.prepare(self._order(mount, system, 100 * seed + number, 10, MAKESPAN_EPOCHS, 1 / step))
                        job.ready()
                        job.begin()
                        steps_s.append(self._steps_s * step)
                        running[job] = None
                for job in with_results(running):
                    epoch = job.receive()
                    if epoch is None:
                        del running[job]
                    else:
                        done.append(epoch)
            makespan_s = time.monotonic() - began_s
            moment, cached = Moment.now(mount), self._cached(mount)
        reads = sum(epoch.reads for epoch in done)
        return Found(
            MAKESPAN,
            system,
            AT_A_TIME,
            cached,
            moment.origin_bytes / self._sample_bytes / reads,
            moment.waits / reads,
            statistics.fmean(epoch.lasted_s for epoch in done),
            statistics.fmean(steps_s),
            makespan_s,
        )

    def _cached(self, mount: Path) -> float:
        sections = stats(mount)["sections"]
        kept = sum(section["entries"] for name, section in sections.items() if name != LANDING)
        return float(kept / self._extent.files)


@dataclass(frozen=True)
class Moment:
    """What a mount has counted by a moment of the clock `time.monotonic`."""

    at_s: float
    origin_bytes: int
    waits: int

    @classmethod
    def now(cls, mount: Path) -> Moment:
        counted = counts(mount)
        return cls(time.monotonic(), counted["origin_bytes"], counted["opens"] - counted["opens_hit"])


def with_results(running: Collection[JobProcess]) -> Iterator[JobProcess]:
    """Those of the processes that have sent something, when there is one."""
    by_pipe = {job.pipe: job for job in running}
    for pipe in wait(list(by_pipe)):
        yield by_pipe[pipe]  # type: ignore[index]


# -- what it shows


def show(found: list[Found], console: Console) -> None:
    table = plain_table(
        "Means of all rounds",
        *("", "system", "cached, %", "fetched", "bound", "times", "waits, %", "epoch, s", "steps", "makespan, s"),
        words=("", "system"),
    )
    for situation in (*SITUATIONS, MAKESPAN):
        for system in SYSTEMS:
            runs = [run for run in found if (run.situation, run.system) == (situation, system)]
            if runs:
                table.add_row(situation, system, *cells(runs))
    console.print(table)
    for sentence in sentences(found):
        console.print(sentence, highlight=False)


def cells(runs: list[Found]) -> Iterator[str]:
    epoch_s = statistics.fmean(run.epoch_s for run in runs)
    makespan_s = statistics.fmean(run.makespan_s for run in runs)
    yield f"{100 * statistics.fmean(run.cached for run in runs):.1f}"
    yield f"{statistics.fmean(run.fetched for run in runs):.3f}"
    yield f"{statistics.fmean(run.bound for run in runs):.3f}"
    yield f"{statistics.fmean(run.over_bound for run in runs):.2f}"
    yield f"{100 * statistics.fmean(run.waits for run in runs):.1f}"
    yield f"{epoch_s:.2f}"
    yield f"{epoch_s / statistics.fmean(run.steps_s for run in runs):.2f}"
    yield f"{makespan_s:.1f}" if makespan_s else ""


def sentences(found: list[Found]) -> Iterator[str]:
    """The comparisons of times within a round, for which targets are set."""
    for what, one, other in (
        ("an epoch of 3 jobs with exchange, against 1 job with a plan", ("3 jobs", "exchange"), ("1 job", "plan")),
        ("an epoch of 1 job with exchange, against 1 job with a plan", ("1 job", "exchange"), ("1 job", "plan")),
        ("the makespan with exchange, against no sharing", (MAKESPAN, "exchange"), (MAKESPAN, "no sharing")),
    ):
        ratios = [of_one / of_other for of_one, of_other in zip(times(found, *one), times(found, *other), strict=False)]
        if ratios:
            yield f"{what}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def times(found: list[Found], situation: str, system: str) -> list[float]:
    """The time of each round of one system in one situation."""
    runs = [run for run in found if (run.situation, run.system) == (situation, system)]
    return [run.makespan_s or run.epoch_s for run in runs]


# -- the program


def runs_of(extent: Extent, names: Collection[str], systems: Collection[str]) -> Iterator[tuple[int, str, str]]:
    """The runs: round, situation and system; the order of the systems changes from round to round."""
    for number in range(extent.rounds):
        for name in names:
            once = name == MAKESPAN or not SITUATIONS[name].timed
            if number and once:
                continue
            chosen = [one for one in (SYSTEMS if name == MAKESPAN else SITUATIONS[name].systems) if one in systems]
            turn = number % max(1, len(chosen))
            for system in chosen[turn:] + chosen[:turn]:
                yield number, name, system


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent: Extent = arguments.extent
    runs = list(runs_of(extent, arguments.situations, arguments.systems))
    found: list[Found] = []
    with scratch_directory("jobs") as scratch, ExitStack() as stack:
        processes = [JobProcess() for _ in range(MOST_JOBS)]
        for process in processes:
            stack.callback(process.end)
        bench = Bench(extent, arguments.immutable, scratch, processes)
        for number, name, system in runs:
            with console.status(f"{name}, {system}"):
                if name == MAKESPAN:
                    found.append(bench.makespan(system, number + 1))
                else:
                    found.append(bench.run(name, SITUATIONS[name], system, number + 1))
    show(found, console)
    if arguments.json is not None:
        rows = [asdict(run) | {"bound": run.bound} for run in found]
        extent_of_all = asdict(extent) | {"immutable": arguments.immutable}
        save(arguments.json, {"machine": machine(), "extent": extent_of_all, "runs": rows})


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--immutable", action="store_true", help="measure mounts with -o immutable")
    known = (*SITUATIONS, MAKESPAN)
    add_names(parser, "--situations", known, "measure these alone")
    add_names(parser, "--systems", SYSTEMS, "measure these alone", SYSTEMS)
    fields = {name: name for name in ("files", "kilobytes", "epochs", "rounds", "step_us")}
    add_numbers(parser, FULL, QUICK, **fields)
    arguments = parser.parse_args()
    base = QUICK if arguments.quick else FULL
    given = {name: getattr(arguments, name) for name in fields if getattr(arguments, name) is not None}
    arguments.extent = replace(base, **given)
    arguments.situations = arguments.situations or (QUICK_SITUATIONS if arguments.quick else known)
    if arguments.extent.files % BATCH or arguments.extent.epochs < 2:
        parser.error(f"--files is a multiple of {BATCH}, and --epochs at least 2")
    console = wide_console(TABLE_WIDTH)
    return exit_status("jobs_mount", lambda: measure(arguments, console), "interrupted; nothing is kept")


if __name__ == "__main__":
    sys.exit(main())
