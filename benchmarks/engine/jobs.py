"""Several jobs on one list and one cache: what each fetches from the source, with exchange and without, in process.

    .venv-dev/bin/python -m benchmarks.engine.jobs --json FILE      twenty minutes on a quiet core
    .venv-dev/bin/python -m benchmarks.engine.jobs --quick          a minute, for a look

Each job reads the whole list once per epoch, in an order of its own. A batch is dispatched some batches before its
samples are read, and taken some batches after that, as by a loader with workers. Time is counted in reads of the
fastest job, and no job waits: a sample that is not there when it is read counts as a wait, and is fetched. The systems:

    no sharing   the product's engine with LRU
    plans        the same; each job publishes its epochs, so that MIN decides
    exchange     the same; jobs exchange samples at dispatch (spiderfs/core/plans/exchange.py)
    exchange, ahead   the same; what is dispatched, and what most jobs will read, is fetched ahead
    MinIO        fills the cache once (CoorDL)
    Quiver       LRU; of the next ten batches' samples each job takes those first that are cached. Only what it takes
                 counts as fetched, which is to Quiver's advantage: in the paper it asks for all ten batches
    ODS          Seneca's opportunistic sampling, section 5.2, with the encoded form alone: a miss gives way to a cached
                 sample that the job has not seen; what as many jobs have used as there are leaves, and a random sample
                 is fetched in its place. Samples are marked that were given (the released code marks those asked for)

Bytes are those of samples of one size, as a share of the list per job and epoch, without the first epoch, which fills
the cache. The bound for K equally fast jobs is (1 - c) / K.

The last columns compare orders. `alike` is the correlation of the positions that a sample has in the orders of two
jobs. `runs` and `serial` say by how many standard deviations the number of runs of equal labels, and the correlation of
each label with the next one, differ from what a uniform shuffle has.
"""

from __future__ import annotations

import heapq
import random
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress

from benchmarks.common.command import command_line
from benchmarks.common.interruption import exit_status
from benchmarks.common.results import machine, plain_table, save, wide_console
from spiderfs.core.engine import Engine
from spiderfs.core.plans.exchange import Groups, SharedList
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.policy import Key, Policy
from spiderfs.policies.baselines import LRU, MinIO
from trainer_hook.loader.epoch_order import EpochOrder

TABLE_WIDTH = 150
LIST = "list"


@dataclass(frozen=True)
class Setting:
    """One situation in which all systems are measured."""

    jobs: int = 3
    samples: int = 4_000
    labels: int = 10
    cached: float = 0.2
    """The share of the samples that the cache holds."""
    paces: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    """Reads of each job for one of the fastest job."""
    starts: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    """When each job begins, in epochs of the fastest job."""
    epochs: int = 4
    batch: int = 32
    read_after: int = 2
    """A batch is read so many batches after it was dispatched."""
    taken_after: int = 2
    """A batch is taken so many batches after it was read."""
    latency: float = 10.0
    """How long a fetch takes, in reads of the fastest job."""
    at_once: int = 32
    """So many fetches ahead may be under way."""
    exchanged_share: float = 1.0
    ready: int = 16
    """With fewer samples to choose from, more are fetched ahead for a job."""

    @property
    def room(self) -> int:
        return int(self.samples * self.cached)

    @property
    def bound(self) -> float:
        """What equally fast jobs cannot do without: fetched samples per job and epoch, as a share of the list."""
        return (1 - self.cached) / self.jobs


FULL = Setting(samples=8_000)
QUICK = Setting(samples=2_000, epochs=3)


