"""Nodes learn by a real server who is there, whatever becomes of it, of them, and of their clocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from benchmarks.common.redis_server import RedisServer
from spiderfs import cluster as stream_module
from spiderfs.cluster import Beats
from spiderfs.sources.node_names import MISSED
from spiderfs.sources.redis_client import PASSWORD_VARIABLE

A, B, C = (f"http://n{number}:8443" for number in (1, 2, 3))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Of a data set that no other test has."""
    return request.node.name


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "TIMEOUT_S", 0.5)


def test_who_comes_counts_at_once_and_so_does_who_says_that_it_leaves(server: RedisServer, name: str) -> None:
    one, two = Beats(server.url, name, A, ()), Beats(server.url, name, B, ())
    assert one.beat() == [A]
    assert two.beat() == one.beat() == [A, B]
    two.leave()
    assert one.beat() == [A]
    back = Beats(server.url, name, B, ())
    assert back.beat() == one.beat() == [A, B]
    one.leave()
    back.leave()


def test_who_is_silent_for_some_beats_has_left_until_it_reports_again(server: RedisServer, name: str) -> None:
    one, two = Beats(server.url, name, A, ()), Beats(server.url, name, B, ())
    for _ in range(3):
        two.beat()
        for _ in range(MISSED):
            assert one.beat() == [A, B]
    assert one.beat() == [A]
    assert two.beat() == one.beat() == [A, B]


def test_the_next_manager_loses_no_one_that_has_not_reported_yet(server: RedisServer, name: str) -> None:
    following = Beats(server.url, name, A, [A, B, C])
    Beats(server.url, name, B, ()).beat()
    for _ in range(MISSED - 1):
        assert following.beat() == [A, B, C]
    assert following.beat() == [A, B]


def test_nodes_of_another_source_do_not_count_and_are_named_once(
    server: RedisServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = Beats(server.url, name, A, (), "nas:/a"), Beats(server.url, name, B, (), "nas:/b\n")
    for _ in range(3):
        assert (one.beat(), two.beat()) == ([A], [B])
    # One of an earlier release does not say what it shows.
    redis.Redis.from_url(server.url).xadd(f"spiderfs:nodes:{name}", {"here": C})
    assert one.beat() == [A, C]
    (said,) = (record.getMessage() for record in caplog.records if record.getMessage().startswith(f"peers: '{B}"))
    assert "'nas:/b\\n'" in said
    assert "'nas:/a'" in said


def test_a_server_that_is_killed_changes_nothing_and_neither_does_its_return(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with RedisServer(tmp_path) as server:
        one, two = Beats(server.url, "set", A, ()), Beats(server.url, "set", B, ())
        one.beat()
        two.beat()
        server.kill()
        for _ in range(2 * MISSED):
            assert one.beat() == [A], "the other one had not reported"
            assert two.beat() == [A, B]
        server.start()
        for _ in range(MISSED - 1):
            assert two.beat() == [A, B], "the other one has not come back yet"
        for _ in range(2 * MISSED):
            assert one.beat() == two.beat() == [A, B]
        server.kill()
        # No one is there who could receive it.
        one.leave()
    logged = [message for message in caplog.messages if server.url in message]
    assert ["the nodes that are known stay" in text for text in logged] == [True, True, False, False]
    assert logged[2] == f"peers: {server.url} is back"


def test_no_clock_counts(server: RedisServer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client, key = redis.Redis.from_url(server.url), f"spiderfs:nodes:{name}"
    one, two = Beats(server.url, name, A, ()), Beats(server.url, name, B, ())
    now = time.time()

    def both_beat() -> tuple[list[str], list[str]]:
        received = one.beat()
        with monkeypatch.context() as patched:
            # This node's clock is an hour late.
            patched.setattr(time, "time", lambda: now - 3600)
            return received, two.beat()

    for _ in range(2 * MISSED):
        both = both_beat()
    assert both == ([A, B], [A, B])
    # The server's clock jumps ahead, and then its successor's is behind.
    client.xadd(key, {"here": A}, id=f"{int((now + 3600) * 1000)}-0")
    for _ in range(2 * MISSED):
        assert both_beat() == ([A, B], [A, B])
    client.delete(key)
    for _ in range(2 * MISSED):
        assert both_beat() == ([A, B], [A, B])
    for _ in range(MISSED):
        assert one.beat() == [A, B]
    assert one.beat() == [A]


def test_what_no_node_says_is_left_out(server: RedisServer, name: str) -> None:
    client, key = redis.Redis.from_url(server.url), f"spiderfs:nodes:{name}"
    one = Beats(server.url, name, A, ())
    for wrong in (
        "",
        "n2",
        "redis://n2/set",
        "http://n2:99999",
        "http://[",
        "http://me:word@n2",
        "http://n2\0",
        "http:// ",
    ):
        client.xadd(key, {"here": wrong})
    client.xadd(key, {"gone": A, "here": B})
    assert one.beat() == [A, B]
    client.xadd(key, {"here": b"\xff"})
    assert [one.beat(), one.beat()] == [[A, B]] * 2
    assert client.ttl(key) > 0


def test_a_user_needs_a_few_rights_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "secret")
    rights = ["on", ">secret", "~spiderfs:*", "+xadd", "+xread", "+expire"]
    with RedisServer(tmp_path, "--requirepass", "other", "--user", "alice", *rights) as server:
        url = server.url.replace("redis://", "redis://alice@")
        one, two = Beats(url, "set", A, ()), Beats(url, "set", B, ())
        one.beat()
        assert two.beat() == [A, B]
        two.leave()
        assert one.beat() == [A]
