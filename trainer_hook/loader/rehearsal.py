"""Rehearsal: predicting the draws of a sampler with a copy of it.

The sampler itself draws later, as it would have done without us, also if an epoch is left early. The copy has copies of
the sampler's own generators; the global ones of torch (on the CPU), NumPy and Python are put back afterwards. It shares
data sets, models and loaders with the sampler, because these may be large.

**State that a sampler shares with its copy**, such as a list of its module, would change what the sampler draws later;
such a sampler is not rehearsed, nor is one that runs a model or a loader (`why_not`). The state is found in the code:
by the names that the class and its methods use (names of their module and of the scope around them, defaults of
arguments, attributes of the class), and in the functions that they call in the same way. An installed package is looked
into only if the sampler belongs to it. Data sets count as constant, because samplers only read them.

**Later epochs** are foreseen (`NextEpoch`) for a SequentialSampler, a DistributedSampler, accelerate's
SeedableRandomSampler, and torch's samplers with a `torch.Generator` of their own or the loader's, also if accelerate
deals out the batches. torch's global generator cannot be foreseen, because the training draws from it too.
"""

from __future__ import annotations

import copy
import dis
import inspect
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import data

from trainer_hook.isolation import by_signal_handler, generators_kept
from trainer_hook.loader.repeating import is_repeating

# The samplers of these packages draw from nothing but their own generators and the global ones.
_KNOWN_PACKAGES = {
    "accelerate",
    "builtins",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "torch",
    "torchdata",
    "transformers",
    "typing",
}
# Instances of the classes of these packages count as constant, except for those in `STATE`.
_CONSTANT_PACKAGES = _KNOWN_PACKAGES | {"numpy"} | sys.stdlib_module_names
STATE = (
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
    list,
    dict,
    set,
    bytearray,
    deque,
    np.ndarray,
    Tensor,
    Iterator,
)
# Running a model or a loader changes it: a model's averages, a loader's generators.
_RUNS = (nn.Module, data.DataLoader)
# Stands for the value of a name that code assigns to: it counts as state.
_ASSIGNED = iter(())

Named = Iterator[tuple[str, Any]]


def shared_state(sampler: Any) -> str | None:
    """The name of state that this sampler shares with a copy of itself; None if there is none."""
    kinds = [kind for kind in type(sampler).__mro__ if _package(kind.__module__) not in _KNOWN_PACKAGES]
    if not kinds:
        return None
    attributes: dict[str, Any] = getattr(sampler, "__dict__", {})
    for name, value in attributes.items():
        if isinstance(value, _RUNS):
            return name
    found: Iterator[str] = (name for name, value in _named_by(kinds) if _is_state(value))
    return next(found, None)


def _is_state(value: Any) -> bool:
    if isinstance(value, (*STATE, *_RUNS)):
        return True
    if isinstance(value, type | ModuleType | FunctionType | data.Dataset | Enum | tuple):
        return False
    return _package(type(value).__module__) not in _CONSTANT_PACKAGES


def _named_by(kinds: list[type[Any]]) -> Named:
    functions: list[FunctionType] = []
    for kind in kinds:
        for name, value in vars(kind).items():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if not isinstance(function, FunctionType):
                if not name.startswith(("__", "_abc_")):
                    yield name, value
            elif name not in ("__init__", "__new__"):
                functions.append(function)
    # The list grows while it is read.
    for function in functions:
        for name, value in _used_by(function):
            yield name, value
            if isinstance(value, FunctionType) and value not in functions and _is_looked_at(value, function):
                functions.append(value)


def _is_looked_at(function: FunctionType, caller: FunctionType) -> bool:
    package = _package(function.__module__)
    if package in _CONSTANT_PACKAGES:
        return False
    file = getattr(sys.modules.get(function.__module__), "__file__", None) or ""
    return package == _package(caller.__module__) or "-packages" not in file


def _used_by(function: FunctionType) -> Named:
    code = function.__code__
    loaded, looked_up = set(_names(code, "LOAD_GLOBAL")), set(_names(code, "LOAD_ATTR", "LOAD_METHOD"))
    assigned = {*_names(code, "STORE_GLOBAL", "DELETE_GLOBAL")}
    assigned.update({*_names(code, "STORE_DEREF")} & {*code.co_freevars})
    yield from ((name, _ASSIGNED) for name in sorted(assigned))
    yield from ((function.__name__, default) for default in function.__defaults__ or ())
    seen = {name: function.__globals__.get(name) for name in sorted(loaded)}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    seen |= {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    for name, value in seen.items():
        yield name, value
        if not isinstance(value, type | ModuleType):
            continue
        if _package(value.__name__ if isinstance(value, ModuleType) else value.__module__) not in _CONSTANT_PACKAGES:
            stored = {*_names(code, "STORE_ATTR")}
            for attribute, found in list(vars(value).items()):
                if attribute in looked_up | stored and not attribute.startswith("__"):
                    yield f"{name}.{attribute}", _ASSIGNED if attribute in stored else found


def _names(code: CodeType, *operations: str) -> Iterator[str]:
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in operations)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant, *operations)


