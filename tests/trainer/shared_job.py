"""A job with `share`, in a process of its own.

It reads every file of the mount in each epoch, through two loader workers, and says after each epoch which numbers it
has found in the files, in order. It says first how many files there are, and begins when it is told to. However busy
the machine is, the jobs stay side by side: now and then each waits for the others.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from listed import Listed
from torch.utils.data import DataLoader

from trainer_hook import plan

BATCH, STEP_S = 4, 0.005
# After so many batches a job waits for the others.
TOGETHER = 25


class Files(Listed[int]):
    def __init__(self, root: Path) -> None:
        self.samples = [(str(file), int(file.parent.name)) for file in sorted(root.glob("[0-9]/*"))]

    def __getitem__(self, index: int) -> int:
        path, _ = self.samples[index]
        content = Path(path).read_bytes()
        number = int(content[:8])
        if number != int(Path(path).name):
            raise RuntimeError(f"{path} holds {number}")
        return number


def main(connection: Connection, root: Path, seed: int, epochs: int, meeting: Barrier) -> None:
    torch.set_num_threads(1)
    files = Files(root)
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(files, BATCH, shuffle=True, generator=generator, num_workers=2, persistent_workers=True)
    with plan(root, loader, share=True):
        connection.send(len(files))
        connection.recv()
        for _ in range(epochs):
            found: list[int] = []
            for number, batch in enumerate(loader):
                if number % TOGETHER == 0:
                    meeting.wait()
                found += batch.tolist()
                time.sleep(STEP_S)
            connection.send(found)
