"""The lists that the manager has in memory, by the digest of their content.

A list has a number, for rows of tables and for traces. It keeps the number when it leaves memory and is declared again.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from spiderfs.daemon.training.known_list import KnownList
from spiderfs.daemon.training.trainer import SampleList

# The number of a list has 16 bits in traces.
_MAX_NUMBER = 0xFFFF


def digest_of(samples: SampleList) -> str:
    """Two declarations have one digest if they name the same files with the same labels in the same order."""
    return xxhash.xxh3_64_hexdigest(b"\0".join(samples.paths) + samples.labels.tobytes())


class KnownLists:
    def __init__(self) -> None:
        self._lists: dict[str, KnownList] = {}
        self._numbers: dict[str, int] = {}

    def __iter__(self) -> Iterator[KnownList]:
        """The lists there are now: others may be declared, or leave memory, while a caller looks at these."""
        return iter(list(self._lists.values()))

    def __contains__(self, digest: object) -> bool:
        return digest in self._lists

    def get(self, digest: str) -> KnownList | None:
        return self._lists.get(digest)

    def number_of(self, digest: str) -> int:
        return self._numbers.setdefault(digest, len(self._numbers) % _MAX_NUMBER + 1)

    def put(self, known_list: KnownList) -> None:
        """Have this list in memory, in place of one with the same digest."""
        self._lists[known_list.digest] = known_list

    def remove(self, known_list: KnownList) -> None:
        del self._lists[known_list.digest]

    def samples_beside(self, digest: str) -> int:
        """How many samples all other lists have together."""
        return sum(len(known_list.keys) for known_list in self._lists.values() if known_list.digest != digest)
