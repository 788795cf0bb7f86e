"""Whether the law of the bottleneck predicts what a partition of the cache among forms is worth.

    .venv-dev/bin/python -m benchmarks.training.partition                some eight minutes
    .venv-dev/bin/python -m benchmarks.training.partition --sizes        along the data set's size (Seneca's figure 8)
    .venv-dev/bin/python -m benchmarks.training.partition --quick        some two minutes, for a look

A PyTorch DataLoader reads images through a mount, as benchmarks.serving.image_loader does: Pillow decodes and crops
each at random. Nothing is trained. In each of four settings (a slow source, a slow processor, a small cache, and a
narrow line, for which equation 9 was made), `spiderfs profile` measures and predicts; then the loader reads epochs
through one mount for each of six splits (`-o forms=`), and through one with forms=auto. The mount holds originals (E),
BMP views (D), and what the loader gave of some samples (A, made again after three uses): these are chosen among those
that are shown as originals, as the law has each sample in one form. Mounts are not immutable, for with so few images
the page cache would hold all that the cache does not.

With --sizes the cache stays as large, and the loader reads a quarter of the images, then half, and so on. The paper
correlates prediction and measurement of each split over these sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks import tables
from benchmarks.common.command import add_data, add_names, command_line, main
from benchmarks.common.images import HELP, make_images
from benchmarks.common.interruption import scratch_directory
from benchmarks.common.mounts import end_loader_workers, leave_signals_to_the_parent, mounted
from benchmarks.serving.image_loader import Images
from benchmarks.training.equation_9 import by_equation_9
from spiderfs.forms.partition import FormSizes, Split
from spiderfs.forms.profile import SHOWN, Profile, Record, save_record
from spiderfs.profiling.measure import Speeds, Wanted, measure
from spiderfs.profiling.private_mount import settings_in
from spiderfs.shared.layout import CacheLayout
from spiderfs.views.recipe import READY
from spiderfs.views.tree import Forms
from trainer_hook.refurbishing.stores import Missing, MountStore, PartialStore

VIEW = "bmp256"
BATCH = 16
USES = 3
READERS, FILLS = 8, 2
# Of predicted and measured throughput in each setting; and of the measured best, by the split that the law names.
LEAST = {"pearson": 0.90, "auto_of_best": 0.95}


@dataclass(frozen=True)
class Setting:
    """How far away the source is, the loader's workers, and the cache as a share of what all originals take."""

    latency_ms: float
    workers: int
    cached: float
    bandwidth: int = 0
    """Bytes that the source gives in a second; 0 is no limit."""


SETTINGS = {
    "slow source": Setting(30, workers=2, cached=0.8),
    "slow processor": Setting(0, workers=1, cached=1.6),
    "small cache": Setting(10, workers=2, cached=0.3),
    "narrow line": Setting(1, workers=2, cached=0.5, bandwidth=5_000_000),
}


def line_of(setting: Setting) -> str:
    """The option for the bytes that the source gives in a second."""
    return f"source.bandwidth={setting.bandwidth}"


@dataclass(frozen=True)
class Extent:
    images: int
    rounds: int
    profiled: int


FULL, QUICK = Extent(480, rounds=3, profiled=256), Extent(120, rounds=3, profiled=64)
# The sizes of the data set, as shares of all images.
SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Row:
    """One split of the cache: samples a second as the law and equation 9 predict them, and of each epoch."""

    split: str
    predicted: float
    equation_9: float
    measured: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.measured)


class Partitioned(Dataset[torch.Tensor]):
    """The images of a mount, some from its store; asked by the epoch times their number plus the image's own number."""

    def __init__(self, paths: list[str], augmented: frozenset[int], store: PartialStore | MountStore) -> None:
        self._images = Images(paths)
        self._augmented = augmented
        self._store = store

    def __getitem__(self, number: int) -> torch.Tensor:
        epoch, index = divmod(number, len(self._images))
        if index not in self._augmented:
            return self._images[index]
        generation, uses = divmod(epoch + index, USES)
        if uses:
            try:
                kept: torch.Tensor = self._store.get(index, generation)
            except Missing:
                pass
            else:
                return kept
        made = self._images[index]
        self._store.put(index, generation, made, generation - 1 if generation else None)
        return made


