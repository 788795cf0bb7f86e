"""A job that shares augmented samples, and with `share` exchanges samples too, in a process of its own.

It says how many files there are, begins when it is told to, and says after each epoch what it got for each sample.
However busy the machine is, the jobs stay side by side: before each batch they wait for each other, and for what the
mount says of it.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from composing import Compose
from noisy_files import Noise
from torch.utils.data import DataLoader, Dataset

from trainer_hook import plan, refurbish
from trainer_hook.loader import exchange

BATCH, STEP_S = 4, 0.005
PATIENCE_S = 60.0


class Files(Dataset[Any]):
    """Sample i is a tensor as large as its file, of a random number that its transform draws."""

    def __init__(self, root: Path) -> None:
        self.samples = [(str(file), 0) for file in sorted(root.glob("[0-9]*"))]
        self.transform = Compose([Noise(1000)])

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        content = Path(self.samples[index][0]).read_bytes()
        return self.transform(torch.zeros(len(content) // 4)), int(content[:8])


def main(connection: Connection, root: Path, epochs: int, meeting: Barrier, share: bool) -> None:
    torch.set_num_threads(1)
    exchange.ANSWER_S = PATIENCE_S
    files = Files(root)
    # What a job has in hand must stay in the cache: with more workers that would be most of the originals there.
    loader = refurbish(DataLoader(files, BATCH, shuffle=True, num_workers=1), split=1, reuse="jobs")
    with plan(root, loader, share=share):
        connection.send(len(files))
        connection.recv()
        for _ in range(epochs):
            found: list[tuple[int, float]] = []
            for made, labels in loader:
                meeting.wait(PATIENCE_S)
                found += zip(labels.tolist(), made[:, 0].tolist(), strict=True)
                time.sleep(STEP_S)
            connection.send(found)
