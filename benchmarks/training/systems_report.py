"""The tables and the picture that benchmarks/training/systems.py shows."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import intervals
from benchmarks.common.results import plain_table, spread
from benchmarks.training.in_process import Epoch
from benchmarks.training.training import CACHED_SHARE

WIDTH = 175

BASELINE = "lru"
COLOURS = {
    "lru": "#7f7f7f",
    "lfu": "#17becf",
    "minio": "#1f77b4",
    "quiver": "#aec7e8",
    "echo 2": "#1b1b1b",
    "echo 3": "#636363",
    "infobatch": "#98df8a",
    "infobatch, echo 2": "#006d2c",
    "shade": "#8c564b",
    "icache": "#e377c2",
    "impact": "#bcbd22",
    "spider-paper": "#ff9896",
    "spider-imp": "#ff7f0e",
    "spider-released": "#e7ba52",
    "spider": "#d62728",
    "spider+plan": "#2ca02c",
    "uniform+plan": "#9467bd",
}


@dataclass(frozen=True)
class Measured:
    """One system at one size of the cache, in one training; bytes are shares of the data set's bytes."""

    system: str
    cached_share: float
    seed: int
    epochs: list[Epoch]
    top1: float
    """The accuracy on all held-out images after the last epoch."""
    mean_bytes: float
    """The mean size of a sample."""
    planned: list[float]
    """The bytes fetched in each epoch by a MIN that knows an epoch's draws when the epoch begins."""
    foreseen: list[float]
    """The bytes fetched in each epoch by a MIN that knows the whole training; empty if that was not computed."""
    seconds: float = 0.0
    """How long the training took; that of an in-process training says nothing of a mount."""

    @property
    def origin(self) -> list[float]:
        """The bytes fetched in each epoch."""
        return [epoch.origin_bytes_per_sample * epoch.reads_share / self.mean_bytes for epoch in self.epochs]

    @property
    def whole(self) -> float:
        """The bytes fetched in the whole training, the first epoch included."""
        return sum(self.origin)

    def settled(self, field: str) -> float:
        """The mean over the second half of the epochs; in the first half impact warms up."""
        values = {"origin": self.origin, "planned": self.planned, "foreseen": self.foreseen}.get(field)
        if values is None:
            values = [getattr(epoch, field) for epoch in self.epochs]
        return statistics.fmean(values[len(values) // 2 :])


Group = dict[tuple[str, float], list[Measured]]


def grouped(measured: list[Measured]) -> Group:
    """The runs by system and size, in the order of their seeds."""
    found: Group = {}
    for of in sorted(measured, key=lambda of: of.seed):
        found.setdefault((of.system, of.cached_share), []).append(of)
    return found


def gained(group: Group, of: Measured) -> float | None:
    """The difference of its top-1 from that of uniform sampling with the same seed, in points."""
    same = [base for base in group.get((BASELINE, of.cached_share), []) if base.seed == of.seed]
    return 100 * (of.top1 - same[0].top1) if same else None


# -- tables


def show(measured: list[Measured], rows: Sequence[str], console: Console) -> None:
    group = grouped(measured)
    sizes = sorted({share for _, share in group})
    console.print(
        "\nhits and bytes are those of the second half of the epochs; mean ± deviation over seeds, differences with "
        "their 95 % interval"
    )
    for title, field, factor, form in (
        ("Hits, % of reads", "hit_ratio", 100, ".0f"),
        ("Fetched in an epoch, in times of the data set", "origin", 1, ".2f"),
        ("Planned: the same by MIN that knows each epoch as it begins", "planned", 1, ".2f"),
        ("Foreseen: the same by MIN that knows the whole training", "foreseen", 1, ".2f"),
        ("Origin bytes per sample read", "origin_bytes_per_sample", 1, ".0f"),
        ("Different samples trained on in an epoch, %", "served_share", 100, ".0f"),
        ("Reads given a substitute, %", "redirected_share", 100, ".1f"),
    ):
        by_size(title, sizes, rows, group, field, factor, form, console)
    by_size("Top-1, %", sizes, rows, group, None, 100, ".1f", console)
    why_size = max(sizes, key=lambda share: len(group.get((BASELINE, share), [])), default=CACHED_SHARE)
    show_costs(group, why_size, console)


def by_size(
    title: str,
    sizes: list[float],
    rows: Sequence[str],
    group: Group,
    field: str | None,
    factor: float,
    form: str,
    console: Console,
) -> None:
    table = plain_table(title, "", *(f"{share:.0%}" for share in sizes))
    table.min_width = len(title)
    for system in rows:
        cells = []
        for share in sizes:
            ran = group.get((system, share), [])
            values = [of.top1 if field is None else of.settled(field) for of in ran]
            cells.append(spread(values, form, factor) if values else "")
        if any(cells):
            table.add_row(system, *cells)
    console.print(table)


def show_costs(group: Group, size: float, console: Console) -> None:
    """Print the bytes and the accuracy of whole trainings, at the size where all seeds were measured."""
    table = plain_table(
        f"Whole trainings with {size:.0%} cached: what they fetch, first epoch included, and reach",
        "",
        "seeds",
        "epochs",
        "reads",
        "fetched",
        "x lru",
        "planned",
        "top-1 %",
        "- uniform, 95 %",
        "may be claimed",
        "uniform fetches",
    )
    for (system, share), ran in group.items():
        if share != size:
            continue
        bases = [of for of in group.get((BASELINE, size), []) if of.seed in {each.seed for each in ran}]
        points = [points for of in ran if (points := gained(group, of)) is not None]
        fetched = statistics.fmean(of.whole for of in ran)
        equal = [found for of in ran if (found := at_equal_accuracy(group, of)) is not None]
        table.add_row(
            system,
            str(len(ran)),
            str(len(ran[0].epochs)),
            f"{statistics.fmean(sum(epoch.reads_share for epoch in of.epochs) for of in ran):.1f}",
            f"{fetched:.2f}",
            f"{fetched / statistics.fmean(of.whole for of in bases):.2f}" if bases else "",
            f"{statistics.fmean(sum(of.planned) for of in ran):.2f}",
            spread([of.top1 for of in ran], ".1f", 100),
            intervals.shown(points),
            intervals.verdict(points),
            f"{statistics.fmean(equal):.2f}" if len(equal) == len(ran) else "",
        )
    console.print(table)
    console.print(
        "fetched, reads: in times of the data set. planned: the same by MIN that knows each epoch as it begins. "
        "uniform fetches: what uniform+plan does that trains for just so many epochs that it is as accurate "
        "(between those above of the same seed, and no more than the longest)",
        highlight=False,
        soft_wrap=True,
    )


def base_of(system: str) -> str:
    """The system of which this one is a variant."""
    return system.partition(",")[0]


def at_equal_accuracy(group: Group, of: Measured) -> float | None:
    """The bytes that uniform+plan fetches for this accuracy; None if even its shortest training is more accurate."""
    points = sorted(
        (other.whole, other.top1)
        for (system, share), ran in group.items()
        for other in ran
        if base_of(system) == "uniform+plan" and share == of.cached_share and other.seed == of.seed
    )
    if len(points) < 2 or of.top1 < points[0][1]:
        return None
    for (less, lower), (more, higher) in itertools.pairwise(points):
        if lower <= of.top1 <= higher > lower:
            return less + (more - less) * (of.top1 - lower) / (higher - lower)
    return points[-1][0]


def print_measured(of: Measured, console: Console) -> None:
    hits = " ".join(f"{100 * epoch.hit_ratio:.0f}" for epoch in of.epochs)
    console.print(
        f"seed {of.seed}  {of.cached_share:4.0%}  {of.system:32}  hits {of.settled('hit_ratio'):5.1%}  "
        f"origin {of.settled('origin'):.2f}  planned {of.settled('planned'):.2f}  in all {of.whole:5.2f}  "
        f"seen {of.settled('served_share'):4.0%}  redirected {of.settled('redirected_share'):5.1%}  "
        f"top-1 {of.top1:5.1%}  hits by epoch {hits}",
        highlight=False,
        soft_wrap=True,
    )


# -- picture


def plot(measured: list[Measured], rows: Sequence[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    group = grouped(measured)
    sizes = sorted({share for _, share in group})
    why_size = max(sizes, key=lambda share: len(group.get((BASELINE, share), [])))
    figure, axes = pyplot.subplots(2, 2, figsize=(13, 10), layout="constrained")
    for axis, field, factor, title in (
        (axes[0, 0], "hit_ratio", 100, "hits, % of reads"),
        (axes[0, 1], "origin", 1, "fetched in an epoch, in times of the data set"),
        (axes[1, 0], "served_share", 100, "different samples in an epoch, %"),
    ):
        for system in rows:
            along = [
                (100 * share, factor * statistics.fmean(of.settled(field) for of in group[system, share]))
                for share in sizes
                if (system, share) in group
            ]
            if along:
                style = "--" if system in ("minio", "uniform+plan") else "-"
                axis.plot(*zip(*along, strict=True), style, marker="o", ms=4, color=COLOURS[system], label=system)
        axis.set(xlabel="cache, % of the bytes of all samples", title=title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    # There is room between the systems that see all samples and those that see about half of them.
    named = axes[0, 0].get_legend_handles_labels()
    axes[1, 0].legend(*named, frameon=False, fontsize=9, ncols=4, loc="center", bbox_to_anchor=(0.5, 0.77))
    plot_costs(axes[1, 1], group, rows, why_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def add_plot_scores(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plot-scores",
        type=Path,
        metavar="FILE",
        help="write a picture of sigma, x_same and the radius over the epochs to FILE (SpiderCache, figure 6(c))",
    )


def plot_scores(measured: list[Measured], path: Path) -> None:
    """Draw how scores of the graph develop; raises RuntimeError if no training has any. A dot: beta has become 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    group = {of: ran for of, ran in grouped(measured).items() if any(epoch.radius for epoch in ran[0].epochs)}
    if not group:
        raise RuntimeError("no training had scores of the graph: measure spider-paper or its variants")
    figure, axes = pyplot.subplots(1, 3, figsize=(17, 5), layout="constrained")
    for axis, field, title in (
        (axes[0], "sigma", "sigma, the deviation of the scores; a dot where beta becomes 1"),
        (axes[1], "mean_same", "x_same, mean"),
        (axes[2], "radius", "radius"),
    ):
        for (system, share), ran in group.items():
            epochs = range(1, min(len(of.epochs) for of in ran) + 1)
            along = [statistics.fmean(getattr(of.epochs[epoch - 1], field) for of in ran) for epoch in epochs]
            (line,) = axis.plot(epochs, along, lw=1.2, label=f"{system}, {share:.0%} cached, {len(ran)} seeds")
            first = next((epoch for epoch in epochs if any(of.epochs[epoch - 1].beta for of in ran)), None)
            if field == "sigma" and first is not None:
                axis.plot(first, along[first - 1], "o", color=line.get_color())
        axis.set(xlabel="epoch", title=title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_costs(axis: Any, group: Group, rows: Sequence[str], size: float) -> None:
    """Draw accuracy over the bytes of a whole training: further left is cheaper, higher is better."""
    lines: dict[str, list[tuple[float, float]]] = {"uniform+plan": [], "spider+plan": []}
    names: dict[tuple[float, float], list[str]] = {}
    for (system, share), ran in group.items():
        base = base_of(system)
        points = [points for of in ran if (points := gained(group, of)) is not None]
        if share != size or base not in COLOURS or not points:
            continue
        fetched, mean = statistics.fmean(of.whole for of in ran), statistics.fmean(points)
        if base in lines:
            lines[base].append((fetched, mean))
        axis.errorbar(
            fetched,
            mean,
            yerr=intervals.interval_of(points).half_width if len(points) > 1 else None,
            marker="o" if system in rows else ".",
            ms=6,
            elinewidth=0.6,
            color=COLOURS[base],
        )
        names.setdefault((round(fetched, 3), mean), []).append(system)
    for system, along in lines.items():
        if along:
            axis.plot(*zip(*sorted(along), strict=True), "-", lw=0.8, color=COLOURS[system])
    above: list[tuple[float, float]] = []
    for place, at_it in sorted(names.items(), key=lambda named: -named[0][1]):
        base, _, variant = at_it[-1].partition(", ")
        if variant:
            # The colour says whose variant it is; left of the line of spider+plan is nothing else.
            offset, side = ((-6, 2), "right") if base == "spider+plan" else ((6, -3), "left")
            text = variant
        else:
            near = any(abs(place[0] - x) < 0.5 and abs(place[1] - y) < 1.0 for x, y in above)
            offset, side, text = (-6, -11 if near else 4), "right", ", ".join(at_it)
            above.append(place)
        axis.annotate(text, place, offset, textcoords="offset points", ha=side, fontsize=7, color=COLOURS[base])
    axis.set(
        xlabel="fetched in the whole training, in times of the data set",
        title=f"top-1 less that of uniform sampling, points; {size:.0%} cached",
    )
    axis.margins(x=0.2)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)
