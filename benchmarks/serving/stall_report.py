"""The report of the benchmark stall.py: how long each configuration waited, what it fetched, which targets it met."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

CACHED_SHARE = 0.20
ENOUGH, TOO_LITTLE = 1.3, 0.7  # times the bandwidth that is needed
# In its first batches a loader's workers fill their queues: with 1.3 times the bandwidth that takes 13 batches, since
# all 64 samples of the queues are asked for at once and only the bandwidth beyond the need makes up for them.
FIRST_BATCHES = 16
HITS = "hits"
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
    "no plan": Configuration(),
    "wrong plan": Configuration(lies=True),
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

    @classmethod
    def of(cls, row: dict[str, Any]) -> Run:
        """As it was kept, perhaps with figures of an epoch that there are no more."""
        known = [field.name for field in fields(Epoch)]
        epochs = [Epoch(**{name: epoch[name] for name in known}) for epoch in row["epochs"]]
        return cls(**row | {"epochs": epochs})

    def later(self, figure: Callable[[Epoch], float]) -> float:
        return statistics.fmean(figure(epoch) for epoch in self.epochs[1:])

    @property
    def seconds(self) -> float:
        return self.later(lambda epoch: epoch.seconds)

    @property
    def of_bound(self) -> float:
        return self.seconds / self.later(lambda epoch: epoch.bound_s)

    @property
    def of_min_in_all(self) -> float:
        """With the first epoch, which fetches what no cache can have, and what is fetched for one that never comes."""
        return sum(epoch.origin_bytes for epoch in self.epochs) / sum(epoch.min_bytes for epoch in self.epochs)

    def __str__(self) -> str:
        hits, settled = (
            self.later(of) for of in (lambda epoch: epoch.hit_ratio, lambda epoch: epoch.settled_hit_ratio)
        )
        return (
            f"{self.configuration:12} x {self.bandwidth_factor:g} cached {self.cached_share:.0%} seed {self.seed}:  "
            f"{self.seconds:6.2f} s, stall {self.later(lambda epoch: epoch.stall_s):5.2f} s  "
            f"{self.of_bound:.2f} x bound  "
            f"hits {hits:5.1%}, later {settled:5.1%}  {self.of_min_in_all:.3f} x MIN's bytes"
        )


def of_case(runs: list[Run], name: str, factor: float) -> dict[int, Run]:
    """By seed."""
    return {run.seed: run for run in runs if run.configuration == name and run.bandwidth_factor == factor}


def against(runs: list[Run], name: str, other: str, factor: float) -> list[float]:
    """Seconds of an epoch, as a multiple of another configuration's of the same seed."""
    ours, theirs = of_case(runs, name, factor), of_case(runs, other, factor)
    return [ours[seed].seconds / theirs[seed].seconds for seed in ours if seed in theirs]


def judged(runs: list[Run], replaced: list[Run]) -> Iterator[tuple[str, float, float]]:
    """Each figure that has a target, and the target: the most that is allowed, but for hits the least."""
    found: list[tuple[str, float, list[float]]] = []
    for name in PLANNED:
        hits = [run.later(lambda epoch: epoch.settled_hit_ratio) for run in of_case(runs, name, ENOUGH).values()]
        found.append((f"{name}, x {ENOUGH}: {HITS} after {FIRST_BATCHES} batches", LEAST_HITS, hits))
        found.append((f"{name}, x {ENOUGH}: of the oracle", MOST_OF_ORACLE, against(runs, name, "oracle", ENOUGH)))
        bounds = [run.of_bound for run in of_case(runs, name, TOO_LITTLE).values()]
        found.append((f"{name}, x {TOO_LITTLE}: of the bound", MOST_OF_BOUND, bounds))
    for factor in (ENOUGH, TOO_LITTLE):
        times = against(runs, "wrong plan", "no plan", factor)
        found.append((f"wrong plan, x {factor}: of no plan", MOST_OF_NO_PLAN, times))
    for share in sorted({run.cached_share for run in replaced}):
        fetched = [run.of_min_in_all for run in replaced if run.cached_share == share]
        found.append((f"{share:.0%} cached, replacement: of MIN's bytes", MOST_OF_MIN, fetched))
    return ((what, statistics.fmean(measured), target) for what, target, measured in found if measured)
