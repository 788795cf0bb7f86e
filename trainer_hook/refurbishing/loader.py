"""Reusing partly augmented samples: data refurbishing ("Refurbish Your Training Data", section 4) for a loader.

The transforms of a data set are split. What the first part makes of a sample is kept and used in several epochs; the
second part runs at each use, so no two uses see the same image. `generations.py` says which generation of a sample an
epoch uses. The sampler draws numbers that carry their generation (`Draw`); to everybody else, hooks and plans too,
they are indices.

With `reuse="jobs"` it is several trainings that use a sample, each once (Seneca's augmented form). Then the mount says
which generation each of them uses next (`spiderfs/core/partials/turns.py`), and loader workers ask for a batch at a
time.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import uuid
import weakref
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any, Literal, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

from trainer_hook.connection.sample_list import samples_of
from trainer_hook.ranks import from_all_ranks, from_first_rank, rank_and_world
from trainer_hook.refurbishing.directory_store import Missing, PartialStore, pickled
from trainer_hook.refurbishing.generations import Generations
from trainer_hook.refurbishing.mount_store import MountStore, Unusable, mount_of
from trainer_hook.refurbishing.pipeline import Functions, Half, SplitDataset, fingerprint
from trainer_hook.refurbishing.sampler import Draw, RefurbishSampler

log = logging.getLogger("trainer_hook")

Store = PartialStore | MountStore
# How many samples are made to learn how large partial samples are, and by which factor their mean may be larger.
_TRIED, _MARGIN = 8, 1.05
# A loader's arguments that its attributes give back under the same names.
_ARGUMENTS = (
    "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn",
    "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "pin_memory_device",
    "in_order",
)  # fmt: skip
# `reuse` of samples that jobs share.
JOBS: Literal["jobs"] = "jobs"


class RefurbishedDataset(Dataset[Any]):
    """A data set whose samples are kept half way.

    Everything else that is asked of it is answered by the data set that it is made of. `job` is that of the training if
    it shares samples with others.
    """

    def __init__(self, whole: Any, split: SplitDataset, store: Store, job: str | None = None) -> None:
        self._whole = whole
        self._split = split
        self._store = store
        self._job = job

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
        return self._split.finish(self._half_way(index))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of a batch, as torch's loaders ask for them."""
        if self._job is not None:
            indices = self._in_turn(self._job, indices)
        return [self[index] for index in indices]

    def _half_way(self, draw: Draw) -> Half:
        index, generation = int(draw), draw.generation
        try:
            half: Half = self._store.get(index, generation)
        except Missing:
            half = self._split.make(index, generation)
            if draw.keeps:
                self._store.put(index, generation, half, draw.replaces)
        return half

    def _in_turn(self, job: str, indices: Sequence[int]) -> Sequence[int]:
        """The same draws with the generations that this job is to use next."""
        draws = [index for index in indices if isinstance(index, Draw)]
        if len(draws) < len(indices):
            return indices
        assert isinstance(self._store, MountStore)
        # Where samples are used once, the generation of a draw is the epoch.
        new = _number(job, draws[0].generation)
        shared = iter(self._store.turns([int(draw) for draw in draws if draw.keeps], new))
        return [next(shared) if draw.keeps else Draw(draw, new, keeps=False) for draw in draws]


def _number(job: str, epoch: int) -> int:
    """The number of the generations that a job makes in an epoch: from 1 on, and below 2^63."""
    digest = hashlib.blake2b(f"{job} {epoch}".encode(), digest_size=8).digest()
    return 1 | int.from_bytes(digest, "little") >> 1