class System(ABC):
    """What several jobs read through. Samples have size 1, and a sample's key is its number plus 1."""

    def __init__(self, setting: Setting, randomness: random.Random) -> None:
        self.setting = setting
        self.randomness = randomness
        self.orders: dict[int, EpochOrder] = {}

    def begin(self, job: int, order: list[int]) -> None:
        """A job begins an epoch."""
        self.orders[job] = EpochOrder(order, self.setting.samples)

    def dispatch(self, job: int) -> list[int]:
        """The samples of a job's next batch."""
        return self.orders[job].hand_on((), self.setting.batch)

    @abstractmethod
    def read(self, job: int, sample: int) -> bool:
        """A job reads a sample; returns whether it was cached. If it was not, it is now fetched."""

    def extra(self) -> int:
        """How many samples were fetched besides those of reads since this was asked before."""
        return 0

    def taken(self, job: int, count: int) -> None:  # noqa: B027 (most systems need not know)
        """A job has taken so many further samples from its loader."""

    def fetch_ahead(self) -> int | None:
        """The sample to fetch now, before anybody reads it."""
        return None

    def arrived(self, sample: int) -> None:  # noqa: B027 (most systems fetch nothing ahead)
        """What was fetched ahead is there."""


class Cached(System):
    """The product's engine, with a policy of the product."""

    policy: type[Policy] = LRU

    def __init__(self, setting: Setting, randomness: random.Random) -> None:
        super().__init__(setting, randomness)
        self.engine = Engine(self.policy(), setting.room)

    def read(self, job: int, sample: int) -> bool:
        hit = sample + 1 in self.engine.members
        self.engine.opened(sample + 1, 1)
        return hit


class MinIOCached(Cached):
    policy = MinIO


class Planned(Cached):
    """Each job publishes each epoch when it begins."""

    def __init__(self, setting: Setting, randomness: random.Random) -> None:
        super().__init__(setting, randomness)
        self.keys = range(1, setting.samples + 1)
        self.index_of: dict[Key, int] = {key: sample for sample, key in enumerate(self.keys)}
        self.epochs: dict[int, int] = {}
        self.reads_of: dict[int, int] = {}
        self.now = 0.0

    def begin(self, job: int, order: list[int]) -> None:
        super().begin(job, order)
        number = self.epochs[job] = self.epochs.get(job, -1) + 1
        epoch = PlannedEpoch(number, self.keys, self.index_of, np.array(order, np.uint32))
        self.engine.plan(job, LIST, epoch, self.now)
        self.reads_of[job] = 0

    def dispatch(self, job: int) -> list[int]:
        handed = super().dispatch(job)
        self._progressed(job)
        return handed

    def _progressed(self, job: int) -> None:
        reads = self.reads_of[job]
        self.engine.progressed(job, LIST, self.epochs[job], self.orders[job].position, reads, self.now)

    def read(self, job: int, sample: int) -> bool:
        self.now += 0.001
        self.engine.wanted(job, sample + 1, self.now)
        self.reads_of[job] += 1
        self._progressed(job)
        return super().read(job, sample)


class Exchanging(Cached):
    """Jobs exchange samples at dispatch."""

    ahead = False

    def __init__(self, setting: Setting, randomness: random.Random) -> None:
        super().__init__(setting, randomness)
        keys = range(1, setting.samples + 1)
        index_of: dict[Key, int] = {key: sample for sample, key in enumerate(keys)}
        self.shared = SharedList(
            keys, index_of, randomness.random, self.engine.exchange_pending.changed, setting.exchanged_share
        )
        self.engine.share(LIST, self.shared)
        self._missing: deque[int] = deque()
        self._landed: dict[int, None] = {}

    def begin(self, job: int, order: list[int]) -> None:
        super().begin(job, order)
        self.shared.begin(job, job, np.array(order))
        self.engine.rerank()

    def dispatch(self, job: int) -> list[int]:
        order = self.orders[job]
        given = self.shared.ask(job, order.coming(self.setting.batch))
        handed = order.hand_on(given, self.setting.batch)
        self.shared.dispatched(job, handed)
        if self.ahead:
            self._missing.extend(sample for sample in handed if sample + 1 not in self.engine.members)
        return handed

    def read(self, job: int, sample: int) -> bool:
        landed = sample in self._landed
        self._landed.pop(sample, None)
        return super().read(job, sample) or landed

    def taken(self, job: int, count: int) -> None:
        self.shared.taken(job, count)


