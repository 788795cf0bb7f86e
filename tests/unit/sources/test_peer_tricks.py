"""Answers of web servers that are unusual, or made to hold up who asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler

import pytest
from test_peer_source import CONTENT, TIMEOUT_S, Peer, Setup, members_of, reply

from benchmarks.fakes import MemorySource
from spiderfs.errors import ConfigError
from spiderfs.shared.shared_memory import SharedSlots
from spiderfs.sources.node_names import addresses_of, own_url
from spiderfs.sources.peers import PeerSource
from spiderfs.sources.source import FromPeer


@pytest.fixture
def setup() -> Iterator[Setup]:
    peer = Peer()
    with closing(Setup(peer)) as setup:
        yield setup
    peer.close()


def drip(handler: BaseHTTPRequestHandler, endless: bytes) -> bool:
    """A few bytes at a time, so that no wait for the next ones is long."""
    try:
        for _ in range(int(8 * TIMEOUT_S / 0.05)):
            handler.wfile.write(endless)
            handler.wfile.flush()
            time.sleep(0.05)
    except OSError:
        pass
    handler.close_connection = True
    return True


def slow_headers(handler: BaseHTTPRequestHandler, path: bytes) -> bool:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    return drip(handler, b"A: b\r\n")


def slow_status(handler: BaseHTTPRequestHandler, path: bytes) -> bool:
    return drip(handler, b"H")


def slow_line(handler: BaseHTTPRequestHandler, path: bytes) -> bool:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    return drip(handler, b"H")


def continued(handler: BaseHTTPRequestHandler, path: bytes) -> bool:
    return drip(handler, b"HTTP/1.1 100 Continue\r\n\r\n")


def slow_absence(handler: BaseHTTPRequestHandler, path: bytes) -> bool:
    reply(handler, 404, b"", length=1 << 40)
    return drip(handler, b"no")


def slow_chunks_of_absence(handler: BaseHTTPRequestHandler, path: bytes) -> bool:
    handler.wfile.write(b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n")
    return drip(handler, b"2\r\nno\r\n")


@pytest.mark.parametrize(
    "answers", [slow_status, slow_headers, slow_line, continued, slow_absence, slow_chunks_of_absence]
)
def test_an_answer_that_comes_drop_by_drop_takes_no_longer_than_the_time_limit(
    setup: Setup, answers: Callable[[BaseHTTPRequestHandler, bytes], bool]
) -> None:
    setup.peer.answers = answers
    began = time.monotonic()
    assert setup.read() == CONTENT
    assert time.monotonic() - began < TIMEOUT_S + 0.2


@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize("protocol", ["HTTP/1.0", "HTTP/1.1"])
def test_a_server_that_ends_each_connection(setup: Setup, status: int, protocol: str) -> None:
    def closing(handler: BaseHTTPRequestHandler, path: bytes) -> bool:
        handler.protocol_version = protocol
        reply(handler, status, CONTENT, {"Connection": "close"})
        return True

    setup.peer.answers = closing
    for _ in range(5):
        found = setup.read()
        assert found == CONTENT
        assert (type(found) is FromPeer) == (status == 200)
    assert setup.status().timeouts == 0


def test_a_piece_from_another_place_in_the_file(setup: Setup) -> None:
    def remote(handler: BaseHTTPRequestHandler, path: bytes) -> bool:
        reply(handler, 206, CONTENT[:100], {"Content-Range": f"bytes 0-99/{len(CONTENT)}"})
        return True

    setup.peer.answers = remote
    assert setup.read(1000, 100) == CONTENT[1000:1100]


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 404 No\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 403 No\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 101 No\r\n\r\n",
        b"\0" * 70_000 + b"\r\n",
    ],
)
def test_answers_that_are_none(setup: Setup, raw: bytes) -> None:
    def say(handler: BaseHTTPRequestHandler, path: bytes) -> bool:
        handler.wfile.write(raw)
        handler.close_connection = True
        return True

    setup.peer.answers = say
    for _ in range(4):
        assert setup.read() == CONTENT


@pytest.mark.parametrize("host", ["a" * 70, "a..b", "a\0b"])
def test_a_name_that_no_host_can_have_is_never_there(host: str) -> None:
    url = f"http://{host}:8443"
    with pytest.raises(ConfigError, match="no node"):
        own_url({url: 1.0}, "")
    source = MemorySource()
    assert addresses_of(host) == []
    members = members_of(url)
    reader = PeerSource(source, members, TIMEOUT_S, 10.0, members.row(0), SharedSlots(8))
    began = time.monotonic()
    for number in range(9):
        name = b"file%d" % number
        assert reader.read(name, 0, len(CONTENT), source.add(name, CONTENT).version) == CONTENT
    assert time.monotonic() - began < TIMEOUT_S / 2


def test_a_path_of_a_server_in_any_letters(setup: Setup) -> None:
    with closing(Setup(setup.peer, prefix="/daten ä")) as remote:
        setup.peer.files["daten ä/".encode() + remote.named(remote.path)] = CONTENT
        assert type(remote.read()) is FromPeer
