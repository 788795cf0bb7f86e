"""Two nodes on a network: each is a host with an address of its own, and has a mount and nginx over it.

A link that is cut in mid-read costs readers the time limit of a question and a fetch, and nothing else.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from mounting import eventually, mounted
from reading import write_files
from test_nodes import Node

from benchmarks.common.network import LINK, Host, NoNetwork, network
from benchmarks.common.web_server import web_server

FILES, FILE_BYTES = 400, 100_000
NAMES = [f"{number:03}" for number in range(FILES)]
PORT = 8443
TIMEOUT_S, LATENCY_S, READERS = 2.0, 0.01, 4  # as `Node.reads_all` has
# Busy cores; a reader that waits for nothing takes a millisecond.
SLACK_S = 15.0


@dataclass
class Apart(Node):
    """A node that is a host of its own."""

    host: Host = field(kw_only=True)

    def peer(self) -> dict[str, int]:
        """The figures of the other node."""
        ((_, found),) = self.mount.stats()["peers"].items()
        return dict(found)

    def received_bytes(self) -> int:
        """What has come over the link."""
        with self.host.entered():
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith(f"{LINK}:"))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Apart]]:
    write_files(tmp_path / "source", dict.fromkeys(NAMES, FILE_BYTES))
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(network(2))
        except NoNetwork as exc:
            pytest.skip(f"no network can be made: {exc}")
        found = []
        for number, host in enumerate(hosts):
            own = tmp_path / f"node{number}"
            options = {
                # No `peer_self`: each finds out by its addresses which one it is.
                "peers": "+".join(f"http://{host.address}:{PORT}" for host in hosts),
                "peer_timeout": f"{TIMEOUT_S}s",
                "source__latency_ms": LATENCY_S * 1000,
                "immutable": "on",
            }
            mount = stack.enter_context(mounted(tmp_path / "source", own, first=host.entering, **options))
            with host.entered():
                server = stack.enter_context(web_server(mount.point, own, PORT, address=host.address))
            found.append(Apart(mount, server, f"http://{host.address}:{PORT}", host=host))
        yield found


def on_all(nodes: Sequence[Apart], names: Sequence[str]) -> float:
    with ThreadPoolExecutor(len(nodes)) as threads:
        return max(threads.map(lambda node: node.reads_all(names), nodes))


def test_what_a_peer_has_comes_over_the_network_from_its_address(nodes: list[Apart]) -> None:
    one, other = nodes
    for node, peer in ((one, other), (other, one)):
        assert [*node.mount.stats()["peers"]] == [peer.url]
    on_all(nodes, NAMES)
    assert sum(node.mount.metric("origin_bytes") for node in nodes) == FILES * FILE_BYTES
    for node in nodes:
        assert node.peer()["timeouts"] == 0
        assert node.received_bytes() > node.peer()["bytes"] > FILES * FILE_BYTES / 4


@pytest.mark.thorough
@pytest.mark.parametrize("whose", ["the peer's", "the reader's"])
def test_a_link_that_is_cut_in_mid_read_costs_the_time_limit_and_a_fetch(nodes: list[Apart], whose: str) -> None:
    reader, peer = nodes
    cut = peer.host if whose == "the peer's" else reader.host
    during, after = NAMES[: FILES * 3 // 4], NAMES[FILES * 3 // 4 :]
    with ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(on_all, nodes, during)
        eventually(lambda: reader.peer()["hits"] > 10, what="hits")
        cut.link("down")
        assert not under_way.done(), "in mid-read"
        before = [node.peer()["hits"] for node in nodes]
        assert under_way.result() < TIMEOUT_S + LATENCY_S + SLACK_S
    told = [node.peer() for node in nodes]
    assert [figures["up"] for figures in told] == [0, 0]
    for hits, figures in zip(before, told, strict=True):
        assert 0 < figures["timeouts"] < len(during) // 4, "a few times"
        assert figures["hits"] <= hits + READERS, "what had come before"

    cut.link("up")
    began, pause_s = time.monotonic(), 0.5

    def asked_again() -> bool:
        nonlocal pause_s
        # The pause after which it is asked again is twice as long after each failure, and a file is fetched once.
        if time.monotonic() - began > pause_s:
            pause_s *= 1.2
            reader.reads(after.pop())
        return reader.peer()["hits"] > told[0]["hits"]

    eventually(asked_again, what=lambda: f"hits again: {reader.peer()}, {len(after)} files are left")