class FetchingAhead(Exchanging):
    ahead = True

    def fetch_ahead(self) -> int | None:
        while self._missing:
            sample = self._missing.popleft()
            if sample + 1 not in self.engine.members and sample not in self._landed:
                self.shared.fetching(sample)
                return sample
        due = self.shared.due(lambda _: self.setting.ready)
        if due is None or not self.engine.would_keep(due[1] + 1, 1):
            return None
        self.shared.fetching(due[1])
        return due[1]

    def arrived(self, sample: int) -> None:
        if not self.engine.place(sample + 1, 1).keep:
            self.shared.not_kept(sample)
            if self.shared.reserved(sample):
                self._landed[sample] = None


class Quiver(Cached):
    """Of the next ten batches each job takes first what is cached."""

    def dispatch(self, job: int) -> list[int]:
        coming = self.orders[job].coming(10 * self.setting.batch)
        held = [sample for sample in coming if sample + 1 in self.engine.members]
        return self.orders[job].hand_on(held, self.setting.batch)


class ODS(System):
    """Seneca's opportunistic sampling with one form, which says nothing of what is in flight: none is, here."""

    def __init__(self, setting: Setting, randomness: random.Random) -> None:
        super().__init__(setting, randomness)
        self.held = Groups(setting.samples)
        self.unheld = Groups(setting.samples)
        self.uses: dict[int, int] = {}
        self.refilled = 0
        for sample in range(setting.samples):
            self.unheld.put(sample, 0)
        for _ in range(setting.room):
            self._refill()
        self.refilled = 0

    def dispatch(self, job: int) -> list[int]:
        order = self.orders[job]
        wanted = order.coming(self.setting.batch)
        asked = set(wanted)
        unseen = [sample for sample in self.held if order.is_pending(sample) and sample not in asked]
        self.randomness.shuffle(unseen)
        given = [sample if sample in self.held or not unseen else unseen.pop() for sample in wanted]
        return order.hand_on(given, self.setting.batch)

    def read(self, job: int, sample: int) -> bool:
        if sample not in self.held:
            return False
        self.uses[sample] += 1
        if self.uses[sample] >= self.setting.jobs:
            self.held.discard(sample)
            self._refill()
            self.unheld.put(sample, 0)
        return True

    def _refill(self) -> None:
        sample = self.unheld.drawn(0, self.randomness.random())
        assert sample is not None
        self.unheld.discard(sample)
        self.held.put(sample, 0)
        self.uses[sample] = 0
        self.refilled += 1

    def extra(self) -> int:
        refilled, self.refilled = self.refilled, 0
        return refilled


SYSTEMS: dict[str, type[System]] = {
    "no sharing": Cached,
    "plans": Planned,
    "exchange": Exchanging,
    "exchange, ahead": FetchingAhead,
    "MinIO": MinIOCached,
    "Quiver": Quiver,
    "ODS": ODS,
}


# -- the jobs


@dataclass
class Job:
    number: int
    pace: float
    next_s: float
    batches: deque[list[int]] = field(default_factory=deque)
    """What was dispatched and not read."""
    unread: deque[int] = field(default_factory=deque)
    read_batches: int = 0
    """Of this epoch."""
    left: int = 0
    """Samples of the epoch that were not dispatched yet."""
    reads: int = 0
    seen: list[int] = field(default_factory=list)
    """What was read in this epoch."""


@dataclass
class Found:
    """The figures of one system in one setting; all but the first two are of the last epochs that all jobs have
    read."""

    system: str
    setting: Setting
    fetched: float
    """Fetched samples per job and epoch, as a share of the list."""
    waits: float
    """The share of the reads whose sample was not cached."""
    late_waits: float
    """The same in the last third of the epochs."""
    alike: float
    """The correlation of the positions that a sample has in the epochs of the first two jobs; 0 if there is one."""
    runs: float
    """By how many standard deviations the number of runs of equal labels differs from that of a uniform shuffle."""
    serial: float
    """The same for the correlation of each label with the next one."""

    @property
    def over_bound(self) -> float:
        return self.fetched / self.setting.bound


