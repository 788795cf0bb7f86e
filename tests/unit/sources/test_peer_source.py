"""What is asked of another node, and that whatever it answers the reader gets the right bytes in time."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote_to_bytes

import pytest
from certificates import own_certificate
from local_server import LocalServer

from benchmarks.fakes import MemorySource
from spiderfs.errors import ConfigError, SourceChanged
from spiderfs.shared.shared_memory import SharedSlots
from spiderfs.sources import peers
from spiderfs.sources.members import Members, PeerStatus
from spiderfs.sources.node_names import Node, addresses_of, own_url
from spiderfs.sources.peers import FAILURES, LONGER, STRIPE_BYTES, PeerSource, asked_name, asked_version, key_at
from spiderfs.sources.source import FromPeer, Version, version_hash

pytestmark = pytest.mark.clock

HERE = "http://127.0.0.1:1"
TIMEOUT_S = 0.3
# What a busy machine may add, and for how long answers go on that are made to hold up who asks.
SLACK_S, ANSWERS_S = 5.0, 20.0
CONTENT = bytes(range(256)) * 20


class Peer(LocalServer):
    """A web server over the files of a node; `answers` may answer in its place."""

    def __init__(self, certificate: Path | None = None) -> None:
        """`certificate`: a PEM file with a key; then it speaks TLS, as the host `localhost`."""
        self.files: dict[bytes, bytes] = {}
        self.asked: list[bytes] = []
        self.connections = 0
        self.answers: Callable[[BaseHTTPRequestHandler, bytes], bool] = lambda handler, path: False
        peer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                peer.connections += 1

            def do_GET(self) -> None:
                path = unquote_to_bytes(self.path.removeprefix("/"))
                peer.asked.append(path)
                if peer.answers(self, path):
                    return
                content = peer.files.get(path)
                if content is None:
                    reply(self, 404, b"there is no such file")
                elif extent := self.headers.get("Range"):
                    first, last = map(int, extent.removeprefix("bytes=").split("-"))
                    piece, of = content[first : last + 1], f"bytes {first}-{last}/{len(content)}"
                    reply(self, 206, piece, {"Content-Range": of})
                else:
                    reply(self, 200, content)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(Handler, certificate)


def reply(
    handler: BaseHTTPRequestHandler,
    status: int,
    content: bytes,
    headers: dict[str, str] | None = None,
    length: int | None = None,
) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(content) if length is None else length), **(headers or {})}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(content)


def members_of(*urls: str) -> Members:
    """This node, and others."""
    members = Members()
    at_home = {url: Node(url, "localhost", ["127.0.0.1"]) for url in urls if "localhost" in url}
    members.change(dict.fromkeys((HERE, *urls), 1.0), {HERE}, at_home)
    return members


class Setup:
    """A source with one file whose home is the peer, and a source with that peer in front of it."""

    def __init__(self, peer: Peer, prefix: str = "") -> None:
        self.peer = peer
        self.source = MemorySource()
        self.homes = members_of(peer.url + prefix)
        self.asked = SharedSlots(64)
        self.reader = PeerSource(self.source, self.homes, TIMEOUT_S, 10.0, self.homes.row(0), self.asked)
        self.paths = [path for path in (b"d/%d x?.jpg" % number for number in range(99)) if self._is_at_peer(path)]
        self.path = self.paths[0]
        self.version = self.source.stat(self.path).version
        peer.files[self.named(self.path)] = CONTENT

    def _is_at_peer(self, path: bytes) -> bool:
        return self.homes.is_remote(version_hash(path, self.source.add(path, CONTENT).version))

    def named(self, path: bytes) -> bytes:
        return asked_name(path, version_hash(path, self.source.stat(path).version))

    def read(self, offset: int = 0, length: int = len(CONTENT)) -> bytes:
        return self.reader.read(self.path, offset, length, self.version)

    def status(self) -> PeerStatus:
        return self.homes.status(1)

    def reads(self) -> int:
        return self.source.calls["read"]

    def close(self) -> None:
        self.reader.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


@pytest.fixture
def setup(peer: Peer) -> Iterator[Setup]:
    with contextlib.closing(Setup(peer)) as setup:
        yield setup


def test_the_home_is_asked_for_exactly_this_version(setup: Setup) -> None:
    found = setup.read()
    assert (found, type(found), setup.reads()) == (CONTENT, FromPeer, 0)
    assert setup.peer.asked == [setup.named(setup.path)]
    assert setup.status() == PeerStatus(True, 1, len(CONTENT), 0, 0)
    for offset, length in ((0, 100), (100, 1000), (len(CONTENT) - 1, 1)):
        assert setup.read(offset, length) == CONTENT[offset : offset + length]
    assert setup.reads() == 0
    assert setup.peer.connections == 1, "kept"
    for _ in range(9):
        changed = setup.source.change(setup.path, CONTENT[::-1])
        assert setup.reader.read(setup.path, 0, len(CONTENT), changed.version) == CONTENT[::-1]
    assert setup.status().absent > 0
    assert setup.read() == CONTENT, "the version before, of which the peer has the bytes still"
    setup.peer.files.clear()
    with pytest.raises(SourceChanged):
        setup.read()


def test_what_is_at_home_here_or_young_or_asked_for_or_empty_is_read_from_the_source(setup: Setup) -> None:
    own = next(path for path in (b"own%d" % number for number in range(99)) if not setup._is_at_peer(path))
    setup.reader.read(own, 0, len(CONTENT), setup.source.stat(own).version)
    for name, content in ((b"empty", b""), (b"n" * 250, CONTENT)):
        found = setup.source.add(name, content)
        assert setup.reader.read(name, 0, len(content), found.version) == content
    for number in range(9):
        young = setup.source.add(b"young%d" % number, CONTENT, mtime_ns=time.time_ns())
        assert setup.reader.read(b"young%d" % number, 0, len(CONTENT), young.version) == CONTENT
    setup.asked.put(version_hash(setup.path, setup.version))
    assert setup.read() == CONTENT
    assert setup.peer.asked == []


def test_each_stripe_has_a_home_of_its_own_and_own_stripes_are_one_request(setup: Setup) -> None:
    size = 12 * STRIPE_BYTES + 5
    content = (random.Random(0).randbytes(STRIPE_BYTES + 1) * 13)[:size]
    places = range(0, size, STRIPE_BYTES)
    # The peer's port is of chance, and with it the homes: of these names, take one whose stripes have both.
    for path in (b"large%d" % number for number in range(99)):
        version = setup.source.add(path, content).version
        number = version_hash(path, version)
        remote = [place for place in places if setup.homes.is_remote(key_at(number, place))]
        if 2 < len(remote) < len(places) - 2:
            break
    else:
        pytest.fail("one node is home to all")
    for place in remote[1:]:
        setup.peer.files[asked_name(path, number, place)] = content
    setup.asked.put(key_at(number, remote[0]))
    pieces = list(setup.reader.stream(path, 0, size, version))
    assert b"".join(pieces) == content
    of_peer = sum(len(piece) for piece in pieces if isinstance(piece, FromPeer))
    assert of_peer == sum(min(STRIPE_BYTES, size - place) for place in remote[1:])
    runs = sum(place not in remote[1:] and place - STRIPE_BYTES in (-STRIPE_BYTES, *remote[1:]) for place in places)
    assert setup.reads() == runs
    assert b"".join(setup.reader.stream(path, 7, 2 * STRIPE_BYTES, version)) == content[7 : 7 + 2 * STRIPE_BYTES]


def says(*pieces: bytes, every_s: float = 0.0, ends: bool = True) -> Callable[[BaseHTTPRequestHandler, bytes], bool]:
    """Gives these pieces whatever is asked, with a pause after each; then the connection ends, or is kept."""

    def answer(handler: BaseHTTPRequestHandler, path: bytes) -> bool:
        handler.close_connection = ends
        with contextlib.suppress(OSError):
            for piece in pieces:
                handler.wfile.write(piece)
                time.sleep(every_s)
        return True

    return answer


def head(status: int, length: int, *others: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 %d Anything" % status, b"Content-Length: %d" % length, *others, b"", b""])


WRONG = {
    "cut": says(head(200, len(CONTENT)), CONTENT[:1000]),
    "longer": says(head(200, len(CONTENT) + 1), CONTENT + b"!", ends=False),
    "failing": says(head(500, len(CONTENT)), CONTENT, ends=False),
    "silent": says(b"", every_s=ANSWERS_S),
    "trickling": says(head(200, len(CONTENT)), *([b"x"] * int(ANSWERS_S / 0.05)), every_s=0.05),
    "nonsense": says(b"220 this is a mail server\r\n"),
    "of no length": says(b"HTTP/1.1 200 OK\r\n\r\n", CONTENT),
    "moved": says(head(302, 0, b"Location: /remote"), ends=False),
}


@pytest.mark.parametrize("kind", WRONG)
def test_whatever_a_peer_does_the_reader_gets_the_bytes_of_the_source_in_time(
    setup: Setup, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PAUSE_S", 3600.0)
    setup.peer.answers = WRONG[kind]
    waits = []
    for _ in range(FAILURES + 2):
        began = time.monotonic()
        assert setup.read() == CONTENT
        waits.append(time.monotonic() - began)
    assert waits[0] < TIMEOUT_S + SLACK_S
    assert max(waits) < LONGER * TIMEOUT_S + SLACK_S, "one that is late is given longer before it counts as silent"
    # Then it is not asked any more: one that gives no sign after two questions, and another after FAILURES answers.
    assert 2 <= setup.status().timeouts <= FAILURES + 1
    assert setup.status()._replace(timeouts=0) == PeerStatus(False, 0, 0, 0, 0)
    assert setup.reads() == FAILURES + 2


def test_a_home_is_waited_for_as_long_as_the_source_takes_at_present(setup: Setup) -> None:
    """One that has to fetch a file from a busy source is no slower than that, and must not be passed by."""

    def busy(handler: BaseHTTPRequestHandler, path: bytes) -> bool:
        time.sleep(1.5 * TIMEOUT_S)
        return False

    setup.peer.answers = busy
    read, own = setup.source.read, next(path for path in map(b"%d".__mod__, range(99)) if not setup._is_at_peer(path))

    def slow(path: bytes, offset: int, length: int, version: Version) -> bytes:
        time.sleep(0.8 * TIMEOUT_S)
        return read(path, offset, length, version)

    setup.source.read = slow  # type: ignore[method-assign]
    assert setup.read() == CONTENT
    assert setup.status().timeouts == 1
    for _ in range(20):
        setup.reader.read(own, 0, len(CONTENT), setup.source.stat(own).version)
    assert setup.read() == CONTENT
    assert (setup.status().timeouts, setup.status().hits) == (1, 1)


def test_a_kept_connection_that_ends_at_the_next_question_is_made_again(setup: Setup) -> None:
    asked: list[BaseHTTPRequestHandler] = []

    def ending(handler: BaseHTTPRequestHandler, path: bytes) -> bool:
        handler.close_connection = again = handler in asked
        asked.append(handler)
        return again

    setup.peer.answers = ending
    for connections in (1, 2, 3):
        assert type(setup.read()) is FromPeer
        assert setup.peer.connections == connections
    assert setup.status() == PeerStatus(True, 3, 3 * len(CONTENT), 0, 0)


def test_a_peer_shows_a_certificate_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for days, known, gives in ((1, False, False), (1, True, True), (-1, True, False)):
        certificate = tmp_path / "localhost.pem"
        certificate.write_bytes(own_certificate("localhost", days))
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate if known else tmp_path / "none.pem"))
        peer = Peer(certificate)
        with contextlib.closing(Setup(peer)) as setup:
            for _ in range(2):
                found = setup.read()
                assert (found, isinstance(found, FromPeer)) == (CONTENT, gives)
            assert setup.status().timeouts == (0 if gives else 2)
            assert bool(peer.asked) == gives
        peer.close()


@pytest.mark.parametrize("place", ["imagenet", "daten ä"])
def test_a_mount_may_lie_below_a_path_of_the_server(peer: Peer, place: str) -> None:
    with contextlib.closing(Setup(peer, prefix=f"/{place}")) as setup:
        peer.files[f"{place}/".encode() + setup.named(setup.path)] = CONTENT
        assert type(setup.read()) is FromPeer


@pytest.mark.parametrize("name", [b"a.jpg", b"a.spiderfs-0", b".spiderfs-0", b"\n\xff.spiderfs-0123456789abcdef"])
def test_names_in_questions(name: bytes) -> None:
    assert asked_version(asked_name(name, 2**63 - 1)) == (name, 2**63 - 1, 0)
    assert asked_version(asked_name(name, 1, 3 * STRIPE_BYTES + 5)) == (name, 1, 3 * STRIPE_BYTES)
    assert asked_version(b"a.spiderfs-0123") is asked_version(b"plain") is None


def test_numbers_of_versions_stay_what_they_were() -> None:
    """Nodes with different versions of spiderfs have to agree."""
    assert version_hash(b"a/b", Version(3, 4)) == 7424832880604841353
    assert version_hash(b"a/b", Version(3, 0, 5)) == 5268498979001324984


# -- answers that are unusual, or made to hold up who asks

# The beginning of an answer, and what follows it again and again: so little that no wait for the next bytes is long.
DRIPS = {
    "the status": (b"", b"H"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"),
    "one header": (b"HTTP/1.1 200 OK\r\nX: ", b"H"),
    "goes on": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "the text of a 404": (head(404, 1 << 40), b"no"),
    "chunks of a 404": (b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n", b"2\r\nno\r\n"),
}


@pytest.mark.parametrize(("begin", "drop"), DRIPS.values(), ids=DRIPS)
def test_an_answer_that_comes_drop_by_drop_takes_no_longer_than_the_time_limit(
    setup: Setup, begin: bytes, drop: bytes
) -> None:
    setup.peer.answers = says(begin, *([drop] * int(ANSWERS_S / 0.05)), every_s=0.05)
    began = time.monotonic()
    assert setup.read() == CONTENT
    assert time.monotonic() - began < TIMEOUT_S + SLACK_S


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
    extent = b"Content-Range: bytes 0-99/%d" % len(CONTENT)
    setup.peer.answers = says(head(206, 100, extent), CONTENT[:100], ends=False)
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
    setup.peer.answers = says(raw)
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
    for number in range(9):
        name = b"file%d" % number
        assert reader.read(name, 0, len(CONTENT), source.add(name, CONTENT).version) == CONTENT
    assert members.statuses()[url].timeouts == 0, "it is not waited for"
