"""State that a sampler shares with a copy of itself, because it lies outside of the sampler's own attributes.

If a copy of a sampler shuffles a list of its module, or counts there, it changes what the sampler itself draws later.
This module finds such state in the sampler's code. It looks at the names that the class and its methods use: names of
their module and of the scope around them, defaults of arguments, and attributes of the class; and it looks at the
functions that they call in the same way. It looks into an installed package only if the sampler belongs to the same
package. Data sets count as constant, because samplers only read them.
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
_RUNS = (nn.Module, DataLoader)
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
