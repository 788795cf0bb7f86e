"""Where accuracy.py could silently be wrong: closed forms, labels, attribution, draws."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

SAMPLES, CLASSES = 480, 4
SIDE = 8


@pytest.fixture(scope="module")
def in_process() -> ModuleType:
    return importlib.import_module("benchmarks.training.in_process")


@pytest.fixture(scope="module")
def accuracy(in_process: ModuleType) -> ModuleType:
    return importlib.import_module("benchmarks.training.accuracy")


@pytest.fixture(scope="module")
def pool(in_process: ModuleType) -> Any:
    """Noise around a colour for each class: learnt in one epoch, so that neighbours are of one label."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(SAMPLES) % CLASSES
    colours = torch.randn(CLASSES, 3, 1, 1, generator=generator)
    images = colours[labels] + 0.5 * torch.randn(SAMPLES, 3, SIDE, SIDE, generator=generator)
    held_out = in_process.Data(Path(), [], 0, images[:100], labels[:100], CLASSES)
    return in_process.Pool(images, labels, [700 + 7 * (sample % 50) for sample in range(SAMPLES)], held_out)


def permutations(samples: int, epochs: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.permutation(samples).tolist() for _ in range(epochs)]


def test_uniform_sampling_meets_the_closed_forms(in_process: ModuleType) -> None:
    lists = permutations(1000, 12)
    found = in_process.list_origin(lists, [1] * 1000, 200)
    assert np.mean(found["LRU"][1:]) == pytest.approx(1 - (0.2 + 0.8 * math.log(0.8)), abs=0.005)
    for name in ("MinIO", "MIN", "MIN by epoch"):
        assert found[name][0] == 1
        assert found[name][1:] == pytest.approx([0.8] * 11)


def test_the_cache_of_uniform_sampling_is_an_lru(accuracy: ModuleType, in_process: ModuleType) -> None:
    lists = permutations(1000, 5)
    sizes = [1 + sample % 3 for sample in range(1000)]
    cache = in_process.Cache(accuracy.CONFIGURATIONS["uniform"], [0] * 1000, sizes, 400, 8, seed=1, epochs=5)
    origin = []
    for drawn in lists:
        assert [cache.read(sample) for sample in drawn] == drawn
        origin.append(cache.counts.origin_bytes / cache.counts.opens)
        assert cache.counts.redirects == 0
        cache.epoch_end(0.5)
    assert origin == pytest.approx(in_process.list_origin(lists, sizes, 400)["LRU"])


def watched(in_process: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What goes into and out of the cache while a training runs."""
    seen: dict[str, list[Any]] = {"wanted": [], "given": [], "learned": []}
    read, learn = in_process.Cache.read, in_process.Cache.learn

    def watched_read(cache: Any, wanted: int) -> int:
        given: int = read(cache, wanted)
        seen["wanted"].append(wanted)
        seen["given"].append(given)
        return given

    def watched_learn(cache: Any, served: Any, embeddings: Any, losses: Any) -> None:
        seen["learned"] += served.tolist()
        assert embeddings.dtype == np.float16
        assert len(embeddings) == len(losses) == len(served)
        learn(cache, served, embeddings, losses)

    monkeypatch.setattr(in_process.Cache, "read", watched_read)
    monkeypatch.setattr(in_process.Cache, "learn", watched_learn)
    return seen


@pytest.mark.thorough
def test_substitutes_have_the_label_and_are_what_is_learned(
    in_process: ModuleType, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watched(in_process, monkeypatch)
    run = in_process.train(pool, in_process.Configuration(), "spider", 1, 3)
    wanted, given = torch.tensor(seen["wanted"]), torch.tensor(seen["given"])
    assert len(wanted) == 3 * SAMPLES
    replaced = wanted != given
    assert (pool.labels[wanted] == pool.labels[given]).all()
    assert seen["learned"] == seen["given"]
    assert int(replaced.sum()) == round(sum(epoch.redirected_share for epoch in run.epochs) * SAMPLES) > 0
    for epoch in run.epochs:
        assert epoch.hit_ratio >= epoch.redirected_share
        assert epoch.served_share <= epoch.drawn_share
    # The first epoch has no scores: it draws every sample once.
    assert sorted(seen["wanted"][:SAMPLES]) == list(range(SAMPLES))
    assert run.epochs[-1].drawn_share < 0.9


def test_an_epoch_of_part_of_the_samples_ends_with_the_same_learning_rate(in_process: ModuleType) -> None:
    training = importlib.import_module("benchmarks.training.training")
    rates = []
    for batches in (8, 5, 3):
        steps = training.Steps(torch.nn.Linear(1, 1), 4, 8 * training.BATCH)
        by_epoch = []
        for epoch in range(4):
            for batch in range(1, batches + 1):
                steps.optimizer.step()
                steps.taken(epoch, batch, batches)
            by_epoch.append(steps.optimizer.param_groups[0]["lr"])
        rates.append(by_epoch)
    assert rates[0] == rates[1] == rates[2]
    assert rates[0][-1] < rates[0][0]
