"""Several nodes whose caches act as one: mounts on this machine, each with nginx over it.

Whatever happens to a node, readers of the others get the right bytes, and none waits longer than the time limit and a
fetch.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from urllib.parse import quote, urlsplit

import pytest
import redis
from mounting import PATIENCE_S, Mounted, descendants, detach, eventually, mounted, settle
from planning import planned
from reading import source_of, write_files
from redis_clusters import RedisCluster

from benchmarks.common.redis_server import RedisServer
from benchmarks.common.web_server import WebServer, free_port, web_server
from spiderfs.core.homes import GROUPS, Homes
from spiderfs.sources.source import Version, version_hash

FILES = 60
NAMES = [f"c{number % 3}/{number:03d} x+%.jpg" for number in range(FILES)]
TIMEOUT_S, LATENCY_S = 0.4, 0.01
# Busy cores; a reader that waits for nothing takes a millisecond.
SLACK_S = 15.0
# One that a busy machine keeps, and that leaves the source its turn before a reader gives up.
LONG_TIMEOUT_S = 10.0
MODES = pytest.mark.parametrize(
    "mode", [{}, {"immutable": "on"}, {"immutable": "on", "workers": 2}], ids=["opened", "immutable", "two workers"]
)


source = source_of({name: 20_000 + 777 * number for number, name in enumerate(NAMES)})


@dataclass
class Node:
    mount: Mounted
    server: WebServer | RedisServer
    url: str
    longest_s: float = 0.0
    """How long a file took to read at most."""

    def read(self, name: str) -> tuple[bytes, bool]:
        """A file's bytes, and whether the source has these."""
        began = time.monotonic()
        content = (self.mount.point / name).read_bytes()
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        return content, content == (Path(self.mount.source) / name).read_bytes()

    def reads(self, name: str) -> float:
        """Read a file, and compare it; returns how long it took."""
        began = time.monotonic()
        _, is_right = self.read(name)
        assert is_right, name
        return time.monotonic() - began

    def reads_all(self, names: Sequence[str] = NAMES) -> float:
        """Read files in an order of its own, several at a time; returns the longest wait."""
        order = random.Random(self.url).sample(names, len(names))
        with ThreadPoolExecutor(4) as threads:
            return max(threads.map(self.reads, order))

    def wrong(self, earlier: Mapping[str, Sequence[bytes]]) -> list[str]:
        """Read all files; which of them are given as they are not at the source, and as which `earlier` version.

        Nothing of it is an assertion about bytes: where pytest sees that it runs in CI, it explains one that fails by a
        comparison line by line, which takes a minute for two such files.
        """

        def look(name: str) -> str:
            content, is_right = self.read(name)
            if is_right:
                return ""
            known = [number for number, version in enumerate(earlier[name]) if version == content]
            return f"{name} as {f'version {known[0]}' if known else f'no version, {len(content)} bytes'}"

        with ThreadPoolExecutor(4) as threads:
            return [said for said in threads.map(look, NAMES) if said]

    def keeps_for(self, other: Node) -> list[str]:
        """The names whose home is this node, of a list with another one."""
        return shares_of({self.url: 1.0, other.url: 1.0}, Path(self.mount.source))[self.url]

    def peers(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = self.mount.stats()["peers"]
        return found

    def had(self, what: str) -> int:
        return sum(peer[what] for peer in self.peers().values())


@contextlib.contextmanager
def nodes(
    source: Path,
    place: Path,
    count: int,
    lists: Sequence[Sequence[int]] = (),
    timeout_s: float = LONG_TIMEOUT_S,
    sources: Sequence[Path] = (),
    **options: object,
) -> Iterator[list[Node]]:
    """Mounts of one source, and a web server over each; `lists` says which nodes each takes for the members.

    `sources`: that of each node, where they differ.
    """
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(count)]
    with contextlib.ExitStack() as stack:
        found = []
        for number, url in enumerate(urls):
            members = [urls[member] for member in (lists[number] if lists else range(count))]
            own = place / f"node{number}"
            mount = stack.enter_context(
                mounted(
                    sources[number] if sources else source,
                    own,
                    peers="+".join(members),
                    peer_self=url,
                    peer_timeout=f"{timeout_s}s",
                    source__latency_ms=LATENCY_S * 1000,
                    **options,
                )
            )
            server = stack.enter_context(web_server(mount.point, own, int(url.rpartition(":")[2])))
            found.append(Node(mount, server, url))
        yield found


