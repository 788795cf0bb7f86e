"""What tests of managers on several nodes share, which hear each other for as long as a test lasts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

import trio

from spiderfs.daemon.training.service import Training


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
