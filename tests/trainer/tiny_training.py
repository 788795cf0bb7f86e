"""Data sets whose samples can be told by their content, loaders of them, and a training."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from hook_daemon import HookDaemon, until
from listed import Listed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

SIZE = 50
CLASSES = 3
WIDTH = 8
# Two workers of a loader.
WORKERS: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}


class Numbered(Listed[tuple[Tensor, int]]):
    """Sample i is a one-hot-like row from which i can be read off its embedding."""

    def __init__(self, size: int = SIZE) -> None:
        self.samples = [(f"class{i % CLASSES}/{i}.png", i % CLASSES) for i in range(size)]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return features(index), index % CLASSES


class Indexed(Dataset[int]):
    """Sample i is i."""

    def __init__(self) -> None:
        self.samples = [(f"{number}.png", 0) for number in range(SIZE)]

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


class OfAll(Sampler[int]):
    """A sampler that draws as many samples as there are."""

    def __len__(self) -> int:
        return SIZE


def features(index: int) -> Tensor:
    return _features(index).clone()


@functools.cache
def _features(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return nn.functional.normalize(torch.randn(WIDTH, generator=generator), dim=0)


def samples_of(rows: Tensor) -> list[int]:
    """The samples that have these features."""
    table = torch.stack([_features(number) for number in range(SIZE)])
    return [int((row == table).all(1).nonzero()[0, 0]) for row in rows]


class Network(nn.Module):
    """Its classifier sees the features themselves, so that an embedding says which sample it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Identity()
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.classifier(self.body(inputs))  # type: ignore[no-any-return]


def loader(dataset: Dataset[Any] | None = None, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    settings: dict[str, Any] = {"batch_size": 8, "shuffle": True, "generator": generator} | options
    return DataLoader(dataset or Numbered(), **settings)


def own() -> torch.Generator:
    """A generator for one loader alone."""
    return torch.Generator().manual_seed(5)


def indexed(**options: Any) -> DataLoader[Any]:
    """A loader of samples that are their own indices."""
    if "batch_sampler" in options:
        return DataLoader(Indexed(), **options)
    return DataLoader(Indexed(), **({"batch_size": 8} | options))


def batches_of(batches: Iterable[Any]) -> list[list[int]]:
    """The indices in each batch, or in each sample where there are no batches."""
    return [torch.as_tensor(batch).reshape(-1).tolist() for batch in batches]


def train(model: nn.Module, batches: Any) -> Iterator[int]:
    """One epoch, step by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.train()
    for step, (inputs, labels) in enumerate(batches):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield step


def train_epoch(model: nn.Module, batches: Any) -> None:
    for _ in train(model, batches):
        pass


def recorded(daemon: HookDaemon, batches: int, tolerance: float = 2e-3) -> list[int]:
    """The indices that arrived, when `batches` have; every embedding must be that of the sample it is filed under."""
    until(lambda: len(daemon.sink.batches) >= batches)
    indices: list[int] = []
    for _, batch in daemon.sink.batches:
        expected = np.stack([features(int(index)).numpy() for index in batch.indices])
        np.testing.assert_allclose(batch.embeddings.astype(np.float32), expected, atol=tolerance)
        indices += batch.indices.tolist()
    assert len(daemon.sink.batches) == batches
    return indices
