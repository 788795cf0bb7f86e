"""Which samples a forward pass of the training is about: known, or not said.

**By identity.** The tensors that the loop was given are remembered by their memory. A forward whose inputs lie in it is
of that batch, whatever the loop has taken since, and a view's strides say of which rows (`provenance.py`).

**By exclusion**, where the inputs are copies (on a device, augmented): they are of the one batch that they can be of.
The loop has taken one batch since its last forward, in this thread, and no other iteration, of this loader or of
another on the same model, has one that it may mean; or the user has said how many batches the loop takes ahead. And all
forwards until the next batch is taken have the same input: if two inputs could be that batch, neither is said to be.
So what is found by exclusion is held back until then. A loop in which a forward was known by identity is not judged by
exclusion any more, and neither is one that has copied some rows of a batch.

Not said is too what has another number of rows than the inputs, and rows of which nobody knows whether they are
samples: of a classifier over positions with as many positions as samples, before others have shown how they lie.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trainer_hook.provenance import Memory, Rows, is_whole_storage, key_of, rows_in_storage, tensors_in

Part = TypeVar("Part")
Indices = npt.NDArray[np.uint32]

_numbers = itertools.count()

# Batches that a loop may hold, all given out and none trained on.
_WAITING_MAX = 256

AHEAD = "the loop takes batches ahead, and trains on copies of them: attach with lookahead=, their number"
SEVERAL_INPUTS = "for one batch came forwards of several inputs, copies all of them"
SEVERAL_BATCHES = "the loop has several batches at once, and trains on copies"
OTHER_ROWS = "the rows that the classifier is given are not the batch's samples: name another layer by classifier="
COPIED_ROWS = "the inputs are copies of some rows of a batch: cut the batch after it was copied to its device"
POSITIONS = "nobody can say which dimension of the classifier's input has the samples"
NOT_OF_THE_LOADER = "the inputs are not what the loader gave, as other inputs were"


class Shown(NamedTuple):
    """A forward: the tensors that the model was given, the shape of what its classifier was, and how often it ran."""

    given: list[Tensor]
    shape: tuple[int, ...]
    runs: int = 1


@dataclass(eq=False)
class _Taken(Generic[Part]):
    """A batch that the loop was given."""

    iteration: object
    indices: Indices
    # Its tensors. Of one that was cut out of others the rows are not its own.
    memories: list[Memory]
    # In the order of all that were taken, and of those of the iteration.
    number: int
    place: int
    thread: int
    # Rows that something is told of.
    seen: npt.NDArray[np.bool_]
    told: list[Found[Part]] = field(default_factory=list)
    used: bool = False
    # No forward can be of it by exclusion any more, and neither is one that has copied some rows of a batch.
    past: bool = False
    reason: str = ""


@dataclass(eq=False)
class Found(Generic[Part]):
    """A forward's samples, row by row; `keep` are the rows that were not seen before, and what is told of those."""

    samples: Indices
    keep: Rows
    batch: _Taken[Part]
    # The input by which it was found by exclusion.
    input: Memory | None = None
    part: Part | None = None


