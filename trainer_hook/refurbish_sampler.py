"""The sampler of a refurbished loader: it draws samples together with their generations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from trainer_hook.generations import Generations
from trainer_hook.ranks import rank_and_world


class Draw(int):
    """An index of a data set, with the generation of the sample that is wanted."""

    generation: int

    def __new__(cls, index: int, generation: int) -> Draw:
        draw = super().__new__(cls, index)
        draw.generation = generation
        return draw

    def __reduce__(self) -> tuple[Any, ...]:
        return Draw, (int(self), self.generation)


class RefurbishSampler(Sampler[int]):
    """Draws each sample once an epoch, so that each batch has the same share of samples that are made anew."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._next = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw this epoch next; without this call the epochs come in order."""
        self._next = epoch

    def __len__(self) -> int:
        return self._generations.samples // rank_and_world()[1]

    def __iter__(self) -> Iterator[int]:
        epoch, self._next = self._next, self._next + 1
        generation = self._generations.of_epoch(epoch)
        for index in self._generations.order(epoch, *rank_and_world()).tolist():
            yield Draw(index, int(generation[index]))
