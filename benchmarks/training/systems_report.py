"""What trainings without a mount have measured (systems.py, full_size.py), compared seed by seed."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

BASELINE = "lru"


@dataclass(frozen=True)
class Epoch:
    hit_ratio: float
    origin_bytes_per_sample: float
    drawn_share: float  # of the training set: distinct samples that the sampler drew
    served_share: float  # distinct samples that were trained on
    redirected_share: float  # of the draws
    ratio: float  # of the importance section, at the end
    top1: float  # on a part of the held-out images
    reads_share: float = 1.0  # reads for training, of the training set
    sigma: float = 0.0  # the deviation of the scores at the end (SpiderCache, figure 6(c))
    beta: int = 0  # of the elastic ratio at the end (equation 5)
    radius: float = 0.0  # in this epoch, if scores are of the graph
    mean_same: float = 0.0  # x_same, over the samples that were scored

    @classmethod
    def of(cls, row: dict[str, Any]) -> Epoch:
        """As it was kept, perhaps with fields that there are no more."""
        return cls(**{field.name: row[field.name] for field in fields(cls) if field.name in row})


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

    @classmethod
    def of(cls, row: dict[str, Any]) -> Measured:
        return cls(**row | {"epochs": [Epoch.of(epoch) for epoch in row["epochs"]]})

    @property
    def origin(self) -> list[float]:
        """The bytes fetched in each epoch."""
        return [epoch.origin_bytes_per_sample * epoch.reads_share / self.mean_bytes for epoch in self.epochs]

    @property
    def whole(self) -> float:
        """The bytes fetched in the whole training, the first epoch included."""
        return sum(self.origin)

    @property
    def steps(self) -> float:
        """The samples that were trained on, as a multiple of the dataset's."""
        return sum(epoch.reads_share for epoch in self.epochs)

    def settled(self, field: str) -> float:
        """The mean over the second half of the epochs; in the first half impact warms up."""
        values = {"origin": self.origin, "planned": self.planned, "foreseen": self.foreseen}.get(field)
        if values is None:
            values = [getattr(epoch, field) for epoch in self.epochs]
        return statistics.fmean(values[len(values) // 2 :])

    def __str__(self) -> str:
        return (
            f"seed {self.seed}  {self.cached_share:4.0%}  {self.system:32}  hits {self.settled('hit_ratio'):5.1%}  "
            f"fetched {self.settled('origin'):.2f}, in all {self.whole:.2f}  seen {self.settled('served_share'):4.0%}  "
            f"redirected {self.settled('redirected_share'):5.1%}  top-1 {self.top1:5.1%}"
        )


class Trainings:
    """The trainings of a result of systems.py or full_size.py, by system and size of the cache."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.group: dict[tuple[str, float], list[Measured]] = {}
        for of in sorted(map(Measured.of, result["measured"]), key=lambda of: of.seed):
            self.group.setdefault((of.system, of.cached_share), []).append(of)

    def of(self, system: str, share: float = 0.2) -> list[Measured]:
        """The runs of a system, in the order of their seeds."""
        return self.group.get((system, share), [])

    def percent(self, system: str, field: str, share: float = 0.2) -> str:
        """The mean of a share over the second half of the epochs."""
        found = [run.settled(field) for run in self.of(system, share)]
        return f"{100 * statistics.fmean(found):.0f}" if found else ""

    def fetched(self, system: str) -> float:
        """Bytes of a whole training, as multiples of the dataset's."""
        return statistics.fmean(run.whole for run in self.of(system))

    def times_lru(self, system: str) -> str:
        seeds = {run.seed for run in self.of(system)}
        base = [run.whole for run in self.of(BASELINE) if run.seed in seeds]
        return f"{self.fetched(system) / statistics.fmean(base):.2f}" if base else ""

    def steps(self, system: str) -> float:
        """Samples that were trained on, as multiples of the dataset's."""
        return statistics.fmean(run.steps for run in self.of(system))

    def gained(self, system: str) -> list[float]:
        """The differences of top-1 from that of uniform sampling with the same seed, in points."""
        base = {run.seed: run.top1 for run in self.of(BASELINE)}
        return [100 * (run.top1 - base[run.seed]) for run in self.of(system) if run.seed in base]

    def as_accurate(self, system: str) -> float | None:
        """Bytes that uniform sampling with a plan fetches for the same accuracy; None if no training is so short."""
        found = [self.at_equal_accuracy(run) for run in self.of(system)]
        return None if None in found else statistics.fmean(filter(None, found))

    def at_equal(self, system: str, amount: Callable[[Measured], float]) -> list[float]:
        """What uniform sampling loses when it stops at the same `amount`, in points for each seed; none if too soon."""
        lost = []
        for run in self.of(system):
            points = sorted((amount(other), other.top1) for other in self._uniform(run))
            if len(points) > 1 and amount(run) >= points[0][0]:
                amounts, top1 = zip(*points, strict=True)
                lost.append(100 * (float(np.interp(amount(run), amounts, top1)) - top1[-1]))
        return lost if len(lost) == len(self.of(system)) else []

    def _uniform(self, of: Measured) -> list[Measured]:
        """The trainings with uniform sampling and a plan, of all lengths, with the seed and the cache of this one."""
        trainings = (self.of(system, of.cached_share) for system, _ in self.group if _family(system) == "uniform+plan")
        return [other for ran in trainings for other in ran if other.seed == of.seed]

    def at_equal_accuracy(self, of: Measured) -> float | None:
        """The same for one training, by the trainings of its seed."""
        points = sorted((other.whole, other.top1) for other in self._uniform(of))
        if len(points) < 2 or of.top1 < points[0][1]:
            return None
        for (less, lower), (more, higher) in itertools.pairwise(points):
            if lower <= of.top1 <= higher > lower:
                return less + (more - less) * (of.top1 - lower) / (higher - lower)
        return points[-1][0]


def _family(system: str) -> str:
    return system.partition(",")[0]


def plot_scores(result: dict[str, Any], path: Path) -> None:
    """Draw how scores of the graph develop; raises RuntimeError if no training has any. A dot: beta has become 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    group = {of: ran for of, ran in Trainings(result).group.items() if any(epoch.radius for epoch in ran[0].epochs)}
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
