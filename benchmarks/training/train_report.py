"""The runs of the benchmark train.py, and what they are compared with."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

BASELINE = "lru"


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

    def __str__(self) -> str:
        return (
            f"{self.seconds:5.1f} s ({self.waiting_share:3.0%} waiting)  hits {self.hit_ratio:5.1%}  "
            f"origin {self.origin_bytes_per_sample:5.0f} B/sample  drawn {self.drawn_share:4.0%}  "
            f"served {self.served_share:4.0%}  redirected {self.redirected_share:5.1%}  top-1 {self.top1:5.1%}"
        )


@dataclass(frozen=True)
class Run:
    configuration: str
    seed: int
    epochs: list[Epoch]
    batches_sent: int
    batches_dropped: int
    graph: str  # what the daemon said of its scores at the end
    workers: int = 2  # of the data loader

    def figure(self, field: str) -> float:
        """The mean over all epochs but the first, which fills the cache; of top-1, that after the last."""
        if field == "top1":
            return self.epochs[-1].top1
        return statistics.fmean(getattr(epoch, field) for epoch in self.epochs[1:])


def by_configuration(runs: list[Run]) -> dict[str, list[Run]]:
    """The runs by configuration, in the order of their seeds."""
    names = dict.fromkeys(run.configuration for run in runs)
    return {name: [run for run in runs if run.configuration == name] for name in names}


def against_baseline(runs: list[Run], name: str, field: str) -> list[tuple[float, float]]:
    """Pairs of the configuration's figure and the baseline's, for each seed that has both."""
    both = by_configuration(runs)
    baseline = {run.seed: run for run in both.get(BASELINE, [])}
    return [(run.figure(field), baseline[run.seed].figure(field)) for run in both.get(name, []) if run.seed in baseline]
