"""The loaders that `benchmarks.serving.object_store` measures, each in a process of its own.

    python -m benchmarks.serving.object_readers TASK                     TASK is JSON
    python -m benchmarks.serving.object_readers download URL KEY BYTES   how long obstore takes for a large object

All loaders have batches of 16 and a new order in each epoch. They read the bytes of all objects and decode nothing. The
process prints a line of JSON when the loader knows its samples, and another after each epoch, and begins an
epoch when it reads a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.serving.paced_store import Bucket, bucket

BATCH, WORKERS = 16, 8
PART_BYTES, PARTS = 8 << 20, 8


@dataclass(frozen=True)
class Task:
    loader: str
    """One of LOADERS."""
    keys: list[str]
    prefix: str
    """Of all keys; a mount shows what lies below it."""
    store: str
    """The URL of the store."""
    root: str = ""
    """The mount point, or the directory for the loader's own cache."""
    planned: bool = False


class Objects(Dataset[int]):
    """All objects as samples; an item is how many bytes came."""

    def __init__(self, names: list[str], read: Callable[[str], int]) -> None:
        self.samples = [(name, 0) for name in names]
        self._read = read

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        return self._read(self.samples[index][0])


def download(url: str, key: str, size: int) -> None:
    """Print how long obstore takes for a large object, and the processor, with PARTS requests at a time."""
    import obstore

    store = bucket(url)
    begin, begin_cpu_s = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(PARTS) as threads:
        parts = threads.map(
            lambda at: len(obstore.get_range(store, key, start=at, length=min(PART_BYTES, size - at))),
            range(0, size, PART_BYTES),
        )
    assert sum(parts) == size
    print(time.perf_counter() - begin, time.process_time() - begin_cpu_s)


def read_once(path: str) -> int:
    """Read a file, and have the kernel forget it: pages are no part of a capacity."""
    with open(path, "rb", buffering=0) as file:
        size = len(file.readall())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return size


def files(task: Task) -> Iterable[Any]:
    names = [os.path.join(task.root, key.removeprefix(task.prefix)) for key in task.keys]
    # With a generator of its own the loader's next epoch can be planned early.
    loader = DataLoader(Objects(names, read_once), shuffle=True, generator=torch.Generator(), **_options())
    if task.planned:
        import trainer_hook

        trainer_hook.plan(task.root, loader)
    return loader


def _options() -> dict[str, Any]:
    return {"batch_size": BATCH, "num_workers": WORKERS, "persistent_workers": True}


LOADERS: dict[str, Callable[[Task], Iterable[Any]]] = {
    "obstore": lambda task: DataLoader(Objects(task.keys, Bucket(task.store).read), shuffle=True, **_options()),
    "files": files,
}


def main(arguments: list[str]) -> None:
    if arguments[0] == "download":
        download(arguments[1], arguments[2], int(arguments[3]))
        return
    torch.set_num_threads(1)
    # That eight workers are more than this machine has cores is meant so.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    task = Task(**json.loads(arguments[0]))
    loader = LOADERS[task.loader](task)
    print(json.dumps({}), flush=True)
    for _ in sys.stdin:
        begin = time.monotonic()
        sizes = torch.cat(list(loader))
        took_s = time.monotonic() - begin
        print(json.dumps({"took_s": took_s, "objects": len(sizes), "bytes": int(sizes.sum())}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
