"""What is promised of a home that is somewhere else: a node's web server, a server of Redis, or a cluster of these.

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
from urllib.parse import urlsplit

import obstore
import pytest
import redis
from certificates import own_certificate
from mounting import eventually
from redis_clusters import RedisCluster

from benchmarks.common.redis_server import RedisServer
from benchmarks.common.web_server import free_port, web_server
from benchmarks.fakes import MemorySource
from spiderfs.core.homes import GROUPS
from spiderfs.sources import redis_client
from spiderfs.sources.members import FIELDS, Members, PeerStatus
from spiderfs.sources.node_names import Node, as_named, is_server
from spiderfs.sources.peers import FAILURES, PAUSE_S, Asked, Counts, PeerSource, RedisPeer, asked_name
from spiderfs.sources.redis_client import SLOTS, Survey, slot_of
from spiderfs.sources.source import FromPeer, version_hash

# One that a busy machine keeps, and one for tests in which a server does not answer.
LONG_TIMEOUT_S, TIMEOUT_S = 10.0, 0.3
# A busy machine.
SLACK_S = 8.0
CONTENT = os.urandom(20_000)


class Home:
    """A server that is the home of all samples, and a source with it in front."""

    def __init__(
        self, url: str, server: Any, put: Callable[[bytes, int, bytes], object], identity: str = "nas:/set"
    ) -> None:
        self.url, self.server = url, server
        self.source = MemorySource()
        self.members = Members(1, identity)
        self.survey = Survey(url, finds_room=True)
        self.node = Node(url, "localhost", ["127.0.0.1"])
        self.look()
        self.reader = self._reader(LONG_TIMEOUT_S)
        self._put = put

    def _reader(self, timeout_s: float) -> PeerSource:
        return PeerSource(self.source, self.members, timeout_s, 10.0, self.members.row(0), ())

    def hurry(self, *paths: bytes) -> None:
        """Wait no longer than TIMEOUT_S from here on; the home gives these files before that."""
        self.reader.close()
        self.reader = self._reader(TIMEOUT_S)
        eventually(lambda: all(self.read(path)[1] for path in paths), what=lambda: str(self.status))

    def look(self) -> None:
        """As the manager does every two seconds."""
        if is_server(self.url):
            self.node = self.survey.look(self.node)
        self.members.change({self.url: 1.0}, {"here"}, {self.url: self.node})

    def add(self, path: bytes, content: bytes = CONTENT, at_home: bytes | None = CONTENT) -> None:
        """A file of the source, and what the home has in its name."""
        self.source.add(path, content)
        if at_home is not None:
            self._put(path, self.number(path), at_home)

    def number(self, path: bytes) -> int:
        """By which the home knows the file's version."""
        return version_hash(path, self.source.stat(path).version) ^ self.members.salt

    def of_source(self, identity: str) -> Home:
        """The same server, for a mount of another source."""
        return Home(self.url, self.server, self._put, identity)

    def clients(self, stack: ExitStack) -> list[Any]:
        """One of each server of Redis."""
        ports = [server.port for server in getattr(self.server, "servers", [self.server])]
        return [stack.enter_context(closing(redis.Redis("127.0.0.1", port, protocol=2))) for port in ports]

    def read(self, path: bytes) -> tuple[bool, bool, float]:
        """Whether the bytes are right, whether the home gave them, and how long that took."""
        version, began = self.source.stat(path).version, time.monotonic()
        found = self.reader.read(path, 0, version.size, version)
        took_s = time.monotonic() - began
        return found == self.source.read(path, 0, version.size, version), isinstance(found, FromPeer), took_s

    @property
    def status(self) -> PeerStatus:
        return self.members.statuses()[self.url]

    def close(self) -> None:
        self.reader.close()
        self.survey.close()


def made(kind: str, place: Path, stack: ExitStack, *settings: str, certificate: Path | None = None) -> Home:
    if kind == "cluster":
        home = clustered(place, stack, *settings, certificate=certificate)
    elif kind == "redis":
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
    return stack.enter_context(closing(home))


