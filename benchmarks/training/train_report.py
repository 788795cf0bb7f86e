"""The report of the benchmark train.py: reads and accuracy of each configuration, compared with those of an LRU."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import intervals
from benchmarks.common.results import Verdict, plain_table, spread

BASELINE, WITHOUT_MOUNT = "lru", "all local"
LEAST_ORIGIN_SAVING, LEAST_SPEEDUP = 0.5, 2.2


@dataclass(frozen=True)
class Epoch:
    """One epoch of training, without the evaluation after it."""

    hit_ratio: float  # of all opens, with those of an evaluation between epochs
    origin_bytes_per_sample: float  # for each sample that was trained on
    origin_share: float  # bytes fetched, as a share of the training set's bytes
    reads_share: float  # samples trained on, as a share of the training set's number
    drawn_share: float  # different samples that the sampler drew, as a share of the training set
    served_share: float  # different samples that were served; fewer than were drawn if there were substitutes
    redirected_share: float  # redirected opens, as a share of the draws
    seconds: float
    waiting_share: float  # of these seconds, for the data loader
    top1: float


@dataclass(frozen=True)
class Run:
    configuration: str
    seed: int
    epochs: list[Epoch]
    batches_sent: int
    batches_dropped: int
    graph: str  # what the daemon said of its scores at the end
    workers: int = 2  # of the data loader

    def later(self, field: str) -> float:
        """The mean over all epochs but the first, which fills the cache and in which nothing is scored yet."""
        return statistics.fmean(getattr(epoch, field) for epoch in self.epochs[1:])

    def figure(self, field: str) -> float:
        return self.epochs[-1].top1 if field == "top1" else self.later(field)

    @property
    def settled_s(self) -> float:
        """The mean time of the epochs of the second half; impact warms up in the first."""
        return statistics.fmean(epoch.seconds for epoch in self.epochs[len(self.epochs) // 2 :])


def by_configuration(runs: list[Run]) -> dict[str, list[Run]]:
    """The runs by configuration, in the order of their seeds."""
    names = dict.fromkeys(run.configuration for run in runs)
    return {name: [run for run in runs if run.configuration == name] for name in names}


def against_baseline(runs: list[Run], name: str, field: str) -> list[tuple[float, float]]:
    """Pairs of the configuration's figure and the baseline's, for each seed that has both."""
    both = by_configuration(runs)
    baseline = {run.seed: run for run in both.get(BASELINE, [])}
    return [(run.figure(field), baseline[run.seed].figure(field)) for run in both.get(name, []) if run.seed in baseline]


def times_as_fast_settled(runs: list[Run], name: str) -> list[float]:
    """How many times as fast as the baseline of the same seed the epochs of the second half are."""
    both = by_configuration(runs)
    baseline = {run.seed: run.settled_s for run in both.get(BASELINE, [])}
    return [baseline[run.seed] / run.settled_s for run in both.get(name, []) if run.seed in baseline]


def judge(runs: list[Run], name: str) -> Iterator[Verdict]:
    saved = [ours / theirs for ours, theirs in against_baseline(runs, name, "origin_bytes_per_sample")]
    faster = [theirs / ours for ours, theirs in against_baseline(runs, name, "seconds")]
    gained = [ours - theirs for ours, theirs in against_baseline(runs, name, "top1")]
    if not saved:
        return
    mean = statistics.fmean
    yield Verdict(
        "origin bytes per sample, x lru", f"<= {LEAST_ORIGIN_SAVING}", saved, mean(saved) <= LEAST_ORIGIN_SAVING
    )
    yield Verdict("epochs, times as fast as lru", f">= {LEAST_SPEEDUP}", faster, mean(faster) >= LEAST_SPEEDUP)
    points = [100 * gain for gain in gained]
    yield Verdict(
        "top-1 less uniform's, points",
        f"all above {-intervals.MARGIN_POINTS:g}",
        points,
        intervals.is_equivalent(intervals.interval_of(points)),
        paired=True,
    )


def speed_table(runs: list[Run]) -> Table:
    """The time of an epoch, by the number of loader workers, and how many times as fast as lru with as many."""
    counts = sorted({run.workers for run in runs})
    headings = [heading for count in counts for heading in (f"{count} workers: s", "x lru", "waiting %")]
    table = plain_table("An epoch, by loader workers", "", "seeds", *headings)
    for name, ran in by_configuration(runs).items():
        cells = []
        for count in counts:
            those = [run for run in runs if run.workers == count]
            same = [run for run in ran if run.workers == count]
            faster = [theirs / ours for ours, theirs in against_baseline(those, name, "seconds")]
            cells += [
                spread([run.figure("seconds") for run in same], ".2f") if same else "",
                spread(faster, ".2f") if faster else "",
                spread([run.figure("waiting_share") for run in same], ".0f", 100) if same else "",
            ]
        table.add_row(name, str(len({run.seed for run in ran})), *cells)
    return table


Column = tuple[str, str, str, float]
TRAFFIC: tuple[Column, ...] = (
    ("hits %", "hit_ratio", ".1f", 100),
    ("origin B", "origin_bytes_per_sample", ".0f", 1),
    ("origin x data", "origin_share", ".2f", 1),
    ("reads %", "reads_share", ".0f", 100),
    ("drawn %", "drawn_share", ".1f", 100),
    ("served %", "served_share", ".1f", 100),
    ("redirected %", "redirected_share", ".1f", 100),
)
TRAINING: tuple[Column, ...] = (
    ("s per epoch", "seconds", ".1f", 1),
    ("of it waiting %", "waiting_share", ".0f", 100),
    ("top-1 %", "top1", ".1f", 100),
)


def summary_table(title: str, runs: list[Run], columns: tuple[Column, ...]) -> Table:
    table = plain_table(title, "", "seeds", *(heading for heading, *_ in columns))
    for name, ran in by_configuration(runs).items():
        table.add_row(
            name,
            str(len(ran)),
            *(spread([run.figure(field) for run in ran], form, factor) for _, field, form, factor in columns),
        )
    return table


def ratio_table(runs: list[Run]) -> Table:
    headings = (
        "",
        "seeds",
        "origin bytes a sample x",
        "an epoch x",
        "times as fast",
        "second half",
        "top-1 points, 95 %",
        "claim",
    )
    table = plain_table("Against lru of the same seed", *headings)
    for name in by_configuration(runs):
        verdicts = list(judge(runs, name))
        if verdicts and name != BASELINE:
            a_sample, faster, points = (verdict.measured for verdict in verdicts)
            an_epoch = [ours / theirs for ours, theirs in against_baseline(runs, name, "origin_share")]
            table.add_row(
                name,
                str(len(points)),
                *(spread(times, ".2f") for times in (a_sample, an_epoch, faster)),
                spread(times_as_fast_settled(runs, name), ".2f"),
                intervals.shown(points),
                intervals.verdict(points),
            )
    return table


FORMS = (".2f", ".2f", "+.1f")


def print_run(run: Run, console: Console) -> None:
    console.print(f"{run.configuration}, seed {run.seed}, {run.workers} loader workers", style="bold", highlight=False)
    for number, epoch in enumerate(run.epochs, 1):
        console.print(
            f"  epoch {number:2}: {epoch.seconds:5.1f} s ({epoch.waiting_share:3.0%} waiting)  "
            f"hits {epoch.hit_ratio:5.1%}  origin {epoch.origin_bytes_per_sample:5.0f} B/sample  "
            f"drawn {epoch.drawn_share:4.0%}  served {epoch.served_share:4.0%}  "
            f"redirected {epoch.redirected_share:5.1%}  top-1 {epoch.top1:5.1%}",
            highlight=False,
            soft_wrap=True,
        )


COLOURS = {
    "lru": "#7f7f7f",
    "lfu": "#17becf",
    "minio": "#1f77b4",
    "uniform+plan": "#9467bd",
    "shade": "#8c564b",
    "icache": "#e377c2",
    "impact": "#bcbd22",
    "importance": "#ff7f0e",
    "spider-paper": "#d62728",
    "prefetch only": "#c5b0d5",
    "all local": "#98df8a",
    "spider": "#2ca02c",
    "echo 2": "#1b1b1b",
    "echo 3": "#637939",
    "infobatch": "#17a2a2",
    "infobatch, echo 2": "#006d2c",
}


def plot(runs: list[Run], directory: Path) -> Path:
    """Draw hit ratio, time and accuracy by epoch: the mean over seeds, and the span from the lowest to the highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("hit_ratio", 100, "hits, % of opens"),
        ("seconds", 1, "seconds per epoch"),
        ("top1", 100, "top-1 on held-out images, %"),
    )
    # These configurations train as lru does, so their lines of accuracy would lie on each other.
    dashes = {"lfu": ":", "minio": "--", "uniform+plan": "--"}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(13, 4.6), layout="constrained")
    for axis, (field, factor, title) in zip(axes, panels, strict=True):
        for name, ran in by_configuration(runs).items():
            values = factor * np.array([[getattr(epoch, field) for epoch in run.epochs] for run in ran])
            numbers = np.arange(1, values.shape[1] + 1)
            axis.plot(numbers, values.mean(0), dashes.get(name, "-"), color=COLOURS[name], label=name, marker="o", ms=3)
            axis.fill_between(numbers, values.min(0), values.max(0), color=COLOURS[name], alpha=0.15, linewidth=0)
        axis.set(title=title, xlabel="epoch")
        axis.set_ylim(bottom=0 if field != "top1" else None)
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=7)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "train.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
