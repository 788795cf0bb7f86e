"""What a sampler is about to draw, found out from a copy of it.

The sampler itself then draws when the loader asks, as it would have done without us; so neither the order of a training
nor the place of any random generator depends on whether somebody wanted to know it beforehand, and an epoch that is
left early leaves sampler and generators where it would have left them.

A copy has copies of the sampler's own generators; the global ones of torch (on the CPU), NumPy and Python are put back
afterwards. Data sets, modules and loaders are shared with the copy, for they may be large. A sampler that draws by
something else that it shares with a copy, a list or a generator of its module, say, or that runs a model or a loader,
is recognised by `why_not`, and is not rehearsed.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer_hook.elsewhere import shared_state


def why_not(sampler: Any) -> str | None:
    """Why what this sampler will draw cannot be found out from a copy of it; None if it can."""
    for part in _parts(sampler):
        shared = shared_state(part)
        if shared is not None:
            return f"{type(part).__name__} draws by {shared}, which a copy of it shares"
    try:
        _copied(sampler)
    except Exception as exc:
        return f"{type(sampler).__name__} cannot be copied ({exc})"
    return None


class Rehearsal:
    """One epoch's drawing by a copy of `sampler`; to be made when the loader makes its own iterator of it.

    Raises whatever the sampler raises.
    """

    def __init__(self, sampler: Any) -> None:
        self._original = sampler
        self._drawing: Iterator[Any] | None = None
        # One whose `__iter__` is a generator function does nothing before the first draw. Others may draw now.
        if not inspect.isgeneratorfunction(type(sampler).__iter__):
            self._begin()

    def draw(self, most: int) -> list[Any]:
        """The first `most` draws, to be asked for when the first of them is about to be drawn."""
        if self._drawing is None:
            self._begin()
        assert self._drawing is not None
        with _generators_kept():
            return list(itertools.islice(self._drawing, most))

    def _begin(self) -> None:
        self.sampler = _copied(self._original)
        """The copy, which is afterwards as the sampler will be."""
        with _generators_kept():
            self._drawing = iter(self.sampler)


@contextmanager
def _generators_kept() -> Iterator[None]:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _copied(sampler: Any) -> Any:
    shared = [value for part in _parts(sampler) for value in _attributes(part) if _is_shared(value)]
    return copy.deepcopy(sampler, {id(value): value for value in shared})


def _parts(sampler: Any) -> list[Any]:
    """A sampler and the samplers that it is made of."""
    parts = [sampler]
    for part in parts:
        for value in _attributes(part):
            if isinstance(value, Sampler) and not any(value is known for known in parts):
                parts.append(value)
    return parts


def _attributes(sampler: Any) -> list[Any]:
    return list(getattr(sampler, "__dict__", {}).values())


def _is_shared(value: Any) -> bool:
    return isinstance(value, Dataset | DataLoader | nn.Module)