# A name server: one name has the addresses that a file lists now.
NAME = "nodes.invalid"
LOOKING_OFTEN = f"""
import socket
from spiderfs.daemon.caching import membership
membership.LOOK_UP_S = membership.AGAIN_S = 0.05
look_up = socket.getaddrinfo
def answer(host, *rest, **more):
    hosts = open("ANSWERS").read().split() if host == "{NAME}" else [host]
    if not hosts:
        raise socket.gaierror(socket.EAI_NONAME, "no address")
    return [found for one in hosts for found in look_up(one, *rest, **more)]
socket.getaddrinfo = answer
"""


@dataclass
class Named:
    """Nodes by one name, each at an address of its own on the loopback."""

    nodes: list[Node]
    answers: Path
    """Has the addresses that the name has now."""

    def are(self, *numbers: int) -> None:
        """The name has the addresses of these nodes from now on, and they have heard of it."""
        listed = [self.nodes[number] for number in numbers]
        replaced(self.answers, " ".join(urlsplit(node.url).hostname or "" for node in listed))
        for node in self.nodes:
            others = {other.url for other in listed} - {node.url}
            eventually(lambda node=node, others=others: node.peers().keys() == others, what=f"{node.url} {others}")


def processes(mount: Mounted) -> list[int]:
    return [mount.supervisor.pid, *descendants(mount.supervisor.pid)]


@contextlib.contextmanager
def stopped(mount: Mounted) -> Iterator[None]:
    """All processes of a mount stand still."""
    pids = processes(mount)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)


