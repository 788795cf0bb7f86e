"""Whether the law of the bottleneck predicts what a partition of the cache among forms is worth.

    .venv/bin/python -m benchmarks.training.partition                some six minutes
    .venv/bin/python -m benchmarks.training.partition --data DIR     the same, of the images in DIR
    .venv/bin/python -m benchmarks.training.partition --quick        some two minutes, for a look

A PyTorch DataLoader reads images through mounts, as benchmarks.serving.image_loader does: Pillow decodes each and crops
it at random. Nothing is trained. In each of three settings (a slow source, a slow processor, a small cache), `spiderfs
profile` measures and predicts; then the loader reads epochs with the cache split in six ways, and as the law says is
best ("auto"). A split decides of each sample where the loader finds it: as an original in a mount that holds it (E), as
a BMP view in a mount that holds it (D), as the loader gave it in memory (A, made anew after three uses), or as an
original in a mount with hardly any cache, which asks the source. The samples of the three forms take the bytes of the
cache together. Mounts are not immutable, for with so few images the page cache would hold all that the cache does not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.common.command import add_data, add_names, add_numbers, command_line
from benchmarks.common.interruption import exit_status, scratch_directory
from benchmarks.common.mounts import end_loader_workers, leave_signals_to_the_parent, mounted
from benchmarks.common.results import machine, plain_table, save, wide_console
from benchmarks.serving.image_loader import Images, make_images
from spiderfs.core.partition import Split
from spiderfs.profiling.measure import Wanted, measure
from spiderfs.profiling.private_mount import settings_in
from spiderfs.profiling.profile import SHOWN, Profile
from trainer_hook.partial_store import PartialStore

VIEW = "bmp256"
BATCH = 16
USES = 3
# The mounts of what is cached have room for everything; that of what is not, for what is under way.
ALL_BYTES, HARDLY_ANY_BYTES = 1 << 32, 2_000_000
READERS = 8
TABLE_WIDTH = 90
# Of predicted and measured throughput in each setting; and of the measured best, by the split that the law names.
LEAST_PEARSON, LEAST_AUTO = 0.90, 0.95


@dataclass(frozen=True)
class Setting:
    """How far away the source is, the loader's workers, and the cache's bytes as a share of the originals'."""

    latency_ms: float
    workers: int
    cached: float


SETTINGS = {
    "slow source": Setting(30, workers=2, cached=0.8),
    "slow processor": Setting(0, workers=1, cached=1.6),
    "small cache": Setting(10, workers=2, cached=0.3),
}


@dataclass(frozen=True)
class Extent:
    images: int
    rounds: int
    profiled: int


FULL, QUICK = Extent(480, rounds=3, profiled=256), Extent(120, rounds=3, profiled=64)


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
    """Images, each from where a split has it; asked by the epoch times their number plus the image's own number."""

    def __init__(self, roots: dict[str, Path], names: list[str], places: list[str], store: PartialStore) -> None:
        self._images = {place: Images([os.path.join(root, name) for name in names]) for place, root in roots.items()}
        self._places = places
        self._store = store

    def __getitem__(self, number: int) -> torch.Tensor:
        epoch, index = divmod(number, len(self._places))
        place = self._places[index]
        if place != "augmented":
            return self._images[place][index]
        if (epoch + index) % USES:
            kept: torch.Tensor = self._store.get(index, 0)
            return kept
        made = self._images["storage"][index]
        self._store.put(index, 0, made)
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


def places_of(profile: Profile, split: Split) -> list[str]:
    """Where each image is found with this split; which ones are in which form is drawn."""
    counts = profile.counts(split, VIEW)
    places = [name for name, count in counts._asdict().items() for _ in range(round(count))]
    places = (places + ["storage"] * profile.samples)[: profile.samples]
    order = np.random.default_rng(0).permutation(profile.samples)
    return [places[number] for number in order]


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


def profiled(mount: Path, scratch: Path, setting: Setting, cache_bytes: float, samples: int) -> Profile:
    options = settings_in((mount / ".spiderfs/config").read_text())
    wanted = Wanted(f"{__spec__.name if __spec__ else ''}:make", (VIEW,), samples, planned=False, uses=USES)
    _, found = measure(options, scratch, cache_bytes, wanted, lambda _: None)
    assert found is not None
    return replace(found, workers=setting.workers)


