"""How long a training waits for a slow source, with and without a plan of its reads.

    .venv-dev/bin/python -m benchmarks.serving.stall --json FILE     the whole measurement, about forty minutes
    .venv-dev/bin/python -m benchmarks.serving.stall --immutable     the same, of mounts with -o immutable
    .venv-dev/bin/python -m benchmarks.serving.stall --quick         under a minute, for a look

A real data loader with two workers reads batches. After each batch comes a step of fixed length in which nothing is
computed, so that the cores are not the limit. The source is 5 ms away, and its bandwidth is a multiple of what uniform
sampling needs with a fifth of the data cached: (1 - 0.2) x all bytes in the time of an epoch's steps. Each run but the
first and the last has a mount of its own with an empty cache:

    direct        no cache: the loader's workers ask the slow source themselves
    lru           this policy, uniform sampling
    no plan       the default policy, uniform sampling
    wrong plan    the same, and in each epoch the trainer publishes another order than it reads
    plan+uniform  uniform sampling, with a plan from trainer_hook.plan
    plan+spider   hook and SpiderSampler, with a plan
    oracle        all files are local: no mount

An epoch can be no shorter than its steps, and no shorter than the line needs for the bytes that MIN would have fetched
for the same draws: that is the bound. The first epoch fills the cache and is left out of every figure. The targets
leave out the first 16 batches of an epoch, in which the loader's workers ask for more than the line carries. The last
part draws with replacement by log-rank weights, with plans, at five sizes of the cache. It compares the bytes fetched
with those of MIN for the same draws.

An immutable mount does not see a read that the kernel's memory answers, and here everything would fit into that. So
with --immutable the loader's workers have the kernel forget each file that they have read: as where a data set is far
larger than memory, a sample comes from the mount in each epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import trainer_hook
from benchmarks import tables
from benchmarks.common.command import add_names, command_line, main, numbers_of
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.mounts import counts, leave_signals_to_the_parent, mounted, stats
from benchmarks.common.results import machine, save
from benchmarks.common.sources import write
from benchmarks.serving.stall_report import (
    CACHED_SHARE,
    CONFIGURATIONS,
    ENOUGH,
    FIRST_BATCHES,
    HITS,
    TOO_LITTLE,
    Configuration,
    Epoch,
    Run,
    judged,
)
from spiderfs.core.engine import Engine
from spiderfs.policies import POLICIES
from spiderfs.protocol import Hello, Plan
from spiderfs.simulation import policy_for, replay
from spiderfs.sources.local import LocalSource
from spiderfs.sources.slow import SlowSettings, SlowSource
from spiderfs.trace import Accesses
from trainer_hook.connection.client import socket_finder

CAPACITIES = (0.10, 0.20, 0.25, 0.50, 0.75)
LATENCY_MS = 5.0
BATCH = 16
LOADER_WORKERS = 2
# A DataLoader hands each of its workers two batches.
IN_HAND = 2 * LOADER_WORKERS * BATCH
CLASSES = 10
WIDTH = 16  # numbers in an embedding
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    samples: int
    step_ms: int
    epochs: int
    seeds: int
    capacities: tuple[float, ...]
    replacement_samples: int  # read twice as fast, because waiting is not measured with them
    replacement_epochs: int

    def __post_init__(self) -> None:
        if self.epochs < 2 or self.seeds < 1 or self.samples < BATCH:
            raise ValueError(f"choose at least 2 epochs (the first fills the cache), 1 seed and {BATCH} samples")


FULL = Extent(2_000, 40, epochs=3, seeds=3, capacities=CAPACITIES, replacement_samples=4_000, replacement_epochs=4)
QUICK = Extent(640, 20, epochs=2, seeds=1, capacities=(0.20,), replacement_samples=640, replacement_epochs=3)


@dataclass(frozen=True)
class Data:
    root: Path
    samples: list[tuple[str, int]]  # CLASS/NAME and label
    sizes: list[int]
    features: torch.Tensor  # in place of what a network would compute from each sample

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes)


class Files(Dataset[tuple[int, int]]):
    """Reads whole files; a sample is its index, and the inode that was served for it."""

    def __init__(self, samples: list[tuple[str, int]], read: Callable[[str], int]) -> None:
        self.samples = samples
        self._read = read

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self._read(self.samples[index][0])


def read_file(path: str, forget: bool = False) -> int:
    """Read a file whole, and return its inode; `forget`: the kernel is to keep nothing of it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while os.read(descriptor, READ_BYTES):
            pass
        if forget:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.fstat(descriptor).st_ino
    finally:
        os.close(descriptor)


