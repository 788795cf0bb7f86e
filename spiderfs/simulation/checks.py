"""Checks of the simulator: against closed forms where these are known, and else against figures measured elsewhere.

Fresh permutations: every epoch reads every sample exactly once. Let c be the cached fraction. From the second epoch on:
- The hit ratio of MinIO is c, and that of MIN is c too. A sample that is fetched in an epoch is not read again in it,
  so no policy that fetches on demand serves more than it held when the epoch began, whatever it foresees. This bound is
  checked for every policy and every epoch, in samples and (with mixed sizes) in bytes.
- The hit ratio of LRU is c + (1 - c) ln(1 - c).
- The hit ratio of LFU is the same while c is small: hardly a member stays long enough to be hit twice, so all counts
  are equal, and of equal members the least recent leaves. Above c = 0.5 the members that were hit begin to stay, and
  the hit ratio rises with every epoch (20,000 samples, epoch 12: 0.60 at c = 0.8, where LRU has 0.48). There the form
  of LRU is only a lower bound.

Draws with replacement, by the weights ln(rank + 10) over ranks 0 to 127 (SHADE's, from batches of 128). No closed form
is known for MIN, so the expected figures are those of an earlier, independent simulation; so are the figures of LRU and
of a cache that was filled once with the samples of the highest weights. The first epochs are left out: at 75 % MIN
needs four epochs until its hit ratio is steady.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import log

import numpy as np
from numpy.typing import NDArray

from spiderfs.core.accesses import Accesses
from spiderfs.core.engine import Engine
from spiderfs.core.policy import SAMPLES
from spiderfs.policies import POLICIES
from spiderfs.policies.minio import MinIO
from spiderfs.simulation.replay import Replay, policy_for, replay

# Sampling noise of a ratio over 10,000 warm accesses is 0.005 at most (one standard deviation).
SAMPLES_PER_EPOCH = 2_000
PERMUTATION_EPOCHS = 6
WEIGHTED_EPOCHS = 12
WEIGHTED_COLD_EPOCHS = 4
NOISE = 0.01

PERMUTATION_CAPACITIES = (0.2, 0.4, 0.6, 0.8)
WEIGHTED_FIGURES = {
    # cached fraction: LRU, most weight, MIN
    0.10: (0.10, 0.12, 0.41),
    0.20: (0.20, 0.24, 0.56),
    0.25: (0.25, 0.29, 0.62),
    0.50: (0.50, 0.56, 0.81),
    0.75: (0.76, 0.80, 0.93),
}
# The expected figures have two digits, so half of the last digit is added to the noise.
WEIGHTED_TOLERANCE = NOISE + 0.005


class Relation(Enum):
    EQUAL = "="
    AT_MOST = "≤"
    AT_LEAST = "≥"


@dataclass(frozen=True, slots=True)
class Check:
    what: str
    capacity: float
    measured: float
    relation: Relation
    expected: float
    tolerance: float = 0.0

    @property
    def passed(self) -> bool:
        # Ratios of whole numbers are compared as floats: the last bits may differ.
        slack = self.tolerance + 1e-12
        if self.relation == Relation.AT_MOST:
            return self.measured <= self.expected + slack
        if self.relation == Relation.AT_LEAST:
            return self.measured >= self.expected - slack
        return abs(self.measured - self.expected) <= slack


def lru_on_permutations(cached: float) -> float:
    """The hit ratio of LRU when every epoch is a fresh permutation and the cache holds the fraction `cached`."""
    return cached + (1 - cached) * log(1 - cached) if cached < 1 else 1.0


def self_test(seed: int = 0) -> Iterator[Check]:
    """All checks, each as soon as it is done."""
    rng = np.random.default_rng(seed)
    yield from _permutation_checks(rng)
    yield from _mixed_size_checks(rng)
    yield from _weighted_checks(rng)


def _permutations(rng: np.random.Generator) -> list[int]:
    epochs = [rng.permutation(SAMPLES_PER_EPOCH) for _ in range(PERMUTATION_EPOCHS)]
    return [int(key) for key in np.concatenate(epochs)]


def _replay_all(accesses: Accesses, capacity_bytes: int) -> dict[str, Replay]:
    return {
        name: replay(Engine(policy_for(policy, accesses), capacity_bytes), accesses, SAMPLES_PER_EPOCH)
        for name, policy in POLICIES.items()
    }


def _permutation_checks(rng: np.random.Generator) -> Iterator[Check]:
    keys = _permutations(rng)
    accesses = Accesses.of(keys, [1] * len(keys))
    for cached in PERMUTATION_CAPACITIES:
        results = _replay_all(accesses, round(cached * SAMPLES_PER_EPOCH))
        lru = lru_on_permutations(cached)
        for name, relation, ratio, tolerance in (
            ("minio", Relation.EQUAL, cached, 0.0),
            ("belady", Relation.EQUAL, cached, 0.0),
            ("lru", Relation.EQUAL, lru, NOISE),
            ("lfu", Relation.EQUAL if cached < 0.5 else Relation.AT_LEAST, lru, NOISE),
        ):
            yield Check(f"permutations: {name}", cached, results[name].warm_hit_ratio, relation, ratio, tolerance)
        best = max(float((result.hits / result.opens).max()) for result in results.values())
        yield Check("permutations: best epoch of any policy", cached, best, Relation.AT_MOST, cached)


def _mixed_size_checks(rng: np.random.Generator) -> Iterator[Check]:
    keys = _permutations(rng)
    size_of: NDArray[np.int64] = rng.lognormal(11, 1, SAMPLES_PER_EPOCH).astype(np.int64)
    accesses = Accesses.of(keys, size_of[keys].tolist())
    for cached in PERMUTATION_CAPACITIES:
        capacity_bytes = int(cached * int(size_of.sum()))
        results = _replay_all(accesses, capacity_bytes).values()
        best = max(float((1 - result.origin_bytes / result.served_bytes).max()) for result in results)
        yield Check("permutations, mixed sizes: bytes of any policy", cached, best, Relation.AT_MOST, cached)


def _weighted_checks(rng: np.random.Generator) -> Iterator[Check]:
    weights = np.log(np.arange(SAMPLES_PER_EPOCH) * 128 // SAMPLES_PER_EPOCH + 10)
    draws = rng.choice(SAMPLES_PER_EPOCH, SAMPLES_PER_EPOCH * WEIGHTED_EPOCHS, p=weights / weights.sum())
    accesses = Accesses.of(draws.tolist(), [1] * len(draws))
    for cached, (lru, most_weight, optimum) in WEIGHTED_FIGURES.items():
        capacity = round(cached * SAMPLES_PER_EPOCH)
        for name, expected in (("lru", lru), ("belady", optimum)):
            engine = Engine(policy_for(POLICIES[name], accesses), capacity)
            measured = _settled_ratio(replay(engine, accesses, SAMPLES_PER_EPOCH))
            yield Check(f"weighted draws: {name}", cached, measured, Relation.EQUAL, expected, WEIGHTED_TOLERANCE)
        filled = Engine(MinIO(), capacity)
        filled.restore([(key, 1, SAMPLES) for key in range(SAMPLES_PER_EPOCH - capacity, SAMPLES_PER_EPOCH)], {})
        measured = _settled_ratio(replay(filled, accesses, SAMPLES_PER_EPOCH))
        yield Check("weighted draws: most weight", cached, measured, Relation.EQUAL, most_weight, WEIGHTED_TOLERANCE)


def _settled_ratio(result: Replay) -> float:
    settled = slice(WEIGHTED_COLD_EPOCHS, None)
    return float(result.hits[settled].sum() / result.opens[settled].sum())
