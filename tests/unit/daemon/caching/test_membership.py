"""Managers find out who the nodes are, by a name server that is slow, fails, or loses its memory, or by themselves."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from waiting import eventually

from benchmarks.common.redis_server import RedisServer
from spiderfs import cluster as stream_module
from spiderfs.daemon.caching import membership as module
from spiderfs.daemon.caching.membership import Membership
from spiderfs.errors import ConfigError
from spiderfs.options.model import Options
from spiderfs.sources.members import Members
from spiderfs.sources.node_names import Node as Known

HERE, A, B = "http://127.0.0.1:80", "http://198.51.100.1:80", "http://198.51.100.2:80"


class Names:
    """A name server; `answers` has what it says next for each name, and it says the last of that again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
        self.answers: dict[str, list[list[str]]] = {}
        self.asked = 0
        self._place = place
        monkeypatch.setattr(module, "addresses_of", self._addresses_of)
        for pause in ("LOOK_UP_S", "LISTED_S", "AGAIN_S", "BEAT_S"):
            monkeypatch.setattr(module, pause, 0.005)

    def says(self, *answers: str, name: str = "nodes") -> None:
        self.answers[name] = [[address for address in answer.split() if address != "-"] for answer in answers]

    def _addresses_of(self, host: str) -> list[str]:
        self.asked += 1
        answers = self.answers.get(host, [[]])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def options(self, peers: str, **more: str) -> Options:
        point = self._place / "m"
        point.mkdir(exist_ok=True)
        return Options(source=self._place, mountpoint=point, peers=peers, **more)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Names:
    return Names(monkeypatch, tmp_path)


class Node:
    def __init__(self, options: Options, members: Members | None = None) -> None:
        self.members = members or Members()
        self.moves = 0
        self.membership = Membership(self.members, options, self._moved)

    def _moved(self) -> None:
        self.moves += 1

    @property
    def known(self) -> list[str]:
        return sorted(url for url in self.members.members if url)


@asynccontextmanager
async def running(node: Node) -> AsyncIterator[Node]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.membership.run)
        yield node
        nursery.cancel_scope.cancel()


async def test_all_addresses_of_a_name_are_members_and_this_node_finds_itself(names: Names) -> None:
    names.says("127.0.0.1 198.51.100.1")
    async with running(Node(names.options("http://nodes:80"))) as node:
        await eventually(lambda: node.known == [HERE, A])
        assert node.members.has_own
        assert list(node.members.statuses()) == [A]
        names.says("127.0.0.1 198.51.100.1 198.51.100.2")
        await eventually(lambda: node.known == [HERE, A, B])
        edition, asked = node.members.edition, names.asked
        await eventually(lambda: names.asked > asked + 3)
        assert node.members.edition == edition
        await eventually(lambda: node.moves == 2)


async def test_a_node_that_the_name_does_not_have_yet_is_the_home_of_nothing(names: Names) -> None:
    names.says("198.51.100.1 198.51.100.2")
    async with running(Node(names.options("http://nodes:80"))) as node:
        await eventually(lambda: node.known == [A, B])
        assert not node.members.has_own
        await eventually(lambda: all(map(node.members.is_remote, range(1000))))
        names.says("198.51.100.1 198.51.100.2 127.0.0.1")
        await eventually(lambda: not all(map(node.members.is_remote, range(1000))))
        assert node.members.has_own


async def test_the_next_manager_goes_on_with_what_the_last_one_knew(names: Names) -> None:
    names.says("127.0.0.1 198.51.100.1 198.51.100.2")
    options = names.options("http://nodes:80")
    async with running(Node(options)) as node:
        await eventually(lambda: len(node.known) == 3)
    names.says("-", "127.0.0.1 198.51.100.1", "-")
    async with running(Node(options, node.members)) as following:
        await eventually(lambda: len(names.answers["nodes"]) == 1)
        assert following.known == [HERE, A, B]


async def test_a_listed_node_has_the_addresses_of_its_name_now(names: Names, caplog: pytest.LogCaptureFixture) -> None:
    names.says("198.51.100.1", name="n1")
    options = names.options(f"{HERE}+http://n1:80+http://n2:80")
    node = Node(options)
    node.members.change(options.peers, {HERE})

    def addresses() -> dict[str, list[str]]:
        return {found.url: found.addresses for found in node.members.nodes() if found}

    async with running(node):
        for address in ("198.51.100.1", "198.51.100.2"):
            names.says(address, name="n1")
            wanted = {HERE: ["127.0.0.1"], "http://n1:80": [address], "http://n2:80": []}
            await eventually(lambda wanted=wanted: addresses() == wanted)
        # Changed while no name is answered for: what is known stays.
        names.says("-", name="n1")
        node.membership.change(options.changed("peers", f"{HERE}+http://n1:80*2+http://n2:80"))
        await eventually(lambda: node.moves == 1)
        assert addresses()["http://n1:80"] == ["198.51.100.2"]
        node.membership.change(options.changed("peers", "http://unknown:80"))
        asked = names.asked
        await eventually(lambda: names.asked > asked + 2)
        assert len(node.known) == 3, "a name that no one knows takes no node away"
    assert node.moves == 1
    assert "n2 cannot be looked up" in caplog.text


