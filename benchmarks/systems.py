"""The papers' systems side by side, each with its own sampler and cache, at several sizes of the cache.

    .venv/bin/python benchmarks/systems.py --data DIR --json FILE --plot PNG    some ten minutes
    .venv/bin/python benchmarks/systems.py --data DIR --quick                   a minute, for a look

Trains as benchmarks/in_process.py does: without a mount, by the policies, scorings and samplers of the product. What a
sampler draws depends on what the cache holds (shade) and on what the model has learned, so each system trains by itself
at each size. Shown is the mean of the second half of the epochs: impact warms up in the first.

    uniform   each sample once in an epoch, through LRU, and through MinIO
    shade     repeats what is cached and hard three times; also without its floor of coverage, with 4 repeats, with none
    icache    half of the samples, the harder ones likelier; easy ones are lent within their class
    impact    the same after a warm-up, with those re-evaluated whose rank varies most
    spider    draws by the neighbourhood of embeddings, with stand-ins

"origin" is what is fetched in an epoch, re-evaluation included, in times of the data set's bytes: epochs of a part of
the samples read less. "planned" is what MIN would fetch for the same lists, known as each epoch begins.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from in_process import MIN_BY_EPOCH, Configuration, Epoch, Pool, Run, decode, list_origin, train
from interruption import exit_status
from rich.console import Console
from rich.progress import Progress
from train import BATCH, Extent, find_data, plain_table

from trainer_hook import SpiderSampler

CACHED_SHARES = (0.1, 0.2, 0.4, 0.6, 0.8)
SHADE = Configuration(scores="rank", policy="shade", sampler="shade", coverage=0.1)
SYSTEMS = {
    "shade": SHADE,
    "shade, no floor": replace(SHADE, coverage=0.0),
    "shade, no floor, 4 repeats": replace(SHADE, coverage=0.0, sampler="shade with 4 repeats"),
    "shade, no repeats": replace(SHADE, sampler="shade without repeats"),
    "icache": Configuration(scores="loss", policy="icache", sampler="icache"),
    "impact": Configuration(scores="loss", policy="impact", sampler="impact"),
    "spider": Configuration(),
}
UNIFORM = Configuration(scores=None)
UNIFORM_CACHES = ("LRU", "MinIO")
# What the papers report for CIFAR-10, in hits.
REPORTED = {
    "shade": {0.2: 0.72},
    "impact": {0.2: 0.43, 0.4: 0.61, 0.6: 0.74, 0.8: 0.88},
}

FULL = Extent(epochs=8, training=2_000, held_out=2_000, seeds=1)
QUICK = Extent(epochs=4, training=600, held_out=300, seeds=1)


@dataclass(frozen=True)
class Point:
    """One system at one size; all of the second half of the epochs, but for the accuracy."""

    system: str
    cached_share: float
    hit_ratio: float
    redirected_share: float
    origin_share: float
    """Bytes fetched in an epoch, of the data set's."""
    planned_share: float
    origin_bytes_per_sample: float
    reads_share: float
    """Reads for training in an epoch, of the number of samples."""
    seen_share: float
    """Different samples trained on in an epoch."""
    top1: float


