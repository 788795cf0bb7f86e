"""Reusing partly augmented samples: data refurbishing ("Refurbish Your Training Data", section 4) for a loader.

The transforms of a data set are split. What the first part makes of a sample is kept and used in several epochs; the
second part runs at each use, so no two uses see the same image. `generations.py` says which generation of a sample an
epoch uses. The sampler draws numbers that carry their generation (`Draw`); to everybody else, hooks and plans too,
they are indices.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
import weakref
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from trainer_hook.generations import Generations
from trainer_hook.partial_store import Missing, PartialStore
from trainer_hook.ranks import from_first_rank, rank_and_world
from trainer_hook.rehearsal import generators_kept

Transform = Callable[[Any], Any]
# A loader's arguments that its attributes give back under the same names.
_ARGUMENTS = (
    "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn",
    "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "pin_memory_device",
)  # fmt: skip


class Draw(int):
    """An index of a data set, with the generation of the sample that is wanted."""

    generation: int

    def __new__(cls, index: int, generation: int) -> Draw:
        draw = super().__new__(cls, index)
        draw.generation = generation
        return draw

    def __reduce__(self) -> tuple[Any, ...]:
        return Draw, (int(self), self.generation)


class RefurbishSampler(Sampler[int]):
    """Draws each sample once an epoch, so that each batch has the same share of samples that are made anew."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._next = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw this epoch next; without this call the epochs come in order."""
        self._next = epoch

    def __len__(self) -> int:
        return self._generations.samples // rank_and_world()[1]

    def __iter__(self) -> Iterator[int]:
        epoch, self._next = self._next, self._next + 1
        generation = self._generations.of_epoch(epoch)
        for index in self._generations.order(epoch, *rank_and_world()).tolist():
            yield Draw(index, int(generation[index]))


class RefurbishedDataset(Dataset[Any]):
    """A data set whose samples are kept half way: `partial` gives them half way, `final` goes the rest of it.

    Everything else that is asked of it is answered by the data set that it is made of.
    """

    def __init__(self, whole: Any, partial: Any, final: Transform, store: PartialStore, keeps: Generations, seed: int):
        self._whole = whole
        self._partial = partial
        self._final = final
        self._store = store
        self._generations = keeps
        self._seed = seed

    def __getattr__(self, name: str) -> Any:
        # A copy that is being unpickled has no attributes yet.
        if name.startswith("__") or "_whole" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._whole, name)

    def __len__(self) -> int:
        return len(self._whole)

    def __getitem__(self, index: int) -> Any:
        # An index without a generation comes from nobody's sampler; it is a sample as it always was.
        if not isinstance(index, Draw):
            return self._whole[index]
        return _applied(self._final, self._half_way(index))

    def _half_way(self, draw: Draw) -> Any:
        index, generation = int(draw), draw.generation
        try:
            return self._store.get(index, generation)
        except Missing:
            pass
        with generators_kept():
            _seed_all(self._seed, index, generation)
            sample = self._partial[index]
        if self._generations.is_kept(index):
            self._store.put(index, generation, sample)
        return sample


def refurbish(
    loader: DataLoader[Any],
    *,
    split: int | tuple[Transform, Transform],
    reuse: int = 2,
    seed: int = 0,
    kept: float = 1.0,
    store: str | os.PathLike[str] | None = None,
) -> DataLoader[Any]:
    """A loader that uses what the first `split` transforms make of a sample in `reuse` epochs (Revamper).

    The other transforms run at every use. With `reuse=1` this is `loader` itself. Otherwise the loader that is
    returned reads the same data set, in the same batches; it shuffles by itself, with the same share of samples made
    anew in each batch, and each sample comes once an epoch. If ranks cannot have equally many samples, fewer than one
    for each rank are left out of an epoch.

    `split` counts the transforms of a pipeline: the data set's `transform`, which is a list, an nn.Sequential, or has
    a list `transforms`, as Compose has. For any other data set give two functions, `(partial, final)`: `partial`
    takes the place of its `transform`, and `final` gets what the data set returns, without the label if that is a
    tuple. A data set that returns mappings gets its final transforms applied to the mapping as a whole.

    `kept` is the share of the samples that is reused; the others are made anew in each epoch. They are kept in memory
    (`/dev/shm`), where the ranks of one machine share them, or in the directory `store`, which is left as it is at
    the end. They are no part of a mount's cache. The random draws of the partial transforms follow from `seed`, the
    sample and its generation (for the generators of torch, numpy and Python; not for generators of a transform's
    own). So a training that resumes goes on with `loader.sampler.set_epoch`, and what was lost is made again as it
    was.

    Raises ValueError for a loader that does not shuffle, or whose sampler repeats samples.
    """
    if reuse < 1:
        raise ValueError(f"reuse={reuse}: give at least 1, which is standard training")
    if not 0 < kept <= 1:
        raise ValueError(f"kept={kept}: give the share of the samples that is reused, above 0 and at most 1")
    if reuse == 1:
        return loader
    _check(loader)
    whole: Any = loader.dataset
    partial, final = _split(whole, split)
    samples = len(whole)
    generations = Generations(samples, reuse, round(kept * samples), seed)
    keeper, is_own = _store(store)
    dataset = RefurbishedDataset(whole, partial, final, keeper, generations, seed)
    arguments = {name: getattr(loader, name) for name in _ARGUMENTS if hasattr(loader, name)}
    if not loader.num_workers:
        # With these, torch refuses a loader without workers.
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            arguments.pop(name, None)
    refurbished = DataLoader(dataset, sampler=RefurbishSampler(generations), **arguments)
    if is_own:
        weakref.finalize(refurbished, _remove, os.getpid(), keeper.directory)
    return refurbished


