"""Where full_size.py could silently be wrong: what an interruption changes, how images are cropped, what is kept."""

from __future__ import annotations

import importlib
import json
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

pytestmark = pytest.mark.thorough

EPOCHS = 3
SYSTEMS = ("uniform", "echo 2", "spider-paper", "spider-paper, radius of 1 % of a class", "shade", "impact")


@pytest.fixture(scope="module")
def full_size() -> ModuleType:
    torch.set_num_threads(1)
    return importlib.import_module("benchmarks.training.full_size")


@pytest.fixture(scope="module")
def resnet() -> ModuleType:
    return importlib.import_module("benchmarks.training.resnet")


@pytest.fixture(autouse=True)
def small(resnet: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small network in place of a ResNet, which takes most of the time and is saved alike."""
    training = importlib.import_module("benchmarks.training.training")
    monkeypatch.setattr(resnet, "on_device", lambda classes, width, device, stem: training.small_network(classes))


def arguments(full_size: ModuleType, path: Path, **chosen: Any) -> Namespace:
    settings: dict[str, Any] = {
        "extent": full_size.Extent(EPOCHS, 480, 100, 1),
        "device": "cpu",
        "jobs": 1,
        "recipe": "tuned",
        "width": 8,
        "quick": False,
        "data": None,
        "minutes": float("inf"),
        "state": path / "state",
        "json": path / "full.json",
        "systems": list(SYSTEMS),
        "plot_scores": None,
    }
    return Namespace(**settings | chosen)


def kept(path: Path) -> Any:
    """The measured figures, without how long they took."""
    return [of | {"seconds": 0} for of in json.loads((path / "full.json").read_text())["measured"]]


def test_slices_end_with_the_figures_of_one_long_run(full_size: ModuleType, tmp_path: Path) -> None:
    console, extent = Console(quiet=True), full_size.Extent(2, 160, 40, 1)
    full_size.measure(arguments(full_size, tmp_path / "long", state=None, extent=extent), console)
    slices = 0
    while True:
        slices += 1
        try:
            # No time: each slice trains the one epoch that it may.
            full_size.measure(arguments(full_size, tmp_path / "short", minutes=0.0, extent=extent), console)
            break
        except full_size.TimeIsOver:
            assert len(list((tmp_path / "short" / "state").iterdir())) <= 1
    assert slices == extent.epochs * len(SYSTEMS)
    assert kept(tmp_path / "short") == kept(tmp_path / "long")
    assert {of["system"] for of in kept(tmp_path / "long")} == {*SYSTEMS[1:], "lru", "uniform+plan"}
    assert list((tmp_path / "short" / "state").iterdir()) == []


def test_the_network_is_a_resnet_of_eighteen_layers(resnet: ModuleType) -> None:
    model = resnet.resnet18(10)
    # 17 convolutions, three more in shortcuts, and the classifier: 11.2 million numbers, as in the literature.
    assert sum(isinstance(module, torch.nn.Conv2d) for module in model.modules()) == 20
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962
    images = torch.zeros(2, 3, 32, 32)
    assert model[:-3](images).shape == (2, 512, 4, 4)
    assert model(images).shape == (2, 10)
    assert resnet.embedded(model[:-1](images)).shape == (2, 64)


def test_the_papers_recipe_is_torchvisions_network_with_a_constant_rate(resnet: ModuleType) -> None:
    model = resnet.resnet18(10, stem=resnet.torchvision_stem)
    # As torchvision.models.resnet18(num_classes=10) has.
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_181_642
    assert model[:-3](torch.zeros(2, 3, 32, 32)).shape == (2, 512, 1, 1)
    training = importlib.import_module("benchmarks.training.training")
    recipe = resnet.recipe_of("papers", 8, "cpu")
    steps = training.Steps(torch.nn.Linear(1, 1), 2, 512, recipe.batch, recipe.optimizer, recipe.schedule)
    for epoch in range(2):
        for batch in (1, 2):
            steps.optimizer.step()
            steps.taken(epoch, batch, 2)
            assert steps.optimizer.param_groups[0]["lr"] == 0.1
    assert {steps.optimizer.defaults[of] for of in ("momentum", "weight_decay")} == {0}