def replaced(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


@contextlib.contextmanager
def named_nodes(source: Path, place: Path, count: int, **options: object) -> Iterator[Named]:
    port, answers = free_port(), place / "answers"
    answers.write_text("")
    with contextlib.ExitStack() as stack:
        found = []
        for number in range(count):
            own, address = place / f"node{number}", f"127.0.0.{number + 2}"
            url = f"http://{address}:{port}"
            mount = stack.enter_context(
                mounted(
                    source,
                    own,
                    first=LOOKING_OFTEN.replace("ANSWERS", str(answers)),
                    allowed=["cannot be looked up", "the manager ended"],
                    peers=f"http://{NAME}:{port}",
                    # All these addresses are this machine's.
                    peer_self=url,
                    peer_timeout=f"{LONG_TIMEOUT_S}s",
                    source__latency_ms=LATENCY_S * 1000,
                    **options,
                )
            )
            server = stack.enter_context(web_server(mount.point, own, port, address=address))
            found.append(Node(mount, server, url))
        yield Named(found, answers)


def total(members: Sequence[Node], metric: str) -> float:
    return sum(node.mount.metric(metric) for node in members)


def entries(node: Node) -> int:
    found: int = node.mount.stats()["sections"]["importance"]["entries"]
    return found


def shares_of(weights: Mapping[str, float], source: Path, names: Sequence[str] = NAMES) -> dict[str, list[str]]:
    """The names that each member is the home of."""
    homes = Homes(weights, min(weights))
    shared: dict[str, list[str]] = {url: [] for url in weights}
    for name in names:
        shared[homes.members[homes.home(number_of(source, name))]].append(name)
    return shared


def number_of(source: Path, name: str) -> int:
    found = (source / name).stat()
    return version_hash(name.encode(), Version(found.st_size, found.st_mtime_ns))


def size_of(source: Path, names: Sequence[str] = NAMES) -> int:
    return sum((source / name).stat().st_size for name in names)


@MODES
def test_nodes_fetch_each_file_once_and_keep_it_at_home(source: Path, tmp_path: Path, mode: dict[str, object]) -> None:
    with nodes(source, tmp_path, 3, **mode) as members:
        with ThreadPoolExecutor(3) as threads:
            assert max(threads.map(Node.reads_all, members)) < PATIENCE_S
        assert total(members, "origin_bytes") == size_of(source)
        assert sum(node.had("bytes") for node in members) == 2 * size_of(source)
        assert sum(node.had("hits") for node in members) == 2 * FILES
        assert [node.had("timeouts") + node.had("absent") for node in members] == [0, 0, 0]
        eventually(lambda: sum(node.mount.stats()["sections"]["importance"]["entries"] for node in members) == FILES)
        text = members[0].mount.status()
        assert f"  {members[1].url}" in text
        assert "from peers" in text
        metrics = members[0].mount.control("metrics").read_text()
        assert f'spiderfs_peer_up{{peer="{members[1].url}"}} 1.0' in metrics
        assert f'spiderfs_peer_hits_total{{peer="{members[2].url}"}}' in metrics


@pytest.mark.parametrize("mode", [{}, {"immutable": "on"}], ids=["opened", "immutable"])
def test_planned_files_are_fetched_ahead_from_peers(source: Path, tmp_path: Path, mode: dict[str, object]) -> None:
    with nodes(source, tmp_path, 2, **mode) as members:
        reader = members[0]
        with planned(reader.mount, NAMES):
            eventually(lambda: reader.mount.metric("prefetched") == FILES, what="all of the plan")
            assert reader.reads_all() < PATIENCE_S
        assert reader.had("hits") > 0
        assert total(members, "origin_bytes") == size_of(source)


@pytest.mark.parametrize("what", ["unmounted", "stopped"])
def test_a_node_that_is_lost_costs_the_time_limit_and_nothing_else(source: Path, tmp_path: Path, what: str) -> None:
    with (
        nodes(source, tmp_path, 2, timeout_s=TIMEOUT_S, immutable="on") as (lost, reader),
        contextlib.ExitStack() as stack,
    ):
        if what == "unmounted":
            lost.mount.stop()
            detach(lost.mount.point)
        else:
            stack.enter_context(stopped(lost.mount))
        assert reader.reads_all() < TIMEOUT_S + LATENCY_S + SLACK_S
        assert reader.had("hits") == 0
        if what == "unmounted":
            # The web server says that there is no such file.
            assert reader.had("absent") > 0
            return
        assert reader.peers()[lost.url]["up"] == 0
        assert f"  {lost.url}" in reader.mount.status()
        assert reader.had("timeouts") < FILES // 4, "a few times"


def test_a_long_time_limit_leaves_the_source_its_turn(source: Path, tmp_path: Path) -> None:
    with nodes(source, tmp_path, 2, timeout_s=60, immutable="on", source__timeout_s=8) as (lost, reader):
        lost.server.signal(signal.SIGSTOP)
        assert 1 < reader.reads(lost.keeps_for(reader)[0]) < 8


def test_the_web_server_gives_files_and_nothing_else(source: Path, tmp_path: Path) -> None:
    with nodes(source, tmp_path, 2) as (node, _):

        def asked(method: str, target: str) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", int(node.url.rpartition(":")[2]), timeout=10)
            with contextlib.closing(connection):
                connection.request(method, target)
                return connection.getresponse().status

        assert asked("GET", f"/{quote(NAMES[0])}") == 200
        for version in ("0123456789abcdef", "0" * 16):
            assert asked("GET", f"/{quote(NAMES[0])}.spiderfs-{version}") == 404
        assert asked("GET", "/.spiderfs/stats.json") == asked("GET", "/.spiderfs/views/original/") == 403
        assert asked("PUT", f"/{quote(NAMES[0])}") == asked("DELETE", f"/{quote(NAMES[0])}") == 403


def test_nodes_with_different_lists_do_not_ask_in_a_circle(source: Path, tmp_path: Path) -> None:
    lists = [(0, 1), (1, 2), (2, 0)]
    with nodes(source, tmp_path, 3, lists, TIMEOUT_S, immutable="on") as members:
        with ThreadPoolExecutor(3) as threads:
            assert max(threads.map(Node.reads_all, members)) < 2 * TIMEOUT_S + SLACK_S
        assert sum(node.had("hits") for node in members) > FILES / 2
        everybody = "+".join(node.url for node in members)
        for node in members:
            node.mount.change("peers", everybody)
            eventually(lambda node=node: len(node.peers()) == 2)
            with pytest.raises(OSError, match="Invalid argument"):
                node.mount.change("peers", "none")
        assert all(f"peers={everybody}" in node.mount.control("config").read_text() for node in members)


@pytest.mark.parametrize("mode", [{}, {"immutable": "on", "workers": 2}], ids=["opened", "two workers"])
def test_nodes_of_one_name_come_and_go(source: Path, tmp_path: Path, mode: dict[str, object]) -> None:
    first, second, third = NAMES[::3], NAMES[1::3], NAMES[2::3]
    with named_nodes(source, tmp_path, 3, **mode) as named, ThreadPoolExecutor(6) as threads:
        one, two, three = named.nodes
        kept, again = (dict.fromkeys((node.url for node in named.nodes), 0) for _ in range(2))

        def are_fetched_once(names: Sequence[str], members: Sequence[Node], readers: Sequence[Node]) -> None:
            """All read these files for the first time."""
            before = total(named.nodes, "origin_bytes")
            assert max(threads.map(lambda node: node.reads_all(names), readers)) < PATIENCE_S
            assert total(named.nodes, "origin_bytes") - before == size_of(source, names)
            for url, share in shares_of({node.url: 1.0 for node in members}, source, names).items():
                kept[url] += len(share)
            # Of files that were read before, the third node may have heard once more when it had become their home.
            eventually(lambda: all(0 <= entries(node) - kept[node.url] <= again[node.url] for node in named.nodes))

        assert "no other node is known" in one.mount.status()
        named.are(0, 1)
        assert "this node is none of them" in three.mount.status()
        are_fetched_once(first, [one, two], named.nodes)

        os.kill(one.mount.manager(), signal.SIGKILL)
        again[three.url] = len(shares_of({node.url: 1.0 for node in named.nodes}, source, first)[three.url])
        under_way = [threads.submit(node.reads_all, first) for node in named.nodes]
        named.are(0, 1, 2)
        assert max(reading.result() for reading in under_way) < PATIENCE_S
        are_fetched_once(second, named.nodes, named.nodes)

        named.are(0, 2)
        two.server.signal(signal.SIGSTOP)
        replaced(named.answers, "")
        are_fetched_once(third, [one, three], [one, three])
        assert [*one.peers(), *three.peers()] == [three.url, one.url]
        assert sum(node.had("timeouts") for node in named.nodes) == 0


@pytest.mark.parametrize("mode", [{}, {"immutable": "on", "workers": 2}], ids=["opened", "two workers"])
def test_nodes_that_meet_at_a_server_come_and_go(source: Path, tmp_path: Path, mode: dict[str, object]) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RedisServer(tmp_path))
        threads = stack.enter_context(ThreadPoolExecutor(4))

        def node(number: int, data_set: str = "images", first: str = "") -> Node:
            own, port = tmp_path / f"node{number}", free_port()
            options = {"peers": f"cluster/{data_set}", "peer_self": f"http://127.0.0.1:{port}", "cluster": server.url}
            mount = stack.enter_context(
                mounted(
                    source,
                    own,
                    first=f"from spiderfs.daemon.caching import membership\nmembership.BEAT_S = 1.0\n{first}",
                    peer_timeout="3s",
                    source__latency_ms=LATENCY_S * 1000,
                    **options,
                    **mode,
                )
            )
            return Node(mount, stack.enter_context(web_server(mount.point, own, port)), options["peer_self"])

        def are(*members: Node) -> None:
            urls = {member.url for member in members}
            for member in members:
                eventually(lambda member=member: {member.url, *member.peers()} == urls, what=f"{member.url} of {urls}")

        early, later, late = NAMES[::3], NAMES[1::3], NAMES[2::3]
        one, stranger = node(0), node(1, "others")
        are(one)
        assert "no other node is known" in one.mount.status()
        two = node(2, first="import time\nnow = time.time\ntime.time = lambda: now() + 3600")
        are(one, two)
        assert f"  {two.url}" in one.mount.status()
        assert max(threads.map(lambda member: member.reads_all(early), (one, two))) < PATIENCE_S
        assert total((one, two), "origin_bytes") == size_of(source, early)
        shares = shares_of({one.url: 1.0, two.url: 1.0}, source, early)
        eventually(
            lambda: [entries(member) for member in (one, two)] == [len(shares[url]) for url in (one.url, two.url)]
        )

        three = node(3)
        are(one, two, three)
        three.mount.stop()
        with contextlib.closing(redis.Redis("127.0.0.1", server.port)) as client:
            said = [fields.get(b"gone") for _, fields in client.xrange("spiderfs:nodes:images")]
        assert said.count(three.url.encode()) == 1
        are(one, two)
        with stopped(two.mount):
            are(one)
            assert one.reads_all(later) < PATIENCE_S
        are(one, two)

        reading = threads.submit(one.reads_all, early + later)
        for pid in processes(two.mount):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        are(one)
        detach(two.mount.point)
        assert reading.result() < PATIENCE_S
        before = entries(one)
        assert one.reads_all(late) < PATIENCE_S
        eventually(
            lambda: entries(one) == before + len(late), what="all that is new is at home at the one that is left"
        )

        for member in (one, stranger):
            member.mount.expect("the nodes that are known stay")
        server.kill()
        assert one.reads_all() < PATIENCE_S
        are(one)
        are(stranger)


