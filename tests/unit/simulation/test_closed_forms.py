"""The simulator against closed forms where these are known, and else against figures measured somewhere else.

Fresh permutations: every epoch reads every sample exactly once. Let c be the cached fraction. From the second epoch on:
- The hit ratio of MinIO is c, and that of MIN is c too. A sample that is fetched in an epoch is not read again in it,
  so no policy that fetches on demand serves more than it held when the epoch began, whatever it foresees. This bound is
  checked for every policy and every epoch, in samples and (with mixed sizes) in bytes.
- The hit ratio of LRU is c + (1 - c) ln(1 - c).
- The hit ratio of LFU is the same while c is small: hardly a member stays long enough to be hit twice, so all counts
  are equal, and of equal members the least recent leaves. Above c = 0.5 the members that were hit begin to stay, and
  the hit ratio rises with every epoch (20,000 samples, epoch 12: 0.60 at c = 0.8, where LRU has 0.48). There the form
  of LRU is only a lower bound.

Draws with replacement, by the weights ln(rank + 10) over ranks 0 to 127 (SHADE's, from batches of 128): LRU has the
hit ratio of Che's approximation (Che, Tung and Wang, 2002), and a cache that was filled once with the samples of the
highest weights has the sum of their weights. No closed form is known for MIN, so the expected figures are those of an
earlier, independent simulation. The first epochs are left out: at 75 % MIN needs four epochs until its hit ratio is
steady.
"""

from __future__ import annotations

from math import log

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import brentq

from spiderfs.core.engine import Engine
from spiderfs.core.policy import SAMPLES
from spiderfs.policies import POLICIES
from spiderfs.policies.baselines import MinIO
from spiderfs.simulation import Replay, policy_for, replay
from spiderfs.trace import Accesses

# Sampling noise of a ratio over 10,000 warm accesses is 0.005 at most (one standard deviation).
SAMPLES_PER_EPOCH = 2_000
PERMUTATION_EPOCHS = 6
WEIGHTED_EPOCHS = 12
WEIGHTED_COLD_EPOCHS = 4
NOISE = 0.01
# Ratios of whole numbers are compared as floats: the last bits may differ.
ROUNDING = 1e-12

PERMUTATION_CAPACITIES = (0.2, 0.4, 0.6, 0.8)
# By the cached fraction.
MIN_OF_WEIGHTED = {0.10: 0.41, 0.20: 0.56, 0.25: 0.62, 0.50: 0.81, 0.75: 0.93}
# These figures have two digits, so half of the last digit is added to the noise.
MIN_TOLERANCE = NOISE + 0.005


def lru_on_permutations(cached: float) -> float:
    """The hit ratio of LRU when every epoch is a fresh permutation and the cache holds the fraction `cached`."""
    return cached + (1 - cached) * log(1 - cached) if cached < 1 else 1.0


def test_closed_form_at_its_ends() -> None:
    assert lru_on_permutations(0) == 0
    assert lru_on_permutations(1) == 1
    assert lru_on_permutations(0.2) == pytest.approx(0.0215, abs=1e-4)


@pytest.mark.slow
def test_permutations() -> None:
    keys = _permutations(np.random.default_rng(0))
    accesses = Accesses.of(keys, [1] * len(keys))
    for cached in PERMUTATION_CAPACITIES:
        results = _replay_all(accesses, round(cached * SAMPLES_PER_EPOCH))
        ratios = {name: result.warm_hit_ratio for name, result in results.items()}
        lru = pytest.approx(lru_on_permutations(cached), abs=NOISE)
        assert (ratios["minio"], ratios["belady"]) == (pytest.approx(cached), pytest.approx(cached))
        assert ratios["lru"] == lru
        assert ratios["lfu"] == lru if cached < 0.5 else ratios["lfu"] >= lru_on_permutations(cached) - NOISE
        best = max(float((result.hits / result.opens).max()) for result in results.values())
        assert best <= cached + ROUNDING


@pytest.mark.slow
def test_permutations_of_mixed_sizes() -> None:
    rng = np.random.default_rng(0)
    keys = _permutations(rng)
    size_of: NDArray[np.int64] = rng.lognormal(11, 1, SAMPLES_PER_EPOCH).astype(np.int64)
    accesses = Accesses.of(keys, size_of[keys].tolist())
    for cached in PERMUTATION_CAPACITIES:
        results = _replay_all(accesses, int(cached * int(size_of.sum()))).values()
        best = max(float((1 - result.origin_bytes / result.served_bytes).max()) for result in results)
        assert best <= cached + ROUNDING


def lru_on_weighted_draws(weights: NDArray[np.float64], capacity: int) -> float:
    """Che's approximation: a sample is cached if it was drawn within the time in which `capacity` samples are drawn."""
    time = brentq(lambda time: float((1 - np.exp(-weights * time)).sum()) - capacity, 1, 1e9)
    return float((weights * (1 - np.exp(-weights * time))).sum())


@pytest.mark.slow
def test_weighted_draws() -> None:
    weights = np.log(np.arange(SAMPLES_PER_EPOCH) * 128 // SAMPLES_PER_EPOCH + 10)
    weights /= weights.sum()
    draws = np.random.default_rng(1).choice(SAMPLES_PER_EPOCH, SAMPLES_PER_EPOCH * WEIGHTED_EPOCHS, p=weights)
    accesses = Accesses.of(draws.tolist(), [1] * len(draws))
    for cached, optimum in MIN_OF_WEIGHTED.items():
        capacity = round(cached * SAMPLES_PER_EPOCH)
        heaviest = range(SAMPLES_PER_EPOCH - capacity, SAMPLES_PER_EPOCH)
        filled = Engine(MinIO(), capacity)
        filled.restore([(key, 1, SAMPLES) for key in heaviest], {})
        lru, belady = (Engine(policy_for(POLICIES[name], accesses), capacity) for name in ("lru", "belady"))
        for engine, expected, tolerance in (
            (lru, lru_on_weighted_draws(weights, capacity), NOISE),
            (belady, optimum, MIN_TOLERANCE),
            (filled, float(weights[heaviest.start :].sum()), NOISE),
        ):
            measured = _settled_ratio(replay(engine, accesses, SAMPLES_PER_EPOCH))
            assert measured == pytest.approx(expected, abs=tolerance), (engine.policy.name, cached)


def _permutations(rng: np.random.Generator) -> list[int]:
    epochs = [rng.permutation(SAMPLES_PER_EPOCH) for _ in range(PERMUTATION_EPOCHS)]
    return [int(key) for key in np.concatenate(epochs)]


def _replay_all(accesses: Accesses, capacity_bytes: int) -> dict[str, Replay]:
    return {
        name: replay(Engine(policy_for(policy, accesses), capacity_bytes), accesses, SAMPLES_PER_EPOCH)
        for name, policy in POLICIES.items()
    }


def _settled_ratio(result: Replay) -> float:
    settled = slice(WEIGHTED_COLD_EPOCHS, None)
    return float(result.hits[settled].sum() / result.opens[settled].sum())
