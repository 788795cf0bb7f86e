"""Several nodes whose caches act as one: mounts on this machine, each with nginx over it.

Whatever happens to a node, readers of the others get the right bytes, and none waits longer than the time limit and a
fetch.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
from mounting import PATIENCE_S, Mounted, detach, eventually, mounted, settle
from planning import planned
from reading import write_files

from benchmarks.common.web_server import WebServer, free_port, web_server

FILES = 60
NAMES = [f"c{number % 3}/{number:03d} x+%.jpg" for number in range(FILES)]
TIMEOUT_S, LATENCY_S = 0.4, 0.01
# Two busy cores; a reader that waits for nothing takes a millisecond.
SLACK_S = 1.5
MODES = pytest.mark.parametrize(
    "mode", [{}, {"immutable": "on"}, {"immutable": "on", "workers": 2}], ids=["opened", "immutable", "two workers"]
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    write_files(source, {name: 20_000 + 777 * number for number, name in enumerate(NAMES)})
    return source


@dataclass
class Node:
    mount: Mounted
    server: WebServer
    url: str

    def reads(self, name: str) -> float:
        """Read a file, and compare it; returns how long it took."""
        began = time.monotonic()
        content = (self.mount.point / name).read_bytes()
        took_s = time.monotonic() - began
        assert content == (self.mount.source / name).read_bytes(), name
        return took_s

    def reads_all(self, names: Sequence[str] = NAMES) -> float:
        """Read files in an order of its own, several at a time; returns the longest wait."""
        order = random.Random(self.url).sample(names, len(names))
        with ThreadPoolExecutor(4) as threads:
            return max(threads.map(self.reads, order))

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
    timeout_s: float = PATIENCE_S,
    **options: object,
) -> Iterator[list[Node]]:
    """Mounts of one source, and a web server over each; `lists` says which nodes each takes for the members.

    Where no node is to be late, the time limit is one that a busy machine keeps.
    """
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(count)]
    with contextlib.ExitStack() as stack:
        found = []
        for number, url in enumerate(urls):
            members = [urls[member] for member in (lists[number] if lists else range(count))]
            own = place / f"node{number}"
            mount = stack.enter_context(
                mounted(
                    source,
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


def total(members: Sequence[Node], metric: str) -> float:
    return sum(node.mount.metric(metric) for node in members)


def size_of(source: Path) -> int:
    return sum((source / name).stat().st_size for name in NAMES)


@MODES
def test_the_nodes_fetch_each_file_once_and_each_is_kept_at_home(
    source: Path, tmp_path: Path, mode: dict[str, object]
) -> None:
    with nodes(source, tmp_path, 3, **mode) as members:
        with ThreadPoolExecutor(3) as threads:
            assert max(threads.map(Node.reads_all, members)) < PATIENCE_S
        assert total(members, "origin_bytes") == size_of(source)
        assert sum(node.had("bytes") for node in members) == 2 * size_of(source)
        assert sum(node.had("hits") for node in members) == 2 * FILES
        assert [node.had("timeouts") + node.had("absent") for node in members] == [0, 0, 0]
        eventually(lambda: sum(node.mount.stats()["sections"]["importance"]["entries"] for node in members) == FILES)
        text = members[0].mount.control("stats").read_text()
        assert f"  {members[1].url}" in text
        assert "from peers" in text
        metrics = members[0].mount.control("metrics").read_text()
        assert f'spiderfs_peer_up{{peer="{members[1].url}"}} 1.0' in metrics
        assert f'spiderfs_peer_hits_total{{peer="{members[2].url}"}}' in metrics


@pytest.mark.parametrize("mode", [{}, {"immutable": "on"}], ids=["opened", "immutable"])
def test_what_a_plan_names_is_fetched_ahead_from_peers_too(
    source: Path, tmp_path: Path, mode: dict[str, object]
) -> None:
    with nodes(source, tmp_path, 2, **mode) as members:
        reader = members[0]
        with planned(reader.mount, NAMES):
            eventually(lambda: reader.mount.metric("prefetched") == FILES, what="all of the plan")
            assert reader.reads_all() < PATIENCE_S
        assert reader.had("hits") > 0
        assert total(members, "origin_bytes") == size_of(source)


@pytest.mark.parametrize("what", ["stopped", "killed", "unmounted"])
def test_a_node_that_is_lost_costs_the_time_limit_and_nothing_else(source: Path, tmp_path: Path, what: str) -> None:
    with nodes(source, tmp_path, 2, timeout_s=TIMEOUT_S, immutable="on") as (lost, reader):
        if what == "unmounted":
            lost.mount.stop()
            detach(lost.mount.point)
        else:
            lost.server.signal(signal.SIGSTOP if what == "stopped" else signal.SIGKILL)
        others = NAMES[FILES // 2 :]
        assert reader.reads_all(NAMES[: FILES // 2]) < TIMEOUT_S + LATENCY_S + SLACK_S
        assert reader.had("hits") == 0
        if what == "unmounted":
            # The web server says that there is no such file.
            assert reader.had("absent") > 0
            return
        assert reader.peers()[lost.url]["up"] == 0
        assert f"  {lost.url}" in reader.mount.control("stats").read_text()
        if what == "stopped":
            lost.server.signal(signal.SIGCONT)

            def asked_again() -> bool:
                if others:
                    reader.reads(others.pop())
                time.sleep(0.1)
                return reader.had("hits") > 0

            eventually(asked_again, what="hits again")


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
        assert asked("GET", "/.spiderfs/stats") == asked("GET", "/.spiderfs/views/original/") == 403
        assert asked("PUT", f"/{quote(NAMES[0])}") == asked("DELETE", f"/{quote(NAMES[0])}") == 403


def test_nodes_with_different_lists_do_not_ask_in_a_circle(source: Path, tmp_path: Path) -> None:
    lists = [(0, 1), (1, 2), (2, 0)]
    with nodes(source, tmp_path, 3, lists, TIMEOUT_S, immutable="on") as members:
        with ThreadPoolExecutor(3) as threads:
            assert max(threads.map(Node.reads_all, members)) < 2 * TIMEOUT_S + SLACK_S
        assert sum(node.had("hits") for node in members) > FILES / 2


def test_what_changes_at_the_source_is_never_given_as_it_was(source: Path, tmp_path: Path) -> None:
    with nodes(source, tmp_path, 2, ttl="1s") as members:
        for _ in range(2):
            for node in members:
                node.reads_all()
            for name in NAMES:
                # Of the same size, and in the same second as others.
                content = (source / name).read_bytes()
                (source / name).write_bytes(content[1:] + content[:1])
            settle(source)

            def all_are_new() -> bool:
                with contextlib.suppress(AssertionError):
                    return all(node.reads_all() >= 0 for node in members)
                return False

            eventually(all_are_new, what="the new versions")
        assert members[0].had("hits") + members[1].had("hits") > FILES


def test_large_files_are_had_from_peers_by_pieces(tmp_path: Path) -> None:
    names = [f"{number}" for number in range(6)]
    write_files(tmp_path / "source", dict.fromkeys(names, (3 << 20) + 5))
    with nodes(tmp_path / "source", tmp_path, 2, sample_max_bytes="1MiB") as members:
        for node in members:
            node.reads_all(names)
        assert sum(node.had("hits") for node in members) >= 6 * 4
        assert total(members, "origin_bytes") < 1.5 * 6 * (3 << 20)