def clustered(place: Path, stack: ExitStack, *settings: str, certificate: Path | None = None) -> Home:
    cluster = stack.enter_context(RedisCluster(place, *settings, certificate=certificate))

    def put(_: bytes, number: int, had: bytes) -> None:
        key = f"spiderfs:set:{number:016x}"
        with closing(cluster.client(cluster.owner(key))) as client:
            client.set(key, had)

    return Home(f"{cluster.url}/set", cluster, put)


@pytest.fixture(params=["nginx", "redis", "cluster"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    with ExitStack() as stack:
        yield made(request.param, tmp_path, stack)


def test_it_gives_exactly_the_version_that_is_asked_for(home: Home) -> None:
    home.add(b"a")
    assert home.read(b"a")[:2] == (True, True)
    home.add(b"a", CONTENT[::-1], at_home=None)
    assert home.read(b"a")[:2] == (True, False)
    assert home.status == PeerStatus(True, 1, len(CONTENT), 1, 0)


def test_another_source_is_given_none_of_the_bytes_though_path_size_and_mtime_are_equal(home: Home) -> None:
    home.add(b"a")
    with closing(home.of_source("nas:/other")) as other:
        other.add(b"a", CONTENT[::-1], at_home=None)
        assert home.source.stat(b"a").version == other.source.stat(b"a").version
        assert other.read(b"a")[:2] == (True, False)
        if is_server(home.url):
            eventually(lambda: other.read(b"a")[1])
            assert other.read(b"a")[0]
        assert home.read(b"a")[:2] == (True, True)


def test_what_is_of_another_length_is_not_given_to_readers(home: Home) -> None:
    for number, wrong in enumerate((b"", CONTENT[:-1], CONTENT + b"!")):
        home.add(b"%d" % number, at_home=wrong)
        assert home.read(b"%d" % number)[:2] == (True, False)
    assert home.status.timeouts == 3


@pytest.mark.parametrize("what", ["killed", "stopped"])
def test_a_lost_one_costs_few_limits_and_is_asked_again(home: Home, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home.add(b"a")
    home.hurry(b"a")
    known = home.status
    home.server.signal(signal.SIGSTOP if what == "stopped" else signal.SIGKILL)
    for _ in range(FAILURES + 3):
        is_right, is_from_home, wait_s = home.read(b"a")
        assert (is_right, is_from_home) == (True, False)
        assert wait_s < TIMEOUT_S + SLACK_S
    # It is not asked any more: each answer that does not come would count. One that refuses connections is left after
    # one failure; the end of a connection that was kept may be another.
    failures = home.status.timeouts - known.timeouts
    assert home.status == known._replace(up=False, timeouts=home.status.timeouts)
    assert failures <= (FAILURES if what == "stopped" else 2)
    if what == "stopped":
        home.server.signal(signal.SIGCONT)
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + 2 * PAUSE_S)
        assert home.read(b"a")[:2] == (True, True)
        assert home.status.up


@pytest.mark.parametrize("does", ["refuses", "says nothing"])
def test_another_address_is_tried_where_the_first_one_does_not_answer(home: Home, does: str) -> None:
    home.add(b"a")
    home.hurry(b"a")
    port = urlsplit(home.url).port
    assert port is not None
    with ExitStack() as stack:
        if does == "says nothing":
            stack.enter_context(socket.create_server(("127.0.0.2", port)))
        node = home.node._replace(addresses=["127.0.0.2", "127.0.0.1"])
        home.members.change({home.url: 1.0}, (), {home.url: node})
        eventually(lambda: all(home.read(b"a")[1] for _ in range(3)))
    assert home.status.up


# -- of servers of Redis alone, and clusters

KINDS = pytest.mark.parametrize("kind", ["redis", "cluster"])


@KINDS
def test_whoever_reads_the_source_fills_the_server(tmp_path: Path, kind: str) -> None:
    with ExitStack() as stack:
        home = made(kind, tmp_path, stack)
        for number in range(40):
            home.add(b"%d" % number, at_home=None)
            assert home.read(b"%d" % number)[:2] == (True, False)
        eventually(lambda: all(home.read(b"%d" % number)[1] for number in range(40)))
        version = home.source.stat(b"1").version
        assert home.reader.read(b"1", 10, 20, version) == CONTENT[10:30], "a piece is had from the source"


def test_what_an_object_store_gave_fills_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        home = made("redis", tmp_path, stack)
        read = home.source.read
        monkeypatch.setattr(home.source, "read", lambda *asked: obstore.Bytes(read(*asked)))
        home.add(b"a", at_home=None)
        eventually(lambda: home.read(b"a")[1])


def test_a_server_whose_address_is_not_known_any_more_is_given_files_when_it_is_known_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        home = made("redis", tmp_path, stack)
        known = home.members.nodes()[1]
        assert known is not None
        for number, addresses in enumerate((["127.0.0.1"], [], ["127.0.0.1"])):
            home.members.change({home.url: 1.0}, {"here"}, {home.url: known._replace(addresses=addresses)})
            path = b"%d" % number
            home.add(path, at_home=None)
            assert home.read(path)[0]
        eventually(lambda: home.read(b"2")[1])


@pytest.mark.parametrize("kind", ["redis", pytest.param("cluster", marks=pytest.mark.thorough)])
def test_a_server_is_home_of_what_it_has_room_for(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_client, "_SETTLED_S", 1)
    with ExitStack() as stack:
        home = made(kind, tmp_path, stack, "--maxmemory", "4mb")
        clients = home.clients(stack)
        paths = [b"%d" % number for number in range(300 * len(clients))]
        for path in paths:
            home.add(path, at_home=None)

        def refused() -> int:
            return sum(client.info().get("errorstat_OOM", {}).get("count", 0) for client in clients)

        until, rooms, refusals = time.monotonic() + 180, [GROUPS], [0]
        while True:
            assert all(home.read(path)[0] for path in paths)
            given = sum(client.dbsize() for client in clients)
            home.look()
            rooms.append(home.node.room)
            refusals.append(refused())
            if home.node.room < GROUPS and refusals[-1] == refusals[-4:][0] and rooms[-1] == rooms[-4:][0]:
                break
            assert time.monotonic() < until, rooms
        assert rooms == sorted(rooms, reverse=True)
        assert given > 20 * len(clients)
        # All that it has room for it gives, it has nothing else, and the rest is at home here.
        there = [path for path in paths if home.members.is_remote(home.number(path))]
        assert all(home.read(path)[1] == (path in there) for path in paths)
        kept = {key for client in clients for key in client.keys("*:????????????????")}
        assert len(kept) == len(there)
        assert home.status.timeouts == 0
        # Another mount hears of it.
        with closing(Survey(home.url, finds_room=True)) as other:
            assert other.look(home.node._replace(room=GROUPS)) == home.node
        assert home.node in home.members.nodes()
        assert home.members.has_own


@KINDS
def test_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    for word, gives in (("wrong", False), ("secret", True)):
        with ExitStack() as stack:
            monkeypatch.delenv("REDISCLI_AUTH", raising=False)
            place = tmp_path / word
            place.mkdir()
            home = made(kind, place, stack)
            home.add(b"a")
            for client in home.clients(stack):
                client.config_set("requirepass", "secret")
            monkeypatch.setenv("REDISCLI_AUTH", word)
            assert home.read(b"a")[:2] == (True, gives)
            caplog.clear()
            with closing(Survey(home.url, finds_room=True)) as survey:
                for _ in range(2):
                    assert survey.look(home.node) == home.node
            assert caplog.text.count("does not say") == (0 if gives else len(home.node.servers()))


@KINDS
def test_the_certificate_is_known_and_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    cases = [(1, False, False), (1, True, True), (-1, True, False)]
    # The servers of a cluster do not take each other's certificates either where these have ended.
    for number, (days, known, gives) in enumerate(cases[: 2 if kind == "cluster" else 3]):
        place = tmp_path / str(number)
        place.mkdir()
        certificate = place / "localhost.pem"
        certificate.write_bytes(own_certificate("localhost", days))
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate if known else place / "none.pem"))
        with ExitStack() as stack:
            home = made(kind, place, stack, certificate=certificate)
            home.add(b"a")
            assert home.read(b"a")[:2] == (True, gives)
            assert home.status.timeouts == (not gives)
            shards = home.node.shards
            assert [host for _, host, *_ in shards] == ["localhost"] * 3 * (kind == "cluster" and gives)


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
        home.hurry()
        with closing(home):
            is_right, is_from_home, wait_s = home.read(b"a")
        assert (is_right, is_from_home) == (True, False)
        assert wait_s < TIMEOUT_S + SLACK_S
        dripping.join()


