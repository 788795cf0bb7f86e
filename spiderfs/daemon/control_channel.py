"""Questions about control files, from a worker to the manager and back.

One connection per question on a Unix stream socket; question and answer are one msgpack map each, and the side that
writes shuts its half down when it has said all. The supervisor made the listening socket, so a question asked while the
manager is being started again waits in the backlog.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import msgpack
import trio

from spiderfs.daemon.context import socket_address
from spiderfs.errors import ConfigError, SpiderfsError, StoreCorrupt, TryAgain
from spiderfs.store.environment import end_as_corrupt

log = logging.getLogger(__name__)

# A list of files to warm may be long, but not endless.
MAX_MESSAGE_BYTES = 64 << 20
# `cache` lists every record: seconds for millions of them.
ANSWER_TIMEOUT_S = 30.0
QUESTION_TIMEOUT_S = 10.0


class Answering(Protocol):
    async def render(self, name: str) -> bytes: ...

    async def apply(self, name: str, text: bytes) -> None: ...


class ControlClient:
    """A worker's end: the ControlChannel of `Control`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def render(self, name: str) -> bytes:
        answer: bytes = await self._ask({"render": name})
        return answer

    async def apply(self, name: str, text: bytes) -> None:
        await self._ask({"apply": name, "text": text})

    async def _ask(self, question: dict[str, Any]) -> Any:
        try:
            with trio.fail_after(ANSWER_TIMEOUT_S), socket_address(self._path) as address:
                async with await trio.open_unix_socket(address) as stream:
                    await stream.send_all(_packed(question))
                    await stream.send_eof()
                    answer = _unpacked(await _receive_all(stream))
        except (trio.TooSlowError, trio.BrokenResourceError, OSError, ValueError) as exc:
            raise TryAgain("the manager does not answer: it may be starting again") from exc
        if "refused" in answer:
            raise ConfigError(answer["refused"])
        if "failed" in answer:
            raise SpiderfsError(answer["failed"])
        return answer["text"]


async def answer_questions(listener: socket.socket, table: Answering, nursery: trio.Nursery) -> None:
    """The manager's end: answer until cancelled."""
    listener.setblocking(False)
    accepting = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
    await trio.serve_listeners(_answering(table), [accepting], handler_nursery=nursery)


def _answering(table: Answering) -> Callable[[trio.SocketStream], Awaitable[None]]:
    async def answer(stream: trio.SocketStream) -> None:
        try:
            with trio.move_on_after(QUESTION_TIMEOUT_S):
                question = _unpacked(await _receive_all(stream))
                await stream.send_all(_packed(await _answer(table, question)))
                await stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            log.debug("a control question was given up by its asker")
        except (ValueError, TypeError, KeyError) as exc:
            # The socket is this user's own: most likely a worker that died in the middle of its question.
            log.info("a control question made no sense: %s", exc)
        finally:
            await trio.aclose_forcefully(stream)

    return answer


async def _answer(table: Answering, question: dict[str, Any]) -> dict[str, Any]:
    try:
        if "render" in question:
            return {"text": await table.render(question["render"])}
        await table.apply(question["apply"], question["text"])
    except StoreCorrupt as exc:
        end_as_corrupt(exc)
    except ConfigError as exc:
        return {"refused": str(exc)}
    except SpiderfsError as exc:
        return {"failed": str(exc)}
    return {"text": b""}


# A refusal quotes what the user wrote, and that need not be UTF-8.
def _packed(message: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(message, unicode_errors="surrogateescape")
    return packed


def _unpacked(received: bytes) -> Any:
    return msgpack.unpackb(received, unicode_errors="surrogateescape")


async def _receive_all(stream: trio.SocketStream) -> bytes:
    received = bytearray()
    async for piece in stream:
        received += piece
        if len(received) > MAX_MESSAGE_BYTES:
            raise ValueError("too long")
    return bytes(received)
