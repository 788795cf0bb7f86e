"""The two parts of ImPACT's cache: members of high importance in a heap, and all other members (section III-C)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from spiderfs.core.heap import Heap
from spiderfs.core.policy import Key


class HighAndLow:
    """The H-part and the L-part of the members; `worths` has the worth of every H-sample, cached or not."""

    def __init__(self, worths: Mapping[Key, float]) -> None:
        self.worths = worths
        self.high: Heap[Key] = Heap()
        """The H-members, by worth."""
        self.low: OrderedDict[Key, None] = OrderedDict()
        """The L-members, in the order in which they entered."""
        self.high_bytes = self.low_bytes = 0

    def __contains__(self, key: object) -> bool:
        return key in self.high or key in self.low

    def add(self, key: Key, size: int) -> None:
        if key in self.worths:
            self.high.set(key, self.worths[key])
            self.high_bytes += size
        else:
            self.low[key] = None
            self.low_bytes += size

    def remove(self, key: Key, size: int) -> None:
        if key in self.high:
            self.high.discard(key)
            self.high_bytes -= size
        else:
            del self.low[key]
            self.low_bytes -= size

    def below(self, worth: float) -> Iterator[Key]:
        """H-members of a lower worth, the lowest first."""
        for key in self.high.ascending():
            if self.high.priority(key) >= worth:
                return
            yield key
