"""Where benchmarks/systems.py could silently be wrong: what is counted as fetched, and what each system is made of."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SAMPLES, CLASSES, SIZE, SHARE, EPOCHS = 480, 4, 700, 0.2, 8


@pytest.fixture(scope="module")
def systems() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("systems")


@pytest.fixture(scope="module")
def pool(systems: ModuleType) -> Any:
    """Noise around a colour for each class; of the last tenth there is only noise."""
    in_process = importlib.import_module("in_process")
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(SAMPLES) % CLASSES
    colours = torch.randn(CLASSES, 3, 1, 1, generator=generator)[labels]
    colours[-SAMPLES // 10 :] = 0
    images = colours + 0.5 * torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    held_out = in_process.Data(Path(), [], 0, images[:100], labels[:100], CLASSES)
    return in_process.Pool(images, labels, [SIZE] * SAMPLES, held_out)


@pytest.fixture(scope="module")
def points(systems: ModuleType, pool: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    found = {}
    for name, configuration in systems.SYSTEMS.items():
        chosen = systems.replace(configuration, cached_share=SHARE)
        run = systems.train(pool, chosen, name, 1, EPOCHS)
        found[name] = systems.point_of(run, name, SHARE, SIZE)
    return found


def test_fetched_is_what_was_neither_cached_nor_lent(points: dict[str, Any]) -> None:
    for name, point in points.items():
        missed = point.reads_share * (1 - point.hit_ratio)
        if name == "impact":
            # Those whose rank varies are read once more before each epoch.
            assert missed < point.origin_share < missed + 0.25 * SHARE + 0.01
        else:
            assert point.origin_share == pytest.approx(missed, rel=0.02), name


def test_each_system_is_what_it_says(points: dict[str, Any]) -> None:
    assert {name for name, point in points.items() if point.redirected_share > 0} == {"icache", "impact", "spider"}
    assert points["icache"].reads_share == pytest.approx(0.5)
    assert points["impact"].reads_share == pytest.approx(0.5)
    assert points["shade"].hit_ratio > points["shade, no repeats"].hit_ratio
    assert points["shade"].seen_share < points["shade, no repeats"].seen_share


def test_uniform_sampling_needs_one_training_for_all_sizes(systems: ModuleType, pool: Any) -> None:
    lru, minio = systems.uniform_points(pool, 1, 12, SHARE, 0.5)
    assert lru.hit_ratio == pytest.approx(0.0215, abs=0.02)
    assert minio.hit_ratio == pytest.approx(SHARE, abs=0.01)
    assert minio.planned_share == pytest.approx(1 - SHARE, abs=0.01)