class Epochs(Sampler[int]):
    """The images of an epoch in random order; first some of them, so that the workers have begun."""

    def __init__(self, images: int, epoch: int) -> None:
        self._images = images
        self._epoch = epoch
        self.few = BATCH

    def __iter__(self) -> Iterator[int]:
        few, self.few = self.few, self._images
        order = np.random.default_rng([self._epoch, few]).permutation(self._images)[:few]
        return iter((self._epoch * self._images + order).tolist())


def make(directory: str) -> DataLoader[torch.Tensor]:
    """The loader that is profiled: as those that are measured, of one directory."""
    paths = [os.path.join(above, name) for above, _, names in os.walk(directory) for name in names]
    return DataLoader(Images(sorted(paths)), BATCH, shuffle=True, num_workers=1)


def chosen(count: float, names: list[str], view_share: float) -> frozenset[int]:
    """So many images to be augmented: those first that a mount shows as originals, in a random order."""
    forms = Forms(READY, VIEW, view_share)
    order = np.random.default_rng(0).permutation(len(names)).tolist()
    order.sort(key=lambda index: forms.place(names[index].encode()).form == VIEW)
    return frozenset(order[: round(count)])


def epoch_rate(dataset: Partitioned, images: int, workers: int, epoch: int) -> float:
    """Images a second of one epoch."""
    loader = DataLoader(
        dataset,
        BATCH,
        sampler=Epochs(images, epoch),
        num_workers=workers,
        persistent_workers=True,
        worker_init_fn=leave_signals_to_the_parent,
    )
    for _ in loader:
        pass
    begin = time.perf_counter()
    for _ in loader:
        pass
    return images / (time.perf_counter() - begin)


def profiled(mount: Path, scratch: Path, setting: Setting, samples: int) -> tuple[Speeds, Profile]:
    options = settings_in((mount / ".spiderfs/config").read_text())
    wanted = Wanted(f"{__spec__.name if __spec__ else ''}:make", (VIEW,), samples, planned=False, uses=USES)
    speeds, found = measure(options, scratch, 0.0, wanted, lambda _: None)
    assert found is not None
    found = replace(found, workers=setting.workers)
    return speeds, replace(found, cache_bytes=setting.cached * found.samples * found.sizes(VIEW).encoded)


@contextmanager
def split_mount(
    source: Path, scratch: Path, capacity: int, setting: Setting, forms: str, record: Record
) -> Iterator[tuple[Path, Split, float]]:
    """A mount with this option; gives its split, and the share of the images that it shows as views."""
    cache = CacheLayout(scratch / "cache")
    cache.cache.mkdir(mode=0o700, parents=True)
    save_record(record, cache.profile)
    options = f"policy=minio,view={VIEW},forms={forms}"
    with mounted(source, scratch, capacity, setting.latency_ms, f"{options},{line_of(setting)}") as mount:
        stats = json.loads((mount / ".spiderfs/stats.json").read_bytes())
        yield mount, Split.parse(stats["split"]), stats["view_share"]


