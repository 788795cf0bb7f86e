"""The recipes of docs/howto/decoding.md, read through a loader: what `benchmarks.serving.decoding` measures.

    python -m benchmarks.serving.decoders TASK      TASK is JSON; prints a line of JSON

Recipes are the page's own snippets, by the heading that they stand under, so that what is measured is what is shown.
Decoders have an environment of their own (benchmarks/install-peers), where much of spiderfs cannot be imported: this
module needs PyTorch alone, and each recipe what it imports.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "decoding.md"
BATCH_LOADER = ROOT / "docs" / "examples" / "batch_loader.py"
COMMON, THREADS, DALI = "Random crop", "Whole batches by threads", "DALI"
BATCH, LOADER_WORKERS = 64, 2


@dataclass(frozen=True)
class Task:
    rows: dict[str, tuple[str, str]]
    """By the name of a row its recipe, and the directory of its images, which has one folder for each class."""
    rounds: int


def snippets(page: Path = PAGE) -> dict[str, str]:
    """The Python blocks of a page, by the heading that each stands under."""
    parts = re.split(r"^## (.*)$", page.read_text(), flags=re.MULTILINE)
    blocks = {
        heading: re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for heading, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    return {heading: found[0] for heading, found in blocks.items() if found}


def defined_by(recipe: str) -> dict[str, Any]:
    """What a recipe defines: `load`, or for DALI `batches`."""
    names: dict[str, Any] = {}
    known = snippets()
    for heading in (COMMON, recipe):
        exec(compile(known[heading], f"{PAGE.name}: {heading}", "exec"), names)
    return names


class Pictures(Dataset[torch.Tensor]):
    def __init__(self, paths: list[str], load: Callable[[str], torch.Tensor]) -> None:
        self._paths, self._load = paths, load

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._load(self._paths[index])


def epochs_of(recipe: str, root: Path) -> Iterator[int]:
    """The number of images in each epoch, as soon as it has been read."""
    paths = sorted(str(path) for path in root.glob("*/*"))
    if recipe == THREADS:
        example = batch_loader()
        whole_batches = example.batches(root, BATCH, LOADER_WORKERS)
        while True:
            yield sum(len(labels) for _, labels in example.ahead(whole_batches))
    if recipe == DALI:
        iterator = defined_by(recipe)["batches"](paths, BATCH, LOADER_WORKERS)
        while True:
            yield sum(len(batch[0]["pixels"]) for batch in iterator)
    loader = DataLoader(
        Pictures(paths, defined_by(recipe)["load"]),
        BATCH,
        shuffle=True,
        num_workers=LOADER_WORKERS,
        persistent_workers=True,
    )
    while True:
        yield sum(len(batch) for batch in loader)


def batch_loader() -> Any:
    """The example, as a module."""
    spec = importlib.util.spec_from_file_location(BATCH_LOADER.stem, BATCH_LOADER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rates(task: Task) -> dict[str, list[float]]:
    """Images a second of each row, in each round; rows take turns, and have read all images once before."""
    running = {name: epochs_of(recipe, Path(root)) for name, (recipe, root) in task.rows.items()}
    for epochs in running.values():
        next(epochs)
    found: dict[str, list[float]] = {name: [] for name in running}
    turns = list(running)
    for number in range(task.rounds):
        first = number % len(turns)
        for name in turns[first:] + turns[:first]:
            began = time.perf_counter()
            images = next(running[name])
            found[name].append(images / (time.perf_counter() - began))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(rates(Task(**json.loads(sys.argv[1])))), flush=True)