def measure_setting(setting: Setting, source: Path, names: list[str], scratch: Path, extent: Extent) -> list[Row]:
    """A row for each split; the last one is the split that the law names."""
    cache_bytes = setting.cached * sum((source / name).stat().st_size for name in names)
    with ExitStack() as stack:
        kinds = {"storage": "policy=lru", "encoded": "policy=minio", "decoded": f"policy=minio,view={VIEW}"}
        roots = {}
        for place, options in kinds.items():
            capacity = HARDLY_ANY_BYTES if place == "storage" else ALL_BYTES
            inside = scratch / place[0]
            roots[place] = stack.enter_context(mounted(source, inside, capacity, setting.latency_ms, options))
        store = PartialStore.in_memory()
        stack.callback(shutil.rmtree, store.directory, ignore_errors=True)
        profile = profiled(roots["storage"], scratch, setting, cache_bytes, extent.profiled)
        with ThreadPoolExecutor(READERS) as pool:
            for root in roots.values():
                list(pool.map(lambda path: path.read_bytes(), [root / name for name in names]))
        originals = Images([os.path.join(roots["encoded"], name) for name in names])
        for index in range(len(names)):
            store.put(index, 0, originals[index])
        splits = list(dict.fromkeys([*SHOWN, profile.best(VIEW)]))
        rates: dict[Split, list[float]] = {split: [] for split in splits}
        for number in range(extent.rounds):
            for split in splits[number % len(splits) :] + splits[: number % len(splits)]:
                dataset = Partitioned(roots, names, places_of(profile, split), store)
                rates[split].append(epoch_rate(dataset, len(names), setting.workers, number))
                end_loader_workers()
    ordered = [*SHOWN, profile.best(VIEW)]
    return [
        Row(
            str(split),
            profile.predicted(split, VIEW).samples_per_s,
            profile.by_equation_9(split, VIEW),
            rates[split],
        )
        for split in ordered
    ]


def pearson(rows: list[Row], of: str) -> float:
    """Between prediction and measurement, over the splits without "auto"."""
    given = rows[: len(SHOWN)]
    return float(np.corrcoef([getattr(row, of) for row in given], [row.median for row in given])[0, 1])


def auto_of_best(rows: list[Row]) -> float:
    """What the split that the law names reaches, as a share of the best measured one."""
    return rows[-1].median / max(row.median for row in rows)


def show(name: str, rows: list[Row], console: Console) -> None:
    table = plain_table(f"{name}: images/s", "E-D-A", "measured", "least", "most", "law", "eq. 9")
    for number, row in enumerate(rows):
        figures = (row.median, min(row.measured), max(row.measured), row.predicted, row.equation_9)
        title = f"auto: {row.split}" if number == len(SHOWN) else row.split
        table.add_row(title, *(f"{figure:,.0f}" for figure in figures))
    console.print(table)
    for what, figure, least in (
        ("Pearson of the law", pearson(rows, "predicted"), LEAST_PEARSON),
        ("auto of the best", auto_of_best(rows), LEAST_AUTO),
    ):
        console.print(f"{what}: {figure:.3f}, >= {least}: {'reached' if figure >= least else 'missed'}")
    console.print(f"Pearson of equation 9: {pearson(rows, 'equation_9'):.3f}\n")


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    extent = QUICK if arguments.quick else FULL
    extent = replace(extent, images=arguments.images or extent.images, rounds=arguments.rounds or extent.rounds)
    settings: dict[str, Any] = {}
    with scratch_directory("partition") as scratch:
        source = scratch / "source"
        names = make_images(source, arguments.data, extent.images)
        for name in arguments.settings:
            rows = measure_setting(SETTINGS[name], source, names, scratch / "m", extent)
            show(name, rows, console)
            settings[name] = {
                **asdict(SETTINGS[name]),
                "splits": [asdict(row) for row in rows],
                "pearson": pearson(rows, "predicted"),
                "pearson_of_equation_9": pearson(rows, "equation_9"),
                "auto_of_best": auto_of_best(rows),
            }
    return {"machine": machine(), "images": extent.images, "settings": settings}


def main() -> int:
    parser = command_line(__doc__)
    add_data(parser, "enlarge the images below DIR, in place of images that are made up")
    add_numbers(parser, FULL, QUICK, images="images", rounds="rounds")
    add_names(parser, "--settings", SETTINGS, "settings (default all)", default=SETTINGS)
    arguments = parser.parse_args()

    def measure_all() -> None:
        result = run(arguments, wide_console(TABLE_WIDTH))
        if arguments.json is not None:
            save(arguments.json, result)

    return exit_status("partition", measure_all, "interrupted; everything is unmounted and deleted")


if __name__ == "__main__":
    sys.exit(main())
