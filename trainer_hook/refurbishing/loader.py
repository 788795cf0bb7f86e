"""Reusing partly augmented samples: data refurbishing ("Refurbish Your Training Data", section 4) for a loader.

The transforms of a data set are split. The result of the first part is kept and used in several epochs; the second part
runs at each use, so no two uses see the same image. `generations.py` decides which generation of a sample an epoch
uses; the sampler draws numbers that carry it (`RefurbishedDraw`). With `reuse="jobs"` several training runs use a
sample, each once (Seneca's augmented form), and the mount assigns the generations (`spiderfs/core/partials.py`).

**Splitting** (`SplitDataset`). Only a pipeline that runs all of its transforms one after the other can be split by a
number. A data set calls its transform wherever it likes and puts the result somewhere into its sample. So `FirstPart`
takes the transform's place and records what it returns; a `Seam` is where these very objects lie in the finished
sample, and there the other transforms continue. A data set that changes what its transform returns has no seam.

**The fingerprint** is the same in each training that would make the same samples, and in no other: the hash of the
pickled data set with its first transforms, of the source files of all classes and functions in it, and of the versions
of the libraries that decode and transform. States of random generators do not count, as a sample's seed decides
(`drawn_by`). What cannot be pickled, or whose source is no file, gets a unique name.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import hashlib
import importlib.metadata
import logging
import math
import os
import pickle
import random
import sys
import types
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils import data

from trainer_hook.connection.sample_list import samples_of
from trainer_hook.isolation import generators_kept
from trainer_hook.ranks import from_all_ranks, from_first_rank, rank_and_world
from trainer_hook.refurbishing.generations import Generations
from trainer_hook.refurbishing.sampler import RefurbishedDraw, RefurbishSampler, SharedDraw, SharedPartials
from trainer_hook.refurbishing.stores import Missing, MountStore, PartialStore, StoreUnusable, mount_of, pickled

Generator = np.random.Generator | np.random.RandomState | random.Random | torch.Generator
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
# What has no generator in it, and may be large.
_LEAVES = (str, bytes, int, float, type, enum.Enum, types.ModuleType, np.ndarray, torch.Tensor, type(None))
# What every module of torch has for itself, but for the table of the modules in it. With these, and with enumerations,
# a look at five transforms of torchvision took 190 microseconds in place of 40.
_OF_MODULES = frozenset(vars(torch.nn.Module())) - {"_modules"}
# A transform with more in it than this keeps data, and is looked at no further. A look takes a microsecond for each.
_MOST_LOOKED_AT = 2000


@contextmanager
def drawn_by(numbers: tuple[int, ...], *transforms: Any) -> Iterator[None]:
    """Let draws follow from these numbers (from 0 on); in the end all generators are as they were.

    A transform may have a generator of its own (albumentations, MONAI), which no seed of the program reaches. It is
    found among the attributes of the transform, and of what that is made of. OpenCV's generator cannot be read, so it
    is not put back, but goes on from what the training and the numbers make it.
    """
    own = own_generators(transforms)
    with generators_kept():
        states = [_state(generator) for generator in own]
        initial_seed = torch.initial_seed()
        try:
            sequence = np.random.SeedSequence(numbers)
            words = sequence.generate_state(4, np.uint64).tolist()
            torch.default_generator.manual_seed(words[0] >> 1)
            np.random.seed([word & 0xFFFFFFFF for word in words[1:3]])
            random.seed(words[3])
            if "cv2" in sys.modules:
                _seed_opencv(sequence)
            for place, generator in enumerate(own):
                _seed(generator, np.random.SeedSequence([*numbers, place]))
            yield
        finally:
            for put_back in states:
                put_back()
            if "cv2" in sys.modules:
                _seed_opencv(np.random.SeedSequence([initial_seed, *numbers]))


def own_generators(transforms: Any) -> list[Generator]:
    """The generators that lie in the attributes of transforms, each once, in the order of the attributes."""
    found: list[Generator] = []
    waiting, seen = [transforms], {id(transforms)}
    for number, value in enumerate(waiting):
        if number == _MOST_LOOKED_AT:
            break
        if isinstance(value, GENERATORS):
            if not isinstance(value, random.SystemRandom):
                found.append(value)
            continue
        for inner in _inside(value):
            if not isinstance(inner, _LEAVES) and id(inner) not in seen:
                seen.add(id(inner))
                waiting.append(inner)
    return found


def _inside(value: Any) -> list[Any]:
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        inner = value.values() if isinstance(value, Mapping) else value
        return list(inner) if len(inner) <= _MOST_LOOKED_AT else []
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType | types.BuiltinMethodType):
        return [value.__self__]
    if isinstance(value, types.FunctionType):
        cells = (cell for cell in value.__closure__ or () if cell != types.CellType())
        return [cell.cell_contents for cell in cells] + list(value.__defaults__ or ())
    if isinstance(value, torch.nn.Module):
        return [inner for name, inner in vars(value).items() if name not in _OF_MODULES]
    return list(getattr(value, "__dict__", {}).values())


def _seed_opencv(sequence: np.random.SeedSequence) -> None:
    sys.modules["cv2"].setRNGSeed(int(sequence.generate_state(1)[0]) >> 1)


def _seed(generator: Generator, sequence: np.random.SeedSequence) -> None:
    if isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(sequence).state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(np.random.RandomState(np.random.MT19937(sequence)).get_state())
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(int(sequence.generate_state(1, np.uint64)[0]) >> 1)
    else:
        generator.seed(int(sequence.generate_state(1, np.uint64)[0]))


def _state(generator: Generator) -> Callable[[], object]:
    """What puts a generator back into its present state."""
    if isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
        return lambda: setattr(generator.bit_generator, "state", state)
    if isinstance(generator, np.random.RandomState):
        return functools.partial(generator.set_state, generator.get_state())
    if isinstance(generator, torch.Generator):
        return functools.partial(generator.set_state, generator.get_state())
    return functools.partial(generator.setstate, generator.getstate())


# -- the split

Transform = Callable[..., Any]
# The way from a sample to something in it: keys of mappings, and numbers in tuples and lists.
Place = tuple[Any, ...]

# How a transform was called: with one value, with several, with keywords, or by Hugging Face with a batch of one row.
ONE, SEVERAL, NAMED, ROW = "one", "several", "named", "row"
# A sample with the results deeper in it than this is none that a data loader collates.
_DEEPEST = 4
# Values of these types may be the same object by chance, such as a label and a small number.
_PLAIN = (int, float, complex, str, bytes, type(None))


class Seam(NamedTuple):
    """One call of the first part: which part that was, how it was called, and where in the sample the result is.

    `whole` are the places of the result. If there are none, `items` has the places of each item of it, which is a
    mapping or a tuple, and `others` are items that the sample does not have.
    """

    part: int
    called: str
    whole: tuple[Place, ...]
    items: dict[Any, tuple[Place, ...]]
    others: dict[Any, Any]


class NoSeam(Exception):
    """The result of a transform is not in the sample; the text says of what kind it is."""


class Call(NamedTuple):
    part: int
    called: str
    result: Any


class FirstPart:
    """The first transforms of the pipeline with the number `part`; it adds each call to `calls`."""

    def __init__(self, transform: Transform, part: int, calls: list[Call], called: str | None = None) -> None:
        """`called` says how it is called, where that cannot be seen."""
        self.transform, self._part, self._calls, self._called = transform, part, calls, called

    def __call__(self, *values: Any, **named: Any) -> Any:
        result = self.transform(*values, **named)
        called = self._called or (NAMED if not values else SEVERAL if len(values) > 1 else ONE)
        self._calls.append(Call(self._part, called, result))
        return result


def seam_of(call: Call, sample: Any) -> Seam:
    """Where the result of a call is in a sample; raises NoSeam."""
    whole = _places(call.result, sample)
    if whole:
        return Seam(call.part, call.called, whole, {}, {})
    items, others = {}, {}
    for key, value in _items(call.result):
        if isinstance(value, _PLAIN):
            others[key] = value
        elif places := _places(value, sample):
            items[key] = places
        else:
            raise NoSeam(type(value).__name__)
    if not items:
        raise NoSeam(type(call.result).__name__)
    return Seam(call.part, call.called, (), items, others)


def _items(result: Any) -> list[tuple[Any, Any]]:
    if isinstance(result, Mapping):
        return list(result.items())
    return list(enumerate(result)) if isinstance(result, tuple | list) else []


def _places(value: Any, sample: Any) -> tuple[Place, ...]:
    found: list[Place] = []

    def look(there: Any, place: Place) -> None:
        if there is value:
            found.append(place)
        elif len(place) < _DEEPEST:
            for key, inner in _items(there):
                look(inner, (*place, key))

    look(sample, ())
    return tuple(found[:1] if isinstance(value, _PLAIN) else found)


def finished(sample: Any, seams: Sequence[Seam], rests: Sequence[Transform | None]) -> Any:
    """The sample with the other transforms applied; `rests` has those of each part, None where there are none."""
    for seam in seams:
        rest = rests[seam.part]
        if rest is None:
            continue
        if seam.whole:
            result = _applied(rest, seam.called, _at(sample, seam.whole[0]))
            for place in seam.whole:
                sample = _with(sample, place, result)
        else:
            values: Any = {key: _at(sample, places[0]) for key, places in seam.items.items()} | seam.others
            if seam.called != NAMED and all(type(key) is int for key in values):
                values = tuple(values[key] for key in range(len(values)))
            result = _applied(rest, seam.called, values)
            for key, places in seam.items.items():
                for place in places:
                    sample = _with(sample, place, result[key])
    return sample


def _applied(rest: Transform, called: str, value: Any) -> Any:
    if called == NAMED:
        return rest(**value)
    if called == SEVERAL:
        return rest(*value)
    if called == ROW:
        return {key: column[0] for key, column in rest({key: [cell] for key, cell in value.items()}).items()}
    return rest(value)


def _at(sample: Any, place: Place) -> Any:
    for key in place:
        sample = sample[key]
    return sample


def _with(sample: Any, place: Place, value: Any) -> Any:
    """A copy of the sample with this value at this place; what lies beside it is shared."""
    if not place:
        return value
    key, inner = place[0], _with(sample[place[0]], place[1:], value)
    if isinstance(sample, tuple):
        whole = [*sample[:key], inner, *sample[key + 1 :]]
        return sample._make(whole) if hasattr(sample, "_make") else type(sample)(whole)
    changed = copy.copy(sample)
    changed[key] = inner
    return changed


Functions = tuple[Transform, Transform]
# The first transforms of a pipeline, and the others, if there are any.
Parts = tuple[Transform, Transform | None]
# A sample half way, with its seams.
Half = tuple[tuple[Seam, ...], Any]
_GIVE_FUNCTIONS = "give two functions as split=(partial, final)"
# What a data set calls its pipeline: `transforms` gets the label too.
_NAMES = ("transform", "transforms")


class SplitDataset:
    """A data set whose pipeline is split: `half_way` gives its samples half way, and `finish` goes the rest of it."""

    def __init__(self, dataset: Any, split: int | Functions, seed: int = 0) -> None:
        """Raises ValueError for a data set, or a pipeline, that cannot be split so."""
        self._split = split
        self._seed = seed
        self._calls: list[Call] = []
        self._rests: list[Transform | None] = []
        self.firsts: list[Transform] = []
        """The first transforms of each pipeline: a ConcatDataset may have several."""
        self.partial = self._partial(dataset)
        """The data set with the first transforms alone."""

    def make(self, index: int, generation: int) -> Half:
        """A sample half way, as this generation of it is: the seed and both numbers decide its random draws."""
        with drawn_by((self._seed, index, generation), self.firsts):
            return self.half_way(index)

    def half_way(self, index: int) -> Half:
        """A sample half way; raises ValueError if the data set does more to it than its transform."""
        self._calls.clear()
        try:
            sample = self.partial[index]
            return self._seams(sample), sample
        finally:
            self._calls.clear()

    def finish(self, half: Half) -> Any:
        return finished(half[1], half[0], self._rests)

    def _seams(self, sample: Any) -> tuple[Seam, ...]:
        if self._calls and self._calls[0].called == ROW:
            return (Seam(self._calls[0].part, ROW, ((),), {}, {}),)
        name = type(self.partial).__name__
        if not self._calls:
            raise ValueError(f"{name} gave a sample without calling its transform, so it cannot be kept half way")
        try:
            return tuple(seam_of(call, sample) for call in self._calls)
        except NoSeam as exc:
            if isinstance(self._split, tuple) and len(self._calls) == 1:
                # Whoever gives two functions knows what comes between them.
                return (Seam(self._calls[0].part, ONE, ((0,) if isinstance(sample, tuple | list) else (),), {}, {}),)
            raise ValueError(
                f"{name} changes what its transform returns ({exc}), so the other transforms cannot go on from there:"
                f" do all of it in the transform, or {_GIVE_FUNCTIONS}, of which `final` gets the changed sample"
            ) from None

    def _partial(self, dataset: Any) -> Any:
        form = getattr(dataset, "format", None)
        if hasattr(dataset, "with_transform") and isinstance(form, dict) and form.get("type") == "custom":
            # A data set of the library `datasets` with a transform of its own (`set_transform`).
            return dataset.with_transform(self._first(dataset.format["format_kwargs"]["transform"], ROW))
        partial = copy.copy(dataset)
        name = next((name for name in _NAMES if getattr(dataset, name, None) is not None), None)
        if name is None and isinstance(self._split, tuple) and hasattr(dataset, _NAMES[0]):
            # A data set that has a place for a transform and none in it.
            name = _NAMES[0]
        if name is not None:
            pipeline = getattr(dataset, name)
            setattr(partial, name, self._first(pipeline))
            # torchvision's data sets keep the same transform a second time, beside that of the label.
            both = getattr(dataset, "transforms", None)
            if name == "transform" and both is not None and getattr(both, "transform", None) is pipeline:
                partial.transforms = copy.copy(both)
                partial.transforms.transform = partial.transform
            return partial
        if isinstance(dataset, data.Subset):
            partial.dataset = self._partial(dataset.dataset)
        elif isinstance(dataset, data.ConcatDataset):
            partial.datasets = [self._partial(part) for part in dataset.datasets]
        else:
            raise ValueError(
                f"{type(dataset).__name__} has no `transform`, in the place of which its first part could be put:"
                " refurbish a loader of a data set that has one, or of a Subset or ConcatDataset of such"
            )
        return partial

    def _first(self, pipeline: Any, called: str | None = None) -> FirstPart:
        parts: Parts = self._split if isinstance(self._split, tuple) else _parts(pipeline, self._split)
        first, rest = parts
        self.firsts.append(first)
        self._rests.append(rest)
        return FirstPart(first, len(self._rests) - 1, self._calls, called)


def _parts(pipeline: Any, split: int) -> Parts:
    steps = _steps(pipeline)
    if not 0 < split <= len(steps):
        raise ValueError(f"split={split}: there are {len(steps)} transforms; give the number before the split")
    rest = steps[split:]
    return _of_steps(pipeline, steps[:split]), _of_steps(pipeline, rest) if rest else None


def _steps(pipeline: Any) -> list[Transform]:
    """The transforms of which a pipeline runs one after the other; raises ValueError if it does anything else."""
    name = type(pipeline).__name__
    if isinstance(pipeline, list | tuple):
        return list(pipeline)
    if isinstance(pipeline, nn.Sequential) and _runs_as(pipeline, nn.Sequential):
        return list(pipeline)
    compose = next((kind for kind in type(pipeline).__mro__ if kind.__name__ == "Compose"), None)
    steps: Any = getattr(pipeline, "transforms", None)
    if compose is None or not hasattr(steps, "__iter__") or not _runs_as(pipeline, compose):
        raise ValueError(f"{name} is no list of transforms that run one after the other: {_GIVE_FUNCTIONS}")
    if getattr(pipeline, "p", 1) != 1:
        raise ValueError(f"{name} with p={pipeline.p} leaves some samples as they are: {_GIVE_FUNCTIONS}")
    if getattr(pipeline, "processors", None):
        raise ValueError(
            f"{name} follows {' and '.join(pipeline.processors)} through all of its transforms: {_GIVE_FUNCTIONS}"
        )
    return list(steps)


def _runs_as(pipeline: Any, kind: type[Any]) -> bool:
    """Whether a pipeline runs its transforms by the code of this class, and not by that of a class made from it."""
    return all(getattr(type(pipeline), name, None) is getattr(kind, name, None) for name in ("__call__", "forward"))


def _of_steps(pipeline: Any, steps: list[Any]) -> Transform:
    if isinstance(pipeline, list | tuple):
        return Chain(steps)
    if isinstance(pipeline, nn.Sequential):
        return nn.Sequential(*steps)
    part = copy.copy(pipeline)
    if isinstance(part, nn.Module):
        # A copy of a module shares its modules with it, unless it gets a table of its own.
        part._modules = dict(part._modules)
    part.transforms = type(pipeline.transforms)(steps)
    return part  # type: ignore[no-any-return]


class Chain:
    def __init__(self, transforms: list[Transform]) -> None:
        self.transforms = transforms

    def __call__(self, sample: Any) -> Any:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


# What decodes and transforms, as far as it is installed.
_LIBRARIES = ("torch", "torchvision", "numpy", "pillow", "opencv-python", "opencv-python-headless", "albumentations")


class _HashPickler(pickle.Pickler):
    """Pickles into a hash, and collects the modules of all classes and functions on the way."""

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)
        super().__init__(self, protocol=pickle.HIGHEST_PROTOCOL)
        self.modules: set[str] = set()

    def write(self, pickled: Any) -> None:
        # A list of a million samples is never in memory a second time.
        self.digest.update(pickled)

    def reducer_override(self, value: Any) -> Any:
        # This is asked of each object that pickle does not know by itself, and of classes and functions.
        kind = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
        self.modules |= {str(one.__module__) for one in getattr(kind, "__mro__", (kind,)) if one is not object}
        return (str, (kind.__qualname__,)) if isinstance(value, GENERATORS) else NotImplemented


def fingerprint(dataset: Any, *given: Any) -> str:
    """The name of what this data set gives with these transforms, and of all else that is `given`: 32 digits."""
    pickler = _HashPickler()
    digest = pickler.digest
    try:
        pickler.dump((given, dataset))
    except Exception:  # whatever a transform's own way of pickling raises
        return uuid.uuid4().hex
    digest.update(sys.version.encode())
    for library in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{library} {importlib.metadata.version(library)}".encode())
    for module in sorted(pickler.modules - set(sys.builtin_module_names)):
        file = getattr(sys.modules.get(module), "__file__", None)
        try:
            digest.update(hashlib.blake2b(Path(file or "").read_bytes()).digest())
        except OSError:
            return uuid.uuid4().hex
    return digest.hexdigest()


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


class RefurbishedDataset(data.Dataset[Any]):
    """A data set whose samples are kept half way.

    Everything else that is asked of it is answered by the data set that it is made of. `job` is that of the training if
    it shares samples with others, of which those in `kept` are kept.
    """

    def __init__(
        self, whole: Any, split: SplitDataset, store: Store, job: str | None, kept: npt.NDArray[np.bool_]
    ) -> None:
        self._whole, self._split, self._store = whole, split, store
        self._job, self._kept = job, kept

    def __getattr__(self, name: str) -> Any:
        # A copy that is being unpickled has no attributes yet.
        if name.startswith("__") or "_whole" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._whole, name)

    def __len__(self) -> int:
        return len(self._whole)

    def __getitem__(self, index: int) -> Any:
        # An index without a generation comes from no one's sampler; it is a sample as it always was.
        if not isinstance(index, RefurbishedDraw):
            return self._whole[index]
        try:
            half: Half = self._store.get(int(index), index.generation)
        except Missing:
            half = self._split.make(int(index), index.generation)
            if index.keeps:
                self._store.put(int(index), index.generation, half, index.replaces)
        return self._split.finish(half)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of a batch, as torch's loaders ask for them."""
        if self._job is not None:
            indices = self._in_turn(self._job, indices)
        return [self[index] for index in indices]

    def _in_turn(self, job: str, indices: Sequence[int]) -> Sequence[int]:
        """The same draws with the generations that this job is to use next."""
        draws = [index for index in indices if isinstance(index, SharedDraw)]
        if len(draws) < len(indices):
            return indices
        assert isinstance(self._store, MountStore)
        # New ones have a number from 1 on, and below 2^63.
        digest = hashlib.blake2b(f"{job} {draws[0].epoch}".encode(), digest_size=8).digest()
        new = 1 | int.from_bytes(digest, "little") >> 1
        shared = iter(self._store.turns([int(draw) for draw in draws if self._kept[draw]], new))
        return [next(shared) if self._kept[draw] else RefurbishedDraw(draw, new, keeps=False) for draw in draws]


