"""Measures the source: a walk that also fills the catalogue, so that the first epoch's look-ups find all names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from spiderfs.sources.source import MAX_SIZE
from spiderfs.vfs.lister import Lister


@dataclass(frozen=True)
class SurveyStatus:
    """`source_bytes` is what was found so far, and the whole source once the survey is `done`."""

    source_bytes: int
    done: bool


class Survey:
    """Measures the bytes of all regular files of the source."""

    def __init__(self, lister: Lister, known_bytes: int) -> None:
        self._lister = lister
        self.source_bytes = known_bytes
        self.done = False

    def status(self) -> SurveyStatus:
        return SurveyStatus(self.source_bytes, self.done)

    async def run(self, report: Callable[[], None]) -> None:
        """Walk the whole source once, and call `report` at each better estimate of its bytes.

        The estimate of an earlier mount stands until this walk has found more, or has ended.
        """
        total = 0
        # A listing is not believed only because it is young: each directory's mtime is compared once.
        async for files in self._lister.walk(lambda directory: True, ttl_s=-math.inf):
            # Sparse files may have any size, and together more than 64 bits can hold.
            total = min(total + sum(file.version.size for file in files), MAX_SIZE)
            if total > self.source_bytes:
                self.source_bytes = total
                report()
        self.done = True
        self.source_bytes = total
        report()
