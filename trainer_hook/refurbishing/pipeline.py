"""Splitting the pipeline of a data set: a data set that stops half way, and what is left to do with its samples.

Only what runs all of its transforms one after the other can be split by a number: a list, an nn.Sequential, and the
`Compose` of torchvision, of albumentations, of MONAI, and of programs that have written one themselves. Whatever else
has a list `transforms` (RandomApply, OneOf, RandomOrder) chooses among them, so it is one step.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.utils.data import ConcatDataset, Subset

from trainer_hook.refurbishing.seam import ONE, ROW, Call, FirstPart, NoSeam, Seam, Transform, finished, seams_of

Functions = tuple[Transform, Transform]
# The first transforms of a pipeline, and the others, if there are any.
Parts = tuple[Transform, Transform | None]
# A sample half way, with its seams.
Half = tuple[tuple[Seam, ...], Any]
_GIVE_FUNCTIONS = "give two functions as split=(partial, final)"
# What a data set calls its pipeline: `transforms` gets the label too.
_NAMES = ("transform", "transforms")


class Split:
    """A data set whose pipeline is split: `half_way` gives its samples half way, and `finish` goes the rest of it."""

    def __init__(self, dataset: Any, split: int | Functions) -> None:
        """Raises ValueError for a data set, or a pipeline, that cannot be split so."""
        self._split = split
        self._calls: list[Call] = []
        self._rests: list[Transform | None] = []
        self.firsts: list[Transform] = []
        """The first transforms of each pipeline: a ConcatDataset may have several."""
        self.partial = self._partial(dataset)
        """The data set with the first transforms alone."""

    def half_way(self, index: int) -> Half:
        """A sample half way; raises ValueError if the data set does more to it than its transform."""
        self._calls.clear()
        try:
            sample = self.partial[index]
            return self._seams(sample), sample
        finally:
            self._calls.clear()

    def finish(self, half: Half) -> Any:
        """The sample, with the other transforms applied."""
        return finished(half[1], half[0], self._rests)

    def _seams(self, sample: Any) -> tuple[Seam, ...]:
        if self._calls and self._calls[0].called == ROW:
            return (Seam(self._calls[0].part, ROW, ((),), {}, {}),)
        name = type(self.partial).__name__
        if not self._calls:
            raise ValueError(f"{name} gave a sample without calling its transform, so it cannot be kept half way")
        try:
            return seams_of(self._calls, sample)
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
    """A pipeline like this one, of some of its transforms."""
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
    """Transforms that are applied one after the other."""

    def __init__(self, transforms: list[Transform]) -> None:
        self.transforms = transforms

    def __call__(self, sample: Any) -> Any:
        for transform in self.transforms:
            sample = transform(sample)
        return sample