def refurbish(
    loader: DataLoader[Any],
    *,
    split: int | Functions,
    reuse: int | Literal["jobs"] = 2,
    seed: int = 0,
    kept: float = 1.0,
    store: str | os.PathLike[str] | None = None,
) -> DataLoader[Any]:
    """A loader that uses what the first `split` transforms make of a sample in `reuse` epochs (Revamper).

    The other transforms run at every use. With `reuse=1` this is `loader` itself. Otherwise the loader that is
    returned reads the same data set, in the same batches; it shuffles by itself, with the same share of samples made
    anew in each batch, and each sample comes once an epoch. If ranks cannot have equally many samples, fewer than one
    for each rank are left out of an epoch.

    `split` counts the transforms of a pipeline: the data set's `transform` (or `transforms`, or what `set_transform`
    was given), which is a list, an nn.Sequential, or a Compose. For any other pipeline give two functions,
    `(partial, final)`: `partial` takes the pipeline's place, and `final` is called as it is called, with what `partial`
    returned. If a data set changes that first, `final` gets what the data set returns, without the label if that is a
    tuple.

    `kept` is the share of the samples that is reused; the others are made anew in each epoch. If the files of the data
    set lie in a mount of this user's, they are kept in the mount's cache, as many of them as its option
    `partials_share` has room for; otherwise in memory (`/dev/shm`), where the ranks of one machine share them. With
    `store` they are kept in this directory, which is left as it is at the end: a later training that makes the same of
    the same files, which must not have changed, finds them there. The random draws of the partial transforms follow
    from `seed`, the sample and its generation: those of the generators of torch, numpy, Python and OpenCV, and of
    generators that are attributes of a transform. So what was lost is made again as it was.

    With `reuse="jobs"` trainings on one mount that call this alike (same files, transforms, and arguments) share what
    is kept: each of them uses it once, and who comes next makes it anew. Each has an order of its own. Without such a
    mount this is `loader` itself.

    Raises ValueError for a loader that does not shuffle or repeats samples, and for what cannot be split so.
    """
    _check(reuse, kept, store)
    if reuse == 1:
        return loader
    ranks = _ranks(loader)
    whole: Any = loader.dataset
    halves = SplitDataset(whole, split, seed)
    name, job, order = fingerprint(halves.partial, seed, reuse), None, 0
    if reuse == JOBS:
        job = from_first_rank(uuid.uuid4().hex)
        # Ranks that begin later could not know the job.
        order, ranks = int(job, 16), ranks or rank_and_world()
    try:
        keeper, kept = _store(store, whole, halves, name, kept, job)
    except Unusable as exc:
        log.warning("no augmented samples are shared with other trainings, as %s: this is standard training", exc)
        return loader
    uses = 1 if reuse == JOBS else reuse
    generations = Generations(len(whole), uses, round(kept * len(whole)), seed, order)
    dataset = RefurbishedDataset(whole, halves, keeper, job)
    # The loader may be freed sooner: libraries that run trainings make another one of it.
    weakref.finalize(dataset, keeper.close)
    return _like(loader, dataset, RefurbishSampler(generations, ranks))


def _check(reuse: Any, kept: float, store: Any) -> None:
    if reuse != JOBS and (isinstance(reuse, str) or reuse < 1):
        raise ValueError(f'reuse={reuse!r}: give at least 1, which is standard training, or "jobs"')
    if not 0 < kept <= 1:
        raise ValueError(f"kept={kept}: give the share of the samples that is reused, above 0 and at most 1")
    if reuse == JOBS and store is not None:
        raise ValueError('reuse="jobs" shares samples through a mount: leave out store')


def _like(loader: DataLoader[Any], dataset: RefurbishedDataset, sampler: RefurbishSampler) -> DataLoader[Any]:
    arguments = {name: getattr(loader, name) for name in _ARGUMENTS if hasattr(loader, name)}
    if not loader.num_workers:
        # With these, torch refuses a loader without workers.
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            arguments.pop(name, None)
    return DataLoader(dataset, sampler=sampler, **arguments)


