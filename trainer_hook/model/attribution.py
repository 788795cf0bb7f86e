"""Attribution: which samples went through the model in a forward pass of the training.

**By identity.** The memory of each batch's tensors is remembered. If all inputs of a forward pass lie in that memory,
it is of that batch, whatever batches the loop has taken since. The strides of a view say which rows it has
(`provenance.py`). If only some inputs lie there, the others may be of other samples, or of none.

**By exclusion**, if the inputs are copies (on a device, or augmented): the forward pass cannot be of any other batch.
Either the loop has taken one batch since its last forward pass, in the same thread, and no other iteration for the same
model has a batch that is not used yet; or the user has given `lookahead`. Until the loop takes its next batch, all
forward passes must have the same inputs, so each is held back until then. Exclusion is given up in a loop in which an
input was a batch's own tensor, in which two inputs came for one batch, or which copies only some rows of a batch.

A forward pass is not attributed for the reasons that the texts below name (`AHEAD` and others). **Labels**
(`LabelCheck`) show whether the rows of a batch are the samples that were drawn, in their order: a collate function may
move or mix rows, and a training may number the classes in its own way, so a label is compared with the earlier label of
a sample of its class.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer_hook.model import provenance
from trainer_hook.model.capture import Seen
from trainer_hook.model.provenance import Memory, Rows, Shown

Numbers = npt.NDArray[np.int64]

# A wider tensor is not taken for labels. Looking through 256 rows of 1,000 classes takes 0.4 ms.
_CLASSES_MAX = 32_768
# CutMix and mixup mix two samples; mosaics mix four.
_MIXED_MAX = 4
# The hook sends nothing while more than one batch in this number had labels of other samples. It does not see samples
# that others of their class replace; with a few broken files in a large data set, these are fewer still.
_TRUSTED = 100
# A second target of two classes may be the labels in another order by chance, but not so often.
_BY_CHANCE = 8

# Why a batch is not sent; the hook logs these texts.
MIXED = "batches are not sent to the daemon: their labels show that the collate function mixes samples"
OTHERS = (
    "batches are not sent to the daemon: their labels are not those that the list has for their samples: the data set "
    "or the collate function moves rows or puts other samples in the place of some, or the list has other labels"
)


class LabelCheck:
    """Compares the labels of batches with those of a list; -1 stands for a sample without a label."""

    def __init__(self, declared: npt.NDArray[np.int32]) -> None:
        self._declared = declared
        self._classes = len(np.unique(declared[declared >= 0]))
        # For each tensor of a batch that may be the labels, by its place: the training's number for each class.
        self._numbers: dict[int, dict[int, int]] | None = None
        # How often a tensor beside the labels was the labels in another order, and which were once something else.
        self._moved: Counter[int] = Counter()
        self._aside: set[int] = set()
        self._mixed = False
        self._batches = self._contradicted = 0

    def doubt(self, indices: npt.NDArray[np.uint32], batch: Any) -> str | None:
        """Why the rows of a batch may not be these samples (empty if that is not worth a warning); None if they are."""
        self._batches += 1
        declared = self._declared[indices].astype(np.int64)
        given: dict[int, Numbers] = {}
        shares = {}
        for place, tensor in _label_like(batch, len(indices)):
            numbers, outstanding = _numbers_in(tensor)
            if outstanding is not None and 2 <= int(outstanding.sum(1).max()) <= _MIXED_MAX:
                shares[place] = outstanding
            elif numbers is not None and not np.array_equal(numbers, indices):
                given[place] = numbers
        if any(np.array_equal(numbers, declared) for numbers in given.values()):
            # Shares that leave out a row's class are something else than the labels.
            classes = range(len(declared)), declared
            enough = int(self._declared.max()) + 1
            self._aside |= {at for at, one in shares.items() if one.shape[1] < enough or not one[classes].all()}
        # This holds for good: a batch with samples of one class does not show that they are mixed.
        self._mixed = self._mixed or bool(shares.keys() - self._aside)
        if self._mixed:
            return MIXED
        labelled = declared >= 0
        return self._compare(declared[labelled], {place: numbers[labelled] for place, numbers in given.items()})

    def _compare(self, declared: Numbers, given: dict[int, Numbers]) -> str | None:
        if self._numbers is None and given:
            self._numbers = {place: {} for place in given}
        standing: dict[int, dict[int, int]] = {}
        renumbered = proof = False
        for place in (self._numbers or {}).keys() & given.keys():
            assert self._numbers is not None
            known, numbers = self._numbers[place], given[place].tolist()
            pairs = set(zip(declared.tolist(), numbers, strict=True))
            if len(dict(pairs)) == len(pairs) and all(known.get(label, number) == number for label, number in pairs):
                standing[place] = known | dict(pairs)
                renumbered |= any(label != number and label not in known for label, number in pairs)
            elif len({*known.values(), *numbers}) <= self._classes:
                # A class that has its own number once has no other.
                known.update((label, number) for label, number in pairs if label == number)
                proof = True
            else:
                del self._numbers[place]
        if standing:
            self._numbers = standing
        elif proof:
            self._contradicted += 1
        if self._contradicted * _TRUSTED > self._batches or (proof and not standing):
            return OTHERS
        doubt = self._beside(given, standing)
        return "" if doubt is None and renumbered else doubt

    def _beside(self, given: dict[int, Numbers], standing: dict[int, Any]) -> str | None:
        """Mixup may give the labels twice, the second time in another order; a further target does that by chance."""
        for place, numbers in given.items():
            alike = [given[other] for other in standing if np.array_equal(np.sort(given[other]), np.sort(numbers))]
            if standing and not alike:
                self._aside.add(place)
            self._moved[place] += bool(alike) and not any(np.array_equal(numbers, other) for other in alike)
        often = max((self._moved[place] for place in given.keys() - self._aside), default=0)
        return None if not often else MIXED if often > _BY_CHANCE else ""


def _label_like(batch: Any, rows: int) -> Iterator[tuple[int, Tensor]]:
    """The tensors of a batch, with their places, that have a number or shares of classes for each row."""
    for place, tensor in enumerate(provenance.tensors_in(batch)):
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
        if not plain or tensor.is_complex() or tensor.is_quantized or tensor.dim() > 2:
            continue
        if len(tensor) == rows if tensor.dim() else rows == 1:
            yield place, tensor.detach()


def _numbers_in(tensor: Tensor) -> tuple[Numbers | None, npt.NDArray[np.bool_] | None]:
    """The whole number that each row has; and which classes of a row stand out, if it has shares of classes.

    In smoothed labels one class stands out, in mixtures of samples two to four, and in a teacher's output nearly all.
    """
    if tensor.dim() < 2 or tensor.shape[1] == 1:
        if tensor.is_floating_point() and not torch.equal(tensor.double(), tensor.double().round()):
            return None, None
        return tensor.reshape(-1).long().numpy(), None
    if not 2 <= tensor.shape[1] <= _CLASSES_MAX or abs(float(tensor[0].sum()) - 1) > 1e-2:
        return None, None
    shares = tensor.float().numpy()
    if shares.min() < 0 or not np.allclose(shares.sum(1), 1, atol=1e-2):
        return None, None
    outstanding: npt.NDArray[np.bool_] = shares - (shares.min(1, keepdims=True) if shares.shape[1] > 2 else 0.0) > 1e-4
    return (shares.argmax(1) if int(outstanding.sum(1).max()) == 1 else None), outstanding


Indices = npt.NDArray[np.uint32]

_numbers = itertools.count()

# At most this many batches are remembered: a loop may take them all before it trains on the first.
_WAITING_MAX = 256

# Why a batch is not attributed; the hook logs these texts.
AHEAD = "the loop takes some batches ahead and trains on copies: attach with HookOptions(lookahead=), their number"
SEVERAL_INPUTS = "the model was given several inputs for one batch, and all of them are copies"
SEVERAL_BATCHES = "the loop has several batches at once, and trains on copies of them"
OTHER_ROWS = "the classifier's input has other rows than the batch: name another layer by HookOptions(classifier=)"
COPIED_ROWS = "the inputs are copies of some rows of a batch: cut the batch after it was copied to its device"
POSITIONS = "it is not known which dimension of the classifier's input has the samples"
NOT_OF_THE_LOADER = "the inputs are not the tensors that the loader gave, although earlier inputs were"
OTHERS_BESIDE = "the model was given other tensors beside those of the batch, which may be of other samples"
PAIRS = "the model was given pairs of inputs, and only one of each pair can be the sample: give it the first alone"
SEVERAL_RUNS = "the classifier runs more than once in a pass: name a layer that runs once by HookOptions(classifier=)"


@dataclass(eq=False)
class _Taken:
    """A batch that the loop has taken."""

    iteration: object
    indices: Indices
    # The memory of its tensors. If a tensor was cut out of a larger one, the memory has rows of other batches too.
    memories: list[Memory]
    # Its number among all batches of all loaders, and among those of its iteration.
    number: int
    number_in_iteration: int
    thread: int
    # Flags of the rows that were attributed.
    seen: npt.NDArray[np.bool_]
    # The attributed forward passes that were not handed out yet.
    attributed: list[AttributedPass] = field(default_factory=list)
    used: bool = False
    # Whether no further forward pass may be attributed to it by exclusion.
    past: bool = False
    # Why nothing of it was attributed.
    reason: str = ""

    def is_of_use(self) -> bool:
        return not self.past or bool(self.attributed) or not all(memory.gone for memory in self.memories)


@dataclass(eq=False)
class AttributedPass:
    """An attributed forward pass."""

    samples: Indices
    """The sample of each row."""
    new_rows: Rows
    """The rows whose samples no earlier forward pass of the batch had."""
    batch: _Taken
    inputs: tuple[Memory, ...] = ()
    """The inputs of a forward pass that was attributed by exclusion."""
    part: Seen | None = None
    """The data of the new rows from the forward pass; `record` sets this."""


class Attribution:
    """The attribution of forward passes to the batches of one loader.

    `beside` has the attributions of all loaders for the same model. `counts["unmatched"]` counts the forward passes
    that were not attributed, and `reasons` says why some batches had none.
    """

    def __init__(self, lookahead: int | None, counts: Counter[str], beside: Iterable[Attribution] = ()) -> None:
        self.counts = counts
        self.reasons: set[str] = set()
        self._lookahead = lookahead
        self._beside = beside
        self._batches: list[_Taken] = []
        self._by_key: dict[int, list[tuple[_Taken, Memory]]] = {}
        # The latest iteration, how many batches the loop took from it, and the iterations that give no more batches.
        self._iteration: object = None
        self._given = 0
        # Whether the loop has used a batch of that iteration before it took the next one.
        self._in_turn = False
        self._over: list[object] = []
        # Forward passes that were attributed by exclusion and are held back until the next batch is taken.
        self._held: list[AttributedPass] = []
        # Why exclusion is no longer used; empty while it is.
        self._not_by_exclusion = ""
        # Whether the first dimension of a classifier's input has the samples; None while that is not known.
        self._rows_first: bool | None = None

    # -- what the loader gives

    def taken(self, iteration: object, indices: Indices, batch: Any = None) -> None:
        """The loop has taken `batch`, which has these samples; `indices` is empty if its samples are not known."""
        self._decide()
        if iteration is not self._iteration:
            self._iteration, self._given, self._in_turn = iteration, 0, False
        for other in self._batches:
            if self._is_past(other, iteration):
                other.past = True
                self._in_turn = self._in_turn or (other.used and other.iteration is iteration)
                self._log_why(other)
        in_use = [other for other in self._batches if other.is_of_use()]
        for other in set(self._batches) - set(in_use[-_WAITING_MAX:]):
            for key in {memory.key for memory in other.memories}:
                others = [hit for hit in self._by_key.pop(key, ()) if hit[0] is not other]
                if others:
                    self._by_key[key] = others
        self._batches = in_use[-_WAITING_MAX:]
        self._over = [over for over in self._over if any(other.iteration is over for other in self._batches)]
        memories = provenance.memories_of(batch)
        seen = np.zeros(len(indices), np.bool_)
        thread = threading.get_ident()
        taken = _Taken(iteration, indices, memories, next(_numbers), self._given, thread, seen)
        self._batches.append(taken)
        self._given += 1
        for memory in memories:
            # If this batch was written into the memory of an earlier one, that memory has this batch now.
            earlier = [hit for hit in self._by_key.get(memory.key, ()) if hit[0] is taken or not memory.lies_as(hit[1])]
            self._by_key[memory.key] = [*earlier, (taken, memory)]

    def add_tensors(self, batch: Any) -> None:
        """Add tensors to the batch that was taken last: copies that the library which runs the loop has made."""
        if self._batches:
            last = self._batches[-1]
            for memory in provenance.memories_of(batch):
                if memory.key not in self._by_key:
                    last.memories.append(memory)
                    self._by_key[memory.key] = [(last, memory)]

    def over(self, iteration: object) -> None:
        """The iteration gives no more batches: it has ended, or the loop has left it."""
        if self._lookahead:
            self._decide()
        elif self._in_turn and iteration is self._iteration:
            # A loop that leaves an iteration does not train on the batch that it took last.
            for batch in self._batches:
                batch.past = batch.past or (batch.iteration is iteration and not batch.used)
        self._over.append(iteration)

    def _is_over(self, iteration: object) -> bool:
        return any(over is iteration for over in self._over)

    def _is_past(self, batch: _Taken, iteration: object) -> bool:
        """Whether the loop will no longer use a batch after it has taken the next one in this iteration."""
        if batch.iteration is not iteration:
            return self._is_over(batch.iteration)
        return batch.used if self._lookahead is None else batch.number_in_iteration < self._given - self._lookahead

    # -- what goes through the model

    def find(self, shown: Shown) -> AttributedPass | None:
        """Attribute a forward pass; returns None, and counts it, if that cannot be done. Then call `record`."""
        found = None
        if shown.shape and shown.shape[0]:
            hits = [
                (tensor, *hit) for tensor in shown.given for hit in self._by_key.get(provenance.key_of(tensor) or 0, ())
            ]
            if hits:
                found = self._by_identity(shown, hits)
            elif not any(
                provenance.key_of(tensor) in other._by_key for other in self._beside for tensor in shown.given
            ):
                found = self._by_exclusion(shown)
        if found is None or not found.batch.seen.any():
            self.counts["unmatched"] += 1
        return found

    def record(self, found: AttributedPass, part: Seen) -> None:
        found.part = part
        (self._held if found.inputs else found.batch.attributed).append(found)

    def ready(self, but: AttributedPass | None = None) -> list[list[AttributedPass]]:
        """The attributed forward passes, by batch, except those of the batch of `but`; each is returned once."""
        ready = []
        for batch in self._batches:
            if batch.attributed and (but is None or batch is not but.batch):
                ready.append(batch.attributed)
                batch.attributed = []
        return ready

    def close_window(self) -> None:
        """Accept what is held back: no further forward pass comes before the loop takes its next batch."""
        self._decide()
        for batch in self._batches:
            self._log_why(batch)

    def _log_why(self, batch: _Taken) -> None:
        if batch.reason and len(batch.indices) and not batch.seen.any():
            self.reasons.add(batch.reason)

    # -- by identity

    def _by_identity(self, shown: Shown, hits: list[tuple[Tensor, _Taken, Memory]]) -> AttributedPass | None:
        self._not_by_exclusion = NOT_OF_THE_LOADER
        self._discard("")
        # Several batches may be cut out of one tensor: prefer those that have the whole input.
        having = [hit for hit in hits if hit[2].has_whole(hit[0])] or hits
        batch = having[-1][1]
        batch.used = True
        if any(other is not batch for _, other, _ in having):
            return None
        inputs = shown.inputs()
        if not all(any(tensor is other for other, _, _ in hits) for tensor in inputs):
            batch.reason = OTHERS_BESIDE
            return None
        having = [hit for hit in having if any(hit[0] is tensor for tensor in inputs)]
        rows = provenance.agreed(_rows_of(tensor, memory, batch, shown.shape[0]) for tensor, _, memory in having)
        # If there is a tensor for each sample, their order is that of the rows.
        order = [batch.memories.index(memory) for _, _, memory in having]
        if rows is None or (1 < len(rows) <= len(order) and order != sorted(order)):
            batch.reason = OTHER_ROWS
            return None
        # The second one of a pair may be another sample, or another view of this one.
        second = all(memory.second or memory.is_cut(tensor) for tensor, _, memory in having)
        paired = len(batch.indices) in having[0][2].shape[:2] and (second or provenance.are_paired(inputs))
        if not paired and shown.runs == 1:
            return self._as_found(shown, batch, rows)
        # The samples are known, but not which of them the classifier's input has.
        batch.reason = PAIRS if paired else SEVERAL_RUNS
        return AttributedPass(batch.indices[rows], rows[:0], batch)

    # -- by exclusion

    def _by_exclusion(self, shown: Shown) -> AttributedPass | None:
        expected, reason = self._expected()
        if len(expected) == 1:
            expected[0].used = True
        inputs = shown.inputs()
        memories = tuple(memory for memory in map(Memory.of, inputs) if memory is not None)
        if self._not_by_exclusion:
            reason = self._not_by_exclusion
        elif not reason and shown.runs > 1:
            reason = SEVERAL_RUNS
        elif not reason and (not inputs or len(memories) < len(inputs)):
            reason = OTHER_ROWS
        elif not reason and provenance.are_paired(inputs):
            reason = PAIRS
        if reason:
            self._set_reason(reason)
            return None
        batch = self._of_input(memories, expected)
        if batch is None:
            return None
        if batch.memories and not provenance.may_be_copies(inputs, batch.memories):
            self._set_reason(OTHERS_BESIDE)
            return None
        of_rows = [tensor for tensor in inputs if tensor.dim() and len(tensor) == shown.shape[0]]
        rows = provenance.agreed(provenance.rows_in_storage(tensor, len(batch.indices)) for tensor in of_rows)
        if not of_rows:
            rows = provenance.all_rows(inputs[0], len(batch.indices))
        if rows is not None and len(rows) == shown.shape[0]:
            return self._as_found(shown, batch, rows, memories)
        if shown.shape[0] < max(len(batch.indices) for batch in expected):
            self._not_by_exclusion = COPIED_ROWS
        self._set_reason(self._not_by_exclusion or OTHER_ROWS)
        return None

    def _expected(self) -> tuple[list[_Taken], str]:
        """The batches that the next forward passes can be of, in order; or the reason why that is not known."""
        waiting = [batch for batch in self._batches if not batch.past]
        latest = waiting[-1].number if waiting else -1
        if any(other._may_mean_another(latest) for other in self._beside if other is not self):
            return [], SEVERAL_BATCHES
        if self._lookahead is not None:
            waiting = [batch for batch in waiting if batch.iteration is self._iteration]
            first = self._given - 1 - self._lookahead
            if self._lookahead and self._is_over(self._iteration):
                expected = [batch for batch in waiting if batch.number_in_iteration > first]
            else:
                expected = [batch for batch in waiting if batch.number_in_iteration == first]
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
        """Whether a forward pass may be of a batch of this loader, and not of another loader's batch `number`."""
        waiting = (batch for batch in self._batches if not batch.past)
        return any(batch.number > number or not self._is_over(batch.iteration) for batch in waiting)

    def _of_input(self, inputs: tuple[Memory, ...], expected: list[_Taken]) -> _Taken | None:
        """The batch of an input: the first input is of the first batch. None if there are more inputs than batches."""
        keys = [memory.key for memory in inputs]
        earlier = [[memory.key for memory in found.inputs] for found in self._held]
        different = [key for number, key in enumerate(earlier) if key not in earlier[:number]]
        number = different.index(keys) if keys in different else len(different)
        if number < len(expected):
            return expected[number]
        # Next time one of them may come alone: a discriminator is not shown a real batch each time.
        self._not_by_exclusion = SEVERAL_INPUTS
        self._discard(SEVERAL_INPUTS)
        self._set_reason(SEVERAL_INPUTS)
        return None

    def _discard(self, reason: str) -> None:
        for found in self._held:
            found.batch.seen[:] = False
            found.batch.reason = reason
        self._held.clear()

    def _decide(self) -> None:
        """Accept the forward passes that were held back: no other input has come for their batches."""
        for found in self._held:
            found.batch.attributed.append(found)
        self._held.clear()

    def _set_reason(self, reason: str) -> None:
        for batch in self._batches:
            if not batch.past:
                batch.reason = reason

    # -- both

    def _as_found(
        self, shown: Shown, batch: _Taken, rows: Rows, inputs: tuple[Memory, ...] = ()
    ) -> AttributedPass | None:
        if not self._lies_by_rows(shown.shape, len(batch.indices)):
            batch.reason = POSITIONS
            return None
        first = np.zeros(len(rows), np.bool_)
        first[np.unique(rows, return_index=True)[1]] = True
        new_rows = np.flatnonzero(first & ~batch.seen[rows])
        batch.seen[rows] = True
        return AttributedPass(batch.indices[rows], new_rows, batch, inputs)

    def _lies_by_rows(self, shape: tuple[int, ...], rows: int) -> bool:
        """Whether the samples are in the first dimension of the classifier's input, and not in the second."""
        if len(shape) != 3:
            return True
        if rows != shape[1]:
            self._rows_first = self._rows_first is not False
        elif rows != shape[0]:
            self._rows_first = False
        return self._rows_first is True


def _rows_of(tensor: Tensor, memory: Memory, batch: _Taken, count: int) -> Rows | None:
    """The rows of a batch that a tensor has, which shares memory with the batch; None if they are not `count` rows."""
    rows = len(batch.indices)
    if memory.has_whole(tensor) and count == rows:
        # The rows in the tensor's order; or in the batch's order, if the tensor is transposed.
        within = memory.rows_in(tensor) if memory.rows == rows else None
        return np.arange(rows) if within is None or len(within) != rows else within
    if memory.rows != rows:
        return None
    found = memory.rows_in(tensor)
    return found if found is not None and len(found) == count else None