def _store(given: str | os.PathLike[str] | None) -> tuple[PartialStore, bool]:
    """The store, and whether this process has made its directory and is to remove it."""
    if given is not None:
        Path(given).mkdir(mode=0o700, parents=True, exist_ok=True)
        return PartialStore(Path(given)), False
    is_first = rank_and_world()[0] == 0
    directory: Path = from_first_rank(PartialStore.in_memory().directory if is_first else None)
    try:
        # Ranks on one machine share what they make; on each other machine one rank makes the directory.
        directory.mkdir(mode=0o700)
    except FileExistsError:
        return PartialStore(directory), is_first
    return PartialStore(directory), True


def _remove(owner: int, directory: Path) -> None:
    # Loader workers are forks of the training, and end while it goes on.
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


def _check(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError("an iterable data set has no indices to reuse samples by: use a data set with __getitem__")
    if type(loader.batch_sampler) is not BatchSampler:
        raise ValueError("this loader has a batch sampler of its own: give batch_size and shuffle=True instead")
    sampler, dataset = loader.sampler, cast(Sized, loader.dataset)
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset):
        return
    if isinstance(sampler, DistributedSampler) and sampler.shuffle:
        return
    raise ValueError(
        f"{type(sampler).__name__} may repeat or leave out samples, or does not shuffle: give the loader shuffle=True,"
        " or a DistributedSampler that shuffles"
    )


def _split(dataset: Any, split: int | tuple[Transform, Transform]) -> tuple[Any, Transform]:
    """The data set with the first transforms alone, and the other transforms as one function."""
    pipeline = getattr(dataset, "transform", None)
    if isinstance(split, tuple):
        first, rest = split
    else:
        if pipeline is None:
            raise ValueError("this data set has no `transform`: give two functions as split=(partial, final)")
        first, rest = _parts(pipeline, split)
    partial = copy.copy(dataset)
    partial.transform = first
    # torchvision's data sets keep the same transform a second time, beside that of the label.
    both = getattr(dataset, "transforms", None)
    if both is not None and getattr(both, "transform", None) is pipeline:
        partial.transforms = copy.copy(both)
        partial.transforms.transform = first
    return partial, rest


def _parts(pipeline: Any, split: int) -> tuple[Transform, Transform]:
    steps = pipeline if isinstance(pipeline, list | tuple | nn.Sequential) else getattr(pipeline, "transforms", None)
    if steps is None or not hasattr(steps, "__len__"):
        raise ValueError(
            f"{type(pipeline).__name__} is no list of transforms: give two functions as split=(partial, final)"
        )
    if not 0 < split <= len(steps):
        raise ValueError(
            f"split={split}: there are {len(steps)} transforms; say how many of them come before the split"
        )
    return Chain(list(steps)[:split]), Chain(list(steps)[split:])


class Chain:
    """Transforms that are applied one after the other."""

    def __init__(self, transforms: list[Transform]) -> None:
        self.transforms = transforms

    def __call__(self, sample: Any) -> Any:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


def _applied(final: Transform, sample: Any) -> Any:
    if isinstance(sample, tuple | list):
        whole = [final(sample[0]), *sample[1:]]
        return sample._make(whole) if hasattr(sample, "_make") else type(sample)(whole)
    return final(sample)


def _seed_all(*numbers: int) -> None:
    words = np.random.SeedSequence(numbers).generate_state(4, np.uint64).tolist()
    torch.default_generator.manual_seed(words[0] >> 1)
    np.random.seed([word & 0xFFFFFFFF for word in words[1:3]])
    random.seed(words[3])
