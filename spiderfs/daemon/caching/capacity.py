"""The capacity of the cache: the option's bytes, or a share of a source that is being measured.

The walk that measures the source also fills the catalogue, so that the first epoch's look-ups find all names.
"""

from __future__ import annotations

import logging
import math
import struct
from dataclasses import dataclass

import trio

from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.errors import StoreError
from spiderfs.options.model import Options
from spiderfs.sources.source import MAX_SIZE
from spiderfs.vfs.catalogue import Catalogue
from spiderfs.vfs.lister import Lister

log = logging.getLogger(__name__)

_SOURCE_BYTES_FACT, _SOURCE_BYTES = "source bytes", struct.Struct("<Q")


@dataclass(frozen=True)
class SurveyStatus:
    """`source_bytes` is what was found so far, and the whole source once the survey is `done`."""

    source_bytes: int
    done: bool


class CacheCapacity:
    """Gives the cache control the capacity, whenever the option changes or the survey knows the source better."""

    def __init__(self, options: Options, cache: CacheControl, catalogue: Catalogue, lister: Lister) -> None:
        self._capacity = options.capacity
        self._dir_ttl_s = options.dir_ttl
        self._cache = cache
        self._catalogue = catalogue
        self._lister = lister
        known = catalogue.fact(_SOURCE_BYTES_FACT)
        self._survey = SurveyStatus(int(_SOURCE_BYTES.unpack(known)[0]) if known else 0, False)
        self._survey_is_needed = trio.Event()
        self._ask_for_survey()

    def survey(self) -> SurveyStatus:
        """What is known of the source's size."""
        return self._survey

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
        await self._measure()

    def _ask_for_survey(self) -> None:
        if self._capacity.unit == "percent":
            self._survey_is_needed.set()

    async def _measure(self) -> None:
        """Walk the whole source once, and follow each better estimate of the bytes of its regular files.

        The estimate of an earlier mount stands until this walk has found more, or has ended.
        """
        total = 0
        # A listing is not trusted only because it is young: each directory's mtime is compared once, if it has one.
        ttl_s = self._dir_ttl_s if self._lister.undated else -math.inf
        async for files in self._lister.walk(lambda directory: True, ttl_s):
            # Sparse files may have any size, and together more than 64 bits can hold.
            total = min(total + sum(file.version.size for file in files), MAX_SIZE)
            if total > self._survey.source_bytes:
                self._measured(total, done=False)
        self._measured(total, done=True)

    def _measured(self, source_bytes: int, done: bool) -> None:
        self._survey = SurveyStatus(source_bytes, done)
        try:
            self._cache.set_capacity(self.budget_bytes)
            if done:
                self._catalogue.record_fact(_SOURCE_BYTES_FACT, _SOURCE_BYTES.pack(source_bytes))
        except StoreError as exc:
            log.warning("%s: the capacity stays as it is", exc)
