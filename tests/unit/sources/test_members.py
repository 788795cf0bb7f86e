"""The nodes of a mount come and go: who they are, at which places, and what a reading process makes of it."""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
from test_peer_source import CONTENT, HERE, TIMEOUT_S, Peer

from benchmarks.fakes import MemorySource
from spiderfs.core.homes import GROUPS, Homes
from spiderfs.errors import ConfigError
from spiderfs.shared.shared_memory import SharedSlots
from spiderfs.sources import members as module
from spiderfs.sources.members import FIELDS, Members, PeerStatus, key_at
from spiderfs.sources.node_names import (
    MISSED,
    Node,
    Roll,
    addresses_of,
    as_named,
    at_address,
    is_here,
    live_name,
    own_url,
    weights_of,
)
from spiderfs.sources.peers import PeerSource
from spiderfs.sources.source import FromPeer, version_hash

A, B, C = (f"http://10.0.0.{number}:80" for number in (1, 2, 3))


def changed(members: Members, *urls: str) -> bool:
    return members.change(dict.fromkeys(urls, 1.0), {HERE})


def homes_of(members: Members) -> list[str]:
    return [members.members[members.home(key)] for key in range(GROUPS)]


# -- names


def test_this_node_is_the_one_with_an_address_of_this_machine() -> None:
    far, near = "http://198.51.100.1:80", "http://127.0.0.1:8443"
    assert own_url({far: 1.0, near: 1.0}, "") == near
    assert own_url({far: 1.0, near: 1.0}, far) == far
    for urls, which in (
        ([far, "http://203.0.113.1:80"], "no node"),
        ([near, "http://127.0.0.1:8444"], "several nodes"),
    ):
        with pytest.raises(ConfigError, match=rf"^peers names {which} .* peer_self=URL for this one$"):
            own_url(dict.fromkeys(urls, 1.0), "")
    assert is_here(["198.51.100.1", "::1"])
    assert not is_here(["198.51.100.1"])


def test_nodes_by_their_urls_and_by_addresses_of_a_name() -> None:
    assert as_named("http://n1:80/a") == Node("http://n1:80/a", "n1", [])
    assert as_named("https://[::1]:80") == Node("https://[::1]:80", "::1", ["::1"])
    name = "https://nodes:8443/imagenet"
    assert at_address(name, "10.0.0.1") == Node("https://10.0.0.1:8443/imagenet", "nodes", ["10.0.0.1"])
    assert at_address("http://nodes", "fd00::1") == Node("http://[fd00::1]", "nodes", ["fd00::1"])
    assert [live_name(urls) for urls in ((), (name,), (name, A))] == ["", name, ""]


def test_what_servers_leave_is_at_home_on_each_node() -> None:
    one, two = "redis://n1/set", "redis://n2/set"
    assert live_name([one]) == ""
    assert weights_of({one: 1.0}) == {one: 1.0}
    assert weights_of({A: 1.0, B: 2.0}) == {A: 1.0, B: 2.0}
    members = Members()
    members.change(weights_of({one: 0.3, two: 0.5}), {own_url({one: 0.3, two: 0.5}, "")})
    homes = homes_of(members)
    for url, share in ((one, 0.3), (two, 0.5), ("here", 0.2)):
        assert homes.count(url) / GROUPS == pytest.approx(share, abs=0.01)
    assert list(members.statuses()) == [one, two]
    # Those whose share is not written share what the others leave.
    assert weights_of({one: 0.0, two: 0.5}) == {one: 0.5, two: 0.5}
    assert weights_of({one: 0.0, two: 0.0}) == {one: 0.5, two: 0.5}


