"""Resuming in the middle of an epoch, on any number of ranks, from the samples that the whole job has consumed.

A state is the same whichever rank returns it: the draws of all ranks in one order, first the consumed ones, then the
rest. Ranks that resume deal the rest out: of W ranks, rank r takes the draws r, r + W and so on. No draw is lost or
repeated; only if the rest cannot be divided, its first draws are repeated, as torch's DistributedSampler does. Each
rank writes its draws to torch.distributed's store when an epoch begins, and with `share` each exchanged batch. So rank
0 alone may ask for the state, at any batch that all ranks have begun, as long as they take equally many.

**Several passes** over one loader may be open at a time: a program reads other batches for a figure or to recalibrate a
norm, or has abandoned an iterator. `Passes` finds the training's: one that is taken from, or ends, after a later one
has begun; else the pass of which most was taken. A finished pass gives way to one that began before it, unless only one
batch was taken of that one, and more of the finished one. When the next pass begins, passes not taken from since then
are dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from trainer_hook.ranks import count_of, rank_and_world, shared_store


class Pass:
    """A pass over a loader or a sampler."""

    steps = 0
    """How often something was taken of it."""
    is_look = False


P = TypeVar("P", bound=Pass)


class Passes(Generic[P]):
    """The passes that are not over, the oldest first, and the last that was over while it was the training's."""

    def __init__(self) -> None:
        self._live: list[P] = []
        self._over: P | None = None

    @property
    def now(self) -> P | None:
        """The training's pass; None before the first one."""
        found = max(reversed(self._live), key=lambda one: one.steps, default=None)
        if found is None or (self._over is not None and found.steps < min(2, self._over.steps)):
            return self._over
        return found

    def begin(self, one: P) -> None:
        self._live = [one] if self._over is not None else [*self._live, one]
        self._over = None

    def took(self, one: P) -> None:
        one.steps += 1
        self._asked(one)

    def _asked(self, one: P) -> None:
        if not one.is_look:
            at = self._live.index(one) if one in self._live else 0
            for later in self._live[at:]:
                later.is_look = later is not one
            self._live = [*self._live[:at], one]
            self._over = None

    def over(self, one: P, asked: bool = False) -> None:
        """The pass has ended, because it was `asked` for more than it has, or because its iterator is gone."""
        if one in self._live:
            if asked:
                self._asked(one)
            self._over = one if self.now is one else self._over
            self._live.remove(one)


Indices = npt.NDArray[np.uint32]

NO_STATE = "the state is not one that state_dict() returned"
# Ranks of a training are at most a batch apart.
_ANSWER_S = 20.0
_NONE = np.empty(0, np.uint32)


class EpochProgress(NamedTuple):
    """The draws of the job in one epoch, `order`; the first `consumed` of them were consumed.

    `sampler_epoch` is the number that `set_epoch` had given the sampler; None if it keeps none.
    """

    order: Indices
    consumed: int
    sampler_epoch: int | None = None

    def state(self) -> dict[str, Any]:
        """The progress in types that every checkpoint can hold."""
        return {"order": self.order.tolist(), "consumed": self.consumed, "sampler_epoch": self.sampler_epoch}


def check_list(state: Mapping[str, Any], samples: int, names: str | None) -> None:
    """Raise ValueError if the state is not one of this list."""
    if "samples" not in state or (names is not None and "names" not in state):
        raise ValueError("the state does not name its list, as those of this version do: begin the epoch again")
    why = None
    if not isinstance(state["samples"], int):
        raise ValueError(NO_STATE)
    if state["samples"] != samples:
        why = f"it has {state['samples']} samples, and this list {samples}"
    elif names is not None and state["names"] != names:
        why = "its files have other names, or another order"
    if why is not None:
        raise ValueError(f"the state is of another list: {why}: give the files of that one, or begin the epoch again")


def restored(state: object, samples: int, names: str | None = None) -> EpochProgress:
    """The progress that `state` was made of; raises ValueError if that is not of a list of so many samples.

    `names` is the hash of the list's names, and None for a sampler, which does not know them.
    """
    if not isinstance(state, Mapping) or not {"order", "consumed"} <= state.keys():
        raise ValueError(NO_STATE)
    check_list(state, samples, names)
    try:
        order, consumed = np.asarray(state["order"]), operator.index(state["consumed"])
    except (TypeError, ValueError):
        raise ValueError(NO_STATE) from None
    if order.ndim != 1 or (len(order) and order.dtype.kind not in "iu") or not 0 <= consumed <= len(order):
        raise ValueError(NO_STATE)
    if len(order) and not 0 <= order.min() <= order.max() < samples:
        raise ValueError(NO_STATE)
    epoch = state.get("sampler_epoch")
    return EpochProgress(order.astype(np.uint32), consumed, epoch if isinstance(epoch, int) else None)


def hash_of(names: Iterable[bytes]) -> str:
    """A hash of the names of a list, in their order."""
    return hashlib.blake2b(b"\0".join(names), digest_size=16).hexdigest()


def number_of_run(name: str) -> int:
    """How often epochs of the list have been begun to be planned: the same on all ranks that call this alike."""
    store = shared_store()
    return 0 if store is None else count_of(store, f"order {name}")


class JobOrder:
    """One epoch of the list `name` in the whole job: what it had consumed `before`, and what each rank reads of it now.

    `own` is this rank's part. If the ranks exchange samples with other jobs, call `handed` with each batch. The store
    has at most two epochs of each list. `number` is that of `number_of_run`, and that of the epoch: the same on all
    ranks, though one of them alone has looked at a batch.
    """

    def __init__(
        self,
        name: str,
        before: Indices,
        own: Indices,
        sampler_epoch: int | None,
        number: tuple[int, int] = (0, 0),
        *,
        exchanges: bool = False,
    ) -> None:
        self._store = shared_store()
        self._number = np.array(number, np.uint32)
        self._name, self._before, self._own = name, before, own
        self._sampler_epoch, self._exchanges = sampler_epoch, exchanges
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

    def progress(self, taken: int) -> EpochProgress:
        """How far the job is when each rank has taken `taken` samples; raises RuntimeError if a rank does not report
        it."""
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
            return EpochProgress(order[firsts], int(np.searchsorted(firsts, len(done))), self._sampler_epoch)
        return EpochProgress(order, len(done), self._sampler_epoch)

    # -- the store of torch.distributed

    def _key(self, rank: int, part: str) -> str:
        return f"spiderfs order {self._name} {rank} {part} {self._number[1] % 2}"

    def _put(self, part: str, draws: Indices) -> None:
        if self._store is not None:
            # If that fails, `_get` says on the other ranks what is missing.
            with contextlib.suppress(RuntimeError):
                self._store.set(self._key(rank_and_world()[0], part), np.append(self._number, draws).tobytes())

    def _get(self, rank: int, parts: list[str]) -> list[Indices]:
        store, keys, deadline = self._store, [self._key(rank, part) for part in parts], time.monotonic() + _ANSWER_S
        while True:
            try:
                store.wait(keys, timedelta(seconds=_ANSWER_S))
                values = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
            except RuntimeError:
                break
            found = [np.frombuffer(bytes(value), np.uint32) for value in values]
            if all(np.array_equal(one[:2], self._number) for one in found):
                return [one[2:] for one in found]
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
