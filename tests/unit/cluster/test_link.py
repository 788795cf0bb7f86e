"""Managers receive from each other by a real server, and go on without it, whatever becomes of it."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import socketserver
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
import trio
import trio.testing
from certificates import own_certificate
from waiting import eventually

from benchmarks.common.redis_server import RedisServer
from spiderfs import cluster as module
from spiderfs import cluster as stream_module
from spiderfs.cluster import Link, Stream, StreamEntry
from spiderfs.errors import StreamLost
from spiderfs.metrics import SharedCounters
from spiderfs.sources.redis_client import PASSWORD_VARIABLE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are shorter than in a mount. A server that answers is given the time that it takes on a busy machine."""
    monkeypatch.setattr(stream_module, "TIMEOUT_S", 20.0)
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    monkeypatch.setattr(module, "PAUSE_S", 0.02)
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.1)


class Node:
    """A link, and what it has received."""

    def __init__(self, url: str, keys: Sequence[str] = (), done_with: bool = False, identity: str = "") -> None:
        self.counters = SharedCounters(1)
        self.link = Link(url, self.counters.row(0), identity)
        self.keys = list(keys)
        self.received: list[bytes] = []
        self._done_with = done_with

    async def receive(self, key: str, messages: Sequence[bytes]) -> bool:
        assert key in self.keys
        self.received += messages
        return self._done_with

    def start(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self.link.run, lambda: self.keys, self.receive)

    def count(self, name: str) -> int:
        return self.counters.totals()[f"cluster_{name}"]


async def test_messages_come_in_order_and_leave_when_they_are_done_with(
    nursery: trio.Nursery, server: RedisServer
) -> None:
    one, two, three = Node(server.url), Node(server.url, ["order"], done_with=True), Node(server.url, ["order"])
    said = [b"%d" % number for number in range(300)]
    for message in said:
        one.link.send("order", message, rows=2)
    one.start(nursery)
    two.start(nursery)
    await eventually(lambda: len(two.received) == 300)
    assert two.received == said
    # The server may give what it was sent before it says that it has taken it.
    await eventually(lambda: one.count("rows_sent") == 600)
    assert (one.count("rows_lost"), one.link.status().up) == (0, True)
    await eventually(lambda: Stream(server.url).read({"order": "0-0"}, 0.01) == {})
    # A stream that is wanted later is received from its beginning on.
    one.link.send("later", b"first")
    await eventually(lambda: Stream(server.url).read({"later": "0-0"}, 0.01))
    three.start(nursery)
    three.keys = ["later"]
    three.link.look_again()
    await eventually(lambda: three.received == [b"first"])


async def test_who_wants_to_receive_nothing_asks_nothing_until_it_does(
    nursery: trio.Nursery, server: RedisServer
) -> None:
    node = Node("redis://127.0.0.1:1")
    node.start(nursery)
    await trio.testing.wait_all_tasks_blocked()
    assert node.link.status().up
    node.keys = ["something"]
    node.link.look_again()
    await eventually(lambda: not node.link.status().up)


async def test_what_is_to_be_received_is_found_even_if_no_one_says_so(
    nursery: trio.Nursery, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.05)

    one, two = Node(server.url), Node(server.url)
    one.start(nursery)
    two.start(nursery)
    await trio.testing.wait_all_tasks_blocked()
    one.link.send("unsaid", b"received")
    two.keys = ["unsaid"]
    await eventually(lambda: two.received == [b"received"])


