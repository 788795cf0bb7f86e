"""The report of the benchmark stall.py: how long each configuration waited, what it fetched, which targets it met."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.common.results import Verdict, plain_table, spread

CACHED_SHARE = 0.20
ENOUGH, TOO_LITTLE = 1.3, 0.7  # times the bandwidth that is needed
# In its first batches a loader's workers fill their queues: with 1.3 times the bandwidth that takes 13 batches, since
# all 64 samples of the queues are asked for at once and only the bandwidth beyond the need makes up for them.
FIRST_BATCHES = 16
LEAST_HITS, MOST_OF_ORACLE, MOST_OF_BOUND, MOST_OF_MIN, MOST_OF_NO_PLAN = 0.99, 1.10, 1.15, 1.03, 1.05


@dataclass(frozen=True)
class Configuration:
    policy: str = "spider"
    guided: bool = False  # whether there are a hook and a SpiderSampler
    plan: bool = False
    lies: bool = False


CONFIGURATIONS: dict[str, Configuration | None] = {
    "direct": None,
    "lru": Configuration("lru"),
    "minio": Configuration("minio"),
    "no plan": Configuration(),
    "wrong plan": Configuration(lies=True),
    "spider": Configuration(guided=True),
    "plan+uniform": Configuration(plan=True),
    "plan+spider": Configuration(guided=True, plan=True),
    "oracle": None,
}
PLANNED = ("plan+uniform", "plan+spider")


@dataclass(frozen=True)
class Epoch:
    seconds: float
    stall_s: float
    hit_ratio: float
    settled_hit_ratio: float  # without the first batches
    redirected_share: float
    origin_bytes: int
    min_bytes: int  # what MIN fetches in this epoch if it knows the draws of all epochs
    three_epochs_min_bytes: int  # what MIN fetches if it knows three epochs, as the daemon does
    bound_s: float


@dataclass(frozen=True)
class Run:
    configuration: str
    seed: int
    bandwidth_factor: float
    cached_share: float
    epochs: list[Epoch]
    draws: int  # in an epoch
    plan: str = ""  # the plans in stats.json at the end, as JSON

    def later(self, figure: Callable[[Epoch], float]) -> float:
        return statistics.fmean(figure(epoch) for epoch in self.epochs[1:])

    @property
    def seconds(self) -> float:
        return self.later(lambda epoch: epoch.seconds)

    @property
    def of_bound(self) -> float:
        return self.seconds / self.later(lambda epoch: epoch.bound_s)

    @property
    def of_min(self) -> float:
        """Without the last epoch too: samples that are fetched for the epoch after it are not read any more.

        Samples that are fetched ahead over the end of an epoch count to that epoch, so this may even be below 1.
        """
        return self._of(lambda epoch: epoch.min_bytes)

    @property
    def of_min_in_all(self) -> float:
        """With the first epoch, which fetches what no cache can have, and what is fetched for one that never comes."""
        return sum(epoch.origin_bytes for epoch in self.epochs) / sum(epoch.min_bytes for epoch in self.epochs)

    @property
    def of_three_epochs_min(self) -> float:
        return self._of(lambda epoch: epoch.three_epochs_min_bytes)

    def _of(self, least: Callable[[Epoch], float]) -> float:
        counted = self.epochs[1:-1] or self.epochs[1:]
        return sum(epoch.origin_bytes for epoch in counted) / sum(least(epoch) for epoch in counted)


def of_case(runs: list[Run], name: str, factor: float) -> dict[int, Run]:
    """By seed."""
    return {run.seed: run for run in runs if run.configuration == name and run.bandwidth_factor == factor}


def against(runs: list[Run], name: str, other: str, factor: float) -> list[float]:
    """Seconds of an epoch, as a multiple of another configuration's of the same seed."""
    ours, theirs = of_case(runs, name, factor), of_case(runs, other, factor)
    return [ours[seed].seconds / theirs[seed].seconds for seed in ours if seed in theirs]


