"""How much the cache may hold: as many bytes as the option says, or a share of a source that is being measured.

The walk that measures the source also fills the catalogue, so that the first epoch's look-ups find all names.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import trio

from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.errors import StoreError
from spiderfs.options.model import Options
from spiderfs.sources.source import MAX_SIZE
from spiderfs.vfs.catalogue import Catalogue
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


log = logging.getLogger(__name__)

_SOURCE_BYTES_FACT, _SOURCE_BYTES = "source bytes", struct.Struct("<Q")


def source_bytes_of_last_mount(catalogue: Catalogue) -> int:
    """How large an earlier survey found the source; 0 if there was none."""
    known = catalogue.fact(_SOURCE_BYTES_FACT)
    return int(_SOURCE_BYTES.unpack(known)[0]) if known else 0


class CacheCapacity:
    """Tells the cache control the capacity, whenever the option changes or the survey knows the source better."""

    def __init__(self, options: Options, survey: Survey, cache: CacheControl, catalogue: Catalogue) -> None:
        self._capacity = options.capacity
        self._survey = survey
        self._cache = cache
        self._catalogue = catalogue
        self._survey_is_needed = trio.Event()
        self._ask_for_survey()

    @property
    def budget_bytes(self) -> int:
        """The capacity as far as it is known now."""
        return self._capacity.budget_bytes(self._survey.source_bytes)

    def change(self, options: Options) -> None:
        """Take over the option; raises StoreError, and then the capacity is as it was."""
        self._cache.set_capacity(options.capacity.budget_bytes(self._survey.source_bytes))
        self._capacity = options.capacity
        self._ask_for_survey()

    async def run(self) -> None:
        """Measure the source, once, as soon as the capacity is a share of it."""
        await self._survey_is_needed.wait()
        await self._survey.run(self._measured)

    def _ask_for_survey(self) -> None:
        if self._capacity.unit == "percent":
            self._survey_is_needed.set()

    def _measured(self) -> None:
        try:
            self._cache.set_capacity(self.budget_bytes)
            if self._survey.done:
                self._catalogue.record_fact(_SOURCE_BYTES_FACT, _SOURCE_BYTES.pack(self._survey.source_bytes))
        except StoreError as exc:
            log.warning("%s: the capacity stays as it is", exc)