class Run:
    """All jobs together, until the slowest one has read its epochs; until then the others go on and count too."""

    def __init__(self, system: System, setting: Setting, seed: int) -> None:
        self.system, self.setting = system, setting
        self.randomness = random.Random(f"orders {seed}")
        self.jobs = [
            Job(number, setting.paces[number], setting.starts[number] * setting.samples)
            for number in range(setting.jobs)
        ]
        self.fetched = self.reads = self.waits = self.late_reads = self.late_waits = 0
        self.flying: list[tuple[float, int]] = []
        self.in_flight: set[int] = set()
        self.orders: dict[int, list[list[int]]] = {}
        """By job, what it read in each whole epoch, but for the last one."""

    def run(self, name: str) -> Found:
        """Read all epochs; raises RuntimeError if a job does not read each sample exactly once in an epoch."""
        setting = self.setting
        self._until(1)
        self.fetched = self.reads = self.waits = self.late_reads = self.late_waits = 0
        self._until(setting.epochs)
        orders = [epochs[-1] for epochs in self.orders.values()]
        labels = np.array(orders[0]) % setting.labels
        return Found(
            name,
            setting,
            self.fetched / self.reads,
            self.waits / self.reads,
            self.late_waits / self.late_reads,
            correlation(orders[0], orders[1]) if len(orders) > 1 else 0.0,
            runs_off(labels),
            serial_off(labels),
        )

    def _until(self, epochs: int) -> None:
        while any(job.reads < epochs * self.setting.samples for job in self.jobs):
            job = min(self.jobs, key=lambda job: job.next_s)
            self._arrive(job.next_s)
            self._read(job)
            job.next_s += 1 / job.pace

    def _read(self, job: Job) -> None:
        if not job.unread:
            self._next_batch(job)
        sample = job.unread.popleft()
        job.seen.append(sample)
        job.reads += 1
        hit = self.system.read(job.number, sample)
        late = len(job.seen) > self.setting.samples * 2 / 3
        self.reads += 1
        self.waits += not hit
        self.late_reads += late
        self.late_waits += late and not hit
        self.fetched += (not hit and sample not in self.in_flight) + self.system.extra()

    def _next_batch(self, job: Job) -> None:
        setting = self.setting
        if not job.batches and not job.left:
            self._next_epoch(job)
        if job.read_batches >= setting.taken_after:
            self.system.taken(job.number, setting.batch)
        while job.left and len(job.batches) <= setting.read_after:
            batch = self.system.dispatch(job.number)
            job.left -= len(batch)
            job.batches.append(batch)
        job.unread.extend(job.batches.popleft())
        job.read_batches += 1
        self._look_ahead(job.next_s)

    def _next_epoch(self, job: Job) -> None:
        samples = self.setting.samples
        if job.seen:
            if sorted(job.seen) != list(range(samples)):
                raise RuntimeError(f"job {job.number} did not read each sample exactly once in an epoch")
            self.orders.setdefault(job.number, []).append(job.seen)
            self.system.taken(job.number, samples)
        job.seen, job.left, job.read_batches = [], samples, 0
        self.system.begin(job.number, self.randomness.sample(range(samples), samples))

    def _look_ahead(self, now: float) -> None:
        while len(self.flying) < self.setting.at_once:
            sample = self.system.fetch_ahead()
            if sample is None:
                return
            self.fetched += 1
            self.in_flight.add(sample)
            heapq.heappush(self.flying, (now + self.setting.latency, sample))

    def _arrive(self, now: float) -> None:
        came = False
        while self.flying and self.flying[0][0] <= now:
            _, sample = heapq.heappop(self.flying)
            self.in_flight.discard(sample)
            self.system.arrived(sample)
            came = True
        if came:
            self._look_ahead(now)


def correlation(first: Sequence[int], second: Sequence[int]) -> float:
    """Of the positions of each sample in two orders."""
    return float(np.corrcoef(np.argsort(first), np.argsort(second))[0, 1])


