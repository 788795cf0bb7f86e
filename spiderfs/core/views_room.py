"""The room of views in a mount whose root shows some samples as views, and the others as originals.

Which samples are shown as views is fixed, and they are as many as their share of the cache has room for
(`partition.view_share`). So none of them has to leave for another, and what fits is kept as it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spiderfs.core.policy import Key

VIEWS = "views"
"""The name of the section."""


@dataclass(frozen=True)
class ViewsRoom:
    """`share` is that of views among the bytes of views and originals; `is_view` says what a sample is shown as.

    `is_view` returns None if that is not known: for a sample of a former mount of which no name was looked up since.
    """

    share: float
    is_view: Callable[[Key], bool | None]

    def limit(self, samples_bytes: int) -> int:
        """The most that views may hold if samples in any form may hold so many bytes."""
        return int(samples_bytes * self.share)


def _no_view(key: Key) -> bool:
    return False


# A function of the module, since engines are pickled (benchmarks/training/full_size.py keeps them between slices).
NO_VIEWS = ViewsRoom(0.0, _no_view)
"""For mounts whose root shows one form."""
