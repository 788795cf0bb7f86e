"""Revamper's schedule: each generation is used so many times, and each batch makes as many samples again."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_hook.refurbishing.generations import Generations

SAMPLES, REUSES, SEEDS = st.integers(1, 200), st.integers(1, 6), st.integers(0, 2**32)
KEPT = st.floats(0, 1)


def schedule(samples: int, reuse: int, kept: float, seed: int) -> Generations:
    return Generations(samples, reuse, round(kept * samples), seed)


@given(SAMPLES, REUSES, SEEDS)
def test_each_generation_after_the_first_is_used_as_often_as_asked(samples: int, reuse: int, seed: int) -> None:
    generations = schedule(samples, reuse, 1, seed)
    epochs = 3 * reuse
    used = np.stack([generations.of_epoch(epoch) for epoch in range(epochs)])
    for index in range(samples):
        counts = Counter(used[:, index].tolist())
        first, last = min(counts), max(counts)
        assert 1 <= counts[first] <= reuse
        assert 1 <= counts[last] <= reuse
        assert all(counts[generation] == reuse for generation in range(first + 1, last))
        assert sorted(counts) == list(range(first, last + 1))


@given(SAMPLES, REUSES, KEPT, SEEDS, st.integers(1, 20))
def test_a_generation_begins_where_a_sample_is_renewed(
    samples: int, reuse: int, kept: float, seed: int, epoch: int
) -> None:
    generations = schedule(samples, reuse, kept, seed)
    changed = generations.of_epoch(epoch) != generations.of_epoch(epoch - 1)
    assert (changed == generations.renewed(epoch)).all()
    assert generations.renewed(0).all()
    # Balanced eviction: a `reuse`-th of what is kept, and all of what is not.
    number = round(kept * samples)
    due = int(generations.renewed(epoch).sum()) - (samples - number)
    assert number // reuse <= due <= -(-number // reuse)
    assert generations.kept.sum() == number


@given(SAMPLES, REUSES, KEPT, SEEDS, st.integers(0, 9), st.integers(1, 4))
def test_ranks_share_an_epoch_without_repetition(
    samples: int, reuse: int, kept: float, seed: int, epoch: int, world_size: int
) -> None:
    generations = schedule(samples, reuse, kept, seed)
    orders = [generations.order(epoch, rank, world_size).tolist() for rank in range(world_size)]
    drawn = [index for order in orders for index in order]
    assert len(set(drawn)) == len(drawn) == samples // world_size * world_size
    assert {len(order) for order in orders} == {samples // world_size}
    makes = [sum(generations.renewed(epoch)[order]) for order in orders]
    assert max(makes) - min(makes) <= 1


@given(SAMPLES, REUSES, KEPT, SEEDS, st.integers(0, 9), st.integers(1, 50))
def test_each_batch_makes_as_many_samples_again(
    samples: int, reuse: int, kept: float, seed: int, epoch: int, batch: int
) -> None:
    generations = schedule(samples, reuse, kept, seed)
    renewed = generations.renewed(epoch)[generations.order(epoch)]
    share = renewed.mean()
    for first in range(0, samples, batch):
        there = renewed[first : first + batch]
        assert abs(there.sum() - share * len(there)) < 1 + 1e-9


def expected_unique(augmentations: float, final: float, reuse: int, epochs: int) -> float:
    """The expected number of different forms of one sample that a training sees, by Revamper's Theorem 1.

    E(U) = |A| (1 - (1 - |A_F|/|A| + |A_F|/|A| (1 - 1/|A_F|)^r)^(k/r)) with |A| `augmentations`, of which the part after
    the split has |A_F| = `final`, r = `reuse` and k = `epochs`, a multiple of `reuse`.
    """
    share = final / augmentations
    unseen: float = 1 - share + share * (1 - 1 / final) ** reuse
    unique: float = augmentations * (1 - unseen ** (epochs / reuse))
    return unique


@pytest.mark.parametrize("reuse", [1, 2, 3, 4])
def test_theorem_1_is_what_the_schedule_gives(reuse: int) -> None:
    """|A| = 60 forms of which the final part chooses 6; counted over samples in the middle of a training."""
    rng, partials, finals, epochs, samples = random.Random(reuse), 10, 6, 12, 3000
    generations = schedule(samples, reuse, 1, 3)
    seen: list[set[tuple[int, int]]] = [set() for _ in range(samples)]
    drawn: dict[tuple[int, int], int] = {}
    # The theorem has whole generations alone: begin with each sample where one of its generations begins.
    begins = [next(epoch for epoch in range(1, 9) if generations.renewed(epoch)[index]) for index in range(samples)]
    for epoch in range(1, 9 + epochs):
        of_epoch = generations.of_epoch(epoch).tolist()
        for index in range(samples):
            if begins[index] <= epoch < begins[index] + epochs:
                partial = drawn.setdefault((index, of_epoch[index]), rng.randrange(partials))
                seen[index].add((partial, rng.randrange(finals)))
    mean = sum(map(len, seen)) / samples
    assert mean == pytest.approx(expected_unique(partials * finals, finals, reuse, epochs), rel=0.01)
