"""A job with `share` in a process of its own: `python shared_job.py MOUNT SEED EPOCHS STEP_MS`.

It reads every file of the mount in each epoch, through two loader workers, and prints a line of JSON after each epoch:
the numbers that it has found in the files, in order. It begins when a line comes through its input.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from trainer_hook import plan

BATCH = 4


class Files(Dataset[int]):
    def __init__(self, root: Path) -> None:
        self.samples = [(str(file), int(file.parent.name)) for file in sorted(root.glob("[0-9]/*"))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        path, _ = self.samples[index]
        content = Path(path).read_bytes()
        number = int(content[:8])
        if number != int(Path(path).name):
            raise RuntimeError(f"{path} holds {number}")
        return number


def main() -> None:
    root, seed, epochs, step_ms = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    files = Files(root)
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(files, BATCH, shuffle=True, generator=generator, num_workers=2, persistent_workers=True)
    with plan(root, loader, share=True):
        print(json.dumps(len(files)), flush=True)
        sys.stdin.readline()
        for _ in range(epochs):
            found: list[int] = []
            for batch in loader:
                found += batch.tolist()
                time.sleep(step_ms / 1000)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