class SlowReader:
    """Reads over the slow line without any cache; every loader worker opens the line for itself.

    The versions are known beforehand, so a read costs one exchange with the source and no stat.
    """

    def __init__(self, data: Data, state: Path, bandwidth: float) -> None:
        SlowSettings.create(state, latency_ms=LATENCY_MS, bandwidth=bandwidth).close()
        self._root, self._state = data.root, state
        listing = LocalSource(str(data.root))
        self._versions = {path: listing.stat(os.fsencode(path)).version for path, _ in data.samples}
        listing.close()
        self._source: SlowSource | None = None

    def __call__(self, path: str) -> int:
        if self._source is None:
            self._source = SlowSource(LocalSource(str(self._root)), SlowSettings.open(self._state))
        version = self._versions[path]
        self._source.read(os.fsencode(path), 0, version.size, version)
        return 0


# -- one run


@dataclass
class Training:
    """The work that a loop over the loader does besides waiting for the loader."""

    data: Data
    step_s: float
    inodes: dict[int, int] = field(default_factory=dict)  # the mount's inode -> index
    model: nn.Module = field(default_factory=lambda: nn.Linear(WIDTH, CLASSES))
    begin_epoch: Callable[[int], None] = lambda epoch: None
    took: Callable[[int], None] = lambda draws: None
    end_epoch: Callable[[], None] = lambda: None

    def epoch(
        self, loader: DataLoader[Any], advance: Callable[[], None], settled: Callable[[], None]
    ) -> tuple[float, float, list[int]]:
        """Seconds in all, of these waiting for the loader, and the indices drawn.

        `settled` is called in the step after the first batches.
        """
        drawn: list[int] = []
        waited_s = 0.0
        begin = asked = time.monotonic()
        for number, (indices, inodes) in enumerate(loader, start=1):
            got = time.monotonic()
            waited_s += got - asked
            pairs = zip(indices.tolist(), inodes.tolist(), strict=True)
            served = [self.inodes.get(inode, index) for index, inode in pairs]
            self.model(self.data.features[served])
            drawn += indices.tolist()
            self.took(len(drawn))
            advance()
            if number == FIRST_BATCHES:
                settled()
            time.sleep(max(0.0, got + self.step_s - time.monotonic()))
            asked = time.monotonic()
        return asked - begin, waited_s, drawn


def loader_of(data: Data, read: Callable[[str], int], root: Path | None, sampler: Any, seed: int) -> DataLoader[Any]:
    samples = [(path if root is None else str(root / path), label) for path, label in data.samples]
    return DataLoader(
        Files(samples, read),
        batch_size=BATCH,
        sampler=sampler,
        shuffle=sampler is None,
        generator=torch.Generator().manual_seed(seed),
        num_workers=LOADER_WORKERS,
        persistent_workers=True,
        worker_init_fn=leave_signals_to_the_parent,
    )


@dataclass(frozen=True)
class Case:
    """One run to be made."""

    name: str
    seed: int
    factor: float
    cached_share: float = CACHED_SHARE
    weights: Any = None  # by which samples are drawn with replacement; None draws each sample once
    immutable: bool = False


