"""Where train.py could silently be wrong: what it goes on with, what is compared with what, and how it is timed."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import tables
from benchmarks.common.command import Extent
from benchmarks.common.interruption import TimeIsOver
from benchmarks.training import train
from benchmarks.training.train_report import Epoch, Run
from benchmarks.training.training import Data


def run_of(name: str, seed: int = 1, workers: int = 2, seconds: float = 4.0, top1: float = 0.5) -> Run:
    epoch = Epoch(0.2, 700.0, 0.8, 1.0, 1.0, 1.0, 0.0, seconds, 0.25, top1)
    return Run(name, seed, [epoch] * 3, 0, 0, "", workers)


def arguments(tmp_path: Path, **chosen: Any) -> Namespace:
    settings: dict[str, Any] = {
        "extent": Extent(3, 100, 50, 2),
        "workers": [2],
        "configs": ["lru", "spider"],
        "json": tmp_path / "train.json",
        "minutes": float("inf"),
        "data": tmp_path,
    }
    return Namespace(**settings | chosen)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[train.Task]:
    """The tasks that are trained, without training."""
    tasks: list[train.Task] = []

    def made(arguments: Any, data: Any, task: train.Task, scratch: Path, progress: Any) -> Run:
        tasks.append(task)
        return run_of(task.configuration, task.seed, task.workers)

    data: Any = Data(Path(), [], 0, None, None, 10)  # type: ignore[arg-type]
    monkeypatch.setattr(train, "run_of", made)
    monkeypatch.setattr(train, "find_data", lambda root, extent: data)
    return tasks


def test_a_measurement_goes_on_where_it_stopped(tmp_path: Path, trained: list[train.Task]) -> None:
    quiet = Console(quiet=True)
    for left in (3, 2, 1):
        with pytest.raises(TimeIsOver, match=f"^{left} runs"):
            train.measure(arguments(tmp_path, minutes=0.0), quiet)
    train.measure(arguments(tmp_path), quiet)
    assert trained == [train.Task(seed, 2, name) for seed in (1, 2) for name in ("lru", "spider")]
    assert train.runs_in(tmp_path / "train.json", arguments(tmp_path)) == [
        run_of(task.configuration, task.seed) for task in trained
    ]


def test_a_file_of_other_settings_is_refused(tmp_path: Path, trained: list[train.Task]) -> None:
    quiet = Console(quiet=True)
    train.measure(arguments(tmp_path), quiet)
    with pytest.raises(RuntimeError, match="another extent or source"):
        train.measure(arguments(tmp_path, extent=Extent(4, 100, 50, 2)), quiet)


def test_a_changed_configuration_is_refused(
    tmp_path: Path, trained: list[train.Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    train.measure(arguments(tmp_path), Console(quiet=True))
    monkeypatch.setitem(train.CONFIGURATIONS, "lru", train.Configuration("policy=lfu"))
    with pytest.raises(RuntimeError, match="another configuration named lru"):
        train.runs_in(tmp_path / "train.json", arguments(tmp_path))


def test_a_run_is_compared_with_the_baseline_of_its_seed() -> None:
    runs = [run_of("lru", 1, seconds=8.0), run_of("lru", 2, seconds=6.0), run_of("echo 2", 2, seconds=2.0)]
    (lru, echo) = tables.train({"runs": [asdict(run) for run in runs]}).splitlines()[2:]
    assert lru == "| lru | 1.00 | 7.0 | 25 | 1.00 | |"
    assert echo == "| **echo 2** | 1.00 | 2.0 | 25 | 3.00 | the same run |"
    (alone,) = tables.train({"runs": [asdict(runs[2])]}).splitlines()[2:]
    assert alone == "| **echo 2** | | 2.0 | 25 | | |"


def test_an_epoch_without_a_mount_waits_for_no_source() -> None:
    data: Any = Data(Path(), [("a", 0)] * 10, 9000, None, None, 1)  # type: ignore[arg-type]
    found = train.epoch_of(train.Figures(2.0, 0.5, 10, {1, 2}, {1, 2}), None, None, data, 0.5)
    assert (found.hit_ratio, found.origin_share, found.redirected_share) == (1.0, 0.0, 0.0)
    assert replace(found, top1=0.0).waiting_share == 0.25
