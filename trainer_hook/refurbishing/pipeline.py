"""Splitting the pipeline of a data set: a data set that stops half way, and what is left to do with its samples.

Only what runs all of its transforms one after the other can be split by a number: a list, an nn.Sequential, and the
`Compose` of torchvision, of albumentations, of MONAI, and of programs that have written one themselves. Whatever else
has a list `transforms` (RandomApply, OneOf, RandomOrder) chooses among them, so it is one step.

A data set calls its transform wherever it likes: once or for each of two views, with an image, with an image and its
boxes, with a mapping, or with keywords as albumentations wants it. What it gets, it puts somewhere into its sample. So
`FirstPart`, which takes the transform's place, records what it returns, and in the finished sample these very objects
are looked for. A `Seam` says where they are: there the other transforms go on, at each use. It is kept with the sample.
A data set that changes what its transform returns has no seam, because the other transforms would run on something
else than in standard training.

The **fingerprint** of a pipeline names what it makes of a sample: it is the same in each training that would make the
same, and in no other. It is the hash of the pickled data set with its first transforms, of the source files of all
classes and functions in it, and of the versions of the libraries that decode and transform. The whole data set counts,
because a sample is made of its label too, and of whatever else the data set goes by. States of random generators do not
count, because what they draw for a sample follows from its seed (`seeding.py`). What cannot be pickled, or whose source
is no file, gets a name that nobody else has.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.metadata
import pickle
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.utils.data import ConcatDataset, Subset

from trainer_hook.refurbishing.seeding import GENERATORS, drawn_by

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
        if _is_hugging_face(dataset):
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
        if isinstance(dataset, Subset):
            partial.dataset = self._partial(dataset.dataset)
        elif isinstance(dataset, ConcatDataset):
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


def _is_hugging_face(dataset: Any) -> bool:
    """Whether this is a data set of the library `datasets` with a transform of its own (`set_transform`)."""
    form = getattr(dataset, "format", None)
    return hasattr(dataset, "with_transform") and isinstance(form, dict) and form.get("type") == "custom"


def _parts(pipeline: Any, split: int) -> Parts:
    steps = _steps(pipeline)
    if not 0 < split <= len(steps):
        raise ValueError(
            f"split={split}: there are {len(steps)} transforms; say how many of them come before the split"
        )
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


class _Pickler(pickle.Pickler):
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
    pickler = _Pickler()
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
