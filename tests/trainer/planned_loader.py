"""A training that only reads, with a DataLoader and a plan; it says which samples each epoch took."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from listed import Listed
from torch.utils.data import DataLoader

import trainer_hook


@dataclass(frozen=True)
class Task:
    point: str
    epochs: list[int | None] = field(default_factory=lambda: [None, None])
    """For each epoch after how many batches the loop leaves it; None: it takes all."""
    workers: int = 2
    batch: int = 8
    step_s: float = 0.0
    persistent: bool = False
    replacement: bool = False
    reads: str = "right"
    """The files that the data set reads: those of its list, or those of other samples ("wrong")."""
    keeps: bool = False
    """Whether the data set reads each file once, and keeps it in memory."""
    share: bool = False
    seed: int = 1
    together: int = 25
    """After so many batches each of several jobs waits for the others, so that they stay side by side."""
    files: str = "*/*"
    """The files of the list, as a glob below the mount."""


class Files(Listed[Any]):
    def __init__(self, task: Task) -> None:
        root = Path(task.point)
        self.samples = [(str(path), 0) for path in sorted(root.glob(task.files))]
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(9)).tolist()
        self.read = (
            [self.samples[index][0] for index in order] if task.reads == "wrong" else [path for path, _ in self.samples]
        )

        self.keeps, self.kept = task.keeps, dict[int, bytes]()

    def __getitem__(self, index: int) -> tuple[int, int]:
        content = self.kept.get(index) or Path(self.read[index]).read_bytes()
        if self.keeps:
            self.kept[index] = content
        assert content.startswith(Path(self.read[index]).name.encode())
        return index, len(content)


def main(connection: Connection, task: Task, meeting: Barrier | None = None) -> None:
    torch.set_num_threads(1)
    data = Files(task)
    generator = torch.Generator().manual_seed(task.seed)
    sampler = torch.utils.data.RandomSampler(data, replacement=task.replacement, generator=generator)
    loader = DataLoader(
        data,
        batch_size=task.batch,
        sampler=sampler,
        num_workers=task.workers,
        persistent_workers=task.persistent,
    )
    with trainer_hook.plan(task.point, loader, share=task.share):
        for batches in task.epochs:
            taken: list[int] = []
            for number, (indices, _) in enumerate(itertools.islice(loader, batches)):
                if meeting is not None and number % task.together == 0:
                    meeting.wait()
                taken += indices.tolist()
                time.sleep(task.step_s)
            connection.send(taken)
            connection.recv()
