"""What the papers report, and how far our figures are from it.

The texts of the papers give these numbers. Of figure 14 of SpiderCache (hits over the size of the cache, the mean of
four networks on CIFAR-10) the text gives no numbers but those of two rows: CoorDL's hits are the size of the cache, and
the baseline is an LRU under uniform sampling, whose hits follow from the size alone. For its other rows the text says
who lies above whom, and by how much SpiderCache lies above the baseline. Nothing here is read off a picture.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

from rich.console import Console

from benchmarks.common import intervals
from benchmarks.common.lists import lru_hits
from benchmarks.common.results import plain_table, spread
from benchmarks.training.systems_report import BASELINE, Group

# A difference of so many points is to be explained in the documents.
NOTABLE_POINTS = 5.0
NOTABLE = "differs"


class Reported(NamedTuple):
    hits: Callable[[float], float | None]
    """The share of hits at a size of the cache; None where the paper gives none."""
    source: str


REPORTED = {
    "lru": Reported(lru_hits, "closed form; ImPACT, figure 20, has the same"),
    "minio": Reported(lambda size: size, "SpiderCache, section 6.3: proportional to the size"),
    "shade": Reported({0.2: 0.725}.get, "SHADE, section 6.5 (ResNet-18)"),
    "impact": Reported({0.2: 0.43, 0.4: 0.61, 0.6: 0.74, 0.8: 0.88}.get, "ImPACT, figure 20 (ShuffleNet)"),
}

# Figure 14 of SpiderCache, as far as its text goes (section 6.3): the first has more hits than each of the others.
ORDER = (
    ("spider-paper", ("icache", "shade", "spider-imp", "minio", "lru")),
    ("spider-imp", ("shade", "minio")),
    ("icache", ("shade",)),
)
# How many times as many hits SpiderCache has as the baseline: at most, and on average over the sizes.
MOST_TIMES, MEAN_TIMES = 8.5, 4.15
FIGURE_14_SIZES = (0.1, 0.25, 0.5, 0.75)


class Strategy(NamedTuple):
    """A row of table 6 of SpiderCache."""

    top1: float
    minutes: float


# The first row is what the others are compared with, here and there.
TABLE_6 = {
    "spider-paper, ratio 90": Strategy(81.63, 165),
    "spider-paper": Strategy(81.44, 125),
    "spider-paper, ratio 90-50": Strategy(78.87, 109),
}


def compare(group: Group, console: Console) -> None:
    """Print what was measured beside what the papers report."""
    compare_hits(group, console)
    if any(system == "spider-paper" for system, _ in group):
        compare_order(group, console)
        compare_table_6(group, console)


def compare_hits(group: Group, console: Console) -> None:
    table = plain_table(
        f"Hits beside those that papers report, % of reads; '{NOTABLE}' by more than {NOTABLE_POINTS:g} points",
        *("", "cached", "seeds", "ours", "reported", "points", " ", "reported by"),
        words=("", " ", "reported by"),
    )
    for system, size in itertools.product(REPORTED, sorted({size for _, size in group})):
        ran, reported = group.get((system, size), []), REPORTED[system].hits(size)
        if not ran or reported is None:
            continue
        ours = [of.settled("hit_ratio") for of in ran]
        points = 100 * (statistics.fmean(ours) - reported)
        table.add_row(
            system,
            f"{size:.0%}",
            str(len(ran)),
            spread(ours, ".1f", 100),
            f"{100 * reported:.1f}",
            f"{points:+.1f}",
            NOTABLE if abs(points) > NOTABLE_POINTS else "",
            REPORTED[system].source,
        )
    console.print(table)


def compare_order(group: Group, console: Console) -> None:
    """Print which statements of SpiderCache's section 6.3 hold at which sizes."""
    sizes = sorted({size for system, size in group if system == "spider-paper"})
    title = f"Figure 14 of SpiderCache: more hits, in points, where its text says so; '{NOTABLE}' if there are less"
    table = plain_table(title, "", *_named(sizes))
    table.min_width = len(title)
    for first, rest in ORDER:
        for second in rest:
            cells = [_points_between(group, first, second, size) for size in sizes]
            if any(cells):
                table.add_row(f"{first} above {second}", *cells)
    times = [_times(group, size) for size in sizes]
    table.add_row("spider-paper, times lru's hits", *(f"{found:.1f}" if found else "" for found in times))
    console.print(table)
    known = [found for found in times if found]
    if known:
        console.print(
            f"times lru's hits: at most {max(known):.1f}, mean {statistics.fmean(known):.2f} over these sizes; "
            f"reported: at most {MOST_TIMES}, mean {MEAN_TIMES} over {', '.join(_named(FIGURE_14_SIZES))}\n",
            highlight=False,
            soft_wrap=True,
        )


def _named(sizes: Iterable[float]) -> list[str]:
    return [f"{size:.0%}" for size in sizes]


def _points_between(group: Group, first: str, second: str, size: float) -> str:
    """By how many points the first has more hits, by seed; marked where the text's order is not ours."""
    others = {of.seed: of for of in group.get((second, size), [])}
    points = [
        100 * (of.settled("hit_ratio") - others[of.seed].settled("hit_ratio"))
        for of in group.get((first, size), [])
        if of.seed in others
    ]
    if not points:
        return ""
    return intervals.shown(points) + ("" if statistics.fmean(points) > 0 else f" {NOTABLE}")


def _times(group: Group, size: float) -> float | None:
    """How many times as many hits SpiderCache has as the LRU of the same seeds."""
    base = {of.seed: of.settled("hit_ratio") for of in group.get((BASELINE, size), [])}
    times = [
        of.settled("hit_ratio") / base[of.seed]
        for of in group.get(("spider-paper", size), [])
        if base.get(of.seed, 0.0) > 0
    ]
    return statistics.fmean(times) if times else None


def compare_table_6(group: Group, console: Console) -> None:
    """Print the strategies of table 6 beside each other, by seed; there are no minutes without a mount, but bytes."""
    base_name, base_reported = next(iter(TABLE_6.items()))
    sizes = sorted({size for system, size in group if system == base_name})
    for size in sizes:
        table = plain_table(
            f"Table 6 of SpiderCache, {size:.0%} cached, beside the row whose ratio stays at 90 %, by seed",
            *("", "seeds", "ratio at the end", "hits %", "substitutes %", "top-1 points, 95 %", "reported"),
            *("points apart", " ", "x its bytes", "x its minutes, reported"),
            words=("", " "),
        )
        base = {of.seed: of for of in group[base_name, size]}
        for system, reported in TABLE_6.items():
            ran = [of for of in group.get((system, size), []) if of.seed in base]
            if not ran:
                continue
            points = [100 * (of.top1 - base[of.seed].top1) for of in ran]
            wanted = reported.top1 - base_reported.top1
            apart = statistics.fmean(points) - wanted
            table.add_row(
                system,
                str(len(ran)),
                spread([of.epochs[-1].ratio for of in ran], ".2f"),
                spread([of.settled("hit_ratio") for of in ran], ".1f", 100),
                spread([of.settled("redirected_share") for of in ran], ".1f", 100),
                intervals.shown(points),
                f"{wanted:+.2f}",
                f"{apart:+.1f}",
                NOTABLE if abs(apart) > NOTABLE_POINTS else "",
                spread([of.whole / base[of.seed].whole for of in ran], ".2f"),
                f"{reported.minutes / base_reported.minutes:.2f}",
            )
        console.print(table)
