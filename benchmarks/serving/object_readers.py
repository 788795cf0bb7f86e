"""The loaders that `benchmarks.serving.object_store` measures, each in a process of its own.

    python -m benchmarks.serving.object_readers TASK        TASK is JSON

All loaders have batches of 16 and a new order in each epoch. They read the bytes of all objects and decode nothing. The
process prints a line of JSON when the loader knows its samples, and another after each epoch, and begins an epoch when
it is told a line. LitData has an environment of its own (benchmarks/install-peers), where much of spiderfs cannot be
imported: this module needs PyTorch and what `trainer_hook` needs alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

BATCH = 16


@dataclass(frozen=True)
class Task:
    loader: str
    """One of LOADERS."""
    keys: list[str]
    prefix: str
    """Of all keys; a mount shows what lies below it."""
    size: int
    """Of each object, bytes."""
    workers: int
    store: str
    """The URL of the store."""
    bucket: str
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


class Bucket:
    """GETs by obstore. The client is made in the loader's worker, because it does not outlive a fork."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._store: Any = None

    def read(self, key: str) -> int:
        import obstore
        from obstore.store import S3Store

        if self._store is None:
            options: Any = {"allow_http": True}
            self._store = S3Store(
                self._task.bucket,
                endpoint=self._task.store,
                region="us-east-1",
                skip_signature=True,
                client_options=options,
            )
        return len(obstore.get(self._store, key).bytes())


def read_once(path: str) -> int:
    """Read a file, and have the kernel forget it: pages are no part of a capacity."""
    with open(path, "rb", buffering=0) as file:
        size = len(file.readall())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return size


def obstore_alone(task: Task) -> Iterable[Any]:
    return DataLoader(Objects(task.keys, Bucket(task).read), shuffle=True, **_options(task))


def files(task: Task) -> Iterable[Any]:
    names = [os.path.join(task.root, key.removeprefix(task.prefix)) for key in task.keys]
    # With a generator of its own the loader's next epoch can be planned early.
    loader = DataLoader(Objects(names, read_once), shuffle=True, generator=torch.Generator(), **_options(task))
    if task.planned:
        import trainer_hook

        trainer_hook.plan(task.root, loader)
    return loader


def litdata(task: Task) -> Iterable[Any]:
    from litdata.raw import StreamingRawDataset
    from litdata.raw.indexer import FileIndexer, FileMetadata
    from litdata.streaming import downloader

    class Known(FileIndexer):  # type: ignore[misc]
        """The keys are known to all loaders here, so that no listing is measured."""

        def build_or_load_index(self, *_: Any, **__: Any) -> list[Any]:
            return [FileMetadata(path=f"s3://{task.bucket}/{key}", size=task.size) for key in task.keys]

    # The store speaks no TLS, which obstore otherwise refuses.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    signed = {"aws_access_key_id": "any", "aws_secret_access_key": "any", "region_name": "us-east-1"}
    dataset = StreamingRawDataset(
        f"s3://{task.bucket}/{task.prefix}",
        cache_dir=task.root,
        indexer=Known(),
        storage_options={"endpoint_url": task.store, **signed},
        transform=len,
    )
    return DataLoader(dataset, shuffle=True, **_options(task))


def _options(task: Task) -> dict[str, Any]:
    return {"batch_size": BATCH, "num_workers": task.workers, "persistent_workers": True}


LOADERS: dict[str, Callable[[Task], Iterable[Any]]] = {"obstore": obstore_alone, "files": files, "litdata": litdata}


def main(arguments: list[str]) -> None:
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
