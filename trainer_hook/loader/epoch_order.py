"""What one rank reads in an epoch, in order; an exchange swaps two of the positions that are still to come.

Whatever is proposed, each sample of the epoch is handed on exactly once: a proposal that the order does not allow is
left out. The rank's own process keeps the order that counts; the mount only proposes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.uint32]


class EpochOrder:
    """`order` has the index of the sample at each position, each sample at most once; raises ValueError otherwise.

    `samples` is the length of the list.
    """

    def __init__(self, order: Sequence[int] | Indices, samples: int) -> None:
        self.order: Indices = np.array(order, np.uint32)
        """The whole epoch: first what has been handed on, in that order, then the rest as it is planned now."""
        total = len(self.order)
        self._position_of = np.full(samples, -1, np.int64)
        if total and int(self.order.max()) >= samples:
            raise ValueError(f"the order has sample {int(self.order.max())} of a list of {samples}")
        self._position_of[self.order] = np.arange(total)
        if int((self._position_of >= 0).sum()) != total:
            raise ValueError("the order has a sample more than once, so its samples cannot be exchanged")
        self.position = 0
        """How many samples have been handed on."""

    def __len__(self) -> int:
        return len(self.order)

    def coming(self, count: int) -> list[int]:
        """The next samples, at most `count`, in the order that is planned now."""
        coming: list[int] = self.order[self.position : self.position + count].tolist()
        return coming

    def hand_on(self, given: Iterable[int], count: int) -> list[int]:
        """Hand on the next `count` samples, and return them; `given` proposes which, one for each position.

        A proposed sample changes places with the one whose turn it is, unless it is not to come any more.
        """
        end = min(self.position + count, len(self.order))
        for position, sample in zip(range(self.position, end), given, strict=False):
            if 0 <= sample < len(self._position_of):
                other = int(self._position_of[sample])
                if other > position:
                    first, second = int(self.order[position]), int(self.order[other])
                    self.order[position], self.order[other] = second, first
                    self._position_of[first], self._position_of[second] = other, position
        handed = self.coming(count)
        self.position = end
        return handed