def _package(module: str) -> str:
    return module.partition(".")[0]


def why_not(sampler: Any, dataset: Any) -> str | None:
    """The reason why this sampler of a loader with this data set cannot be rehearsed; None if it can be."""
    for part in _parts(sampler):
        shared = shared_state(part)
        if shared is not None:
            return f"{type(part).__name__} draws by {shared}, which a copy of it shares"
    try:
        _copied(sampler, dataset)
    except Exception as exc:
        if by_signal_handler(exc):
            raise
        return f"{type(sampler).__name__} cannot be copied ({exc})"
    return None


class Rehearsal:
    """A rehearsal of one epoch of a loader's `sampler`; to be made when the loader makes its own iterator of it.

    The methods raise whatever the sampler raises.
    """

    def __init__(self, sampler: Any, dataset: Any) -> None:
        self._original = sampler
        self._dataset = dataset
        self._drawing: Iterator[Any] | None = None
        self._copies: dict[int, Any] = {}
        # A sampler whose `__iter__` is a generator does nothing before the first draw; others may draw now.
        if not inspect.isgeneratorfunction(type(sampler).__iter__):
            self._begin()

    def draw(self, most: int) -> list[Any]:
        """The first `most` draws; to be called when the sampler is about to make the first of them."""
        if self._drawing is None:
            self._begin()
        assert self._drawing is not None
        if inspect.isgenerator(self._drawing):
            # It has drawn nothing yet, but the loader may have, for the seeds of its workers.
            for original in self._copies.get(id(self._copies), ()):
                if isinstance(original, torch.Generator):
                    self._copies[id(original)].set_state(original.get_state())
        with generators_kept():
            return list(itertools.islice(self._drawing, most))

    def go_on(self, state: Any) -> None:
        """Go on in the epoch as the sampler's own iterator does, which was given this state."""
        if self._drawing is None:
            self._begin()
        with generators_kept():
            self._drawing.load_state_dict(state)  # type: ignore[union-attr]

    def _begin(self) -> None:
        self.sampler = _copied(self._original, self._dataset, self._copies)
        """The copy; after `draw` it is in the state that the sampler will have at the end of the epoch."""
        with generators_kept():
            self._drawing = iter(self.sampler)


def _copied(sampler: Any, dataset: Any, copies: dict[int, Any] | None = None) -> Any:
    """A copy of the sampler; `copies` gets what `copy.deepcopy` has copied, by identity."""
    copies = {} if copies is None else copies
    named = [(part, name, value) for part in _parts(sampler) for name, value in _attributes(part).items()]
    shared = [value for part, name, value in named if value is dataset or _is_shared(part, name, value)]
    copies.update({id(value): value for value in shared})
    return copy.deepcopy(sampler, copies)


def _parts(sampler: Any) -> list[Any]:
    """A sampler and what it is made of: samplers, and data sets that are samplers in disguise (`_draws`)."""
    parts = [sampler]
    for part in parts:
        for value in _attributes(part).values():
            if (isinstance(value, data.Sampler) or _draws(value)) and not any(value is known for known in parts):
                parts.append(value)
    return parts


def _attributes(sampler: Any) -> dict[str, Any]:
    return dict(getattr(sampler, "__dict__", {}))


def _draws(value: Any) -> bool:
    """Whether this is a data set whose samples are the draws of a sampler, as Lightning makes one for its ranks."""
    return type(value).__name__ == "_DatasetSamplerWrapper" and isinstance(value, data.Dataset)


def _is_shared(part: data.Sampler[Any], name: str, value: Any) -> bool:
    if _draws(value):
        return False
    if isinstance(value, data.Dataset | data.DataLoader | nn.Module):
        return True
    # torch's samplers only ask for its length. Another sampler may keep a list there that it shuffles.
    return name in ("data_source", "dataset") and (
        type(part).__module__.startswith("torch.") or not isinstance(value, STATE)
    )