def test_what_a_server_has_no_room_for_is_at_home_here() -> None:
    one, two = "redis://n1/set", "redis://n2/set"
    members, weights, node = Members(), {one: 0.5, two: 0.5}, as_named(one)
    members.change(weights, {"here"}, {one: node})
    before = homes_of(members)
    assert not members.has_own
    for room in (GROUPS // 2, GROUPS // 4, 0):
        assert members.change(weights, {"here"}, {one: node._replace(room=room)})
        assert node._replace(room=room) in members.nodes()
        assert members.has_own
        assert homes_of(members) == [
            "here" if home == one and group >= room else home for group, home in enumerate(before)
        ]
    assert not members.change(weights, {"here"}, {one: node._replace(room=0)})
    assert members.change(weights, {"here"})
    assert homes_of(members) == before


def test_blocks_of_other_nodes_pass_unless_their_home_is_a_server_or_is_down() -> None:
    server, number, asked = "redis://n1/set", (1 << 40) | 77, SharedSlots(64)
    members = Members(asked=asked)
    assert not members.passes(number, 1), "before the homes are known"
    members.change({A: 1.0, B: 1.0, server: 1.0}, {A})
    keys = {block: key_at(number, (block - 1) << 20) for block in range(1, 161)}
    home = {block: members.home(key) for block, key in keys.items()}
    of_b = {block for block, place in home.items() if members.members[place] == B}
    assert {block for block in keys if members.passes(number, block)} == of_b
    assert 0 < len(of_b) < len(keys)
    # Other nodes ask this one, for B does not answer.
    stripe = min(of_b)
    asked.put(keys[stripe])
    assert {block for block in of_b if not members.passes(number, block)} == set(range(stripe, stripe + 8))


@pytest.mark.parametrize(
    ("answer", "addresses"),
    [(["::1", "10.0.0.2", "fd00::1", "10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.2"]), (["fd00::1"], ["fd00::1"])],
)
def test_a_node_with_addresses_of_two_kinds_is_one_member(
    monkeypatch: pytest.MonkeyPatch, answer: Sequence[str], addresses: Sequence[str]
) -> None:
    def look_up(host: str, port: int, **_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        families = (socket.AF_INET6 if ":" in address else socket.AF_INET for address in answer)
        return [(family, 2, 0, "", (address, port)) for family, address in zip(families, answer, strict=True)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert addresses_of("nodes") == addresses


def test_an_address_leaves_after_several_answers_without_it_and_no_answer_changes_nothing() -> None:
    roll = Roll(["a", "b"])
    for _ in range(2 * MISSED):
        assert roll.after([]) == ["a", "b"]
    for _ in range(3):
        for _ in range(MISSED - 1):
            assert roll.after(["b", "c"]) == ["a", "b", "c"]
        assert roll.after([]) == roll.after(["a"]) == ["a", "b", "c"], "it is back"
    for _ in range(MISSED):
        left = roll.after(["a"])
    assert left == ["a"]


# -- places and homes


def test_homes_are_those_that_all_nodes_draw_and_a_place_is_kept() -> None:
    members = Members()
    assert homes_of(members) == [""] * GROUPS
    assert not any(map(members.is_remote, range(GROUPS)))
    for urls, moves in (((HERE, A), True), ((HERE, A, B), True), ((A, B), True), ((B, C), False), ((HERE,), True)):
        moved = changed(members, *urls)
        drawn = Homes(dict.fromkeys(urls, 1.0), urls[0])
        expected = [drawn.members[drawn.home(key)] for key in range(GROUPS)]
        assert homes_of(members) == expected
        assert moved == moves, "of what is at home here"
        assert not changed(members, *urls)
        assert members.has_own == (HERE in urls)
        assert [members.is_remote(key) for key in range(GROUPS)] == [home != HERE for home in expected]
        assert members.members[0] == (HERE if HERE in urls else "")
    changed(members, HERE, A, B, C)
    place = members.members.index(C)
    changed(members, HERE, C)
    assert members.members.index(C) == place
    assert list(members.statuses()) == [C]


def test_who_takes_the_place_of_another_has_no_part_in_what_that_gave() -> None:
    members = Members(processes=2)
    changed(members, HERE, A, B)
    place = members.members.index(A)

    def note() -> None:
        cells = array("Q", [1, 1, 1, 1, module.mark_of(A)])
        members.row(0)[place * len(FIELDS) : (place + 1) * len(FIELDS)] = memoryview(cells)

    note()
    assert not members.statuses()[A].up
    changed(members, HERE, B, C)
    assert members.members.index(C) == place
    assert members.statuses()[C] == PeerStatus(True, 0, 0, 0, 0)
    # The answer to a question that a process had asked the other node before.
    note()
    assert members.statuses()[C].up
    for number in range(5):
        changed(members, HERE, f"http://n{number}:80")
    assert len(members.members) <= 3, "places do not become more for ever"


def test_a_manager_draws_the_homes_that_one_before_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    members = Members()
    changed(members, HERE, A)
    homes = homes_of(members)

    def killed(*_: object) -> None:
        os._exit(0)

    if not (pid := os.fork()):
        monkeypatch.setattr(members, "_publish", killed)
        changed(members, HERE, A, B)
    os.waitpid(pid, 0)
    assert [members.home(key) for key in range(GROUPS)] != [members.members.index(home) for home in homes]
    if not (pid := os.fork()):
        changed(members, HERE, A)
        os._exit(0)
    os.waitpid(pid, 0)
    assert homes_of(members) == homes


def test_more_members_than_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="more than 256 nodes"):
        changed(Members(), *(f"http://n{number}" for number in range(300)))
    with pytest.raises(ConfigError, match="too long"):
        changed(Members(), A, "http://n/" + "x" * (1 << 20))


def test_other_processes_learn_of_a_change() -> None:
    members = Members()
    changed(members, HERE, A)
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        changed(members, HERE, A, B)
        os.write(writer, b"!")
        os._exit(0)
    os.read(reader, 1)
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
    assert [node.url for node in members.nodes() if node] == [HERE, A, B]
    assert set(homes_of(members)) == {HERE, A, B}


# -- whom a reading process asks


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    found = [Peer(), Peer()]
    yield found
    for peer in found:
        peer.close()


def test_a_reading_process_asks_those_that_are_members_now(peers: Sequence[Peer]) -> None:
    source, members = MemorySource(), Members()
    versions = {path: source.add(path, CONTENT).version for path in (b"%d" % number for number in range(60))}
    with closing(PeerSource(source, members, TIMEOUT_S, 10.0, members.row(0), SharedSlots(64))) as reader:
        for urls in ([], [0], [0, 1], [1], [0, 1], []):
            for peer in peers:
                peer.asked.clear()
            changed(members, HERE, *(peers[number].url for number in urls))
            remote = [path for path in versions if members.is_remote(version_hash(path, versions[path]))]
            for path, version in versions.items():
                assert reader.read(path, 0, len(CONTENT), version) == CONTENT
            assert len(peers[0].asked) + len(peers[1].asked) == len(remote)
            assert [bool(peer.asked) for peer in peers] == [number in urls for number in (0, 1)]
        assert peers[0].connections == 2, "one as long as it was a member"


def test_what_a_process_let_rest_ends_with_it(peers: Sequence[Peer]) -> None:
    source, members = MemorySource(), Members()
    url = peers[0].url
    changed(members, HERE, url)
    members.row(0)[members.members.index(url) * len(FIELDS) + FIELDS.index("resting")] = module.mark_of(url)
    assert not members.statuses()[url].up
    with closing(PeerSource(source, members, TIMEOUT_S, 10.0, members.row(0), SharedSlots(64))):
        assert members.statuses()[url].up


def test_new_addresses_leave_breaker_and_counts_as_they_were(peers: Sequence[Peer]) -> None:
    source, members = MemorySource(), Members()
    url = f"http://node:{peers[0].port}"
    members.change({HERE: 1.0, url: 1.0}, {HERE})
    names = (b"%d" % number for number in range(60))
    versions = {path: source.add(path, CONTENT).version for path in names}
    path = next(path for path in versions if members.is_remote(version_hash(path, versions[path])))
    peers[0].answers = lambda handler, asked: peers[0].files.setdefault(asked, CONTENT) is None
    with closing(PeerSource(source, members, TIMEOUT_S, 10.0, members.row(0), SharedSlots(64))) as reader:
        for addresses, hits in (([], 0), (["127.0.0.1"], 1), (["127.0.0.2", "127.0.0.1"], 2)):
            members.change({HERE: 1.0, url: 1.0}, {HERE}, {url: Node(url, "node", addresses)})
            found = reader.read(path, 0, len(CONTENT), versions[path])
            assert (found, isinstance(found, FromPeer)) == (CONTENT, hits > 0)
            assert members.statuses()[url] == PeerStatus(True, hits, hits * len(CONTENT), 0, 0)
