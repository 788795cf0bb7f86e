"""Rehearsal: finding out what a sampler is about to draw, from a copy of it.

The sampler itself draws later, when the loader asks, as it would have done without us. So the order of a training and
the state of its random generators do not depend on a rehearsal, and an epoch that is left early leaves the sampler and
the generators as it would have left them without one.

The copy has copies of the sampler's own generators. The global generators of torch (on the CPU), NumPy and Python are
put back into their states afterwards. The copy shares data sets, models and loaders with the sampler, because these may
be large; of data sets that are no torch `Dataset`, the loader's own, and what samplers call so. `why_not` recognises a
sampler that draws by other state that it shares with its copy, for example by a list or a generator of its module, and
one that runs a model or a loader: such a sampler is not rehearsed.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer_hook.boundary import by_signal_handler
from trainer_hook.loader.shared_state import STATE, shared_state
from trainer_hook.random_state import generators_kept


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
            if (isinstance(value, Sampler) or _draws(value)) and not any(value is known for known in parts):
                parts.append(value)
    return parts


def _attributes(sampler: Any) -> dict[str, Any]:
    return dict(getattr(sampler, "__dict__", {}))


def _draws(value: Any) -> bool:
    """Whether this is a data set whose samples are the draws of a sampler, as Lightning makes one for its ranks."""
    return type(value).__name__ == "_DatasetSamplerWrapper" and isinstance(value, Dataset)


def _is_shared(part: Sampler[Any], name: str, value: Any) -> bool:
    if _draws(value):
        return False
    if isinstance(value, Dataset | DataLoader | nn.Module):
        return True
    # torch's samplers only ask for its length. Another sampler may keep a list there that it shuffles.
    return name in ("data_source", "dataset") and (
        type(part).__module__.startswith("torch.") or not isinstance(value, STATE)
    )
