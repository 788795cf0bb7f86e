"""The base of all samplers: one draws a whole epoch at a time, knows how far the training is in it, and can resume."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Sampler

from trainer_hook.connection.client import Client
from trainer_hook.ranks import rank_and_world, share_of_rank
from trainer_hook.resuming import NO_STATE, restored

Draws = npt.NDArray[np.uint32]
Scores = npt.NDArray[np.float32]


class Epoch(NamedTuple):
    """The draws of an epoch over all ranks, and the scores by which they were drawn (None: without scores)."""

    number: int
    order: Draws
    scores: Scores | None = None


def whole_number(name: str, value: object, least: int) -> int:
    """The value of an option; raises ValueError unless it is a whole number of at least `least`."""
    try:
        found = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = least - 1
    if found < least:
        raise ValueError(f"{name}={value}: give a whole number of at least {least}")
    return found


class EpochSampler(Sampler[int]):
    """Draws epochs of `draws` draws over all ranks; a subclass says how, in `_draw`.

    All ranks make the same draws, and each rank takes every world_size-th of them. So a state of any rank serves a
    training with any number of ranks.
    """

    def __init__(self, samples: int, *, draws: int | None = None, seed: int = 0) -> None:
        self.samples = whole_number("samples", samples, 1)
        self._draws = self.samples if draws is None else whole_number("draws", draws, 1)
        self._seed = whole_number("seed", seed, 0)
        self._client: Client | None = None
        self._list = ""
        self._whole = 1
        self.epoch = 0
        # The draws of the current epoch over all ranks, how many of them were consumed before this process resumed it,
        # and how many of this rank's share of the rest the training has taken.
        self._order: Draws | None = None
        self._before = 0
        self._position = 0
        self._resuming = False
        # By how much this sampler's epochs are ahead of the numbers that `set_epoch` is given.
        self._ahead_of_caller = 0
        self._ahead: Epoch | None = None

    def bind(self, client: Client, name: str, whole: int = 1) -> None:
        """Use the list `name` of `client` from the next epoch on; the caller calls `took` from now on.

        The loader leaves out fewer than `whole` draws at the end of an epoch, because they make no batch (drop_last).
        """
        self._client, self._list, self._whole = client, name, whole

    def unbind(self) -> None:
        """Ask the client nothing more; the sampler then counts what it has handed out as taken."""
        self._client = None

    def set_epoch(self, epoch: int) -> None:
        """Draw this epoch next; without this call the epochs come in order.

        After `load_state_dict`, the number of the state's epoch lets that epoch go on, and a later one leaves it out. A
        lower number comes from a caller that counts its epochs from the start of the process, as accelerate does: its
        epochs are counted on from that of the state.
        """
        if self._resuming and epoch < self.epoch:
            self._ahead_of_caller = self.epoch - epoch
        epoch += self._ahead_of_caller
        if epoch != self.epoch:
            self.epoch, self._order, self._resuming = epoch, None, False

    def __len__(self) -> int:
        return -(-self._draws // rank_and_world()[1])

    def __iter__(self) -> Iterator[int]:
        # This is a generator, so it begins at the first draw: a data loader makes iterators that it never uses.
        if self._resuming:
            self._resuming = False
        else:
            self._begin()
        assert self._order is not None
        for number, index in enumerate(share_of_rank(self._order[self._before :]).tolist(), 1):
            if self._client is None:
                self._position = number
            yield index

    @property
    def settled(self) -> float:
        """The share of an epoch after which `draw_ahead` may draw the next one."""
        return 0.0

    def draw_ahead(self) -> list[int] | None:
        """Draw the next epoch now, and return this rank's share; None if the epoch is to be drawn when it begins."""
        self._ahead = self._draw(self.epoch + 1)
        share: list[int] = share_of_rank(self._ahead.order).tolist()
        return share

    def offer(self, evaluate: Callable[[npt.NDArray[np.int64]], Scores | None]) -> None:
        """Offer an evaluation: `evaluate` returns the losses of samples by the current model, or None if it cannot."""

    def took(self, samples: int) -> None:
        """Note that the training has taken this many samples; its loader workers have drawn more."""
        self._position += samples
        if self._order is not None and self._own_draws() - self._position < self._whole:
            # The rest makes no batch: a training that resumes here begins the next epoch.
            self.end_epoch()

    def end_epoch(self) -> None:
        """End the current epoch, also if the training has not taken all of its draws."""
        self._position = self._own_draws()

    def trained(self, indices: Draws, losses: npt.NDArray[np.floating]) -> None:
        """Note the losses of a batch. The hook's sending thread calls this, perhaps after `epoch_end`."""

    def epoch_end(self, accuracy: float | None) -> None:
        """Note that an epoch has ended; `accuracy` is a share, or None if it is not known."""

    def weights(self, indices: npt.ArrayLike, clip: float | None = None) -> Tensor:
        """The weights 1/(N q) of these samples: weighted losses have the expectation of losses under uniform draws."""
        weights = torch.ones(np.shape(indices))
        return weights if clip is None else weights.clamp(max=clip)

    def probabilities(self) -> npt.NDArray[np.float64]:
        """The chance q of each sample at each draw of the current epoch."""
        return np.full(self.samples, 1 / self.samples)

    def state_dict(self) -> dict[str, Any]:
        """The state from which a training can resume on any number of ranks: what the job has consumed of the epoch.

        It is the same on all ranks that have taken equally many draws; save that of rank 0.
        """
        order = self._order
        consumed = 0 if order is None else min(self._before + self._position * rank_and_world()[1], len(order))
        return {
            "epoch": self.epoch,
            "consumed": consumed,
            "order": None if order is None else torch.from_numpy(order.astype(np.int64)),
        }

    def at_position(self, taken: int, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `ask` returns while this sampler's state says that the training has taken `taken` of its draws."""
        position, self._position = self._position, taken
        try:
            return ask()
        finally:
            self._position = position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state` was taken; raises ValueError for a state that is not one of this data set."""
        try:
            self._restore(state)
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(NO_STATE) from exc

    def _restore(self, state: dict[str, Any]) -> None:
        """As `load_state_dict`; a subclass reads its own part first."""
        epoch, order = operator.index(state["epoch"]), state["order"]
        progress = restored({**state, "order": [] if order is None else order}, self.samples)
        self.epoch, self._before, self._position = epoch, progress.consumed, 0
        self._order = None if order is None else progress.order
        self._ahead, self._ahead_of_caller = None, 0
        self._resuming = self._before < len(progress.order)

    @property
    def left_to_draw(self) -> int:
        """How many draws this rank makes of an epoch that is about to go on; 0 if none is."""
        return self._own_draws() if self._resuming else 0

    # -- drawing

    def _own_draws(self) -> int:
        """How many draws of the current epoch each rank has in this process; 0 before the first epoch."""
        return 0 if self._order is None else -(-(len(self._order) - self._before) // rank_and_world()[1])

    def _begin(self) -> Epoch:
        if self._order is not None:
            self.epoch += 1
        epoch, self._ahead = self._ahead, None
        if epoch is None or epoch.number != self.epoch:
            epoch = self._draw(self.epoch)
        self._order, self._before, self._position = epoch.order, 0, 0
        return epoch

    def _draw(self, number: int) -> Epoch:
        """Draw the epoch of this number. All ranks call this when an epoch begins."""
        raise NotImplementedError
