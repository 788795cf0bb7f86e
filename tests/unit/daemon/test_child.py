"""How a worker or manager ends: by itself, by an error, and by a store that must be rebuilt."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import pytest
import trio

from spiderfs.daemon.supervisor import live
from spiderfs.errors import SpiderfsError, StoreCorrupt
from spiderfs.store.environment import EXIT_STORE_CORRUPT


def damaged() -> None:
    raise StoreCorrupt("a page is missing")


async def ends() -> None:
    await trio.lowlevel.checkpoint()


async def fails() -> None:
    raise ValueError("a mistake")


async def meets_damage() -> None:
    damaged()


async def meets_damage_in_a_thread() -> None:
    await trio.to_thread.run_sync(damaged)


async def meets_damage_behind_handlers() -> None:
    """No handler of ordinary errors on the way may take the damage for one."""
    try:
        try:
            damaged()
        except SpiderfsError:
            return
    except Exception:
        return


async def meets_damage_in_one_of_its_tasks() -> None:
    async with trio.open_nursery() as outer, trio.open_nursery() as inner:
        outer.start_soon(trio.sleep_forever)
        inner.start_soon(meets_damage)


@pytest.mark.parametrize(
    ("main", "status"),
    [
        (ends, 0),
        (fails, 1),
        (meets_damage, EXIT_STORE_CORRUPT),
        (meets_damage_in_a_thread, EXIT_STORE_CORRUPT),
        (meets_damage_behind_handlers, EXIT_STORE_CORRUPT),
        (meets_damage_in_one_of_its_tasks, EXIT_STORE_CORRUPT),
    ],
)
def test_the_status_shows_the_supervisor_why_it_ended(main: Callable[[], Awaitable[None]], status: int) -> None:
    child = os.fork()
    if child == 0:
        live(main)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
