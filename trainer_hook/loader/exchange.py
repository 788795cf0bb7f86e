"""One epoch of a loader that shares its list with other jobs: which samples each batch gets.

The mount is asked a batch ahead: when one batch is handed on to the loader's workers, the question for the next is
sent. Whatever it answers, or does not, `EpochOrder` hands each sample on exactly once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from trainer_hook.connection.client import HookClient
from trainer_hook.loader.epoch_order import EpochOrder, Indices
from trainer_hook.loader.repeating import is_repeating
from trainer_hook.refurbishing.sampler import RefurbishSampler, SharedDraw, SharedPartials
from trainer_hook.samplers.epoch import EpochSampler, PoolSampler

log = logging.getLogger("trainer_hook")

# An answer was asked for a batch ago, so it is nearly always there. After this time the batch goes on as it was
# planned, and no later one waits until an answer is there in time.
ANSWER_S = 0.1


@dataclass(eq=False)
class Exchanging:
    """`drawn` is the epoch as a copy of the sampler drew it; None if the epoch goes on in a saved order.

    `handed` is called with each batch that is handed on. `partials` is where jobs share partial samples.
    """

    client: HookClient
    name: str
    epoch: int
    order: EpochOrder
    drawn: Indices | None
    handed: Callable[[list[int]], None]
    partials: SharedPartials | None = None
    taken = 0
    """How many samples of the epoch the loop has taken."""

    def __post_init__(self) -> None:
        self._given: Callable[[float], Sequence[int] | None] | None = None
        self._patience_s = ANSWER_S
        self._asks = True
        self.follows_sampler = False
        """Whether the sampler's own draws count from now on, because its copy drew something else, or less."""
        # Then: what was handed on before its turn, and what was not, though its turn has come.
        self._early: set[int] = set()
        self._late: list[int] = []

    def stop(self) -> None:
        """Ask no more: the rest of the epoch goes on as it is planned now."""
        self._asks, self._given = False, None

    def follow_sampler(self) -> None:
        """Hand on what the sampler itself draws, and still hand on each of its draws once in the epoch.

        A saved order counts whatever the sampler draws.
        """
        if self.drawn is None or self.follows_sampler:
            return
        self.stop()
        self.follows_sampler = True
        handed, drawn = (whole[: self.order.position] for whole in (self.order.order, self.drawn))
        self._early = set(np.setdiff1d(handed, drawn).tolist())
        self._late = np.setdiff1d(drawn, handed).tolist()

    def batch(self, drawn: Sequence[int]) -> list[int]:
        """The next samples of the epoch, as many as the sampler has drawn for the batch, or fewer at the end."""
        if self.order.position == len(self.order):
            if self.drawn is None:
                return []
            self.follow_sampler()
        if self.follows_sampler:
            return [self._in_turn(sample) for sample in drawn]
        count = len(drawn)
        if self._given is None:
            self._ask((), count)
        given = None if self._given is None else self._given(self._patience_s)
        self._patience_s = 0.0 if given is None else ANSWER_S
        batch = self.order.hand_on(given or (), count)
        self.handed(batch)
        self._ask(batch, count)
        return batch

    def _in_turn(self, sample: int) -> int:
        if sample not in self._early:
            return sample
        self._early.remove(sample)
        return self._late.pop()

    def _ask(self, dispatched: Sequence[int], count: int) -> None:
        if not self._asks:
            return
        wanted = self.order.coming(count)
        position = self.order.position
        self._given = self.client.exchange(
            self.name, self.epoch, position, self.taken, dispatched, wanted, self.partials
        )


def like(drawn: Any, batch: Sequence[int]) -> Any:
    """A batch as its sampler would have drawn it, and of the same types: a number, an array, a tensor, or a list."""
    if isinstance(drawn, list | tuple):
        return type(drawn)(like(one, [index]) for one, index in zip(drawn, batch, strict=False))
    if type(drawn) is int:
        return batch[0]
    if isinstance(drawn, SharedDraw):
        return SharedDraw(batch[0], drawn.epoch)
    if isinstance(drawn, np.generic):
        return type(drawn)(batch[0])
    made = drawn.new_tensor(batch) if isinstance(drawn, torch.Tensor) else np.array(batch, drawn.dtype)
    return made.reshape(drawn.shape if math.prod(drawn.shape) == len(batch) else -1)


def why_not_replaced(batches: Iterable[Any], exchanged: Indices | None = None) -> str | None:
    """The reason why `like` cannot make batches like these of other samples; None if it can.

    `exchanged` is an epoch whose samples are to be exchanged: then none may be drawn twice.
    """
    if exchanged is not None and repeats(exchanged):
        return "its sampler draws some more than once in an epoch"
    # The types of indices, or of whole batches in one object.
    kinds: set[type] = set()
    for drawn in batches:
        kinds.update(map(type, drawn) if type(drawn) in (list, tuple) else (type(drawn),))
    other = next((kind for kind in kinds if not issubclass(kind, _KINDS) and kind is not int), None)
    return None if other is None else f"its sampler draws {other.__name__} objects, and not plain indices"


def repeats(order: Indices) -> bool:
    """Whether some index is drawn more than once."""
    return len(order) > 0 and int(np.bincount(order).max()) > 1


# `int` itself is plain too, but an object of a subclass of it may say more than its number.
_KINDS = (np.integer, np.ndarray, torch.Tensor, SharedDraw)


def refuse_repetition(loader: DataLoader[Any]) -> None:
    """Raise ValueError if the loader's sampler is known to draw samples more than once, or in an order with a meaning.

    A loader that repeats its sampler is refused too: its next round begins before the loop has taken this one.
    """
    if is_repeating(loader):
        raise ValueError(f"share=True: a {type(loader).__name__} repeats its sampler for ever: leave share out")
    for owner in (loader, loader.batch_sampler):
        sampler = getattr(owner, "sampler", None)
        if isinstance(sampler, RefurbishSampler) and sampler.shared is None:
            raise ValueError(
                "share=True: the order of a loader that was refurbished for one job says what is made again: leave "
                'share out, or refurbish with reuse="jobs"'
            )
        if isinstance(sampler, PoolSampler):
            raise ValueError("share=True: PoolSampler draws neighbours near each other: leave share out, or shuffle")
        if isinstance(sampler, EpochSampler) or getattr(sampler, "replacement", False):
            raise ValueError(
                f"share=True: {type(sampler).__name__} draws samples more than once in an epoch, so they cannot be "
                "exchanged: leave share out, or use a sampler that draws each sample once"
            )


def takes_part(share: bool, paths: Sequence[bytes]) -> bool:
    """Whether a loader of these files takes part, as the user has asked; logs a warning if it cannot."""
    if share and len(set(paths)) < len(paths):
        log.warning(
            "the loader's samples are not exchanged: %d of its %d samples are files that the list has before: name "
            "each file once, or leave share out",
            len(paths) - len(set(paths)),
            len(paths),
        )
        return False
    return share