_WITH_GENERATOR = (data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)


def sampler_of(index_sampler: Any) -> Any:
    """The sampler whose draws an index sampler makes batches of; itself, if it makes none."""
    batches = _dealt(index_sampler) or index_sampler
    return getattr(batches, "sampler", batches)


def _dealt(index_sampler: Any) -> Any:
    """The batch sampler whose batches accelerate deals out to the ranks; None where it does not."""
    return index_sampler.batch_sampler if _is_accelerates(index_sampler, "BatchSamplerShard") else None


def _is_accelerates(sampler: Any, kind: str) -> bool:
    return type(sampler).__module__.startswith("accelerate.") and type(sampler).__name__ == kind


def batches_of(index_sampler: Any, indices: Iterable[int]) -> list[Any] | None:
    """The batches of a loader's index sampler if its sampler draws `indices`; None if it is of an unknown kind."""
    if not isinstance(index_sampler, data.BatchSampler):
        return list(indices)
    dealt = _dealt(index_sampler)
    if type(dealt or index_sampler).__iter__ is not data.BatchSampler.__iter__:
        return None
    cut = copy.copy(dealt or index_sampler)
    cut.sampler = indices
    if dealt is None:
        return list(cut)
    dealer: Any = copy.copy(index_sampler)
    dealer.batch_sampler = cut
    return list(dealer)


class NextEpoch:
    """Foresees the next epochs of one loader; the loader draws its batches from `index_sampler`."""

    def __init__(self, loader: data.DataLoader[Any], index_sampler: Any) -> None:
        self._index_sampler = index_sampler
        self._sampler = sampler_of(index_sampler)
        # Each new iterator of a loader first draws a seed for its loader workers from the loader's generator.
        shared = loader.generator is not None and getattr(self._sampler, "generator", None) is loader.generator
        makes_iterators = not (loader.persistent_workers and loader.num_workers) and not is_repeating(loader)
        self._draws_seeds = shared and makes_iterators
        # By how much the training increases a DistributedSampler's epoch: by 1, or by 0 if it does not call set_epoch.
        self._step = 1
        self._epoch_before: int | None = None

    def drawn(self) -> None:
        """Learn how the training numbers its epochs; to be called once in each epoch, before `foresee`."""
        if _draws_like(self._sampler, data.DistributedSampler):
            if self._epoch_before is not None:
                self._step = self._sampler.epoch - self._epoch_before
            self._epoch_before = self._sampler.epoch

    def foresee(self, ended: Any, passed: int = 0) -> list[Any] | None:
        """The epoch that comes `passed` epochs after the next one; None if it cannot be known.

        `ended` is the index sampler, or a copy of it, in its state at the end of the current epoch.
        """
        copied = self._at_begin(sampler_of(ended), passed)
        return None if copied is None else batches_of(self._index_sampler, copied)

    def _at_begin(self, sampler: Any, passed: int) -> Iterable[int] | None:
        """A copy of the sampler in its state at the beginning of that epoch; None if that cannot be known."""
        if _draws_like(sampler, data.SequentialSampler):
            return sampler  # type: ignore[no-any-return]
        if _draws_like(sampler, data.DistributedSampler):
            copied = copy.copy(sampler)
            copied.epoch = sampler.epoch + self._step * (1 + passed)
            return copied  # type: ignore[no-any-return]
        if _is_accelerates(sampler, "SeedableRandomSampler"):
            copied = copy.copy(sampler)
            # It seeds its generator again in each epoch, and has the number of the next one when an epoch has ended.
            copied.generator = torch.Generator()
            copied.epoch = sampler.epoch + passed
            return copied  # type: ignore[no-any-return]
        if any(_draws_like(sampler, kind) for kind in _WITH_GENERATOR) and sampler.generator is not None:
            copied = copy.copy(sampler)
            copied.generator = torch.Generator(sampler.generator.device)
            copied.generator.set_state(sampler.generator.get_state())
            for _ in range(passed):
                self._begin_iterator(copied.generator)
                deque(copied, maxlen=0)
            self._begin_iterator(copied.generator)
            return copied  # type: ignore[no-any-return]
        return None

    def _begin_iterator(self, copied: torch.Generator) -> None:
        if self._draws_seeds:
            torch.empty((), dtype=torch.int64).random_(generator=copied)


def _draws_like(sampler: Any, kind: type[Any]) -> bool:
    draw: Callable[..., Any] = kind.__iter__
    return isinstance(sampler, kind) and type(sampler).__iter__ is draw