class Attribution(Generic[Part]):
    """One loader's batches; `beside` has those of all loaders on the same model.

    `counts` has the forwards that nothing could be said of (`unmatched`), `unsaid` why of some batches nothing is.
    """

    def __init__(self, lookahead: int | None, counts: Counter[str], beside: Iterable[Attribution[Any]] = ()) -> None:
        self.counts = counts
        self.unsaid: set[str] = set()
        self._lookahead = lookahead
        self._beside = beside
        self._batches: list[_Taken[Part]] = []
        self._by_key: dict[int, list[tuple[_Taken[Part], Memory]]] = {}
        # The latest iteration, how many batches it gave, and those iterations that give no more.
        self._iteration: object = None
        self._given = 0
        # Whether the loop has used a batch of that iteration before it took the next.
        self._in_turn = False
        self._over: list[object] = []
        self._held: list[Found[Part]] = []
        # Whether an input was a batch's own tensor, and whether one was a copy of some rows.
        self._identified = self._chooses_rows = False
        self._rows_first: bool | None = None

    # -- what the loader gives

    def taken(self, iteration: object, indices: Indices, batch: Any = None) -> None:
        """The loop was given `batch`, of these samples; of none, if nobody knows them."""
        self._decide()
        if iteration is not self._iteration:
            self._iteration, self._given, self._in_turn = iteration, 0, False
        for other in self._batches:
            if self._is_past(other, iteration):
                other.past = True
                self._in_turn = self._in_turn or (other.used and other.iteration is iteration)
                self._say_why(other)
        kept = [other for other in self._batches if self._is_of_use(other)][-_WAITING_MAX:]
        if len(kept) < len(self._batches):
            for other in set(self._batches) - set(kept):
                self._forget(other)
        self._batches = kept
        self._over = [over for over in self._over if any(other.iteration is over for other in self._batches)]
        memories = [memory for memory in map(Memory.of, tensors_in(batch)) if memory is not None]
        seen = np.zeros(len(indices), np.bool_)
        thread = threading.get_ident()
        taken = _Taken[Part](iteration, indices, memories, next(_numbers), self._given, thread, seen)
        self._batches.append(taken)
        self._given += 1
        for memory in memories:
            # What this batch was written to is no longer of the one before.
            earlier = [hit for hit in self._by_key.get(memory.key, ()) if hit[0] is taken or not memory.lies_as(hit[1])]
            self._by_key[memory.key] = [*earlier, (taken, memory)]

    def _forget(self, batch: _Taken[Part]) -> None:
        for key in {memory.key for memory in batch.memories}:
            others = [hit for hit in self._by_key.pop(key, ()) if hit[0] is not batch]
            if others:
                self._by_key[key] = others

    def also(self, batch: Any) -> None:
        """The batch taken last is made of these tensors too: copies that whoever owns the loop says are of it."""
        if self._batches:
            last = self._batches[-1]
            for memory in map(Memory.of, tensors_in(batch)):
                if memory is not None and memory.key not in self._by_key:
                    last.memories.append(memory)
                    self._by_key[memory.key] = [(last, memory)]

    def over(self, iteration: object) -> None:
        """The iteration gives no more batches, or the loop has let go of it."""
        if self._lookahead:
            self._decide()
        elif self._in_turn and iteration is self._iteration:
            # The batch at which it has broken off it does not train on.
            for batch in self._batches:
                batch.past = batch.past or (batch.iteration is iteration and not batch.used)
        self._over.append(iteration)

    def _is_over(self, iteration: object) -> bool:
        return any(over is iteration for over in self._over)

    def _is_past(self, batch: _Taken[Part], iteration: object) -> bool:
        """Whether a batch is done with when the next one is taken in this iteration."""
        if batch.iteration is not iteration:
            return self._is_over(batch.iteration)
        return batch.used if self._lookahead is None else batch.place < self._given - self._lookahead

    def _is_of_use(self, batch: _Taken[Part]) -> bool:
        return not batch.past or bool(batch.told) or not all(memory.gone for memory in batch.memories)

    # -- what the model shows

    def find(self, shown: Shown) -> Found[Part] | None:
        """The samples of a forward; None, and counted, if they cannot be said. Follow it by `record`."""
        found = None
        if shown.shape and shown.shape[0]:
            hits = [(tensor, *hit) for tensor in shown.given for hit in self._by_key.get(key_of(tensor) or 0, ())]
            if hits:
                found = self._by_identity(shown, hits)
            elif not any(key_of(tensor) in other._by_key for other in self._beside for tensor in shown.given):
                found = self._by_exclusion(shown)
        if found is None:
            self.counts["unmatched"] += 1
        return found

    def record(self, found: Found[Part], part: Part) -> None:
        """What a forward showed of its rows `keep`."""
        found.part = part
        (found.batch.told if found.input is None else self._held).append(found)

    def ready(self, but: Found[Part] | None = None) -> list[list[Found[Part]]]:
        """What can be told of each batch, but that of `but`; it is not told twice."""
        ready = []
        for batch in self._batches:
            if batch.told and (but is None or batch is not but.batch):
                ready.append(batch.told)
                batch.told = []
        return ready

    def close_window(self) -> None:
        """No further forward comes before the next batch."""
        self._decide()
        for batch in self._batches:
            self._say_why(batch)

    def _say_why(self, batch: _Taken[Part]) -> None:
        if batch.reason and len(batch.indices) and not batch.seen.any():
            self.unsaid.add(batch.reason)

    # -- by identity

    def _by_identity(self, shown: Shown, hits: list[tuple[Tensor, _Taken[Part], Memory]]) -> Found[Part] | None:
        self._identified = True
        self._discard("")
        # Of a tensor that batches are cut out of, each has a piece.
        having = [hit for hit in hits if hit[2].has_whole(hit[0])] or hits
        batch = having[-1][1]
        batch.used = True
        if any(other is not batch for _, other, _ in having):
            return None
        if shown.runs > 1 and not self._are_all_of(batch, shown, [tensor for tensor, _, _ in hits]):
            return None
        for tensor, _, memory in having:
            rows = _rows_of(tensor, memory, batch, shown.shape[0])
            if rows is not None:
                return self._told(shown, batch, rows)
        batch.reason = OTHER_ROWS
        return None

    def _are_all_of(self, batch: _Taken[Part], shown: Shown, known: list[Tensor]) -> bool:
        """Whether all that the model was given of so many rows is of the batch, and so all that its classifier was."""
        strange = [tensor for tensor in shown.given if not any(tensor is other for other in known)]
        return not any(tensor.dim() and len(tensor) == shown.shape[0] for tensor in strange)

    # -- by exclusion

    def _by_exclusion(self, shown: Shown) -> Found[Part] | None:
        expected, reason = self._expected()
        if len(expected) == 1:
            expected[0].used = True
        if self._identified or self._chooses_rows:
            reason = NOT_OF_THE_LOADER if self._identified else COPIED_ROWS
        if reason or shown.runs > 1:
            self._note(reason or OTHER_ROWS)
            return None
        of_rows = [tensor for tensor in shown.given if tensor.dim() and len(tensor) == shown.shape[0]]
        for tensor in of_rows or shown.given[:1]:
            memory = Memory.of(tensor)
            if memory is None:
                continue
            batch = self._of_input(memory, expected)
            if batch is None:
                return None
            rows = rows_in_storage(tensor, len(batch.indices)) if of_rows else _all_rows(tensor, batch, shown)
            if rows is not None and len(rows) == shown.shape[0]:
                return self._told(shown, batch, rows, memory)
        self._chooses_rows = shown.shape[0] < max(len(batch.indices) for batch in expected)
        self._note(COPIED_ROWS if self._chooses_rows else OTHER_ROWS)
        return None

    def _expected(self) -> tuple[list[_Taken[Part]], str]:
        """The batches that forwards until the next one is taken can be of, in order; or why nobody can say."""
        waiting = [batch for batch in self._batches if not batch.past]
        latest = waiting[-1].number if waiting else -1
        if any(other._may_mean_another(latest) for other in self._beside if other is not self):
            return [], SEVERAL_BATCHES
        if self._lookahead is not None:
            waiting = [batch for batch in waiting if batch.iteration is self._iteration]
            if self._lookahead and self._is_over(self._iteration):
                expected = [batch for batch in waiting if batch.place >= self._given - self._lookahead]
            else:
                expected = [batch for batch in waiting if batch.place == self._given - 1 - self._lookahead]
        else:
            expected = waiting
            if len(waiting) > 1:
                several = any(batch.iteration is not waiting[0].iteration for batch in waiting)
                return [], SEVERAL_BATCHES if several else AHEAD
        if not expected:
            return [], NOT_OF_THE_LOADER
        if expected[0].thread != threading.get_ident():
            return [], AHEAD
        return expected, ""

    def _may_mean_another(self, number: int) -> bool:
        """Whether a forward may be of a batch of this loader where one of another has this number."""
        waiting = (batch for batch in self._batches if not batch.past)
        return any(batch.number > number or not self._is_over(batch.iteration) for batch in waiting)

    def _of_input(self, memory: Memory, expected: list[_Taken[Part]]) -> _Taken[Part] | None:
        """The batch of an input: the first that comes is of the first. None if more come than there are batches."""
        keys = list(dict.fromkeys(found.input.key for found in self._held if found.input is not None))
        place = keys.index(memory.key) if memory.key in keys else len(keys)
        if place < len(expected):
            return expected[place]
        self._discard(SEVERAL_INPUTS)
        self._note(SEVERAL_INPUTS)
        for batch in expected:
            batch.past = True
        return None

    def _discard(self, reason: str) -> None:
        for found in self._held:
            found.batch.seen[:] = False
            found.batch.reason = reason
        self._held.clear()

    def _decide(self) -> None:
        """No other input has come for what was held back."""
        for found in self._held:
            found.batch.told.append(found)
        self._held.clear()

    def _note(self, reason: str) -> None:
        for batch in self._batches:
            if not batch.past:
                batch.reason = reason

    # -- both

    def _told(self, shown: Shown, batch: _Taken[Part], rows: Rows, memory: Memory | None = None) -> Found[Part] | None:
        if not self._lies_by_rows(shown.shape, len(batch.indices)):
            batch.reason = POSITIONS
            return None
        first = np.zeros(len(rows), np.bool_)
        first[np.unique(rows, return_index=True)[1]] = True
        keep = np.flatnonzero(first & ~batch.seen[rows])
        batch.seen[rows] = True
        return Found(batch.indices[rows], keep, batch, memory)

    def _lies_by_rows(self, shape: tuple[int, ...], rows: int) -> bool:
        """Whether the first dimension of the classifier's input is that of the samples, and not the second."""
        if len(shape) != 3:
            return True
        if rows != shape[1]:
            self._rows_first = self._rows_first is not False
        elif rows != shape[0]:
            self._rows_first = False
        return self._rows_first is True


def _rows_of(tensor: Tensor, memory: Memory, batch: _Taken[Any], count: int) -> Rows | None:
    """The batch's rows that a tensor in the memory of one of its tensors has; None if they are not `count`."""
    rows = len(batch.indices)
    if memory.has_whole(tensor) and count == rows:
        # Its own order, or that of its transpose, in which the rows are another dimension.
        within = memory.rows_in(tensor) if memory.rows == rows else None
        return np.arange(rows) if within is None or len(within) != rows else within
    if memory.rows != rows:
        return None
    found = memory.rows_in(tensor)
    return found if found is not None and len(found) == count else None


def _all_rows(tensor: Tensor, batch: _Taken[Any], shown: Shown) -> Rows | None:
    """Of an input whose rows do not lie in the first dimension: all of them or none."""
    rows = len(batch.indices)
    return np.arange(rows) if shown.shape[0] == rows and is_whole_storage(tensor) else None
