"""Questions about control files over a real socket."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import msgpack
import pytest
import trio
import trio.testing

from spiderfs.daemon.control import channel as module
from spiderfs.daemon.control.channel import ControlClient, Send, answer_questions
from spiderfs.errors import ConfigError, SpiderfsError, TryAgain
from spiderfs.protocol.requests import socket_address


class Table:
    """What the manager would say."""

    def __init__(self) -> None:
        self.applied: list[tuple[str, bytes]] = []
        self.error: Exception | None = None
        self.dies: Exception | None = None
        self.text = b"text of "

    async def render(self, name: str, send: Send) -> None:
        await trio.lowlevel.checkpoint()
        if self.error:
            raise self.error
        for piece in (self.text, name.encode()):
            await send(piece)
        if self.dies:
            raise self.dies

    async def apply(self, name: str, text: bytes) -> None:
        if self.error:
            raise self.error
        self.applied.append((name, text))


class Harness:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.table = Table()
        self.client = ControlClient(path)

    async def ask(self, name: str) -> bytes:
        text = bytearray()
        await self.client.render(name, text.extend)
        return bytes(text)

    async def raw(self, sent: bytes) -> bytes:
        """What the manager answers to these bytes."""
        with socket_address(self.path) as address:
            async with await trio.open_unix_socket(address) as stream:
                await stream.send_all(sent)
                await stream.send_eof()
                answer = b""
                async for piece in stream:
                    answer += piece
                return answer


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with socket_address(path) as address:
            listener.bind(address)
        listener.listen(128)
        yield listener


@asynccontextmanager
async def running(path: Path, table: Table | None = None) -> AsyncIterator[Harness]:
    harness = Harness(path)
    harness.table = table or harness.table
    with listening(path) as listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_questions, listener, harness.table, nursery)
            yield harness
            nursery.cancel_scope.cancel()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    # Longer than the 107 bytes of a Unix socket's address, as a cache directory may be.
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    return directory / "control.sock"


@pytest.fixture
def harness(path: Path) -> AbstractAsyncContextManager[Harness]:
    return running(path)


async def test_questions_are_answered(harness: Harness) -> None:
    assert await harness.ask("stats") == b"text of stats"
    await harness.client.apply("warm", b"caf\xe9/\xff\n")
    assert harness.table.applied == [("warm", b"caf\xe9/\xff\n")]


async def test_many_ask_at_once_and_long_answers_arrive_whole(harness: Harness) -> None:
    harness.table.text = bytes(3 << 20)
    answers: list[int] = []

    async def ask() -> None:
        answers.append(len(await harness.ask("cache")))

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(ask)
    assert answers == [(3 << 20) + 5] * 20
    await harness.client.apply("warm", bytes(3 << 20))
    assert len(harness.table.applied[0][1]) == 3 << 20


@pytest.mark.parametrize("reason", ["workers cannot be changed", "unknown option \udcff\udce9", "é"])
async def test_a_refusal_comes_with_its_reason(harness: Harness, reason: str) -> None:
    harness.table.error = ConfigError(reason)
    with pytest.raises(ConfigError) as caught:
        await harness.client.apply("config", b"x")
    assert str(caught.value) == reason


@pytest.mark.parametrize("ends", ["before", "between"])
async def test_a_mistake_in_a_control_file_is_logged_and_ends_nothing(
    harness: Harness, caplog: pytest.LogCaptureFixture, ends: str
) -> None:
    mistake = RuntimeError("dictionary changed size during iteration")
    harness.table.error, harness.table.dies = (mistake, None) if ends == "before" else (None, mistake)
    with pytest.raises(SpiderfsError, match="changed size") as caught:
        await harness.ask("graph")
    assert caught.value.errno == errno.EIO
    harness.table.error = harness.table.dies = None
    assert await harness.ask("stats") == b"text of stats"
    (record,) = caplog.records
    assert record.levelname == "ERROR"


async def test_a_list_of_any_length_is_sent_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MESSAGE_BYTES", 200_000)

    class Endless(Table):
        async def render(self, name: str, send: Send) -> None:
            for _ in range(100):
                await send(bytes(100_000))

    async with running(path, table=Endless()) as harness:
        pieces: list[int] = []
        await harness.client.render("cache", lambda piece: pieces.append(len(piece)))
        assert sum(pieces) == 10_000_000


async def test_a_manager_that_is_long_about_something_is_waited_for(path: Path, jumping_clock: trio.abc.Clock) -> None:
    long_s = 2 * module.ANSWER_TIMEOUT_S

    class Slow(Table):
        async def apply(self, name: str, text: bytes) -> None:
            await trio.sleep(long_s)
            self.applied.append((name, text))

        async def render(self, name: str, send: Send) -> None:
            await send(b"one ")
            await trio.sleep(long_s)
            await send(b"two")

    table = Slow()

    async with running(path, table=table) as harness:
        await harness.client.apply("evict", b"/\n")
        assert table.applied == [("evict", b"/\n")]
        assert await harness.ask("cache") == b"one two"


async def test_who_has_read_enough_stops_the_manager(path: Path) -> None:
    class Enough(Exception):
        pass

    stopped = trio.Event()

    class Endless(Table):
        async def render(self, name: str, send: Send) -> None:
            try:
                while True:
                    await send(bytes(100_000))
            finally:
                stopped.set()

    def take(piece: bytes) -> None:
        raise Enough

    async with running(path, table=Endless()) as harness:
        with pytest.raises(Enough):
            await harness.client.render("cache", take)
        await stopped.wait()


async def test_a_manager_that_ends_in_the_middle_is_try_again(path: Path) -> None:
    async def end(listener: trio.SocketListener) -> None:
        stream = await listener.accept()
        await stream.send_all(msgpack.packb({"text": b"a piece"}))
        await trio.aclose_forcefully(stream)

    with listening(path) as raw:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(raw))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end, listener)
            with pytest.raises(TryAgain):
                await Harness(path).ask("cache")


async def test_a_question_that_makes_no_sense_ends_nothing(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for sent in (b"", b"\xc1", b"hello", msgpack.packb(5), msgpack.packb({}), msgpack.packb({"apply": "x"})):
            assert await harness.raw(sent) == b""
        assert await harness.ask("stats") == b"text of stats"
    assert len(caplog.records) == 6


async def test_a_question_without_end_is_given_up(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_MESSAGE_BYTES", 1000)
    with caplog.at_level(logging.INFO):
        with pytest.raises(TryAgain):
            await harness.client.apply("warm", bytes(100_000))
        assert await harness.ask("stats") == b"text of stats"
    assert [record.message for record in caplog.records] == ["a control question made no sense: too long"]


async def test_who_asks_and_goes_away_ends_nothing(harness: Harness, path: Path) -> None:
    harness.table.text = bytes(8 << 20)
    for _ in range(5):
        with socket_address(harness.path) as address:
            async with await trio.open_unix_socket(address) as stream:
                await stream.send_all(msgpack.packb({"render": "cache"}))
                await stream.send_eof()
    harness.table.text = b""
    assert await harness.ask("stats") == b"stats"


async def test_without_a_socket_it_is_try_again(tmp_path: Path) -> None:
    with pytest.raises(TryAgain):
        await ControlClient(tmp_path / "control.sock").render("stats", lambda piece: None)


async def test_a_manager_that_does_not_answer_is_not_waited_for_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.05)
    with listening(path), pytest.raises(TryAgain):
        await Harness(path).ask("stats")


async def test_a_question_asked_before_the_manager_is_there_is_answered_when_it_comes(path: Path) -> None:
    harness, answers = Harness(path), list[bytes]()

    async def ask() -> None:
        answers.append(await harness.ask("stats"))

    with listening(path) as listener:
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as asking:
                asking.start_soon(ask)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(answer_questions, listener, harness.table, nursery)
            nursery.cancel_scope.cancel()
    assert answers == [b"text of stats"]
