"""Questions about control files, from a worker to the manager and back.

A worker makes one connection to a Unix stream socket for each question. The question is one msgpack map; the worker
then shuts down its half of the connection. The answer is any number of maps with a piece of the `text` each, and a last
map that says how it went: `done`, `refused` with the reason, or `failed`. So a text may be of any length, and neither
side holds more than a piece of it. The supervisor made the listening socket, so a question that is asked while the
manager starts again waits in the backlog.

No question may end the manager: if a control file raises an error that it should not raise, the manager logs the error,
and the reader gets EIO.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import trio

from spiderfs.errors import ConfigError, NotFound, SpiderfsError, TryAgain
from spiderfs.protocol.requests import socket_address

log = logging.getLogger(__name__)

# The longest question, or piece of an answer. A list of files to warm may be long, but not endless.
MAX_MESSAGE_BYTES = 64 << 20
# How long a worker waits for each piece. A manager that needs longer sends empty pieces, to say that it is still there.
ANSWER_TIMEOUT_S = 30.0
ALIVE_INTERVAL_S = 5.0
# How long the manager waits for the question, and for the worker to take each piece.
QUESTION_TIMEOUT_S = 10.0

# Sending raises these when the worker has gone, or takes nothing.
_GIVEN_UP = (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError)

Send = Callable[[bytes], Awaitable[None]]
"""Takes a piece of a text."""


# A list takes as much disk as it is long, and half of the manager's time while it is written.
_LISTS_AT_ONCE = 4

Render = Callable[[], bytes | AsyncGenerator[bytes]]
"""Gives the text of a control file (`texts.py`), at once or piece by piece."""

Act = Callable[[bytes], Awaitable[None]]
"""Acts on what was written to a control file (`commands.py`); raises ConfigError with the reason of a refusal."""


class ControlTable:
    def __init__(self, renders: Mapping[str, Render], acts: Mapping[str, Act]) -> None:
        self._renders, self._acts = renders, acts
        self.last_refusal = ""
        """Why the last write to a control file was refused: the writer's program shows no more than an errno of it."""
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
            self.last_refusal = str(exc)
            raise
        if name == "config":
            self.last_refusal = ""


class ControlClient:
    """A worker's end of the channel: the ControlChannel of `vfs.control_files.Control`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def render(self, name: str, take: Callable[[bytes], None]) -> None:
        await self._ask({"render": name}, take)

    async def apply(self, name: str, text: bytes) -> None:
        await self._ask({"apply": name, "text": text}, lambda piece: None)

    async def _ask(self, question: dict[str, Any], take: Callable[[bytes], None]) -> None:
        try:
            with trio.fail_after(ANSWER_TIMEOUT_S) as patience, socket_address(self._path) as address:
                async with await trio.open_unix_socket(address) as stream:
                    await stream.send_all(_packed(question))
                    await stream.send_eof()
                    # A refusal quotes the text that the user wrote, which need not be UTF-8.
                    answers = msgpack.Unpacker(unicode_errors="surrogateescape", max_buffer_size=MAX_MESSAGE_BYTES)
                    async for received in stream:
                        answers.feed(received)
                        for answer in answers:
                            patience.deadline = trio.current_time() + ANSWER_TIMEOUT_S
                            if "refused" in answer:
                                raise ConfigError(answer["refused"])
                            if "failed" in answer:
                                raise SpiderfsError(answer["failed"])
                            if "text" not in answer:
                                return
                            take(answer["text"])
        except (trio.TooSlowError, trio.BrokenResourceError, OSError, ValueError) as exc:
            raise TryAgain("the manager does not answer: it may be starting again") from exc
        raise TryAgain("the manager has ended in the middle of its answer")


async def answer_questions(listener: socket.socket, table: ControlTable, nursery: trio.Nursery) -> None:
    """The manager's end: answer until cancelled."""
    listener.setblocking(False)
    accepting = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
    await trio.serve_listeners(partial(_answer, table), [accepting], handler_nursery=nursery)


async def _answer(table: ControlTable, stream: trio.SocketStream) -> None:
    sending = trio.Lock()

    async def send(message: dict[str, Any]) -> None:
        async with sending:
            with trio.fail_after(QUESTION_TIMEOUT_S):
                await stream.send_all(_packed(message))

    try:
        with trio.fail_after(QUESTION_TIMEOUT_S):
            received = bytearray()
            async for piece in stream:
                received += piece
                if len(received) > MAX_MESSAGE_BYTES:
                    raise ValueError("too long")
            question = msgpack.unpackb(received, unicode_errors="surrogateescape")
        if "render" in question:
            act = partial(table.render, question["render"], lambda text: send({"text": text}))
        else:
            act = partial(table.apply, question["apply"], question["text"])
    except trio.TooSlowError:
        log.debug("a control question came too slowly")
    except trio.BrokenResourceError:
        log.debug("a control question was given up by its asker")
    except (ValueError, TypeError, KeyError) as exc:
        # Only this user reaches the socket; most likely a worker died in the middle of its question.
        log.info("a control question made no sense: %s", exc)
    else:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send_alive, send)
            outcome = await _outcome_of(act)
            nursery.cancel_scope.cancel()
        with contextlib.suppress(*_GIVEN_UP):
            await send(outcome)
    finally:
        await trio.aclose_forcefully(stream)


async def _send_alive(send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    while True:
        await trio.sleep(ALIVE_INTERVAL_S)
        with contextlib.suppress(*_GIVEN_UP):
            await send({"text": b""})


async def _outcome_of(act: Callable[[], Awaitable[None]]) -> dict[str, Any]:
    try:
        await act()
    except ConfigError as exc:
        return {"refused": str(exc)}
    except SpiderfsError as exc:
        return {"failed": str(exc)}
    except _GIVEN_UP:
        log.debug("a control question was given up by its asker")
    except Exception as exc:
        # A mistake in one control file must not end the process that decides for all readers.
        log.exception("a control file failed")
        return {"failed": f"unexpected {type(exc).__name__}: {exc}"}
    return {"done": True}


def _packed(message: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(message, unicode_errors="surrogateescape")
    return packed