def point_of(run: Run, system: str, cached_share: float, mean_bytes: float) -> Point:
    half = slice(len(run.epochs) // 2, None)
    epochs = run.epochs[half]

    def mean(field: str) -> float:
        return statistics.fmean(getattr(epoch, field) for epoch in epochs)

    def in_times_of_all(per_sample: list[float]) -> float:
        shares = (each * epoch.reads_share for each, epoch in zip(per_sample, epochs, strict=True))
        return statistics.fmean(shares) / mean_bytes

    return Point(
        system=system,
        cached_share=cached_share,
        hit_ratio=mean("hit_ratio"),
        redirected_share=mean("redirected_share"),
        origin_share=in_times_of_all([epoch.origin_bytes_per_sample for epoch in epochs]),
        planned_share=in_times_of_all(run.list_origin[MIN_BY_EPOCH][half]),
        origin_bytes_per_sample=mean("origin_bytes_per_sample"),
        reads_share=mean("reads_share"),
        seen_share=mean("served_share"),
        top1=run.top1,
    )


def uniform_points(pool: Pool, seed: int, epochs: int, cached_share: float, top1: float) -> Iterator[Point]:
    """Uniform sampling draws the same lists whatever the cache does, so one training is enough for all sizes."""
    sampler = SpiderSampler(len(pool.sizes), seed=seed)
    lists = [list(sampler) for _ in range(epochs)]
    found = list_origin(lists, pool.sizes, pool.capacity(cached_share))
    half = slice(epochs // 2, None)
    mean_bytes = statistics.fmean(pool.sizes)
    for cache in UNIFORM_CACHES:
        origin = statistics.fmean(found[cache][half])
        yield Point(
            system=f"uniform, {cache.lower()}",
            cached_share=cached_share,
            # Of bytes: all images have nearly the same size.
            hit_ratio=1 - origin / mean_bytes,
            redirected_share=0.0,
            origin_share=origin / mean_bytes,
            planned_share=statistics.fmean(found[MIN_BY_EPOCH][half]) / mean_bytes,
            origin_bytes_per_sample=origin,
            reads_share=1.0,
            seen_share=1.0,
            top1=top1,
        )


# -- what it shows


def averaged(points: list[Point]) -> dict[tuple[str, float], dict[str, float]]:
    """The means over seeds."""
    found: dict[tuple[str, float], list[Point]] = {}
    for point in points:
        found.setdefault((point.system, point.cached_share), []).append(point)
    numbers = [name for name in Point.__dataclass_fields__ if name not in ("system", "cached_share")]
    return {
        key: {name: statistics.fmean(getattr(point, name) for point in group) for name in numbers}
        for key, group in found.items()
    }


def show(points: list[Point], console: Console) -> None:
    means = averaged(points)
    systems = list(dict.fromkeys(system for system, _ in means))
    shares = sorted({share for _, share in means})
    for title, field, factor, form in (
        ("Hits, % of reads (in brackets: reported by the paper)", "hit_ratio", 100, ".0f"),
        ("Origin, bytes fetched in an epoch in times of the data set", "origin_share", 1, ".2f"),
        ("Planned: the same with the lists known as each epoch begins (MIN)", "planned_share", 1, ".2f"),
        ("Origin bytes per sample read", "origin_bytes_per_sample", 1, ".0f"),
        ("Different samples trained on in an epoch, %", "seen_share", 100, ".0f"),
        ("Reads given a stand-in, %", "redirected_share", 100, ".0f"),
        ("Top-1, %", "top1", 100, ".1f"),
    ):
        table = plain_table(title)
        table.min_width = len(title)
        table.add_column("")
        for share in shares:
            table.add_column(f"{share:.0%}", justify="right", no_wrap=True)
        for system in systems:
            cells = []
            for share in shares:
                found = means.get((system, share))
                text = format(factor * found[field], form) if found else ""
                reported = REPORTED.get(system, {}).get(share) if field == "hit_ratio" else None
                cells.append(f"{text} ({100 * reported:.0f})" if reported else text)
            table.add_row(system, *cells)
        console.print(table)


def plot(points: list[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    means = averaged(points)
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.5), layout="constrained")
    for axis, field, factor, title in (
        (axes[0], "hit_ratio", 100, "hits, % of reads"),
        (axes[1], "origin_share", 1, "fetched in an epoch, in times of the data set"),
        (axes[2], "seen_share", 100, "different samples in an epoch, %"),
    ):
        for number, system in enumerate(dict.fromkeys(system for system, _ in means)):
            along = sorted((100 * share, factor * means[name, share][field]) for name, share in means if name == system)
            colour = f"C{number}"
            axis.plot(*zip(*along, strict=True), marker="o", ms=4, color=colour, label=system)
            if field == "hit_ratio" and system in REPORTED:
                reported = [(100 * share, 100 * hits) for share, hits in REPORTED[system].items()]
                axis.plot(*zip(*reported, strict=True), "x", ms=8, color=colour)
        axis.set(xlabel="cache, % of the bytes of all samples", title=title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    # Between what sees all samples and what does not.
    axes[2].legend(
        handles, labels, frameon=False, fontsize=8, ncols=2, loc=(0.02, 0.66), title="x: reported", title_fontsize=8
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# -- the program


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent: Extent = arguments.extent
    torch.set_num_threads(1)
    pool = decode(find_data(arguments.data, extent))
    mean_bytes = statistics.fmean(pool.sizes)
    points: list[Point] = []
    steps = extent.epochs * -(-extent.training // BATCH)
    try:
        with Progress(console=console, transient=True) as progress:
            for seed in range(1, extent.seeds + 1):
                task = progress.add_task("uniform", total=steps)
                uniform = train(pool, UNIFORM, "uniform", seed, extent.epochs, lambda: progress.advance(task))  # noqa: B023
                for share in arguments.shares:
                    for point in uniform_points(pool, seed, extent.epochs, share, uniform.top1):
                        points.append(point)
                        print_point(point, seed, (), console)
                    for system, configuration in SYSTEMS.items():
                        progress.remove_task(task)
                        task = progress.add_task(f"{share:.0%} {system}", total=steps)
                        chosen = replace(configuration, cached_share=share)
                        run = train(pool, chosen, system, seed, extent.epochs, lambda: progress.advance(task))  # noqa: B023
                        points.append(point_of(run, system, share, mean_bytes))
                        print_point(points[-1], seed, run.epochs, console)
                        if arguments.json is not None:
                            save(arguments.json, extent, points)
    finally:
        # A measurement that is broken off shows what it has.
        if points:
            show(points, console)
            if arguments.plot is not None:
                plot(points, arguments.plot)


def print_point(point: Point, seed: int, epochs: Sequence[Epoch], console: Console) -> None:
    by_epoch = " ".join(f"{100 * epoch.hit_ratio:.0f}" for epoch in epochs)
    console.print(
        f"seed {seed}  {point.cached_share:4.0%}  {point.system:26}  hits {point.hit_ratio:5.1%}  "
        f"origin {point.origin_share:.2f}  planned {point.planned_share:.2f}  reads {point.reads_share:.2f}  "
        f"seen {point.seen_share:4.0%}  redirected {point.redirected_share:5.1%}  top-1 {point.top1:5.1%}  "
        + (f"hits by epoch {by_epoch}" if epochs else ""),
        highlight=False,
        soft_wrap=True,
    )


def save(path: Path, extent: Extent, points: list[Point]) -> None:
    result: dict[str, Any] = {
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        },
        "extent": asdict(extent),
        "systems": {name: asdict(configuration) for name, configuration in SYSTEMS.items()},
        "points": [asdict(point) for point in points],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="DIR/train/CLASS/NAME, DIR/test/...")
    parser.add_argument("--quick", action="store_true", help="few images and epochs, one size")
    parser.add_argument("--shares", metavar="A,B", help="of the data set's bytes that are cached, as 0.2,0.4")
    parser.add_argument("--seeds", type=int, metavar="N", help=f"default {FULL.seeds}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there, after each run")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture there")
    arguments = parser.parse_args()
    arguments.extent = QUICK if arguments.quick else FULL
    if arguments.seeds:
        arguments.extent = replace(arguments.extent, seeds=arguments.seeds)
    default = (0.2,) if arguments.quick else CACHED_SHARES
    arguments.shares = [float(share) for share in arguments.shares.split(",")] if arguments.shares else default
    return arguments


def main() -> int:
    arguments = parse_arguments()
    console = Console()
    return exit_status("systems", lambda: measure(arguments, console), "interrupted", (OSError, RuntimeError))


if __name__ == "__main__":
    sys.exit(main())
