"""A training of one job in a process of its own, one step for each line of its input: `python one_job.py MOUNT MODEL`.

It prints a line of JSON when it has attached, and one after each step. After each step it asks for the scores, so the
daemon has scored each batch before the next one comes: none is left out, however busy the machine is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from vector_files import WIDTH

from trainer_hook import attach

BATCH = 10
# Of each model: the seed of its weights, that of its order, and its layers.
MODELS = {
    "one": (1, 7, lambda: [nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 2)]),
    "two": (2, 8, lambda: [nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 2)]),
}


class Files(Dataset[Any]):
    def __init__(self, root: Path) -> None:
        self.samples = [(str(file), int(file.parent.name[-1])) for file in sorted(root.glob("*/*.npy"))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        return torch.from_numpy(np.load(path)).float(), label


def main(mount: Path, name: str) -> None:
    seed, order, layers = MODELS[name]
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = nn.Sequential(*layers())
    files = Files(mount)
    loader = DataLoader(files, BATCH, shuffle=True, generator=torch.Generator().manual_seed(order))
    hook = attach(mount, model, loader, job_name=f"model {name}", epochs=5)
    client: Any = hook._client

    def scores() -> str:
        hook._release()
        found = client.scores("train", 30)
        return "" if found is None else found.tobytes().hex()

    print(json.dumps({"job": hook.job, "scores": scores()}), flush=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches, losses = iter(loader), []
    for command in sys.stdin:
        if command == "epoch\n":
            hook.epoch_end(0.5)
            batches = iter(loader)
        else:
            inputs, labels = next(batches)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        print(json.dumps({"scores": scores(), "losses": losses}), flush=True)
    hook.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