async def test_a_name_that_is_not_answered_for_keeps_no_other_waiting(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, over = names._addresses_of, threading.Event()

    def hang(host: str) -> list[str]:
        if host == "hangs":
            over.wait(30)
        return ask(host)

    monkeypatch.setattr(module, "addresses_of", hang)
    names.says("198.51.100.1", name="n1")
    options = names.options(f"{HERE}+http://hangs:80+http://n1:80")
    node = Node(options)
    node.members.change(options.peers, {HERE})
    async with running(node):
        await eventually(
            lambda: any(found is not None and "198.51.100.1" in found.addresses for found in node.members.nodes())
        )
    over.set()


async def test_a_list_is_changed_while_mounted(names: Names) -> None:
    before = names.options(f"{HERE}+{A}")
    node = Node(before)
    node.members.change(before.peers, {HERE})
    async with running(node):
        for peers, known in ((f"{HERE}+{A}+{B}", [HERE, A, B]), (f"{HERE}+{B}*3", [HERE, B])):
            node.membership.change(before.changed("peers", peers))
            await eventually(lambda known=known: node.known == known)
            assert node.members.has_own
        await eventually(lambda: node.moves == 2)
        names.says("127.0.0.1 198.51.100.1")
        node.membership.change(before.changed("peers", "http://nodes:80"))
        await eventually(lambda: node.known == [HERE, A])
        node.membership.change(before)
        await eventually(lambda: node.members.nodes()[1].host == "198.51.100.1")
        assert node.known == [HERE, A]
        with pytest.raises(ConfigError, match="unmount"):
            node.membership.change(before.changed("peers", "none"))
        assert node.known == [HERE, A]
    alone = names.options("none")
    membership = Membership(None, alone, lambda: None)
    await membership.run()
    membership.change(alone)
    with pytest.raises(ConfigError, match="unmount"):
        membership.change(before)


async def test_servers_hold_their_shares_and_this_node_the_rest(names: Names) -> None:
    names.says("198.51.100.1", name="n1")
    options = names.options("redis://n1/set*0.5")
    async with running(Node(options)) as node:
        await eventually(lambda: Known("redis://n1/set", "n1", ["198.51.100.1"]) in node.members.nodes())
        assert node.members.members == ["here", "redis://n1/set"]
        await eventually(lambda: node.moves == 1)
        remote = sum(map(node.members.is_remote, range(1 << 16)))
        node.membership.change(options.changed("peers", "redis://n1/set*0.25"))
        await eventually(lambda: sum(map(node.members.is_remote, range(1 << 16))) < 0.55 * remote)


async def test_nodes_find_each_other_by_a_server(names: Names, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stream_module, "TIMEOUT_S", 0.5)
    names.says("198.51.100.2", name="n2")
    with RedisServer(tmp_path) as server:
        urls = ["http://n1:80", "http://n2:80", A]
        one, two, three = (Node(names.options("cluster/set", cluster=server.url, peer_self=url)) for url in urls)
        async with running(one):
            await eventually(lambda: one.known == urls[:1])
            assert one.members.has_own
            assert not any(map(one.members.is_remote, range(1000)))
            async with running(two):
                async with running(three):
                    for node in (one, two, three):
                        await eventually(lambda node=node: node.known == sorted(urls))
                    assert set(one.members.statuses()) == set(urls[1:])
                    # A name is looked up by those who ask it, and no name where the URL has an address.
                    expected = {urls[0]: [], urls[1]: ["198.51.100.2"], A: ["198.51.100.1"]}
                    await eventually(
                        lambda: {node.url: node.addresses for node in one.members.nodes() if node} == expected
                    )
                await eventually(lambda: one.known == two.known == urls[:2])
                server.kill()
                await trio.sleep(0.2)
                assert one.known == two.known == urls[:2]
            # No one has heard it, for the server was down.
            assert one.known == urls[:2]
            server.start()
            await eventually(lambda: one.known == urls[:1])
            assert one.moves >= 2

            # To another way of finding them and back, while mounted.
            found = one.membership._options
            one.membership.change(found.changed("peers", f"{urls[0]}+{A}"))
            await eventually(lambda: one.known == sorted([urls[0], A]))
            one.membership.change(found)
            await eventually(lambda: one.known == urls[:1])
