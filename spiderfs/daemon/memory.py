"""The memory of a mount's processes, compared with the bounds of the option `memory_limit`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from spiderfs.core.memory import UNBOUNDED, MemoryBounds
from spiderfs.linux.memory import anonymous_bytes
from spiderfs.options.units import format_size, round_size

log = logging.getLogger(__name__)


class Memory:
    """The manager makes it before it learns of any sample: what it takes later, it takes for samples."""

    def __init__(
        self,
        limit_bytes: int | None,
        bounds: MemoryBounds,
        in_flight_bytes: Callable[[], int],
        pushed_bytes: Callable[[], int],
        own_bytes: Callable[[], int] = anonymous_bytes,
    ) -> None:
        """`in_flight_bytes` of all processes; `own_bytes` are all of this one."""
        self._limit_bytes, self._bounds = limit_bytes, bounds
        self._in_flight_bytes, self._pushed_bytes, self._own_bytes = in_flight_bytes, pushed_bytes, own_bytes
        self._first_bytes = own_bytes()
        self._has_warned = False

    def status(self) -> Mapping[str, int | None]:
        """What is held, each with its bound (of what is in flight that of each process); None: no bound."""
        in_flight, pushed, samples = self._bounds.in_flight, self._bounds.pushed, self._bounds.samples
        return {
            "limit_bytes": self._limit_bytes,
            "in_flight_bytes": self._in_flight_bytes(),
            "in_flight_limit_bytes": None if in_flight == UNBOUNDED else in_flight,
            "pushed_bytes": self._pushed_bytes(),
            "pushed_limit_bytes": pushed,
            "samples_bytes": self._samples_bytes(),
            "samples_limit_bytes": None if samples == UNBOUNDED else samples,
        }

    def check(self) -> None:
        """Warn once if samples take more than is left for them."""
        taken, left = self._samples_bytes(), self._bounds.samples
        if self._limit_bytes is not None and taken > left and not self._has_warned:
            self._has_warned = True
            log.warning(
                "names, plans and scores of samples take %s of memory, and memory_limit=%s leaves %s for them: mount"
                " with a higher limit, or declare fewer samples",
                *(round_size(taken), format_size(self._limit_bytes), round_size(left)),
            )

    def _samples_bytes(self) -> int:
        return max(0, self._own_bytes() - self._first_bytes)
