"""Two jobs on one list, each in a process of its own; they exchange samples, share augmented ones, or both.

A job reads every file of the mount in each epoch, through two loader workers, and says after each epoch what it got for
each sample, in order. It says first how many files there are, and begins when it is told to. However busy the machine
is, the jobs stay side by side: now and then each waits for the other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import torch
from composing import Compose
from listed import Listed
from mounting import Mounted
from noisy_files import Noise
from torch.utils.data import DataLoader
from training_process import TrainingProcess, training_process

from trainer_hook import plan, refurbish

BATCH, STEP_S = 4, 0.005
# After so many batches a job waits for the other.
TOGETHER = 10


class Sharing(NamedTuple):
    exchanges: bool
    augments: bool


class Files(Listed[Any]):
    """Sample i is a tensor as large as its file, of a random number that its transform draws, and the file's number."""

    def __init__(self, root: Path) -> None:
        self.samples = [(str(file), int(file.parent.name)) for file in sorted(root.glob("[0-9]/*"))]
        self.transform = Compose([Noise(1000)])

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, _ = self.samples[index]
        content = Path(path).read_bytes()
        number = int(content[:8])
        if number != int(Path(path).name):
            raise RuntimeError(f"{path} holds {number}")
        return self.transform(torch.zeros(len(content) // 4)), number


def main(connection: Connection, root: Path, seed: int, epochs: int, meeting: Barrier, sharing: Sharing) -> None:
    torch.set_num_threads(1)
    files = Files(root)
    # With a generator of its own, a loader's next epoch is known while one runs.
    generator = None if sharing.augments else torch.Generator().manual_seed(seed)
    loader = DataLoader(files, BATCH, shuffle=True, generator=generator, num_workers=2)
    if sharing.augments:
        loader = refurbish(loader, split=1, reuse="jobs")
    with plan(root, loader, share=sharing.exchanges):
        connection.send(len(files))
        connection.recv()
        for _ in range(epochs):
            found: list[tuple[int, float]] = []
            for number, (made, labels) in enumerate(loader):
                if number % TOGETHER == 0:
                    meeting.wait()
                found += zip(labels.tolist(), made[:, 0].tolist(), strict=True)
                time.sleep(STEP_S)
            connection.send(found)


@contextlib.contextmanager
def two_jobs(mount: Mounted, files: int, epochs: int, sharing: Sharing) -> Iterator[list[TrainingProcess]]:
    """Both have begun, and each is heard once an epoch."""
    with contextlib.ExitStack() as stack:
        meeting = multiprocessing.get_context("forkserver").Barrier(2)
        running = [
            stack.enter_context(training_process(main, mount.point, seed, epochs, meeting, sharing))
            for seed in range(2)
        ]
        assert [job.hear() for job in running] == [files, files]
        for job in running:
            job.tell("go")
        yield running