@pytest.mark.parametrize("mode", [{}, {"immutable": "on", "workers": 2}], ids=["opened", "two workers"])
def test_a_cluster_is_the_home_of_what_it_has_room_for_and_each_mount_of_the_rest(
    source: Path, tmp_path: Path, mode: dict[str, object]
) -> None:
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(RedisCluster(tmp_path, "--maxmemory", "100mb"))
        at_cluster = f"{cluster.url}/images"
        clients = [stack.enter_context(contextlib.closing(cluster.client(number))) for number in range(3)]
        clients[cluster.owner("spiderfs:images:groups")].set("spiderfs:images:groups", GROUPS // 2)
        options = {"peers": at_cluster, "peer_timeout": f"{LONG_TIMEOUT_S}s", **mode}
        one, two = (
            Node(stack.enter_context(mounted(source, tmp_path / name, **options)), cluster.servers[0], at_cluster)
            for name in ("one", "two")
        )
        there = len([name for name in NAMES if number_of(source, name) % GROUPS < GROUPS // 2])
        assert 0 < there < FILES
        for node in (one, two):
            eventually(lambda node=node: node.mount.logged("and this is here"))
        assert one.reads_all() < PATIENCE_S
        eventually(lambda: sum(len(client.keys("*:????????????????")) for client in clients) == there)
        assert two.reads_all() < PATIENCE_S
        assert (one.had("absent"), two.had("hits"), one.had("timeouts") + two.had("timeouts")) == (there, there, 0)
        eventually(lambda: entries(one) == entries(two) == FILES - there)


def test_what_changes_at_the_source_is_never_given_as_it_was(source: Path, tmp_path: Path) -> None:
    with nodes(source, tmp_path, 2, ttl="1s") as members:
        earlier: dict[str, list[bytes]] = {name: [] for name in NAMES}
        wrong: dict[str, list[str]] = {}

        def all_are_new() -> bool:
            wrong.update((node.url, node.wrong(earlier)) for node in members)
            return not any(wrong.values())

        def seen() -> str:
            told = (f"{node.url} waited {node.longest_s:.1f} s, {node.peers()}, {wrong[node.url]}" for node in members)
            return "the new versions: " + "; ".join(told)

        for _ in range(2):
            for node in members:
                node.reads_all()
            for name in NAMES:
                # Of the same size, and in the same second as others.
                content = (source / name).read_bytes()
                earlier[name].append(content)
                (source / name).write_bytes(content[1:] + content[:1])
            settle(source)
            eventually(all_are_new, what=seen)
        assert members[0].had("hits") + members[1].had("hits") > FILES


@pytest.mark.parametrize("mode", [{}, {"immutable": "on", "workers": 2}], ids=["opened", "immutable"])
def test_a_large_file_leaves_the_source_once_for_all_nodes(tmp_path: Path, mode: dict[str, object]) -> None:
    size = (100 << 20) + 5
    write_files(tmp_path / "source", {"large": size})
    with nodes(tmp_path / "source", tmp_path, 3, **mode) as members:
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(lambda node: node.reads("large"), members))
        assert total(members, "origin_bytes") < 1.05 * size
        # No node is asked for more than its own part.
        assert all(node.mount.metric("origin_bytes") < 0.7 * size for node in members)

        def kept() -> list[int]:
            return [node.mount.stats()["sections"]["blocks"]["bytes"] for node in members]

        # And none keeps the others' parts.
        eventually(lambda: sum(kept()) > 0.9 * size, what="blocks")
        assert sum(kept()) <= size
        assert min(kept()) > 0


@pytest.mark.thorough
def test_the_stripes_of_a_node_that_is_killed_are_fetched_once_by_another(tmp_path: Path) -> None:
    size, piece = 160 << 20, 1 << 20
    write_files(tmp_path / "source", {"large": size})
    content = (tmp_path / "source/large").read_bytes()
    with nodes(tmp_path / "source", tmp_path, 3, timeout_s=TIMEOUT_S) as (lost, *others):
        a_quarter = Barrier(3, action=lambda: lost.server.signal(signal.SIGKILL))

        def read(node: Node) -> None:
            with open(node.mount.point / "large", "rb", buffering=0) as file:
                for at in range(0, size, piece):
                    assert file.read(piece) == content[at : at + piece]
                    if at == size // 4:
                        a_quarter.wait(PATIENCE_S)
                        if node is lost:
                            return

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(read, (lost, *others)))
        # What the killed node had fetched, or was being asked for, is fetched again.
        assert total([lost, *others], "origin_bytes") < 1.3 * size