# -- of clusters


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """With the settings that are a parameter."""
    with ExitStack() as stack:
        yield made("cluster", tmp_path, stack, *getattr(request, "param", ()))


def paths_by_owner(home: Home, each: int) -> list[list[bytes]]:
    """New files of the source, so many at home at each server."""
    found: list[list[bytes]] = [[], [], []]
    for number in range(10_000):
        if min(map(len, found)) == each:
            break
        path = b"%d" % number
        home.add(path, at_home=None)
        owner = home.server.owner(f"spiderfs:set:{home.number(path):016x}")
        if len(found[owner]) < each:
            found[owner].append(path)
            home._put(path, home.number(path), CONTENT)
    return found


@pytest.mark.parametrize(("what", "lost"), [("killed", 0), ("stopped", 1)])
def test_a_shard_that_is_lost_keeps_no_one_from_the_others(cluster: Home, what: str, lost: int) -> None:
    paths = paths_by_owner(cluster, 5)
    cluster.hurry(*(path for some in paths for path in some))
    known = cluster.status
    cluster.server.servers[lost].signal(signal.SIGSTOP if what == "stopped" else signal.SIGKILL)
    for path in paths[lost]:
        is_right, is_from_home, wait_s = cluster.read(path)
        assert (is_right, is_from_home) == (True, False)
        assert wait_s < TIMEOUT_S + SLACK_S
    # Each answer that does not come counts.
    assert cluster.status.timeouts - known.timeouts <= FAILURES
    # The others are asked, and on a busy machine one may be late.
    for owner, some in enumerate(paths):
        for path in some:
            if owner != lost:
                eventually(lambda path=path: cluster.read(path)[:2] == (True, True))
    assert not cluster.status.up
    # Also where the one that is named in the URL is lost.
    node = cluster.node
    cluster.look()
    assert cluster.node == node
    eventually(lambda: all(cluster.read(path)[:2] == (True, True) for path in paths[2]))


