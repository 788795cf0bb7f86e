"""Reusing partly augmented samples: data refurbishing ("Refurbish Your Training Data", section 4) for a loader.

The transforms of a data set are split. What the first part makes of a sample is kept and used in several epochs; the
second part runs at each use, so no two uses see the same image. `generations.py` says which generation of a sample an
epoch uses. The sampler draws numbers that carry their generation (`Draw`); to everybody else, hooks and plans too,
they are indices.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import random
import weakref
from collections.abc import Callable, Sized
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
    Subset,
)

from trainer_hook.fingerprint import fingerprint
from trainer_hook.generations import Generations
from trainer_hook.mount_store import MountStore, Unusable, mount_of
from trainer_hook.partial_store import Missing, PartialStore, pickled
from trainer_hook.ranks import from_first_rank, rank_and_world
from trainer_hook.refurbish_sampler import Draw, RefurbishSampler
from trainer_hook.rehearsal import generators_kept
from trainer_hook.sample_list import samples_of

log = logging.getLogger("trainer_hook")

Transform = Callable[[Any], Any]
Store = PartialStore | MountStore
# So many samples are made to learn how large partial samples are; by so much they may be larger in the mean.
_TRIED, _MARGIN = 8, 1.05
# A loader's arguments that its attributes give back under the same names.
_ARGUMENTS = (
    "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn",
    "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "pin_memory_device",
    "in_order",
)  # fmt: skip


class RefurbishedDataset(Dataset[Any]):
    """A data set whose samples are kept half way: `partial` gives them half way, `final` goes the rest of it.

    Everything else that is asked of it is answered by the data set that it is made of.
    """

    def __init__(self, whole: Any, partial: Any, final: Transform, store: Store, keeps: Generations, seed: int):
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
        sample = _made(self._partial, index, generation, self._seed)
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
    a list `transforms`, as Compose has. For any other `transform` give two functions, `(partial, final)`: `partial`
    takes its place, and `final` gets what the data set returns, without the label if that is a tuple. A data set that
    returns mappings gets its final transforms applied to the mapping as a whole. Of a Subset the `transform` is that of
    the data set in it.

    `kept` is the share of the samples that is reused; the others are made anew in each epoch. If the files of the data
    set lie in a mount of this user's, they are kept in the mount's cache, as many of them as its option
    `partials_share` has room for. Otherwise they are kept in memory (`/dev/shm`), where the ranks of one machine share
    them. With `store` they are kept in this directory, which is left as it is at the end: a later training that makes
    the same of the same files, which must not have changed, finds them there. The random draws of the
    partial transforms follow from `seed`, the sample and its generation (for the generators of torch, numpy and
    Python; not for generators of a transform's own). So a training that resumes goes on with
    `loader.sampler.set_epoch`, and what was lost is made again as it was.

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
    partial, first, final = _split(whole, split)
    samples = len(whole)
    keeper, kept = _store(store, whole, partial, fingerprint(partial, first, seed, reuse), seed, kept)
    generations = Generations(samples, reuse, round(kept * samples), seed)
    dataset = RefurbishedDataset(whole, partial, final, keeper, generations, seed)
    arguments = {name: getattr(loader, name) for name in _ARGUMENTS if hasattr(loader, name)}
    if not loader.num_workers:
        # With these, torch refuses a loader without workers.
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            arguments.pop(name, None)
    refurbished = DataLoader(dataset, sampler=RefurbishSampler(generations), **arguments)
    weakref.finalize(refurbished, keeper.close)
    return refurbished


def _store(
    given: str | os.PathLike[str] | None, whole: Any, partial: Any, name: str, seed: int, kept: float
) -> tuple[Store, float]:
    """The store, and the share of the samples that it is to keep: all ranks are given that of the first."""
    # Where transforms have no name that others would find, each rank has made up one.
    name, in_mount = from_first_rank(name), None
    if given is not None:
        Path(given).mkdir(mode=0o700, parents=True, exist_ok=True)
        return PartialStore(Path(given), name=name), kept
    try:
        in_mount, kept = _mount_store(whole, partial, name, seed, kept)
    except Unusable as exc:
        log.info("partly augmented samples are kept in memory, as %s", exc)
    first_in_mount, kept = from_first_rank((in_mount is not None, kept))
    if in_mount is not None and first_in_mount:
        return in_mount, kept
    if in_mount is not None:
        in_mount.close()
    if first_in_mount:
        return PartialStore.in_memory(), kept
    return _in_shared_memory(), kept


def _in_shared_memory() -> PartialStore:
    store = PartialStore.in_memory() if rank_and_world()[0] == 0 else None
    directory: Path = from_first_rank(None if store is None else store.directory)
    if store is not None:
        return store
    try:
        # Ranks on one machine share what they make; on each other machine one rank makes the directory.
        directory.mkdir(mode=0o700)
    except FileExistsError:
        return PartialStore(directory)
    return PartialStore(directory, os.getpid())


def _mount_store(whole: Any, partial: Any, name: str, seed: int, kept: float) -> tuple[MountStore, float]:
    """The mount's cache as the store, and the share of the samples that it has room for; raises Unusable."""
    try:
        paths = [os.path.abspath(os.fsdecode(path)) for path, _ in samples_of(whole)]
    except ValueError as exc:
        raise Unusable(str(exc)) from exc
    samples = len(whole)
    if len(paths) != samples:
        raise Unusable(f"the data set has {samples} samples and names {len(paths)} files")
    mount = mount_of(paths)
    tried = {index: _made(partial, index, 0, seed) for index in range(0, samples, max(1, samples // _TRIED))}
    each_bytes = _MARGIN * sum(len(pickled(sample)) for sample in tried.values()) / len(tried)
    store = MountStore(mount, paths, name, math.ceil(kept * samples * each_bytes))
    room = store.room_bytes / each_bytes / samples
    try:
        _try_out(store, *next(iter(tried.items())))
        if round(min(room, kept) * samples) == 0:
            raise Unusable(f"the cache of {mount} has no room for them: give it more capacity, or partials_share")
    except Unusable:
        store.close()
        raise
    if room < kept:
        log.info("the cache of %s has room for %.0f %% of the partly augmented samples", mount, 100 * room)
    return store, min(room, kept)


def _try_out(store: MountStore, index: int, sample: Any) -> None:
    """Put a sample, and read it; raises Unusable if that does not work."""
    store.put(index, 0, sample)
    store.settle()
    try:
        store.get(index, 0)
    except Missing:
        raise Unusable("what was put into the mount's cache could not be read") from None


def _made(partial: Any, index: int, generation: int, seed: int) -> Any:
    """A partial sample, drawn by what its generation says."""
    with generators_kept():
        _seed_all(seed, index, generation)
        return partial[index]


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


def _split(dataset: Any, split: int | tuple[Transform, Transform]) -> tuple[Any, Transform, Transform]:
    """The data set with the first transforms alone, these as one function, and the other transforms as another."""
    partial = copy.copy(dataset)
    if isinstance(dataset, Subset):
        partial.dataset, first, rest = _split(dataset.dataset, split)
        return partial, first, rest
    if not hasattr(dataset, "transform"):
        raise ValueError(
            f"{type(dataset).__name__} has no `transform`, in the place of which its first part could be put: refurbish"
            " a loader of a data set that has one, or of a Subset of it"
        )
    pipeline = dataset.transform
    first, rest = split if isinstance(split, tuple) else _parts(pipeline, split)
    partial.transform = first
    # torchvision's data sets keep the same transform a second time, beside that of the label.
    both = getattr(dataset, "transforms", None)
    if both is not None and getattr(both, "transform", None) is pipeline:
        partial.transforms = copy.copy(both)
        partial.transforms.transform = first
    return partial, first, rest


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
