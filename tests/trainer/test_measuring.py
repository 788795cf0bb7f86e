"""What a pass over a loader measures, and what is said of loaders that cannot be measured."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainer_hook.refurbishing.profiled_loader import LoaderUnusable, Measuring, loader_of

SLOW_S = 0.004


class Waiting(Dataset[Any]):
    """Each sample takes time in which the worker waits."""

    def __init__(self, samples: int = 12) -> None:
        self.samples = samples
        self.asked = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked += 1
        time.sleep(SLOW_S)
        return torch.full((1000,), index, dtype=torch.uint8)


class Working(Waiting):
    """Each sample takes CPU time."""

    def __getitem__(self, index: int) -> torch.Tensor:
        until_s = time.thread_time() + SLOW_S
        while time.thread_time() < until_s:
            pass
        return torch.zeros(1)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize("workers", [0, 2])
def test_waits_are_told_from_work(workers: int) -> None:
    waiting = Measuring(DataLoader(Waiting(), 4, num_workers=workers), None).measure(0, 8, kept="no")
    working = Measuring(DataLoader(Working(), 4, num_workers=workers), None).measure(0, 8, kept="no")
    assert waiting.samples == working.samples == 8
    assert waiting.worker_wait_s >= 8 * SLOW_S * 0.9
    assert waiting.worker_cpu_s < waiting.worker_wait_s
    assert working.worker_cpu_s >= 8 * SLOW_S
    assert working.worker_wait_s < working.worker_cpu_s
    assert waiting.elapsed_s >= 8 * SLOW_S


@pytest.mark.parametrize("mount", [None, "/nowhere"])
def test_kept_samples_are_made_once_and_have_a_size(mount: str | None) -> None:
    data = Waiting()
    measuring = Measuring(DataLoader(data, 4), None, mount)
    try:
        first = measuring.measure(2, 6, kept="again")
        assert data.asked == 6
        passes = [measuring.measure(2, 6, kept=kept) for kept in ("read", "again", "read")]
        assert data.asked == 6
        assert all(again.kept_bytes == first.kept_bytes >= 6 * 1000 for again in passes)
        assert min(again.worker_wait_s for again in passes) < first.worker_wait_s
    finally:
        measuring.close()


def test_steps_are_measured_on_batches_of_the_loader() -> None:
    seen: list[int] = []

    def step(batch: torch.Tensor) -> None:
        seen.append(len(batch))
        time.sleep(SLOW_S)

    measuring = Measuring(DataLoader(Waiting(), 4), step)
    assert measuring.facts == {"samples": 12, "workers": 0, "batch": 4, "steps": True}
    measuring.measure(0, 12, kept="no")
    assert measuring.steps(5) >= SLOW_S
    assert seen == [4] * 7


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (DataLoader([], 4), "gives no batches"),  # type: ignore[arg-type]
        (DataLoader(Waiting(3), 4, drop_last=True), "gives no batches"),
        (DataLoader(Endless(), 2), "no indices"),
        ([1, 2], "a list is no torch.utils.data.DataLoader"),
        ((DataLoader(Waiting(), 4), 3), "not \\(loader, step\\)"),
    ],
)
def test_what_cannot_be_measured_is_named(made: Any, reason: str) -> None:
    with pytest.raises(LoaderUnusable, match=reason):
        loader_of(lambda directory: made, "/mnt")


def test_what_a_training_prints_is_no_answer_and_what_it_reads_no_question(tmp_path: Path) -> None:
    (tmp_path / "talking_training.py").write_text(
        "import torch.utils.data\n"
        "print('imported')\n"
        "def make(directory):\n"
        "    try:\n"
        "        input('a question to whoever is there')\n"
        "    except EOFError:\n"
        "        print('no one is there')\n"
        "    return torch.utils.data.DataLoader(list(range(6)), 2)\n"
    )
    questions = [{"directory": "/mnt"}, {"first": 0, "count": 4, "kept": "no"}]
    done = subprocess.run(
        [sys.executable, "-m", "trainer_hook.refurbishing.profiled_loader", "talking_training:make"],
        input="".join(f"{json.dumps(question)}\n" for question in questions),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
    )
    there, facts, figures = map(json.loads, done.stdout.splitlines())
    assert there == {}
    assert facts["samples"] == 6
    assert figures["samples"] == 4
    assert "imported" in done.stderr
    assert "no one is there" in done.stderr
