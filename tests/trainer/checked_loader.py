"""A training with a plan whose data set verifies all bytes; it says what was wrong, and how long a read took."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from listed import Listed
from torch.utils.data import DataLoader

import trainer_hook


def make_files(source: Path, files: int) -> Path:
    """Files of 17 to 197 kB, of which each says what it is."""
    for number in range(files):
        path = source / str(number % 4) / f"{number:05d}"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content_of(path.name, size_of(number)))
    return source


def content_of(name: str, size: int) -> bytes:
    word = f"{name}:{size}|".encode()
    return (word * (size // len(word) + 1))[:size]


def size_of(number: int) -> int:
    return 17_000 + number * 7919 % 180_000


@dataclass(frozen=True)
class Task:
    point: str
    epochs: int = 3
    workers: int = 2
    batch: int = 8


class Files(Listed[Any]):
    def __init__(self, task: Task) -> None:
        self.samples = [(str(path), 0) for path in sorted(Path(task.point).glob("*/*"))]

    def __getitem__(self, index: int) -> tuple[int, str, float]:
        path = Path(self.samples[index][0])
        began = time.monotonic()
        wrong = ""
        try:
            content = path.read_bytes()
            if content != content_of(path.name, size_of(int(path.name))):
                wrong = f"wrong bytes {path}"
        except OSError as exc:
            wrong = f"{path}: {exc}"
        return index, wrong, time.monotonic() - began


def main(connection: Connection, task: Task) -> None:
    torch.set_num_threads(1)
    data = Files(task)
    generator = torch.Generator().manual_seed(1)
    sampler = torch.utils.data.RandomSampler(data, generator=generator)
    loader = DataLoader(data, batch_size=task.batch, sampler=sampler, num_workers=task.workers, collate_fn=list)

    with trainer_hook.plan(task.point, loader):
        for _ in range(task.epochs):
            wrongs, longest_s = [], 0.0
            for batch in loader:
                wrongs += [wrong for _, wrong, _ in batch if wrong]
                longest_s = max(longest_s, *(took_s for *_, took_s in batch))
            connection.send((wrongs, longest_s))