def judge(runs: list[Run], replaced: list[Run]) -> Iterator[Verdict]:
    mean = statistics.fmean
    for name in PLANNED:
        ran = list(of_case(runs, name, ENOUGH).values())
        hits = [100 * run.later(lambda epoch: epoch.settled_hit_ratio) for run in ran]
        if hits:
            yield Verdict(
                f"{name}, x {ENOUGH}: hits % after {FIRST_BATCHES} batches",
                f">= {100 * LEAST_HITS:g}",
                hits,
                mean(hits) >= 100 * LEAST_HITS,
            )
        times = against(runs, name, "oracle", ENOUGH)
        if times:
            yield Verdict(
                f"{name}, x {ENOUGH}: of the oracle", f"<= {MOST_OF_ORACLE}", times, mean(times) <= MOST_OF_ORACLE
            )
        bounds = [run.of_bound for run in of_case(runs, name, TOO_LITTLE).values()]
        if bounds:
            yield Verdict(
                f"{name}, x {TOO_LITTLE}: of the bound", f"<= {MOST_OF_BOUND}", bounds, mean(bounds) <= MOST_OF_BOUND
            )
    for factor in (ENOUGH, TOO_LITTLE):
        times = against(runs, "wrong plan", "no plan", factor)
        if times:
            yield Verdict(
                f"wrong plan, x {factor}: of no plan", f"<= {MOST_OF_NO_PLAN}", times, mean(times) <= MOST_OF_NO_PLAN
            )
    for share, ran in by_share(replaced).items():
        fetched = [run.of_min_in_all for run in ran]
        yield Verdict(
            f"{share:.0%} cached, replacement: of MIN's bytes",
            f"<= {MOST_OF_MIN}",
            fetched,
            mean(fetched) <= MOST_OF_MIN,
        )


def by_share(runs: list[Run]) -> dict[float, list[Run]]:
    return {
        share: [run for run in runs if run.cached_share == share]
        for share in sorted({run.cached_share for run in runs})
    }


def time_table(runs: list[Run], factor: float) -> Table:
    table = plain_table(
        f"Bandwidth {factor:g} x what uniform sampling needs; mean of later epochs",
        "",
        "epoch s",
        "stall s",
        "x oracle",
        "x bound",
        "hits %",
        "hits % later",
        "origin kB",
        "MIN kB",
        "redirected %",
    )
    for name, configuration in CONFIGURATIONS.items():
        ran = list(of_case(runs, name, factor).values())
        if not ran:
            continue
        of_oracle = against(runs, name, "oracle", factor)
        figures = [
            spread([run.seconds for run in ran], ".2f"),
            spread([run.later(lambda epoch: epoch.stall_s) for run in ran], ".2f"),
            spread(of_oracle, ".2f") if of_oracle else "",
            spread([run.of_bound for run in ran], ".2f"),
        ]
        if name != "oracle":
            kilobytes = [run.later(lambda epoch: epoch.origin_bytes) / run.draws / 1000 for run in ran]
            least = [run.later(lambda epoch: epoch.min_bytes) / run.draws / 1000 for run in ran]
            hits = [run.later(lambda epoch: epoch.hit_ratio) for run in ran]
            redirected = [run.later(lambda epoch: epoch.redirected_share) for run in ran]
            settled = [run.later(lambda epoch: epoch.settled_hit_ratio) for run in ran]
            figures += [spread(hits, ".1f", 100), spread(settled, ".1f", 100)]
            figures += [spread(kilobytes, ".1f"), spread(least, ".1f")]
            figures.append(spread(redirected, ".1f", 100) if configuration is not None else "")
        table.add_row(name, *figures)
    return table


def replacement_table(runs: list[Run]) -> Table:
    table = plain_table(
        "Drawn with replacement by log-rank weights, published",
        "cached",
        "origin kB",
        "MIN kB",
        "x MIN",
        "x MIN, all epochs",
        "x MIN of three epochs",
        "hits %",
        "stall s",
    )
    for share, ran in by_share(runs).items():
        kilobytes = [run.later(lambda epoch: epoch.origin_bytes) / run.draws / 1000 for run in ran]
        least = [run.later(lambda epoch: epoch.min_bytes) / run.draws / 1000 for run in ran]
        hits = [run.later(lambda epoch: epoch.hit_ratio) for run in ran]
        table.add_row(
            f"{share:.0%}",
            spread(kilobytes, ".1f"),
            spread(least, ".1f"),
            spread([run.of_min for run in ran], ".3f"),
            spread([run.of_min_in_all for run in ran], ".3f"),
            spread([run.of_three_epochs_min for run in ran], ".3f"),
            spread(hits, ".1f", 100),
            spread([run.later(lambda epoch: epoch.stall_s) for run in ran], ".2f"),
        )
    return table


def print_run(run: Run, console: Console) -> None:
    console.print(
        f"{run.configuration:12} x {run.bandwidth_factor:g} cached {run.cached_share:.0%} seed {run.seed}:  "
        f"{run.seconds:6.2f} s, stall {run.later(lambda epoch: epoch.stall_s):5.2f} s  "
        f"{run.of_bound:.2f} x bound  hits {run.later(lambda epoch: epoch.hit_ratio):5.1%}, "
        f"later {run.later(lambda epoch: epoch.settled_hit_ratio):5.1%}  "
        f"{run.of_min:.3f} x MIN's bytes",
        highlight=False,
        soft_wrap=True,
    )