def runs_off(labels: npt.NDArray[np.integer]) -> float:
    """By how many standard deviations the runs of equal labels differ from a uniform shuffle's (Wald and Wolfowitz)."""
    total, counts = len(labels), np.bincount(labels).astype(float)
    squares, cubes = float((counts**2).sum()), float((counts**3).sum())
    mean = (total * (total + 1) - squares) / total
    variance = (squares * (squares + total * (total + 1)) - 2 * total * cubes - total**3) / (total**2 * (total - 1))
    return float((1 + np.count_nonzero(np.diff(labels)) - mean) / np.sqrt(variance)) if variance else 0.0


def serial_off(labels: npt.NDArray[np.integer]) -> float:
    """By how many standard deviations the correlation of neighbouring labels differs from a uniform shuffle's."""
    return float(np.corrcoef(labels[:-1], labels[1:])[0, 1] * np.sqrt(len(labels)))


def measure(system: str, setting: Setting, seed: int = 1) -> Found:
    return Run(SYSTEMS[system](setting, random.Random(f"system {seed}")), setting, seed).run(system)


# -- the program

ALL = tuple(SYSTEMS)
EXCHANGING = ("exchange", "exchange, ahead")


def situations(base: Setting) -> dict[str, tuple[Setting, tuple[str, ...]]]:
    """By name: the setting, and the systems that are measured in it."""
    found = {f"{jobs} jobs": (replace(base, jobs=jobs), ALL) for jobs in (1, 2, 3, 4)}
    found |= {f"{jobs} jobs, 100 labels": (replace(base, jobs=jobs, labels=100), EXCHANGING) for jobs in (2, 3, 4)}
    return found | {
        "3 jobs, 1,000 labels, 5 %": (replace(base, labels=1000, cached=0.05), EXCHANGING),
        "3 jobs, 40 %": (replace(base, cached=0.4), ALL),
        "3 jobs, paces 1, 0.8, 0.6": (replace(base, paces=(1.0, 0.8, 0.6)), ("plans", *EXCHANGING)),
        "3 jobs, 0.3 epochs apart": (replace(base, starts=(0.0, 0.3, 0.6)), ("plans", *EXCHANGING)),
        **{
            f"3 jobs, {share:.0%} of misses exchanged": (replace(base, exchanged_share=share), EXCHANGING)
            for share in (0.5, 0.8)
        },
        "3 jobs, apart, 80% exchanged": (replace(base, starts=(0.0, 0.3, 0.6), exchanged_share=0.8), EXCHANGING),
    }


def show(found: list[Found], names: list[str], console: Console) -> None:
    table = plain_table(
        "Without the first epoch",
        "",
        "system",
        "fetched",
        "bound",
        "times",
        "waits, %",
        "last third",
        "alike",
        "runs",
        "serial",
        words=("", "system"),
    )
    for name, result in zip(names, found, strict=True):
        table.add_row(
            name,
            result.system,
            f"{result.fetched:.3f}",
            f"{result.setting.bound:.3f}",
            f"{result.over_bound:.2f}",
            f"{100 * result.waits:.1f}",
            f"{100 * result.late_waits:.1f}",
            f"{result.alike:.2f}",
            f"{result.runs:+.1f}",
            f"{result.serial:+.1f}",
        )
    console.print(table)


def main() -> int:
    parser = command_line(__doc__)
    arguments = parser.parse_args()
    base = QUICK if arguments.quick else FULL

    def run() -> None:
        console = wide_console(TABLE_WIDTH)
        cells = [(name, system, setting) for name, (setting, systems) in situations(base).items() for system in systems]
        with Progress(console=console, transient=True) as progress:
            found = [measure(system, setting) for _, system, setting in progress.track(cells)]
        show(found, [name for name, _, _ in cells], console)
        rows = [{"situation": name} | asdict(result) for (name, _, _), result in zip(cells, found, strict=True)]
        save(arguments.json, {"machine": machine(), "rows": rows})

    return exit_status("jobs", run, "interrupted; nothing is kept")


if __name__ == "__main__":
    sys.exit(main())
