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
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgpack
import trio

from spiderfs.errors import ConfigError, SpiderfsError, TryAgain
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


class Answering(Protocol):
    async def render(self, name: str, send: Send) -> None: ...

    async def apply(self, name: str, text: bytes) -> None: ...


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


async def answer_questions(listener: socket.socket, table: Answering, nursery: trio.Nursery) -> None:
    """The manager's end: answer until cancelled."""
    listener.setblocking(False)
    accepting = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
    await trio.serve_listeners(partial(_answer, table), [accepting], handler_nursery=nursery)


async def _answer(table: Answering, stream: trio.SocketStream) -> None:
    sending = trio.Lock()

    async def send(message: dict[str, Any]) -> None:
        async with sending:
            with trio.fail_after(QUESTION_TIMEOUT_S):
                await stream.send_all(_packed(message))

    try:
        with trio.fail_after(QUESTION_TIMEOUT_S):
            question = msgpack.unpackb(await _receive_all(stream), unicode_errors="surrogateescape")
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


async def _receive_all(stream: trio.SocketStream) -> bytes:
    received = bytearray()
    async for piece in stream:
        received += piece
        if len(received) > MAX_MESSAGE_BYTES:
            raise ValueError("too long")
    return bytes(received)
