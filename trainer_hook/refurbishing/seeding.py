"""Random draws that follow from some numbers: those of the global generators, and those of a transform's own.

A transform may have a generator of its own (albumentations, MONAI), which no seed of the program reaches. It is found
among the attributes of the transform, and of what that is made of. OpenCV's generator cannot be read, so it is not put
back, but goes on from what the training and the numbers make it.
"""

from __future__ import annotations

import enum
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from trainer_hook.isolation import generators_kept

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
    """Let draws follow from these numbers (from 0 on); in the end all generators are as they were."""
    own = own_generators(transforms)
    with generators_kept():
        states = [_state(generator) for generator in own]
        initial_seed = torch.initial_seed()
        try:
            _seed_global(np.random.SeedSequence(numbers))
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
    if isinstance(value, list | tuple | set | frozenset):
        return list(value) if len(value) <= _MOST_LOOKED_AT else []
    if isinstance(value, Mapping):
        return list(value.values()) if len(value) <= _MOST_LOOKED_AT else []
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


def _seed_global(sequence: np.random.SeedSequence) -> None:
    words = sequence.generate_state(4, np.uint64).tolist()
    torch.default_generator.manual_seed(words[0] >> 1)
    np.random.seed([word & 0xFFFFFFFF for word in words[1:3]])
    random.seed(words[3])
    if "cv2" in sys.modules:
        _seed_opencv(sequence)


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