def measure(data: Data, case: Case, extent: Extent, scratch: Path, progress: Progress) -> Run:
    configuration = CONFIGURATIONS[case.name]
    steps = -(-len(data.samples) // BATCH)
    step_s = extent.step_ms / 1000 / (1 if case.weights is None else 2)
    compute_s = steps * step_s
    bandwidth = case.factor * (1 - CACHED_SHARE) * data.total_bytes / compute_s
    capacity = int(data.total_bytes * case.cached_share)
    epochs = extent.epochs if case.weights is None else extent.replacement_epochs
    training = Training(data, step_s)
    torch.manual_seed(case.seed)
    place = Path(tempfile.mkdtemp(dir=scratch))
    with ExitStack() as stack:
        count: Callable[[], dict[str, int]] = dict
        if configuration is None:
            slow = case.name == "direct"
            reader: Any = SlowReader(data, place / "line", bandwidth) if slow else read_file
            loader = loader_of(data, reader, None if slow else data.root, None, case.seed)
            describe: Callable[[], str] = str
        else:
            options = f"policy={configuration.policy},source.bandwidth={int(bandwidth)}{',immutable' * case.immutable}"
            point = stack.enter_context(mounted(data.root, place, capacity, LATENCY_MS, options))
            sampler: Any = None
            if configuration.guided:
                sampler = trainer_hook.SpiderSampler(len(data.samples), seed=case.seed, coverage=0.0)
            elif case.weights is not None:
                own = torch.Generator().manual_seed(case.seed)
                sampler = WeightedRandomSampler(case.weights, len(data.samples), generator=own)
            loader = loader_of(data, partial(read_file, forget=case.immutable), point, sampler, case.seed)
            training.inodes = inodes_of(data, point)
            stack.enter_context(published(configuration, point, loader, training, case.seed))
            count = lambda: counts(point)  # noqa: E731
            describe = lambda: json.dumps(stats(point)["plans"])  # noqa: E731
        task = progress.add_task(f"{case.name}, x {case.factor:g}, seed {case.seed}", total=epochs * steps)
        figures, lists = [], []
        for number in range(epochs):
            counted = [count()]
            training.begin_epoch(number)
            seconds, stall_s, drawn = training.epoch(
                loader,
                lambda: progress.advance(task),
                lambda: counted.append(count()),  # noqa: B023
            )
            training.end_epoch()
            figures.append((seconds, stall_s, [*counted, count()]))
            lists.append(drawn)
        said = describe()
        progress.remove_task(task)
        # The loader's workers have files of the mount open.
        del loader
    least = min_by_epoch(data, lists, capacity)
    done = [
        epoch_of(*figure, drawn, data, fetched, max(compute_s, fetched / bandwidth))
        for figure, drawn, fetched in zip(figures, lists, least, strict=True)
    ]
    return Run(case.name, case.seed, case.factor, case.cached_share, done, len(lists[0]), said)


def inodes_of(data: Data, point: Path) -> dict[int, int]:
    """Which sample each inode of the mount is; as with every image folder, the mount learns the names at once."""
    index_of = {path: index for index, (path, _) in enumerate(data.samples)}
    folders = {path.partition("/")[0] for path in index_of}
    listed = ((f"{folder}/{entry.name}", entry.inode()) for folder in folders for entry in os.scandir(point / folder))
    return {inode: index_of[path] for path, inode in listed if path in index_of}


@contextmanager
def published(
    configuration: Configuration, point: Path, loader: DataLoader[Any], training: Training, seed: int
) -> Iterator[None]:
    """Publish to the daemon, while the context lasts, all that the trainer of this configuration has to."""
    if configuration.guided:
        hook = trainer_hook.attach(point, training.model, loader, plan=configuration.plan)
        training.end_epoch = hook.epoch_end
        try:
            yield
        finally:
            hook.close()
    elif configuration.plan:
        with trainer_hook.plan(point, loader):
            yield
    elif configuration.lies:
        client = trainer_hook.HookClient(socket_finder(point, None), Hello("liar", "liar"))
        paths, labels = zip(*training.data.samples, strict=True)
        encoded = [os.fsencode(path) for path in paths]
        client.declare(trainer_hook.Declaration("train", "train", encoded, np.array(labels, np.int32)))
        rng = np.random.default_rng([seed, 1])

        def lie(epoch: int) -> None:
            client.plan(Plan("train", epoch, 0, True, rng.permutation(len(paths)).astype(np.uint32)))
            progressed(0)

        def progressed(taken: int) -> None:
            client.set_progress("train", min(taken + IN_HAND, len(paths)), taken)

        training.begin_epoch, training.took = lie, progressed
        try:
            yield
        finally:
            client.close()
    else:
        yield


def min_by_epoch(data: Data, lists: list[list[int]], capacity: int) -> list[int]:
    """Bytes that MIN fetches in each epoch."""
    drawn = [sample for epoch in lists for sample in epoch]
    accesses = Accesses.of(drawn, [data.sizes[sample] for sample in drawn])
    everything = Engine(policy_for(POLICIES["belady"], accesses), capacity)
    fetched: list[int] = replay(everything, accesses, len(lists[0])).origin_bytes.tolist()
    return fetched


def epoch_of(
    seconds: float,
    stall_s: float,
    counted: list[dict[str, int]],
    drawn: list[int],
    data: Data,
    least: int,
    bound_s: float,
) -> Epoch:
    if not counted[-1]:  # without a mount every draw is read from the source
        return Epoch(seconds, stall_s, 0.0, 0.0, 0.0, sum(data.sizes[sample] for sample in drawn), least, bound_s)
    before, *_, settled, after = [counted[0], *counted]
    redirects, origin_bytes = (after[name] - before[name] for name in ("redirects", "origin_bytes"))
    hits = hit_ratio(before, after), hit_ratio(settled, after)
    return Epoch(seconds, stall_s, *hits, redirects / len(drawn), origin_bytes, least, bound_s)


def hit_ratio(before: dict[str, int], after: dict[str, int]) -> float:
    """The share of reads that did not wait for the source; those that the page cache answered come on top of opens."""
    opens, hits, unseen = (after[name] - before[name] for name in ("opens", "opens_hit", "page_cache_reads"))
    return (hits + unseen) / (opens + unseen)


# -- data


def make_data(root: Path, samples: int) -> None:
    """Files of random bytes, 20 to 80 kB long."""
    rng = np.random.default_rng(samples)
    for number in range(samples):
        path = root / f"{number % CLASSES}" / f"{number:05d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, rng.bytes(int(rng.integers(20_000, 80_000))))
    os.sync()  # otherwise the disk still writes during the first runs


def found_data(root: Path, samples: int) -> Data:
    """Some of the files that were made."""
    paths = sorted(str(path.relative_to(root)) for path in root.glob("*/*") if path.is_file())
    paths = sorted(np.random.default_rng(0).choice(paths, samples, replace=False).tolist())
    classes = {name: label for label, name in enumerate(sorted({path.partition("/")[0] for path in paths}))}
    labels = [classes[path.partition("/")[0]] for path in paths]
    # The classes overlap: a sample near the centre of its class has many neighbours, others have few.
    rng = np.random.default_rng(1)
    spread_of = rng.uniform(0.1, 1.0, (samples, 1))
    features = rng.normal(size=(len(classes), WIDTH))[labels] + spread_of * rng.normal(size=(samples, WIDTH))
    sizes = [(root / path).stat().st_size for path in paths]
    return Data(root, list(zip(paths, labels, strict=True)), sizes, torch.from_numpy(features.astype(np.float32)))


def log_rank_weights(samples: int) -> Any:
    """Some samples are drawn several times as often as others, as by SHADE's ranks."""
    ranks = np.random.default_rng(2).permutation(samples)
    return np.log(ranks + 10.0)


# -- the program


def run_all(arguments: argparse.Namespace, console: Console) -> None:
    extent: Extent = arguments.extent
    factors = arguments.factors or ([ENOUGH] if arguments.quick else [ENOUGH, TOO_LITTLE])
    torch.set_num_threads(1)
    runs: list[Run] = []
    replaced: list[Run] = []
    with scratch_directory("stall") as scratch, Progress(console=console, transient=True) as progress:
        make_data(scratch / "source", max(extent.samples, extent.replacement_samples))
        data = found_data(scratch / "source", extent.samples)
        more_data = found_data(scratch / "source", extent.replacement_samples)
        console.print(
            f"{extent.samples:,} files, {data.total_bytes / 1e6:.0f} MB; {extent.step_ms:g} ms for a batch of {BATCH}; "
            f"source {LATENCY_MS:g} ms away; {LOADER_WORKERS} loader workers; {CACHED_SHARE:.0%} cached",
            highlight=False,
        )
        weights = log_rank_weights(extent.replacement_samples)
        cases = []
        for seed in range(1, extent.seeds + 1):
            case_of = partial(Case, seed=seed, immutable=arguments.immutable)
            cases += [case_of(name, factor=factor) for factor in factors for name in arguments.configs]
            if not arguments.no_replacement:
                shares = extent.capacities
                cases += [
                    case_of("plan+uniform", factor=ENOUGH, cached_share=share, weights=weights) for share in shares
                ]
        try:
            for case in cases:
                run = measure(data if case.weights is None else more_data, case, extent, scratch, progress)
                (runs if case.weights is None else replaced).append(run)
                console.print(str(run), highlight=False, soft_wrap=True)
        finally:
            # An interrupted measurement shows what it has measured.
            show(arguments, data, runs, replaced, console)


def show(arguments: argparse.Namespace, data: Data, runs: list[Run], replaced: list[Run], console: Console) -> None:
    verdicts = list(judged(runs, replaced))
    result = {
        "machine": machine(),
        "extent": asdict(arguments.extent),
        "latency_ms": LATENCY_MS,
        "batch": BATCH,
        "loader_workers": LOADER_WORKERS,
        "immutable": arguments.immutable,
        "total_bytes": data.total_bytes,
        "runs": [asdict(run) for run in runs],
        "with_replacement": [asdict(run) for run in replaced],
        "verdicts": verdicts,
    }
    print(tables.stall(result))
    for what, figure, target in verdicts:
        print(f"{what}: {tables.aimed(figure, target, '.3f', most=HITS not in what)}")
    if runs or replaced:
        save(arguments.json, result)


if __name__ == "__main__":
    program = command_line(__doc__, FULL, QUICK)
    help_text = f"factors of the bandwidth (default {ENOUGH},{TOO_LITTLE}; quick {ENOUGH})"
    program.add_argument("--factors", type=numbers_of(float), metavar="A,B", help=help_text)
    add_names(program, "--configs", CONFIGURATIONS, "to run (default all)", default=CONFIGURATIONS)
    program.add_argument("--immutable", action="store_true", help="mount with -o immutable")
    program.add_argument("--no-replacement", action="store_true", help="leave out the draws with replacement")
    main(run_all, program)
