"""The control files as the manager has them: by name, how to render each one, and how to act on what is written."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import trio

from spiderfs.daemon.control.channel import Send
from spiderfs.errors import ConfigError, NotFound, SpiderfsError

# A list takes as much disk as it is long, and half of the manager's time while it is written.
_LISTS_AT_ONCE = 4

Render = Callable[[], bytes | AsyncGenerator[bytes]]
"""Gives the text of a control file: at once (`texts.py`), or piece by piece (`long_texts.py`)."""

Act = Callable[[bytes], Awaitable[None]]
"""Acts on what was written to a control file (`commands.py`); raises ConfigError with the reason of a refusal."""


@dataclass
class LastRefusal:
    """Why the last write to a control file was refused: the writer's program shows no more than an errno of it."""

    reason: str = ""


class ControlTable:
    def __init__(self, renders: Mapping[str, Render], acts: Mapping[str, Act], refusal: LastRefusal) -> None:
        self._renders = renders
        self._acts = acts
        self._refusal = refusal
        self._listing = trio.CapacityLimiter(_LISTS_AT_ONCE)

    async def render(self, name: str, send: Send) -> None:
        """Send the text of a control file; raises NotFound."""
        if name not in self._renders:
            raise NotFound(f"no control file {name}")
        text = self._renders[name]()
        if isinstance(text, bytes):
            await send(text)
            return
        async with self._listing, aclosing(text) as pieces:
            async for piece in pieces:
                await send(piece)

    async def apply(self, name: str, text: bytes) -> None:
        """Act on what was written to a control file; raises SpiderfsError with the reason of a refusal."""
        if name not in self._acts:
            raise ConfigError(f"{name} can only be read")
        try:
            await self._acts[name](text)
        except SpiderfsError as exc:
            self._refusal.reason = str(exc)
            raise
        if name == "config":
            self._refusal.reason = ""
