"""The interface of a policy that has room for samples which nobody has read yet.

Such a policy has a part that reads use up: a sample in it is worth more before it is read in an epoch than after. The
samples of this part rank low, and one of them is as good as another. So the caller chooses which ones it brings, and
can bring many at a time (`daemon/caching/packer.py`). The policy only ranks: it says which samples rank low, which of
these readers had to do without, and for how many bytes of unread ones it has room.

A brought sample enters like every other: it lies in landing, and the caller has to call `Engine.place` for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from spiderfs.core.policy import Key


class Restocked(ABC):
    """The questions that such a policy answers beside those that every policy answers (`policy.py`)."""

    @abstractmethod
    def ranks_low(self, key: Key) -> bool:
        """Whether a sample, member or not, belongs to the part that reads use up."""

    @abstractmethod
    def missed_low(self) -> Iterable[Key]:
        """Samples that rank low and were not cached when readers asked for them, the latest first."""

    @abstractmethod
    def room_for_unread_bytes(self) -> int:
        """Bytes that the policy would give, now, to samples that it `wants_unread`."""

    @abstractmethod
    def wants_unread(self, key: Key) -> bool:
        """Whether a sample that is not cached would be useful in the cache before anybody asks for it."""
