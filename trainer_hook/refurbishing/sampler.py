"""The sampler of a refurbished loader: it draws samples together with their generations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import DistributedSampler

from trainer_hook.isolation import callers
from trainer_hook.ranks import rank_and_world
from trainer_hook.refurbishing.generations import Generations

# What accelerate makes of a loader on several ranks.
_DEALERS = ("BatchSamplerShard", "DataLoaderDispatcher")


class RefurbishedDraw(int):
    """An index of a data set, with the generation of the sample that is wanted.

    If `keeps`, the sample is kept for later uses, in the place of the generation `replaces`.
    """

    generation: int
    keeps: bool
    replaces: int | None

    def __new__(cls, index: int, generation: int, keeps: bool = True, replaces: int | None = None) -> RefurbishedDraw:
        draw = super().__new__(cls, index)
        draw.generation, draw.keeps, draw.replaces = generation, keeps, replaces
        return draw

    def __reduce__(self) -> tuple[Any, ...]:
        return RefurbishedDraw, (int(self), self.generation, self.keeps, self.replaces)


class SharedDraw(int):
    """An index of a data set whose partial samples jobs share: the mount assigns the generation when a worker asks.

    So a draw says nothing but its sample and its epoch, and jobs may exchange it.
    """

    epoch: int

    def __new__(cls, index: int, epoch: int) -> SharedDraw:
        draw = super().__new__(cls, index)
        draw.epoch = epoch
        return draw

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedDraw, (int(self), self.epoch)


class SharedPartials(NamedTuple):
    """The store in which jobs share partial samples, and this training's job there (`protocol.PartialSamples`)."""

    store: str
    job: str


class RefurbishSampler(DistributedSampler[int]):
    """Draws each sample once an epoch, so that each batch has the same share of samples that are made again.

    Its epochs are dealt out to the ranks of the training, so programs that look for a DistributedSampler leave it be.
    """

    # Nothing of what torch's sampler does is needed, and its attributes would be fixed before the ranks are known.
    def __init__(
        self, generations: Generations, ranks: tuple[int, int] | None = None, shared: SharedPartials | None = None
    ) -> None:
        """`ranks` is this rank and the number of ranks, if they are others than torch.distributed says.

        `shared` is where jobs share the partial samples; None if they do not.
        """
        self.shared = shared
        self._generations = generations
        self._ranks = ranks
        self._next, self._taken = 0, 0

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The rank whose share of each epoch is drawn."""
        return (self._ranks or rank_and_world())[0]

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        return (self._ranks or rank_and_world())[1]

    def set_epoch(self, epoch: int, taken: int | None = None) -> None:
        """Draw this epoch next; without this call the epochs come in order.

        `taken` says how many samples of it this rank has trained on already: a training that goes on in the middle of
        an epoch gets the others. If the epoch is the next one anyhow, an earlier `taken` of it holds.
        """
        if taken is not None and not 0 <= taken <= len(self):
            raise ValueError(f"taken={taken}: an epoch has {len(self)} samples for each rank")
        if taken is not None or epoch != self._next:
            self._next, self._taken = epoch, taken or 0

    def __len__(self) -> int:
        return self._generations.samples // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        if self._ranks is not None and rank_and_world()[1] not in (1, self._ranks[1]):
            raise RuntimeError(
                f"the loader was refurbished for {self._ranks[1]} ranks, and the training has {rank_and_world()[1]}:"
                " call refurbish after torch.distributed.init_process_group"
            )
        if self.num_replicas > 1 and any(type(caller).__name__ in _DEALERS for caller in callers()):
            raise RuntimeError(
                "accelerate's prepare would deal this rank's samples out to all ranks once more: leave the refurbished"
                " loader out of prepare, and move its batches to the device"
            )
        epoch, taken = self._next, self._taken
        self._next, self._taken = epoch + 1, 0
        order = self._generations.order(epoch, self.rank, self.num_replicas)[taken:].tolist()
        if self.shared is not None:
            yield from (SharedDraw(index, epoch) for index in order)
            return
        generation = self._generations.of_epoch(epoch)
        for index in order:
            number = int(generation[index])
            yield RefurbishedDraw(index, number, bool(self._generations.kept[index]), number - 1 if number else None)