def refurbish(
    loader: data.DataLoader[Any],
    *,
    split: int | Functions,
    reuse: int | Literal["jobs"] = 2,
    seed: int = 0,
    kept: float = 1.0,
    store: str | os.PathLike[str] | None = None,
) -> data.DataLoader[Any]:
    """A loader that uses the output of the first `split` transforms in `reuse` epochs (Revamper).

    The other transforms run at every use. With `reuse=1` this is `loader` itself. Otherwise the loader that is
    returned reads the same data set, in the same batches; it shuffles by itself, with the same share of samples made
    again in each batch, and each sample comes once an epoch. If ranks cannot have equally many samples, fewer than one
    for each rank are left out of an epoch.

    `split` counts the transforms of a pipeline: the data set's `transform` (or `transforms`, or what `set_transform`
    was given), which is a list, an nn.Sequential, or a Compose. For any other pipeline give two functions,
    `(partial, final)`: `partial` takes the pipeline's place, and `final` is called as it is called, with what `partial`
    returned. If a data set changes that first, `final` gets what the data set returns, without the label if that is a
    tuple.

    `kept` is the share of the samples that is reused; the others are made again in each epoch. If the files of the data
    set lie in a mount of this user's, they are kept in the mount's cache, as many of them as its option
    `partials_share` has room for; otherwise in memory (`/dev/shm`), where the ranks of one machine share them. With
    `store` they are kept in this directory, which is left as it is at the end: a later training that makes the same of
    the same files, which must not have changed, finds them there. The random draws of the partial transforms follow
    from `seed`, the sample and its generation: those of the generators of torch, numpy, Python and OpenCV, and of
    generators that are attributes of a transform. So what was lost is made again as it was.

    With `reuse="jobs"` trainings on one mount that call this alike (same files, transforms, and arguments) share what
    is kept: each of them uses it once, and who comes next makes it again. Each has an order of its own; with
    `plan(..., share=True)` they exchange samples as well. Without such a mount this is `loader` itself.

    Raises ValueError for a loader that does not shuffle or repeats samples, and for what cannot be split so.
    """
    if reuse != JOBS and (isinstance(reuse, str) or reuse < 1):
        raise ValueError(f'reuse={reuse!r}: give at least 1, which is standard training, or "jobs"')
    if not 0 < kept <= 1:
        raise ValueError(f"kept={kept}: give the share of the samples that is reused, above 0 and at most 1")
    if reuse == JOBS and store is not None:
        raise ValueError('reuse="jobs" shares samples through a mount: leave out store')
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
    except StoreUnusable as exc:
        log.warning("no augmented samples are shared with other trainings, as %s: this is standard training", exc)
        return loader
    uses = 1 if reuse == JOBS else reuse
    generations = Generations(len(whole), uses, round(kept * len(whole)), seed, order)
    dataset = RefurbishedDataset(whole, halves, keeper, job, generations.kept)
    shared = SharedPartials(keeper.name, job) if job is not None and isinstance(keeper, MountStore) else None
    # The loader may be freed sooner: libraries that run trainings make another one of it.
    weakref.finalize(dataset, keeper.close)
    arguments = {name: getattr(loader, name) for name in _ARGUMENTS if hasattr(loader, name)}
    if not loader.num_workers:
        # With these, torch refuses a loader without workers.
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            arguments.pop(name, None)
    return data.DataLoader(dataset, sampler=RefurbishSampler(generations, ranks, shared), **arguments)


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
    except StoreUnusable as exc:
        why_not = str(exc)
    first_in_mount, kept = from_first_rank((in_mount is not None, kept))
    shares = job is None or all(from_all_ranks(in_mount is not None))
    if in_mount is not None and first_in_mount and shares:
        return in_mount, kept
    if in_mount is not None:
        in_mount.close()
    if job is not None:
        raise StoreUnusable(why_not or "another rank has no mount for them")
    log.info("partly augmented samples are kept in memory, as %s", why_not or "the first rank has no mount for them")
    if first_in_mount:
        return PartialStore.in_memory(), kept
    # Ranks on one machine share what they make; on each other machine one rank makes the directory.
    store = PartialStore.in_memory() if rank_and_world()[0] == 0 else None
    directory: Path = from_first_rank(None if store is None else store.directory)
    if store is None:
        try:
            directory.mkdir(mode=0o700)
            store = PartialStore(directory, os.getpid())
        except FileExistsError:
            store = PartialStore(directory)
    return store, kept


