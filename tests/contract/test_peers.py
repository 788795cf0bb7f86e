"""What is promised of a home that is elsewhere, whether it is a node's web server or a server of Redis.

Whatever becomes of it, readers get the right bytes, within its time limit and a fetch.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from certificates import own_certificate

from benchmarks.common.redis_server import RedisServer
from benchmarks.common.web_server import free_port, web_server
from benchmarks.fakes import MemorySource
from spiderfs.sources.members import Members, PeerStatus
from spiderfs.sources.node_names import Node
from spiderfs.sources.peer import FAILURES, PAUSE_S
from spiderfs.sources.peers import PeerSource, asked_name
from spiderfs.sources.source import FromPeer, version_hash

TIMEOUT_S = 0.3
# A busy machine.
SLACK_S = 2.0
CONTENT = os.urandom(20_000)


class Home:
    """A server that is the home of all samples, and a source with it in front."""

    def __init__(self, url: str, server: Any, put: Callable[[bytes, int, bytes], object]) -> None:
        self.url, self.server = url, server
        self.source = MemorySource()
        self.members = Members()
        self.members.change({url: 1.0}, (), {url: Node(url, "localhost", ["127.0.0.1"])})
        self.reader = PeerSource(self.source, self.members, TIMEOUT_S, self.members.row(0), ())
        self._put = put

    def add(self, path: bytes, content: bytes = CONTENT, at_home: bytes | None = CONTENT) -> None:
        """A file of the source, and what the home has in its name."""
        number = version_hash(path, self.source.add(path, content).version)
        if at_home is not None:
            self._put(path, number, at_home)

    def read(self, path: bytes) -> tuple[bool, bool, float]:
        """Whether the bytes are right, whether the home gave them, and how long that took."""
        version, began = self.source.stat(path).version, time.monotonic()
        found = self.reader.read(path, 0, version.size, version)
        took_s = time.monotonic() - began
        return found == self.source.read(path, 0, version.size, version), isinstance(found, FromPeer), took_s

    @property
    def status(self) -> PeerStatus:
        return self.members.statuses()[self.url]


def made(kind: str, place: Path, stack: ExitStack, *settings: str, certificate: Path | None = None) -> Home:
    if kind == "redis":
        server = stack.enter_context(RedisServer(place, *settings, certificate=certificate))
        tls: dict[str, Any] = {"ssl": True, "ssl_cert_reqs": "none"} if certificate else {}
        client = stack.enter_context(closing(redis.Redis("127.0.0.1", server.port, **tls)))
        home = Home(f"{server.url}/set", server, lambda _, number, had: client.set(f"spiderfs:set:{number:016x}", had))
    else:
        point, port = place / "point", free_port()
        point.mkdir()
        web = stack.enter_context(web_server(point, place, port))
        home = Home(
            f"http://127.0.0.1:{port}",
            web,
            lambda path, number, had: (point / os.fsdecode(asked_name(path, number))).write_bytes(had),
        )
    stack.enter_context(closing(home.reader))
    return home


@pytest.fixture(params=["nginx", "redis"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    with ExitStack() as stack:
        yield made(request.param, tmp_path, stack)


def test_it_gives_exactly_the_version_that_is_asked_for(home: Home) -> None:
    home.add(b"a")
    assert home.read(b"a")[:2] == (True, True)
    home.add(b"a", CONTENT[::-1], at_home=None)
    assert home.read(b"a")[:2] == (True, False)
    assert home.status == PeerStatus(True, 1, len(CONTENT), 1, 0)


def test_what_is_of_another_length_is_not_given_to_readers(home: Home) -> None:
    for number, wrong in enumerate((b"", CONTENT[:-1], CONTENT + b"!")):
        home.add(b"%d" % number, at_home=wrong)
        assert home.read(b"%d" % number)[:2] == (True, False)
    assert home.status.timeouts == 3


def test_threads_ask_side_by_side(home: Home) -> None:
    contents = {b"%d" % number: os.urandom(100 + 1000 * number) for number in range(40)}
    for path, content in contents.items():
        home.add(path, content, content)
    with ThreadPoolExecutor(8) as threads:
        for is_right, is_from_home, _ in threads.map(home.read, contents):
            assert is_right
            assert is_from_home
    assert home.status.hits == 40


@pytest.mark.parametrize("what", ["killed", "stopped"])
def test_one_that_is_lost_costs_the_time_limit_a_few_times_and_is_asked_again(
    home: Home, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.add(b"a")
    home.read(b"a")
    home.server.signal(signal.SIGSTOP if what == "stopped" else signal.SIGKILL)
    waits = []
    for _ in range(FAILURES + 3):
        is_right, is_from_home, wait_s = home.read(b"a")
        assert (is_right, is_from_home) == (True, False)
        waits.append(wait_s)
    assert max(waits) < TIMEOUT_S + SLACK_S
    assert max(waits[FAILURES:]) < TIMEOUT_S, "it is not asked any more"
    assert home.status == PeerStatus(False, 1, len(CONTENT), 0, FAILURES)
    if what == "stopped":
        home.server.signal(signal.SIGCONT)
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + 2 * PAUSE_S)
        assert home.read(b"a")[:2] == (True, True)
        assert home.status.up


# -- of servers of Redis alone


def test_whoever_reads_the_source_fills_the_server(tmp_path: Path) -> None:
    with ExitStack() as stack:
        home = made("redis", tmp_path, stack)
        for number in range(40):
            home.add(b"%d" % number, at_home=None)
            assert home.read(b"%d" % number)[:2] == (True, False)
        until = time.monotonic() + 10
        while not all(home.read(b"%d" % number)[1] for number in range(40)):
            assert time.monotonic() < until
        version = home.source.stat(b"1").version
        assert home.reader.read(b"1", 10, 20, version) == CONTENT[10:30], "a piece is had from the source"


def test_a_server_whose_address_is_not_known_any_more_is_given_files_when_it_is_known_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        home = made("redis", tmp_path, stack)
        known = home.members.nodes()[1]
        assert known is not None
        for number, addresses in enumerate((["127.0.0.1"], [], ["127.0.0.1"])):
            home.members.change({home.url: 1.0}, (), {home.url: known._replace(addresses=addresses)})
            path = b"%d" % number
            home.add(path, at_home=None)
            assert home.read(path)[0]
        until = time.monotonic() + 10
        while not home.read(b"2")[1]:
            assert time.monotonic() < until


def test_a_server_that_is_full_gives_what_it_has(tmp_path: Path) -> None:
    with ExitStack() as stack:
        home = made("redis", tmp_path, stack, "--maxmemory", "4mb")
        paths = [b"%d" % number for number in range(300)]
        for path in paths:
            home.add(path, at_home=None)
        for _ in range(3):
            given = 0
            for path in paths:
                is_right, is_from_home, _ = home.read(path)
                assert is_right
                given += is_from_home
        assert 20 < given < 250
        assert (home.status.up, home.status.timeouts) == (True, 0)


def test_the_password_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for word, gives in (("wrong", False), ("secret", True)):
        with ExitStack() as stack:
            monkeypatch.setenv("REDISCLI_AUTH", word)
            place = tmp_path / word
            place.mkdir()
            home = made("redis", place, stack)
            home.add(b"a")
            with closing(redis.Redis("127.0.0.1", home.server.port)) as client:
                client.config_set("requirepass", "secret")
            assert home.read(b"a")[:2] == (True, gives)


def test_the_certificate_is_known_and_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (days, known, gives) in enumerate([(1, False, False), (1, True, True), (-1, True, False)]):
        place = tmp_path / str(number)
        place.mkdir()
        certificate = place / "localhost.pem"
        certificate.write_bytes(own_certificate("localhost", days))
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate if known else place / "none.pem"))
        with ExitStack() as stack:
            home = made("redis", place, stack, certificate=certificate)
            home.add(b"a")
            assert home.read(b"a")[:2] == (True, gives)
            assert home.status.timeouts == (not gives)


def test_an_answer_that_comes_drop_by_drop_takes_no_longer_than_the_time_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connected, _ = server.accept()
            with connected, suppress(OSError):
                for _ in range(int(4 * (TIMEOUT_S + SLACK_S) / 0.05)):
                    connected.sendall(b"+")
                    time.sleep(0.05)

        dripping = threading.Thread(target=drip)
        dripping.start()
        home = Home(f"redis://127.0.0.1:{server.getsockname()[1]}/set", None, lambda *_: None)
        home.add(b"a")
        with closing(home.reader):
            is_right, is_from_home, wait_s = home.read(b"a")
        assert (is_right, is_from_home) == (True, False)
        assert wait_s < TIMEOUT_S + SLACK_S
        dripping.join()