def test_a_slot_moves_while_it_is_read(cluster: Home, tmp_path: Path) -> None:
    """With the steps that `redis-cli --cluster reshard` takes."""
    cluster.add(b"a")
    key = f"spiderfs:set:{cluster.number(b'a'):016x}"
    slot, giving = slot_of(key), cluster.server.owner(key)
    taking = (giving + 1) % 3
    with ExitStack() as stack:
        clients = cluster.clients(stack)
        ids = [client.execute_command("CLUSTER MYID").decode() for client in clients]
        set_slot = ("CLUSTER", "SETSLOT", slot)

        def reads(is_from_home: bool) -> None:
            for _ in range(FAILURES + 1):
                assert cluster.read(b"a")[:2] == (True, is_from_home)

        reads(True)
        clients[taking].execute_command(*set_slot, "IMPORTING", ids[giving])
        clients[giving].execute_command(*set_slot, "MIGRATING", ids[taking])
        reads(True)
        cluster.look()
        clients[giving].execute_command("MIGRATE", "127.0.0.1", cluster.server.servers[taking].port, key, 0, 5000)
        reads(False)
        for client in clients:
            client.execute_command(*set_slot, "NODE", ids[taking])
        reads(False)
        cluster.look()
        reads(True)
        assert (cluster.status.up, cluster.status.timeouts) == (True, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("cluster", [("--cluster-node-timeout", "2000")], indirect=True)
def test_the_replica_of_a_shard_takes_its_place(cluster: Home) -> None:
    cluster.add(b"a")
    lost = cluster.server.owner(f"spiderfs:set:{cluster.number(b'a'):016x}")
    cluster.server.add_replica(lost)
    cluster.hurry(b"a")
    cluster.server.servers[lost].signal(signal.SIGKILL)
    until = time.monotonic() + 90
    while True:
        is_right, is_from_home, wait_s = cluster.read(b"a")
        assert is_right
        assert wait_s < TIMEOUT_S + SLACK_S
        if is_from_home:
            break
        assert time.monotonic() < until
        cluster.look()
    assert cluster.status.up


def test_a_shard_that_leaves_while_it_is_asked_keeps_the_peer_up_whatever_becomes_of_the_question() -> None:
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        threads = stack.enter_context(ThreadPoolExecutor(FAILURES))
        lost, taking = f"redis://127.0.0.1:{silent.getsockname()[1]}/set", "redis://127.0.0.1:1/set"

        def at(url: str) -> Node:
            return Node("redis://n1/set", "n1", [], ([url, "127.0.0.1", "127.0.0.1", [0, SLOTS - 1]],))

        counts = Counts(memoryview(bytearray(8 * len(FIELDS))).cast("Q"), "redis://n1/set")
        with closing(RedisPeer(at(lost), counts, 1.0)) as peer:
            asking = [threads.submit(peer.ask, Asked(b"a", 1, 0, 1, 1)) for _ in range(FAILURES)]
            for _ in asking:
                stack.enter_context(silent.accept()[0])
            peer.node = at(taking)
            assert [one.result() for one in asking] == [None] * FAILURES
            assert not counts.resting


# -- what the manager hears


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"maxmemory": "40mb", "maxmemory-policy": "allkeys-lru"}, "loses samples by maxmemory-policy allkeys-lru"),
        ({"maxmemory": "0"}, "has no maxmemory"),
        ({"maxmemory": "40mb"}, ""),
    ],
)
def test_a_server_that_is_set_up_in_another_way_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, str], said: str
) -> None:
    with RedisServer(tmp_path, *(word for name, value in settings.items() for word in (f"--{name}", value))) as server:
        url = f"{server.url}/set"
        with closing(Survey(url, finds_room=False)) as survey:
            for _ in range(3):
                assert survey.look(as_named(url)) == as_named(url)
    assert len(caplog.records) == bool(said)
    assert said in caplog.text


def test_a_server_that_does_not_let_itself_be_asked_is_named_once_and_gives_what_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer(tmp_path))
        client = stack.enter_context(closing(redis.Redis("127.0.0.1", server.port)))
        client.execute_command("ACL", "SETUSER", "few", "on", ">secret", "~spiderfs:*", "+getex", "+set")
        monkeypatch.setenv("REDISCLI_AUTH", "secret")
        url = f"redis://few@127.0.0.1:{server.port}/set"
        home = Home(url, server, lambda _, number, had: client.set(f"spiderfs:set:{number:016x}", had))
        stack.enter_context(closing(home))
        home.add(b"a")
        client.set("spiderfs:set:groups", GROUPS // 2)
        home.look()
        home.look()
        assert home.node.room == GROUPS // 2
        assert home.read(b"a")[0]
        assert caplog.text.count("does not say which shards it has, or how much room") == 1
        client.delete("spiderfs:set:groups")
        home.look()
        assert home.node.room == GROUPS
        assert home.read(b"a")[:2] == (True, True)