async def test_a_killed_server_is_said_once_and_so_is_its_return(
    nursery: trio.Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with RedisServer(tmp_path) as server:
        one, two = Node(server.url), Node(server.url, ["key"])
        one.start(nursery)
        two.start(nursery)
        one.link.send("key", b"before")
        await eventually(lambda: two.received == [b"before"])
        server.kill()
        one.link.send("key", b"lost", rows=3)
        await eventually(lambda: one.count("rows_lost") == 3 and not two.link.status().up)
        await trio.sleep(0.3)
        server.start()
        await eventually(lambda: two.link.status().up)
        one.link.send("key", b"after")
        await eventually(lambda: two.received == [b"before", b"after"])
        # What one node has sent is received before it knows that the server has taken it.
        await eventually(lambda: sum("is back" in record.getMessage() for record in caplog.records) == 2)
        assert one.link.status().up
    # Two links.
    said = [record.getMessage() for record in caplog.records]
    assert sum("continues with its scores" in text for text in said) == 2
    assert sum("is back" in text for text in said) == 2


async def test_a_server_that_has_not_taken_what_was_offered_is_asked_until_it_is_back(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    with RedisServer(tmp_path) as server:
        node = Node(server.url, ())
        node.start(nursery)
        assert await node.link.offer("key", b"some", 9)
        server.kill()
        assert not await node.link.offer("key", b"some", 9)
        assert not node.link.status().up
        server.start()
        await eventually(lambda: node.link.status().up)
        assert await node.link.offer("key", b"some", 9)


async def test_a_paused_server_keeps_no_one_waiting(
    nursery: trio.Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "TIMEOUT_S", 0.5)

    with RedisServer(tmp_path) as server:
        node = Node(server.url, ["key"])
        node.start(nursery)
        node.link.send("key", b"before")
        await eventually(lambda: node.received == [b"before"])
        server.signal(signal.SIGSTOP)
        began = trio.current_time()
        for number in range(100):
            node.link.send("key", b"%d" % number, rows=1)
        assert trio.current_time() - began < 0.1
        await eventually(lambda: not node.link.status().up)
        server.signal(signal.SIGCONT)
        await eventually(lambda: node.link.status().up)
        node.link.send("key", b"after")
        await eventually(lambda: node.received[-1] == b"after")
        assert node.received.count(b"after") == node.received.count(b"before") == 1


async def test_a_full_server_costs_what_it_does_not_take(
    nursery: trio.Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        node = Node(server.url, ["something else"])
        node.start(nursery)
        for _ in range(8):
            node.link.send("key", bytes(500_000), rows=1)
        await eventually(lambda: node.count("rows_lost"))
        # It can be read from all the while, and takes nothing.
        for _ in range(5):
            await trio.sleep(0.05)
            assert not node.link.status().up
        redis.Redis(port=server.port).config_set("maxmemory", 0)
        await eventually(lambda: node.link.status().up)
        await eventually(lambda: node.count("rows_lost") + node.count("rows_sent") == 8)
        assert node.count("rows_lost") <= 3, "what waited is sent later"
    fails, back = (record.getMessage() for record in caplog.records)
    assert "maxmemory" in fails
    assert "is back" in back
    assert len(fails) < 200


@pytest.mark.parametrize(("user", "password"), [("", None), ("", "wrong"), ("alice@", "wrong"), ("bob@", "secret")])
async def test_who_has_no_right_to_it_gets_the_reason(
    nursery: trio.Nursery,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    user: str,
    password: str | None,
) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    if password is not None:
        monkeypatch.setenv(PASSWORD_VARIABLE, password)

    with guarded(tmp_path) as server:
        node = Node(server.url.replace("redis://", f"redis://{user}"), ["spiderfs:key"])
        node.start(nursery)
        await eventually(lambda: not node.link.status().up)
    (record,) = caplog.records
    assert "continues with its scores" in record.getMessage()
    assert any(word in record.getMessage().lower() for word in ("authentication", "password")), record.getMessage()
    assert "secret" not in record.getMessage()


def guarded(place: Path, *more: str) -> RedisServer:
    """A server with a user who has the rights that the documents name, of which `more` are not needed."""
    rights = ["on", ">secret", "~spiderfs:*", "+xadd", "+xread", "+xdel", "+expire", *more]
    return RedisServer(place, "--requirepass", "other", "--user", "alice", *rights)


@pytest.mark.parametrize("more", [(), ("+xinfo",)])
@pytest.mark.parametrize("done_with", [True, False])
async def test_a_user_needs_a_few_rights_alone(
    nursery: trio.Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], done_with: bool
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "secret")

    with guarded(tmp_path, *more) as server:
        node = Node(server.url.replace("redis://", "redis://alice@"), ["spiderfs:key"], done_with=done_with)
        node.start(nursery)
        node.link.send("spiderfs:key", b"allowed")
        await eventually(lambda: node.received == [b"allowed"])
        await trio.sleep(0.1)
        assert node.link.status().up
        assert node.received == [b"allowed"], "once"
        # Who may not ask whether a stream has room takes it that it has.
        taken = [await node.link.offer("spiderfs:offered", b"some", 2) for _ in range(3)]
        assert taken == [True, True, not more]
        node.link.send("others:key", b"not allowed", rows=1)
        await eventually(lambda: node.count("rows_lost") == 1)


async def test_a_server_shows_a_certificate_that_is_known(
    nursery: trio.Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.pem").write_bytes(own_certificate("localhost"))

    with RedisServer(tmp_path, certificate=tmp_path / "own.pem") as server:
        stranger = Node(server.url, ["key"])
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "own.pem"))
        known = Node(server.url, ["key"])
        known.start(nursery)
        known.link.send("key", b"hidden")
        await eventually(lambda: known.received == [b"hidden"])
        monkeypatch.delenv("SSL_CERT_FILE")
        stranger.start(nursery)
        await eventually(lambda: not stranger.link.status().up)
    assert "certificate" in caplog.text.lower()


def test_what_waits_and_what_is_kept_has_a_limit(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_BYTES", 1000)
    node = Node("redis://127.0.0.1:1")
    for number in range(20):
        node.link.send("key", b"%d" % number + bytes(99), rows=1)
    assert node.count("rows_lost") == 20 - 1000 // 101

    monkeypatch.setattr(stream_module, "STREAM_BYTES", 100_000)
    stream = Stream(server.url)
    for _ in range(20):
        stream.append([StreamEntry("many", bytes(10_000))] * 10)
    assert len(stream.read({"many": "0-0"}, 0.01)["many"]) <= 20


def test_no_call_is_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library repeats what is late, unless it is set not to: it would be stored twice."""
    monkeypatch.setattr(stream_module, "TIMEOUT_S", 0.5)
    with RedisServer(tmp_path) as server:
        stream = Stream(server.url)
        stream.append([StreamEntry("key", b"before")])
        server.signal(signal.SIGSTOP)
        with pytest.raises(StreamLost):
            stream.append([StreamEntry("key", b"late")])
        server.signal(signal.SIGCONT)
        (_, *late) = Stream(server.url).read({"key": "0-0"}, 0.1)["key"]
        assert len(late) <= 1


class NoRedis(socketserver.StreamRequestHandler):
    """Answers each command in the same way, after those by which the library begins."""

    answer = b""

    def handle(self) -> None:
        while data := self.request.recv(1 << 16):
            for command in re.findall(rb"CLIENT|XADD|EXPIRE|XREAD|XDEL|XINFO", data):
                self.request.sendall(b"+OK\r\n" if command == b"CLIENT" else self.answer)


@pytest.mark.parametrize(
    "answer",
    [
        b"+OK\r\n",
        b":5\r\n",
        b"*1\r\n:5\r\n",
        b"*1\r\n*2\r\n:1\r\n*1\r\n*2\r\n:3\r\n*0\r\n",
        b"*1\r\n*2\r\n$1\r\na\r\n*1\r\n*2\r\n$1\r\n1\r\n*2\r\n$1\r\nm\r\n:99\r\n",
        b"*1\r\n" * 5000,
    ],
)
def test_a_server_that_is_none_is_a_server_that_fails(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoRedis, "answer", answer)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), NoRedis) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        stream = Stream(f"redis://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(StreamLost, match="answers as no Redis server does"):
            stream.read({"a": "0-0"}, 0.1)
        stream.close()
        server.shutdown()


def test_a_stream_without_messages_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream("redis://127.0.0.1:1")
    server = SimpleNamespace(xread=lambda *_: [[b"a", []]])
    monkeypatch.setattr(stream, "_redis", SimpleNamespace(within=lambda timeout_s: server))
    assert stream.read({"a": "0-0"}, 0.1) == {}


async def test_a_key_that_is_no_stream_is_said_once(
    nursery: trio.Nursery, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The server takes the question whether it takes anything, each time, and no message."""
    redis.Redis.from_url(server.url).set("taken", "by another program")

    node = Node(server.url)
    node.start(nursery)
    sent = []
    for _ in range(5):
        sent.append(b"a row")
        node.link.send("taken", sent[-1], rows=1)
        await eventually(lambda: node.count("rows_lost") == len(sent))
        await eventually(lambda: node.link.status().up)
    assert [record.message.split(" (")[0] for record in caplog.records] == [f"{server.url} fails"]
    node.link.send("free", b"a row", rows=1)
    await eventually(lambda: node.count("rows_sent") == 1)
    assert f"{server.url} is back" in caplog.messages[-1]


async def test_one_key_that_is_no_stream_keeps_no_one_from_receiving_the_others(
    nursery: trio.Nursery, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = redis.Redis.from_url(server.url)
    client.set("other", "by another program")

    one, two = Node(server.url), Node(server.url, ["other", "stream"])
    one.start(nursery)
    two.start(nursery)
    for count in (1, 2):
        one.link.send("stream", b"received")
        await eventually(lambda count=count: len(two.received) == count)
    assert two.link.status().up
    client.delete("other")
    one.link.send("other", b"now")
    await eventually(lambda: two.received[-1] == b"now")
    assert caplog.messages == ["nothing is received from other: the server has something else in this name"]


async def test_a_stream_that_begins_again_by_a_clock_that_is_behind_is_received(
    nursery: trio.Nursery, server: RedisServer
) -> None:
    client = redis.Redis.from_url(server.url)

    node = Node(server.url, ["lost", "busy"])
    node.start(nursery)
    client.xadd("lost", {"m": b"before"}, id="9000000000000-0")
    await eventually(lambda: node.received == [b"before"])
    client.delete("lost")
    client.xadd("lost", {"m": b"after"}, id="1000-0")
    client.xadd("lost", {"m": b"and more"}, id="1000-1")

    def said() -> list[bytes]:
        client.xadd("busy", {"m": b"."})
        return [message for message in node.received if message != b"."]

    await eventually(lambda: said() == [b"before", b"after", b"and more"])
    await trio.sleep(0.2)
    assert said() == [b"before", b"after", b"and more"], "each once"


class Drips(socketserver.StreamRequestHandler):
    """Answers with a piece now and then, each within the time limit."""

    def handle(self) -> None:
        while data := self.request.recv(1 << 16):
            if b"XREAD" not in data:
                self.request.sendall(b"+OK\r\n" * data.count(b"CLIENT"))
                continue
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.request.sendall(b"*1\r\n")
                    time.sleep(0.05)


def test_a_server_that_drips_holds_no_call_for_longer_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "TIMEOUT_S", 0.5)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Drips) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        stream, began = Stream(f"redis://127.0.0.1:{server.server_address[1]}"), time.monotonic()
        with pytest.raises(StreamLost, match=r"(?i)time"):
            stream.read({"a": "0-0"}, 0.1)
        assert 0.4 < time.monotonic() - began < 4.5, "and not 5 s"
        stream.close()
        server.shutdown()


async def test_mounts_of_another_source_receive_nothing_and_take_nothing_out(
    nursery: trio.Nursery, server: RedisServer
) -> None:
    key = "spiderfs:of a source"
    one, like, other = (
        Node(server.url, [key], done_with=source == "nas:/b", identity=source)
        for source in ("nas:/a", "nas:/a", "nas:/b")
    )
    for node in (like, other):
        node.start(nursery)
    one.keys.clear()
    one.start(nursery)
    other.link.send(key, b"of b")
    with trio.fail_after(30):
        while not other.received:
            await trio.sleep(0.005)
    one.link.send(key, b"of a")
    assert await one.link.offer(key, b"offered", 9)
    with trio.fail_after(30):
        while len(like.received) < 2:
            await trio.sleep(0.005)
    assert sorted(like.received) == [b"of a", b"offered"]
    assert other.received == [b"of b"]
