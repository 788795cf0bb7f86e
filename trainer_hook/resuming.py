"""Going on in the middle of an epoch, on any number of ranks: what the whole job has consumed of the epoch.

A state is the same whichever rank gives it. It has the draws of all ranks in one order: first what the job has
consumed, then the rest. Ranks that go on share the rest as cards are dealt: of W ranks, rank r takes the draws r, r + W
and so on. So a state of four ranks serves one rank or eight, and no draw is lost or made twice; only if the rest cannot
be divided, its first draws are made once more, as torch's DistributedSampler does.

A rank knows only what its own sampler draws. So each leaves that in torch.distributed's store when an epoch begins, and
with `share` each batch that was exchanged; who needs it reads it there. So rank 0 alone may ask for the state, at any
batch that all ranks have begun, as long as they take equally many.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer_hook.ranks import count_of, rank_and_world, shared_store

Indices = npt.NDArray[np.uint32]

NO_STATE = "the state is not one that state_dict() returned"
# Ranks of a training are at most a batch apart.
_ANSWER_S = 20.0
_NONE = np.empty(0, np.uint32)


class Progress(NamedTuple):
    """The draws of the job in one epoch, `order`; the first `consumed` of them were consumed.

    `sampler_epoch` is the number that `set_epoch` had told the sampler; None if it keeps none.
    """

    order: Indices
    consumed: int
    sampler_epoch: int | None = None

    def state(self) -> dict[str, Any]:
        """The progress in types that every checkpoint can hold."""
        return {"order": self.order.tolist(), "consumed": self.consumed, "sampler_epoch": self.sampler_epoch}


def restored(state: object, samples: int) -> Progress:
    """The progress that `state` was made of; raises ValueError if that is not of a list of `samples` samples."""
    if not isinstance(state, Mapping) or not {"order", "consumed"} <= state.keys():
        raise ValueError(NO_STATE)
    try:
        order, consumed = np.asarray(state["order"]), operator.index(state["consumed"])
    except (TypeError, ValueError):
        raise ValueError(NO_STATE) from None
    if order.ndim != 1 or (len(order) and order.dtype.kind not in "iu") or not 0 <= consumed <= len(order):
        raise ValueError(NO_STATE)
    if len(order) and not 0 <= order.min() <= order.max() < samples:
        raise ValueError(f"the state is of another list: it has sample {order.max()}, and this list {samples} samples")
    epoch = state.get("sampler_epoch")
    return Progress(order.astype(np.uint32), consumed, epoch if isinstance(epoch, int) else None)


class JobOrder:
    """One epoch of the list `name` in the whole job: what it had consumed `before`, and what each rank reads of it now.

    `own` is this rank's part. If the ranks exchange samples with other jobs, tell `handed` of each batch. The store has
    at most two epochs of each list.
    """

    def __init__(
        self, name: str, before: Indices, own: Indices, sampler_epoch: int | None, *, exchanges: bool = False
    ) -> None:
        self._store = shared_store()
        self._number = 0 if self._store is None else count_of(self._store, f"order {name}")
        self._name = name
        self._before = before
        self._own = own
        self._sampler_epoch = sampler_epoch
        self._exchanges = exchanges
        # If ranks exchange: after how many samples each batch ended, and the samples of each batch.
        self._ends: list[int] = []
        self._handed: list[Indices] = []
        self._put(_DRAWN, own)

    def __len__(self) -> int:
        return len(self._own)

    def handed(self, batch: Sequence[int]) -> None:
        """Record the samples of a batch that this rank hands on now, in the place of those that it had drawn."""
        self._handed.append(np.asarray(batch, np.uint32))
        self._ends.append(len(batch) + (self._ends[-1] if self._ends else 0))
        self._put(str(self._ends[-1]), self._handed[-1])

    def progress(self, taken: int) -> Progress:
        """How far the job is when each rank has taken `taken` samples; raises RuntimeError if a rank does not tell."""
        rank, world_size = rank_and_world()
        ends = [str(end) for end in self._ends if end <= taken]
        consumed, rest = [], []
        for other in range(world_size):
            if other == rank:
                drawn, *batches = [self._own, *self._handed[: len(ends)]]
            else:
                drawn, *batches = self._get(other, [_DRAWN, *ends])
            read = np.concatenate([_NONE, *batches]) if self._exchanges else drawn[:taken]
            consumed.append(read)
            # Where samples are exchanged, each was drawn once.
            rest.append(drawn[~np.isin(drawn, read)] if self._exchanges else drawn[taken:])
        done = np.concatenate([self._before, _in_turn(consumed)])
        order = np.concatenate([done, _in_turn(rest)])
        # A sampler for ranks gives some samples twice, fewer than there are ranks, so that each gets equally many.
        firsts = np.sort(np.unique(order, return_index=True)[1])
        if 0 < len(order) - len(firsts) < world_size:
            return Progress(order[firsts], int(np.searchsorted(firsts, len(done))), self._sampler_epoch)
        return Progress(order, len(done), self._sampler_epoch)

    # -- the store of torch.distributed

    def _key(self, rank: int, part: str) -> str:
        return f"spiderfs order {self._name} {rank} {part} {self._number % 2}"

    def _put(self, part: str, draws: Indices) -> None:
        if self._store is not None:
            # If that fails, `_get` says on the other ranks what is missing.
            with contextlib.suppress(RuntimeError):
                self._store.set(
                    self._key(rank_and_world()[0], part), np.append(np.uint32(self._number), draws).tobytes()
                )

    def _get(self, rank: int, parts: list[str]) -> list[Indices]:
        store, keys, deadline = self._store, [self._key(rank, part) for part in parts], time.monotonic() + _ANSWER_S
        while True:
            try:
                store.wait(keys, timedelta(seconds=_ANSWER_S))
                values = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
            except RuntimeError:
                break
            found = [np.frombuffer(bytes(value), np.uint32) for value in values]
            if all(int(one[0]) == self._number for one in found):
                return [one[1:] for one in found]
            # These are of an earlier epoch: that rank has not begun this one yet.
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        raise RuntimeError(
            f"rank {rank} has not said in {_ANSWER_S:.0f} s what it reads of {self._name!r} in this epoch: "
            "call plan or attach on all ranks alike, and save after a step that all have done"
        )


_DRAWN = "drawn"


def _in_turn(parts: Sequence[Indices]) -> Indices:
    """What ranks read, as one order: the first of each rank, the second of each, and so on."""
    rounds = itertools.zip_longest(*(part.tolist() for part in parts))
    return np.array([one for each in rounds for one in each if one is not None], np.uint32)
