"""One epoch of a loader that shares its list with other jobs: which samples each batch gets.

Before a batch goes to the loader's workers, the mount is asked what to take in its place, a batch ahead: when one batch
is handed on, the question for the next one is sent. Whatever the mount answers, or does not, `OwnOrder` hands each
sample of the epoch on exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from trainer_hook.client import Client
from trainer_hook.own_order import Indices, OwnOrder
from trainer_hook.refurbish_sampler import RefurbishSampler
from trainer_hook.sampler import SpiderSampler

# An answer was asked for a batch ago, so it is nearly always there. After this time the batch goes on as it was
# planned, and no later one waits until an answer is there in time.
ANSWER_S = 0.1


class Exchanging:
    def __init__(self, client: Client, name: str, epoch: int, order: OwnOrder) -> None:
        self._client = client
        self._name = name
        self._epoch = epoch
        self.order = order
        self._given: Callable[[float], Sequence[int] | None] | None = None
        self._patience_s = ANSWER_S
        self._asks = True
        self.taken = order.position
        """How many samples of the epoch the loop has taken."""

    @property
    def ended(self) -> bool:
        """Whether all samples of the epoch have been handed on."""
        return self.order.position == len(self.order)

    def stop(self) -> None:
        """Ask no more: the rest of the epoch goes on as it is planned now."""
        self._asks, self._given = False, None

    def batch(self, count: int) -> list[int]:
        """The next `count` samples of the epoch, fewer at its end."""
        if self._given is None:
            self._ask((), count)
        given = None if self._given is None else self._given(self._patience_s)
        self._patience_s = 0.0 if given is None else ANSWER_S
        batch = self.order.hand_on(given or (), count)
        self._ask(batch, count)
        return batch

    def _ask(self, dispatched: Sequence[int], count: int) -> None:
        if not self._asks:
            return
        wanted = self.order.coming(count)
        position = self.order.position
        self._given = self._client.exchange(self._name, self._epoch, position, self.taken, dispatched, wanted)


def like(drawn: Any, batch: list[int]) -> Any:
    """A batch as its sampler would have drawn it: a number, an array, or a list."""
    if isinstance(drawn, np.ndarray):
        return np.array(batch, drawn.dtype).reshape(drawn.shape if len(batch) == drawn.size else -1)
    try:
        len(drawn)
    except TypeError:
        return batch[0]
    return tuple(batch) if isinstance(drawn, tuple) else batch


def refuse_repetition(loader: DataLoader[Any]) -> None:
    """Raise ValueError if the loader's sampler is known to draw samples more than once, or with their generations."""
    for owner in (loader, loader.batch_sampler):
        sampler = getattr(owner, "sampler", None)
        if isinstance(sampler, RefurbishSampler):
            raise ValueError(
                "share=True: the order of a refurbished loader says what is made anew, so its samples cannot be "
                "exchanged: leave share out"
            )
        if isinstance(sampler, SpiderSampler) or getattr(sampler, "replacement", False):
            raise ValueError(
                f"share=True: {type(sampler).__name__} draws samples more than once in an epoch, so they cannot be "
                "exchanged: leave share out, or use a sampler that draws each sample once"
            )


def saved(order: OwnOrder, taken: int) -> dict[str, Any]:
    """What `restored` needs, in types that every checkpoint can hold; `taken` samples were taken by the loop."""
    return {"order": order.order.tolist(), "taken": taken}


def restored(state: dict[str, Any], samples: int) -> OwnOrder:
    """The order of an epoch that goes on after what was taken; raises ValueError if it is not one of this list."""
    order: npt.NDArray[np.integer[Any]] = np.array(state.get("order", 0), np.int64)
    if order.ndim != 1 or (len(order) and int(order.min()) < 0):
        raise ValueError("the state is not one that state_dict() returned")
    whole: Indices = order.astype(np.uint32)
    return OwnOrder(whole, samples, int(state.get("taken", -1)))