def filled(
    mount: Path, source: Path, names: list[str], wanted: float, view_share: float, sizes: FormSizes
) -> Partitioned:
    """The images of a mount, once it holds what its split says; `wanted` is how many are to be augmented."""
    paths = [os.path.join(mount, name) for name in names]
    store = MountStore(mount, paths, "partition", math.ceil(wanted * sizes.augmented))
    # A loader keeps as many as the mount has room for.
    augmented = chosen(min(wanted, store.room_bytes / sizes.augmented), names, view_share)
    others = [Path(path) for index, path in enumerate(paths) if index not in augmented]
    with ThreadPoolExecutor(READERS) as pool:
        for _ in range(FILLS):
            list(pool.map(lambda path: path.read_bytes(), others))
    originals = Images([os.path.join(source, name) for name in names])
    for index in sorted(augmented):
        store.put(index, index // USES, originals[index])
    store.settle()
    return Partitioned(paths, augmented, store)


def measure_setting(
    setting: Setting, source: Path, names: list[str], scratch: Path, extent: Extent
) -> tuple[Profile, list[Row]]:
    """What was profiled, and a row for each split; the last one is that of forms=auto."""
    with mounted(source, scratch / "p", 1 << 30, setting.latency_ms, f"policy=minio,{line_of(setting)}") as mount:
        speeds, profile = profiled(mount, scratch, setting, extent.profiled)
    return profile, measure_splits(setting, source, names, scratch, extent, speeds.record(profile), profile)


def measure_splits(
    setting: Setting, source: Path, names: list[str], scratch: Path, extent: Extent, record: Record, profile: Profile
) -> list[Row]:
    with ExitStack() as stack:
        sizes = profile.sizes(VIEW)
        data: dict[Split, Partitioned] = {}
        best = None
        for forms in ("auto", *map(str, SHOWN)):
            if best is not None and forms == str(best):
                continue
            mount, split, view_share = stack.enter_context(
                split_mount(source, scratch / forms, int(profile.cache_bytes), setting, forms, record)
            )
            best = best or split
            wanted = profile.counts(split, VIEW).augmented
            data[split] = filled(mount, source, names, wanted, view_share, sizes)
        assert best is not None
        splits = list(data)
        rates: dict[Split, list[float]] = {split: [] for split in splits}
        for number in range(extent.rounds):
            for split in splits[number % len(splits) :] + splits[: number % len(splits)]:
                rates[split].append(epoch_rate(data[split], len(names), setting.workers, number + 1))
                end_loader_workers()
    return [
        Row(
            str(split),
            profile.predicted(split, VIEW).samples_per_s,
            by_equation_9(profile, split, VIEW),
            rates[split],
        )
        for split in (*SHOWN, best)
    ]


def measure_sizes(
    setting: Setting, source: Path, names: list[str], scratch: Path, extent: Extent
) -> dict[str, dict[str, Any]]:
    """For each split its rows at all sizes of the data set, and their correlation."""
    with mounted(source, scratch / "p", 1 << 30, setting.latency_ms, f"policy=minio,{line_of(setting)}") as mount:
        speeds, profile = profiled(mount, scratch, setting, extent.profiled)
    found: dict[str, list[Row]] = {}
    for share in SHARES:
        some = names[: round(share * len(names))]
        part, mounts = scratch / f"{share:.0%}", scratch / f"m{share:.0%}"
        for name in some:
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(source / name, part / name)
        of = replace(profile, samples=len(some))
        record = replace(speeds.record(of), samples=len(some))
        for row in measure_splits(setting, part, some, mounts, extent, record, of)[:-1]:
            found.setdefault(row.split, []).append(row)
    return {
        split: {"rows": [asdict(row) for row in rows]}
        | {name: pearson(rows, of) for name, of in (("pearson", "predicted"), ("pearson_of_equation_9", "equation_9"))}
        for split, rows in found.items()
    }


def pearson(rows: list[Row], of: str) -> float:
    """Between prediction and measurement."""
    return float(np.corrcoef([getattr(row, of) for row in rows], [row.median for row in rows])[0, 1])


def auto_of_best(rows: list[Row]) -> float:
    """What the split that the law names reaches, as a share of the best measured one."""
    return rows[-1].median / max(row.median for row in rows)


def judged(rows: list[Row]) -> dict[str, float]:
    """The last row is that of "auto", which is one of the others again."""
    return {
        "pearson": pearson(rows[:-1], "predicted"),
        "pearson_of_equation_9": pearson(rows[:-1], "equation_9"),
        "auto_of_best": auto_of_best(rows),
    }


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent: Extent = arguments.extent
    result: dict[str, Any] = {"images": extent.images, "settings": {}}
    with scratch_directory("partition") as scratch:
        source = scratch / "source"
        names = make_images(source, arguments.data, extent.images)
        for name in arguments.settings:
            if arguments.sizes:
                of_splits = measure_sizes(SETTINGS[name], source, names, scratch / name.replace(" ", "-"), extent)
                result["settings"][name] = asdict(SETTINGS[name]) | {"splits": of_splits}
                continue
            profile, rows = measure_setting(SETTINGS[name], source, names, scratch / "m", extent)
            figures = judged(rows)
            found = {"splits": [asdict(row) for row in rows], **figures, "profile": asdict(profile)}
            result["settings"][name] = asdict(SETTINGS[name]) | found
            for what, figure in figures.items():
                console.print(f"{name}, {what}: {tables.aimed(figure, LEAST.get(what), '.3f')}", highlight=False)
    if arguments.sizes:
        result["shares"] = SHARES
    print(tables.figure_8(result) if arguments.sizes else tables.partition(result))
    return result


if __name__ == "__main__":
    program = command_line(__doc__, FULL, QUICK)
    add_data(program, HELP)
    program.add_argument("--sizes", action="store_true", help="measure along the size of the data set")
    add_names(program, "--settings", SETTINGS, "settings (default all)", default=SETTINGS)
    main(run, program)
