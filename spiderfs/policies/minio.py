"""Fill the cache once and never evict (MinIO of CoorDL, Mohan et al., VLDB 2021).

If an epoch reads every sample exactly once, the hit ratio of this policy is the cached fraction, whatever the order of
the draws. No policy that does not fetch ahead does better.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from spiderfs.core.policy import Key, Policy


class MinIO(Policy):
    name = "minio"

    def __init__(self) -> None:
        self._members: OrderedDict[Key, None] = OrderedDict()

    def inserted(self, key: Key, size: int) -> None:
        self._members[key] = None

    def removed(self, key: Key) -> None:
        del self._members[key]

    def eviction_order(self, section: str | None = None) -> Iterator[Key]:
        """The newest first. This is asked only when the budget shrinks; all members are worth the same."""
        return reversed(self._members)

    def victims_for(self, key: Key, size: int, full: str | None) -> Iterator[Key]:
        return iter(())

    def score(self, key: Key) -> float:
        return 1.0 if key in self._members else 0.0

    def restore(self, members: Mapping[Key, int], state: Mapping[str, Any]) -> None:
        self._members = OrderedDict.fromkeys(members)
