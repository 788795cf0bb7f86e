"""What tests of managers on several nodes share, which hear each other for as long as a test lasts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import trio

from spiderfs.daemon.training.service import Training

PATIENCE_S = 60.0


class Attaching(Protocol):
    training: Training

    async def attach(self) -> None: ...


@contextlib.asynccontextmanager
async def sharing(*nodes: Attaching) -> AsyncIterator[trio.Nursery]:
    for node in nodes:
        await node.attach()
    async with trio.open_nursery() as nursery:
        for node in nodes:
            nursery.start_soon(node.training.share_with_other_nodes)
        yield nursery
        nursery.cancel_scope.cancel()


async def eventually(condition: Callable[[], object]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not condition():
            await trio.sleep(0.002)
