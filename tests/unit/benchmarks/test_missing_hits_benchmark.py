"""Where missing_hits.py could silently be wrong: what it counts, and what its changes change."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SAMPLES, CLASSES = 128, 4


@pytest.fixture(scope="module")
def missing_hits() -> ModuleType:
    return importlib.import_module("benchmarks.training.missing_hits")


@pytest.fixture(scope="module")
def pool(missing_hits: ModuleType) -> Any:
    """Noise, so that losses stay apart."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    labels = torch.arange(SAMPLES) % CLASSES
    data = importlib.import_module("benchmarks.training.training").Data
    return missing_hits.Pool(images, labels, [700] * SAMPLES, data(Path(), [], 0, images[:50], labels[:50], CLASSES))


def test_the_parts_of_the_hits_are_those_that_the_cache_counts(
    missing_hits: ModuleType, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(missing_hits.POLICIES, "impact, counted", missing_hits.CountedImpact)
    plain, counted = (
        missing_hits.Configuration(scores="loss", policy=policy, sampler="impact")
        for policy in ("impact", "impact, counted")
    )
    training = missing_hits.Training(pool, plain, 1, 5)
    expected = [training.epoch(epoch, lambda: None)[1].hit_ratio for epoch in range(1, 6)]
    training = missing_hits.CountedTraining(pool, counted, 1, 5)
    for epoch in range(1, 6):
        training.policy.counts.clear()
        _, found = training.epoch(epoch, lambda: None)
        assert found.hit_ratio == expected[epoch - 1]
        counts = training.policy.counts
        missed = sum(count for (outcome, _), count in counts.items() if outcome == "misses")
        assert 1 - missed / counts.total() == pytest.approx(found.hit_ratio)
    # Before each of the two epochs after the warm-up.
    assert 2 * training.evaluations.total() == training.sampler.evaluated > 0


def test_changes_last_for_one_training(missing_hits: ModuleType, pool: Any) -> None:
    policies = dict(missing_hits.POLICIES)
    hits = missing_hits.measured(pool, (1, "still, all for H"), 5)
    assert policies == missing_hits.POLICIES
    assert (hits.ratio, hits.pinned) == (1, 0)
    assert hits.all == pytest.approx(hits.with_evaluation)
    assert missing_hits.impact_policy.LOW_LEAST_SHARE > 0


def test_any_member_substitutes_for_any_class_and_again_without_a_limit(missing_hits: ModuleType, pool: Any) -> None:
    once, again = (missing_hits.measured(pool, (1, name), 5) for name in ("any class", "any class, no limit"))
    assert again.stand_ins > once.stand_ins > 0
