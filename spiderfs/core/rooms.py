"""The rooms in a cache beside the policy's: what is left free for landing, and the room of views.

Landing holds fetched files until the manager has decided about them, some 10 ms. Room is left free for it while nothing
is known of the files that come.

A mount's root may show some samples as views and the others as originals. Which are shown as views is fixed, and they
are as many as their share of the cache has room for (`partition.view_share`). So no view has to leave for another, and
what fits is kept as it comes.

The user may pin files: they stay whatever they are worth, and come first among all that want room. Who pins more than
the room for pins would leave nothing that follows the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spiderfs.core.policy import Key

# Landing gets 5 % of a small cache, and at most 64 MiB of a large one: 600 files of 112 kB, a fifth of a second at full
# speed.
LANDING_SHARE = 0.05
LANDING_MAX_BYTES = 64 << 20
# Landing has room for this many of the largest files. With room for one alone, each such file would push out all
# others.
LANDING_FILES = 4
VIEWS = "views"
"""The name of the section of views."""
PINS = "user-pinned"
"""The name of the section of pins."""
PINS_SHARE = 0.5
"""The share of the budget that pins may take."""


def landing_room(capacity_bytes: int, share: float = LANDING_SHARE) -> int:
    """The bytes that a cache of this capacity leaves free for landing."""
    return min(int(capacity_bytes * share), LANDING_MAX_BYTES)


def landing_of(share_bytes: int, largest_bytes: int, capacity_bytes: int) -> int:
    """The bytes that are left free if `share_bytes` are wanted, and the largest file has `largest_bytes`."""
    return min(max(share_bytes, LANDING_FILES * largest_bytes), capacity_bytes // 2)


@dataclass(frozen=True)
class ViewsRoom:
    """`share` is that of views among the bytes of views and originals; `is_view` says what a sample is shown as.

    `is_view` returns None if that is not known: for a sample of a former mount whose name no one has looked up since.
    """

    share: float
    is_view: Callable[[Key], bool | None]

    def limit(self, samples_bytes: int) -> int:
        """The most bytes that views may hold if samples in any form may hold `samples_bytes`."""
        return int(samples_bytes * self.share)


def _no_view(key: Key) -> bool:
    return False


# A function of the module, since engines are pickled (benchmarks/training/saved_training.py).
NO_VIEWS = ViewsRoom(0.0, _no_view)
"""For mounts whose root shows one form."""


def file_of(key: Key) -> Key:
    """The inode of the file that a key is of."""
    inode: Key = key[0] if isinstance(key, tuple) else key
    return inode


class PinnedFiles:
    """The files that the user has pinned, cached or not, by their inodes."""

    def __init__(self) -> None:
        self._sizes: dict[Key, int] = {}
        self.bytes = 0

    def __contains__(self, key: Key) -> bool:
        """Whether the file of this key is pinned."""
        return bool(self._sizes) and file_of(key) in self._sizes

    def __iter__(self) -> Iterator[Key]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def size_of(self, inode: Key) -> int:
        """How many bytes of a file are pinned."""
        return self._sizes.get(inode, 0)

    def add(self, inode: Key, size: int) -> None:
        """Pin `size` bytes more of a file."""
        self._sizes[inode] = self._sizes.get(inode, 0) + size
        self.bytes += size

    def discard(self, inode: Key) -> None:
        self.bytes -= self._sizes.pop(inode, 0)
