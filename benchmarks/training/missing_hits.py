"""Why ImPACT's cache has fewer hits here than in its paper: one change at a time, and whose hits are lost.

    .venv-dev/bin/python -m benchmarks.training.missing_hits --data DIR --json FILE    some minutes
    .venv-dev/bin/python -m benchmarks.training.missing_hits --data DIR --quick        under a minute, for a look

Trainings without a mount (in_process.py), with a fifth of the bytes cached. The paper reports 37 % of hits with the
H-cache alone and 43 % with all of it, for a fifth. A sample of which a share p of all has a lower loss is drawn with
the chance p, so a cache that held the fifth of the highest losses would have 36 % of the reads: 37 % is what ranks that
do not move, and a cache that is all H-part, give. The rows take the two apart, and what is ours:

    icache                     the product: half of the samples are H-samples, parts share the room by their reads
    one list an epoch          the list of H-samples is made when an epoch begins, and not again before the next
    all room for H-samples     the L-part gets nothing
    H-list of a fifth          the list has as many samples as the cache holds, as in the paper's example for ImageNet
    ranks stand still          from the fifth epoch on sampler and cache have the losses that they had then
    still, all for H           both: the paper's 37 %
    any class                  any L-member substitutes for any L-sample, each once, and not only within a class
    any class, no limit        the same as often as it is asked, which the paper does not do; the member is random
    impact                     with S, the samples that are evaluated before each epoch, in a quarter of the cache
    impact, S of 1 sample      the same warm-up, but the whole cache is left to the parts

Hits are in % of the reads of epochs 5 to the last, by the sample that was asked for: H-samples, samples of S, L-samples
that were cached themselves, and samples that got a substitute. "With S" counts the reads for evaluation too.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

import trainer_hook.samplers.impact as impact_sampler
from benchmarks.common.command import add_data, command_line
from benchmarks.common.extent import Extent, add_extent, extent_of
from benchmarks.common.interruption import exit_status
from benchmarks.common.results import machine, plain_table, save, spread, wide_console
from benchmarks.common.side_by_side import add_jobs, side_by_side
from benchmarks.training.in_process import Configuration, Pool, Training, pool_in
from benchmarks.training.training import IMAGES
from spiderfs.core.policy import Key
from spiderfs.policies import POLICIES, impact
from spiderfs.policies import impact as impact_policy
from spiderfs.policies.impact import Impact
from trainer_hook.connection.client import HookClient

FULL = Extent(epochs=8, training=3_000, held_out=500, seeds=3)
QUICK = Extent(epochs=6, training=600, held_out=200, seeds=1)
# The epochs before are those of the warm-up and of the list that follows it, which fill the cache.
FIRST_COUNTED = 5
# The warm-up has three epochs, and this one is the last that all rows train alike.
STILL_AFTER = 4


class CountedImpact(Impact):
    """Counts reads and hits by what the sample that was asked for is: "H", "S" or "L"."""

    name = "impact, counted"
    high_share: float | None = None
    """The share of the room for H-samples; None leaves it to the policy."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.still = False
        self._is_given = False

    @property
    def ratio(self) -> float:
        return super().ratio if self.high_share is None else self.high_share

    def hit(self, key: Key, size: int) -> None:
        if not self._is_given:
            self.counts["hits", self._kind(key)] += 1
        self._is_given = False
        super().hit(key, size)

    def missed(self, key: Key, size: int) -> None:
        self.counts["misses", self._kind(key)] += 1
        super().missed(key, size)

    def substituted(self, job_dataset_id: str, substitute: Key, wanted: Key) -> None:
        self.counts["stand-ins", self._kind(wanted)] += 1
        self._is_given = True
        super().substituted(job_dataset_id, substitute, wanted)

    def scored(self, key: Key, score: float) -> None:
        if not self.still:
            super().scored(key, score)

    def scored_by(self, job_dataset_id: str, key: Key, score: float) -> None:
        if not self.still:
            super().scored_by(job_dataset_id, key, score)

    def _kind(self, key: Key) -> str:
        return "S" if key in self._pins else "H" if not self.ranks_low(key) else "L"


class AllForHigh(CountedImpact):
    name = "impact, counted, all for H"
    high_share = 1.0


class AnyClass(CountedImpact):
    """Substitutes are found as if all samples had one label."""

    name = "impact, counted, any class"

    def listed(self, job_dataset_id: str, labels: Mapping[Key, int]) -> None:
        super().listed(job_dataset_id, dict.fromkeys(labels, 0))


class NoLimit(CountedImpact):
    """Each L-sample that is not cached gets any L-member, drawn at random, however often that was read."""

    name = "impact, counted, no limit"

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(0)

    def substitute_for(self, job_dataset_id: str, key: Key) -> Key | None:
        if key in self._sizes or key not in self._worths or not self.ranks_low(key):
            return None
        members = [*self._old.low, *self._parts.low]
        return self._random.choice(members) if members else None


class CountedTraining(Training):
    """A training that can let the ranks stand still, and that keeps the reads for evaluation apart."""

    evaluations: Counter[tuple[str, str]]

    @property
    def policy(self) -> CountedImpact:
        policy = self.cache.engine.policy
        assert isinstance(policy, CountedImpact)
        return policy

    def stand_still(self) -> None:
        """From now on the sampler draws by the scores of now, and the policy learns no more."""
        self.policy.still = True
        scores = self.cache.scores("train", 0.0)
        assert scores is not None
        self.sampler.bind(cast(HookClient, _Still(self.cache, scores.copy())), "train")

    def evaluated(self, samples: NDArray[np.int64]) -> NDArray[np.float32]:
        before = self.policy.counts.copy()
        found = super().evaluated(samples)
        self.evaluations = self.policy.counts - before
        self.policy.counts = before
        return found


