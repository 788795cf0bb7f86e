"""Waiting, in an asynchronous test, for what other tasks, threads or processes do."""

from __future__ import annotations

from collections.abc import Callable

import trio

PATIENCE_S = 60.0


async def eventually(condition: Callable[[], object]) -> None:
    """Return once the condition holds, or fail after a minute."""
    with trio.fail_after(PATIENCE_S):
        while not condition():
            await trio.sleep(0.002)