def _mount_store(whole: Any, halves: SplitDataset, name: str, kept: float, job: str | None) -> tuple[MountStore, float]:
    """The mount's cache as the store, and the share of the samples that it has room for; raises StoreUnusable."""
    try:
        paths = [os.path.abspath(os.fsdecode(path)) for path, _ in samples_of(whole)]
    except ValueError as exc:
        raise StoreUnusable(str(exc)) from exc
    samples = len(whole)
    if len(paths) != samples:
        raise StoreUnusable(f"the data set has {samples} samples and names {len(paths)} files")
    mount = mount_of(paths)
    tried = {index: halves.make(index, 0) for index in range(0, samples, max(1, samples // _TRIED))}
    sizes = [len(pickled(half)) for half in tried.values()]
    each_bytes = _MARGIN * sum(sizes) / len(sizes)
    store = MountStore(mount, paths, name, math.ceil(kept * samples * each_bytes), job)
    room = store.room_bytes / each_bytes / samples
    try:
        if max(sizes) > store.most_bytes:
            raise StoreUnusable(
                f"one of them has {max(sizes):,} bytes, and {mount} takes sample_max_bytes={store.most_bytes}: split"
                " where samples are smaller, before they become floating-point numbers for example"
            )
        index, half = next(iter(tried.items()))
        store.put(index, 0, half)
        store.settle()
        try:
            store.get(index, 0)
        except Missing:
            raise StoreUnusable("an augmented sample in the mount's cache could not be read") from None
        if round(min(room, kept) * samples) == 0:
            raise StoreUnusable(f"the cache of {mount} has no room for them: give it more capacity, or partials_share")
    except StoreUnusable:
        store.close()
        raise
    if room < kept:
        log.info("the cache of %s has room for %.0f %% of the partly augmented samples", mount, 100 * room)
    return store, min(room, kept)


def _ranks(loader: data.DataLoader[Any]) -> tuple[int, int] | None:
    """This rank and the number of ranks, if the loader's sampler says so; raises ValueError for other samplers."""
    if type(loader).__iter__ is not data.DataLoader.__iter__:
        raise ValueError(
            f"{type(loader).__name__} is no DataLoader of torch, or draws in its own way: refurbish the DataLoader that"
            " it is made of, before it is prepared or wrapped"
        )
    if isinstance(loader.dataset, data.IterableDataset):
        raise ValueError("an iterable data set has no indices to reuse samples by: use a data set with __getitem__")
    if isinstance(loader.dataset, RefurbishedDataset):
        raise ValueError("this loader is refurbished already")
    if type(loader.batch_sampler) is not data.BatchSampler:
        raise ValueError("this loader has a batch sampler of its own: give batch_size and shuffle=True instead")
    sampler, dataset = loader.sampler, cast(Sized, loader.dataset)
    if isinstance(sampler, data.RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset):
        return None
    if isinstance(sampler, data.DistributedSampler) and sampler.shuffle:
        if rank_and_world()[1] == 1:
            return sampler.rank, sampler.num_replicas
        return None
    raise ValueError(
        f"{type(sampler).__name__} may repeat or leave out samples, or does not shuffle: give the loader shuffle=True,"
        " or a DistributedSampler that shuffles"
    )