class _Still:
    """A client whose scores stay as they were."""

    def __init__(self, client: Any, scores: NDArray[np.float32]) -> None:
        self._client, self._scores = client, scores

    def scores(self, name: str, timeout_s: float) -> NDArray[np.float32]:
        return self._scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@dataclass(frozen=True)
class Variant:
    sampler: str = "icache"
    policy: type[CountedImpact] = CountedImpact
    still: bool = False
    constants: Mapping[tuple[ModuleType, str], float] = field(default_factory=dict)


SELDOM = {(impact, "LISTED_AFTER_READS"): float("inf")}
NO_LOW = {(impact_policy, "LOW_LEAST_SHARE"): 0.0}
VARIANTS = {
    "icache": Variant(),
    "one list an epoch": Variant(constants=SELDOM),
    "all room for H-samples": Variant(policy=AllForHigh, constants=NO_LOW),
    "H-list of a fifth": Variant(constants={(impact, "H_SHARE"): 0.2}),
    "ranks stand still": Variant(still=True),
    "still, all for H": Variant(policy=AllForHigh, still=True, constants=NO_LOW),
    "any class": Variant(policy=AnyClass),
    "any class, no limit": Variant(policy=NoLimit),
    "impact": Variant("impact"),
    "impact, S of 1 sample": Variant("impact", constants={(impact_sampler, "UNSTABLE_SHARE"): 0.0}),
}


@dataclass(frozen=True)
class Hits:
    """Shares of the reads; `with_evaluation` is the share of all reads, those for evaluation included."""

    variant: str
    seed: int
    high: float
    pinned: float
    low: float
    stand_ins: float
    with_evaluation: float
    ratio: float

    @property
    def all(self) -> float:
        return self.high + self.pinned + self.low + self.stand_ins


def measured(pool: Pool, task: tuple[int, str], epochs: int) -> Hits:
    """The hits of a variant; `task` is its seed and its name."""
    torch.set_num_threads(1)
    seed, name = task
    variant = VARIANTS[name]
    with changed(variant.constants), patch.dict(POLICIES, {variant.policy.name: variant.policy}):
        configuration = Configuration(scores="loss", policy=variant.policy.name, sampler=variant.sampler)
        training = CountedTraining(pool, configuration, seed, epochs)
        counts: Counter[tuple[str, str]] = Counter()
        evaluations: Counter[tuple[str, str]] = Counter()
        for epoch in range(1, epochs + 1):
            training.policy.counts.clear()
            training.evaluations = Counter()
            training.epoch(epoch, lambda: None)
            if epoch == STILL_AFTER and variant.still:
                training.stand_still()
            if epoch >= FIRST_COUNTED:
                counts += training.policy.counts
                evaluations += training.evaluations
    reads, evaluated = counts.total(), evaluations.total()
    stand_ins = sum(count for (outcome, _), count in counts.items() if outcome == "stand-ins")
    missed = sum(count for (outcome, _), count in (counts + evaluations).items() if outcome == "misses")
    return Hits(
        name,
        seed,
        high=counts["hits", "H"] / reads,
        pinned=counts["hits", "S"] / reads,
        low=counts["hits", "L"] / reads,
        stand_ins=stand_ins / reads,
        with_evaluation=1 - missed / (reads + evaluated),
        ratio=training.policy.ratio,
    )


@contextmanager
def changed(constants: Mapping[tuple[ModuleType, str], float]) -> Iterator[None]:
    """Give constants of modules other values for a while."""
    before = {(module, name): getattr(module, name) for module, name in constants}
    try:
        for (module, name), value in constants.items():
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


def show(found: list[Hits], console: Console) -> None:
    table = plain_table("Hits, % of reads", "", "all", "H", "S", "L", "substitutes", "with S", "room for H")
    for name in VARIANTS:
        rows = [hits for hits in found if hits.variant == name]
        if rows:
            columns = ("all", "high", "pinned", "low", "stand_ins", "with_evaluation", "ratio")
            table.add_row(name, *(spread([getattr(hits, column) for hits in rows], ".1f", 100) for column in columns))
    console.print(table)


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent: Extent = arguments.extent
    found: list[Hits] = []
    prepare = functools.partial(pool_in, arguments.data, extent)
    work = functools.partial(measured, epochs=extent.epochs)
    tasks = list(itertools.product(range(1, extent.seeds + 1), VARIANTS))
    try:
        for hits in side_by_side(prepare, work, tasks, arguments.jobs):
            found.append(hits)
            rows = [asdict(hits) for hits in found]
            save(arguments.json, {"machine": machine(), "extent": asdict(extent), "hits": rows})
    finally:
        show(found, console)


def main() -> int:
    parser = command_line(__doc__)
    add_data(parser, IMAGES, required=True)
    add_extent(parser, FULL, QUICK)
    add_jobs(parser)
    arguments = parser.parse_args()
    arguments.extent = extent_of(parser, arguments, FULL, QUICK)
    if arguments.extent.epochs < FIRST_COUNTED:
        parser.error(f"choose at least {FIRST_COUNTED} epochs: hits are counted from that one on")
    console = wide_console(110)
    return exit_status("missing_hits", lambda: measure(arguments, console), "interrupted", (OSError, RuntimeError))


if __name__ == "__main__":
    sys.exit(main())
