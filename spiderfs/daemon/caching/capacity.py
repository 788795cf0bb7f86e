"""How much the cache may hold: as many bytes as the option says, or a share of a source that is being measured."""

from __future__ import annotations

import logging
import struct

import trio

from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.caching.survey import Survey
from spiderfs.errors import StoreError
from spiderfs.options.model import Options
from spiderfs.vfs.catalogue import Catalogue

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
