"""What a sampler may draw from, or change, that is no attribute of its own: a copy of the sampler shares that with it.

A copy that shuffles a list of its module, or counts there, would change what the sampler itself draws afterwards. Such
things are found in the code: in what a class and its methods name in their module, in the scope around them, as a
default or as an attribute of the class, and likewise in functions that they call. Code of installed packages is looked
at only where the sampler is of the same package. Data sets are taken for constant: samplers look at them only.
"""

from __future__ import annotations

import dis
import random
import sys
from collections import deque
from collections.abc import Iterator
from enum import Enum
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

# Their samplers draw from nothing but their own generators and the global ones.
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
# Instances of their classes are constant, but for those below.
_CONSTANT_PACKAGES = _KNOWN_PACKAGES | {"numpy"} | sys.stdlib_module_names
_STATE = (
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
# What a model or a loader gives it also changes: averages in the one, the place of generators in the other.
_RUNS = (nn.Module, DataLoader)
# Of a name that code assigns to.
_ASSIGNED = iter(())

Named = Iterator[tuple[str, Any]]


def shared_state(sampler: Any) -> str | None:
    """The name of something that this sampler shares with a copy and that may change; None if there is nothing."""
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
    if isinstance(value, (*_STATE, *_RUNS)):
        return True
    if isinstance(value, type | ModuleType | FunctionType | Dataset | Enum | tuple):
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
    # It grows meanwhile.
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
    seen |= {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    for name, value in seen.items():
        yield name, value
        if isinstance(value, type | ModuleType) and _package(_module_of(value)) not in _CONSTANT_PACKAGES:
            stored = {*_names(code, "STORE_ATTR")}
            for attribute, found in list(vars(value).items()):
                if attribute in looked_up | stored and not attribute.startswith("__"):
                    yield f"{name}.{attribute}", _ASSIGNED if attribute in stored else found


def _names(code: CodeType, *operations: str) -> Iterator[str]:
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in operations)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant, *operations)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _module_of(value: type[Any] | ModuleType) -> str:
    return value.__name__ if isinstance(value, ModuleType) else value.__module__


def _package(module: str) -> str:
    return module.partition(".")[0]