def _store(
    given: str | os.PathLike[str] | None, whole: Any, halves: SplitDataset, name: str, kept: float, job: str | None
) -> tuple[Store, float]:
    """The store, and the share of the samples that it is to keep: all ranks are given that of the first.

    Raises Unusable if there is no mount by which a job could share samples.
    """
    # Where transforms have no name that others would find, each rank has made up one.
    name, in_mount, why_not = from_first_rank(name), None, ""
    if given is not None:
        Path(given).mkdir(mode=0o700, parents=True, exist_ok=True)
        return PartialStore(Path(given), name=name), kept
    try:
        in_mount, kept = _mount_store(whole, halves, name, kept, job)
    except Unusable as exc:
        why_not = str(exc)
    first_in_mount, kept = from_first_rank((in_mount is not None, kept))
    shares = job is None or all(from_all_ranks(in_mount is not None))
    if in_mount is not None and first_in_mount and shares:
        return in_mount, kept
    if in_mount is not None:
        in_mount.close()
    if job is not None:
        raise Unusable(why_not or "another rank has no mount for them")
    log.info("partly augmented samples are kept in memory, as %s", why_not or "the first rank has no mount for them")
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


def _mount_store(whole: Any, halves: SplitDataset, name: str, kept: float, job: str | None) -> tuple[MountStore, float]:
    """The mount's cache as the store, and the share of the samples that it has room for; raises Unusable."""
    try:
        paths = [os.path.abspath(os.fsdecode(path)) for path, _ in samples_of(whole)]
    except ValueError as exc:
        raise Unusable(str(exc)) from exc
    samples = len(whole)
    if len(paths) != samples:
        raise Unusable(f"the data set has {samples} samples and names {len(paths)} files")
    mount = mount_of(paths)
    tried = {index: halves.make(index, 0) for index in range(0, samples, max(1, samples // _TRIED))}
    sizes = [len(pickled(half)) for half in tried.values()]
    each_bytes = _MARGIN * sum(sizes) / len(sizes)
    store = MountStore(mount, paths, name, math.ceil(kept * samples * each_bytes), job)
    room = store.room_bytes / each_bytes / samples
    try:
        if max(sizes) > store.most_bytes:
            raise Unusable(
                f"one of them has {max(sizes):,} bytes, and {mount} takes sample_max_bytes={store.most_bytes}: split"
                " where samples are smaller, before they become floating-point numbers for example"
            )
        _try_out(store, *next(iter(tried.items())))
        if round(min(room, kept) * samples) == 0:
            raise Unusable(f"the cache of {mount} has no room for them: give it more capacity, or partials_share")
    except Unusable:
        store.close()
        raise
    if room < kept:
        log.info("the cache of %s has room for %.0f %% of the partly augmented samples", mount, 100 * room)
    return store, min(room, kept)


def _try_out(store: MountStore, index: int, half: Half) -> None:
    store.put(index, 0, half)
    store.settle()
    try:
        store.get(index, 0)
    except Missing:
        raise Unusable("what was put into the mount's cache could not be read") from None


def _ranks(loader: DataLoader[Any]) -> tuple[int, int] | None:
    """This rank and the number of ranks, if the loader's sampler says so; raises ValueError for other samplers."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ValueError(
            f"{type(loader).__name__} is no DataLoader of torch, or draws in its own way: refurbish the DataLoader that"
            " it is made of, before it is prepared or wrapped"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError("an iterable data set has no indices to reuse samples by: use a data set with __getitem__")
    if isinstance(loader.dataset, RefurbishedDataset):
        raise ValueError("this loader is refurbished already")
    if type(loader.batch_sampler) is not BatchSampler:
        raise ValueError("this loader has a batch sampler of its own: give batch_size and shuffle=True instead")
    sampler, dataset = loader.sampler, cast(Sized, loader.dataset)
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset):
        return None
    if isinstance(sampler, DistributedSampler) and sampler.shuffle:
        if rank_and_world()[1] == 1:
            return sampler.rank, sampler.num_replicas
        return None
    raise ValueError(
        f"{type(sampler).__name__} may repeat or leave out samples, or does not shuffle: give the loader shuffle=True,"
        " or a DistributedSampler that shuffles"
    )
