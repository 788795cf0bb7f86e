"""A training of one job in a process of its own, which does one step each time it is told to.

It answers when it has attached, and after each step. After each step it asks for the scores, so the daemon has scored
each batch before the next one comes: none is left out, however busy the machine is.
"""

from __future__ import annotations

import contextlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from listed import Read
from torch import nn
from torch.utils.data import DataLoader
from vector_files import WIDTH

from trainer_hook import HookOptions, attach

BATCH = 10
# Of each model: the seed of its weights, that of its order, and its layers.
MODELS = {
    "one": (1, 7, lambda: [nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 2)]),
    "two": (2, 8, lambda: [nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 2)]),
}


def main(connection: Connection, mount: Path, name: str) -> None:
    seed, order, layers = MODELS[name]
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = nn.Sequential(*layers())
    samples = [(str(file), int(file.parent.name[-1])) for file in sorted(mount.glob("*/*.npy"))]
    files = Read(samples, lambda path, label: (torch.from_numpy(np.load(path)).float(), label))
    loader = DataLoader(files, BATCH, shuffle=True, generator=torch.Generator().manual_seed(order))
    hook = attach(mount, model, loader, options=HookOptions(job_name=f"model {name}", epochs=5))
    client: Any = hook._client

    def scores() -> str:
        hook._send_known()
        found = client.scores("train", 30)
        return "" if found is None else found.tobytes().hex()

    connection.send({"job": hook.job, "scores": scores()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches, losses = iter(loader), []
    # No one tells it anything any more when the test has ended.
    with contextlib.suppress(EOFError):
        while command := connection.recv():
            if command == "epoch":
                hook.epoch_end(0.5)
                batches = iter(loader)
            else:
                inputs, labels = next(batches)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(loss.item())
            connection.send({"scores": scores(), "losses": losses})
    hook.close()
