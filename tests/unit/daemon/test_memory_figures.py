"""What the manager says of the memory of a mount, and when it warns."""

from __future__ import annotations

import logging

import pytest

from spiderfs.core.memory import MemoryBounds, memory_bounds
from spiderfs.daemon.manager import Memory

LIMIT = 1 << 30
BOUNDS = memory_bounds(LIMIT, 1)


class Held:
    def __init__(self, limit: int | None, bounds: MemoryBounds) -> None:
        self.own = 100 << 20
        self.memory = Memory(limit, bounds, lambda: 3, lambda: 4, lambda: self.own)


def test_samples_that_take_more_than_is_left_are_remarked_on_once(caplog: pytest.LogCaptureFixture) -> None:
    held = Held(LIMIT, BOUNDS)
    held.own += BOUNDS.samples
    held.memory.check()
    assert caplog.messages == []
    held.own += 1 << 20
    held.memory.check()
    held.memory.check()
    with caplog.at_level(logging.WARNING):
        (said,) = caplog.messages
    assert said == (
        "names, plans and scores of samples take 227.0 MiB of memory, and memory_limit=1GiB leaves 226.0 MiB for them:"
        " mount with a higher limit, or declare fewer samples"
    )


def test_figures() -> None:
    held = Held(LIMIT, BOUNDS)
    held.own += 5
    values = list(held.memory.status().values())
    assert values == [LIMIT, 3, BOUNDS.in_flight, 4, BOUNDS.pushed, 5, BOUNDS.samples]
    # A manager that has given back memory holds nothing for samples.
    held.own -= 6
    assert held.memory.status()["samples_bytes"] == 0
