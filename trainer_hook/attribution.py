"""Which samples a forward pass of the training was about.

A data loader hands out batches in the order in which its batch sampler made them, whatever its workers do; that is
PyTorch's promise unless `in_order=False`. So the k-th batch that the loop takes is the k-th that was drawn in this
iteration over the loader, and the k-th training forward is about the k-th batch taken. What could break the second
half is met like this:

- an epoch left early: a new iteration over the loader forgets what the old one still had;
- a batch taken and skipped: only `lookahead` batches can be waiting when the loop takes its next one and goes on to
  the forward, so older ones were skipped;
- a forward of more rows than the batch has (two crops), or of fewer (a collate function that leaves samples out):
  nothing is recorded. Forwards of parts are put together when they add up to the batch before it is out of reach.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Part = TypeVar("Part")


@dataclass
class _Taken(Generic[Part]):
    indices: npt.NDArray[np.uint32]
    parts: list[Part] = field(default_factory=list)
    rows: int = 0


class Attribution(Generic[Part]):
    """`counts` has what was skipped (batches) and unmatched (forwards) since the iteration began."""

    def __init__(self, lookahead: int) -> None:
        self.lookahead = lookahead
        self.counts: Counter[str] = Counter()
        self._taken: deque[_Taken[Part]] = deque()
        self._iteration: object = None

    def is_in(self, iteration: object) -> bool:
        """Whether this iteration over the loader is the current one."""
        return iteration is self._iteration

    def taken(self, iteration: object, indices: npt.NDArray[np.uint32]) -> None:
        """The loop took a batch of these samples in this iteration over the loader."""
        if iteration is not self._iteration:
            self._iteration = iteration
            self._taken.clear()
            self.counts.clear()
        self._taken.append(_Taken(indices))
        while len(self._taken) > self.lookahead + 1:
            self._taken.popleft()
            self.counts["skipped"] += 1

    def rows_of(self, rows: int) -> npt.NDArray[np.uint32] | None:
        """The samples that a forward of so many rows is about; None, and counted, if that cannot be said."""
        if self._taken:
            head = self._taken[0]
            if head.rows + rows <= len(head.indices):
                return head.indices[head.rows : head.rows + rows]
            self._taken.popleft()
        self.counts["unmatched"] += 1
        return None

    def forward(self, rows: int, part: Part) -> tuple[npt.NDArray[np.uint32], list[Part]] | None:
        """After `rows_of` said which: the whole batch and its parts, when this forward was its last."""
        head = self._taken[0]
        head.rows += rows
        head.parts.append(part)
        if head.rows < len(head.indices):
            return None
        self._taken.popleft()
        return head.indices, head.parts
