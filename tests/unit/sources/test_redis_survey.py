"""What the manager makes of the answers of a server of Redis, also of one that is none."""

from __future__ import annotations

import signal
import socket
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_clusters import RedisCluster

from benchmarks.common.redis_server import RedisServer
from spiderfs.core.homes import GROUPS
from spiderfs.sources import redis_client
from spiderfs.sources.node_names import Node, as_named
from spiderfs.sources.redis_client import Survey, _shards, errors

ASKED = Node("rediss://me@n1:6379/set", "n1", ["10.0.0.1"])


class Answering:
    def __init__(self, answer: object) -> None:
        self._answer = answer

    def execute_command(self, question: str) -> Any:
        return {"cluster_state": "ok"} if question == "CLUSTER INFO" else self._answer


@pytest.mark.parametrize(
    ("endpoint", "more", "shard"),
    [
        # Redis 6.2 has no more than that.
        (b"10.0.0.2", [], ["rediss://me@10.0.0.2:7000/set", "10.0.0.2", "10.0.0.2"]),
        (b"10.0.0.2", [[]], ["rediss://me@10.0.0.2:7000/set", "10.0.0.2", "10.0.0.2"]),
        (b"fd00::2", [[]], ["rediss://me@[fd00::2]:7000/set", "fd00::2", "fd00::2"]),
        # cluster-announce-hostname
        (b"10.0.0.2", [[b"hostname", b"n2"]], ["rediss://me@n2:7000/set", "n2", "10.0.0.2"]),
        # and cluster-preferred-endpoint-type: hostname, unknown-endpoint
        (b"n2", [[b"ip", b"10.0.0.2"]], ["rediss://me@n2:7000/set", "n2", "10.0.0.2"]),
        (None, [[b"ip", b"172.16.0.2", b"hostname", b"n2"]], ["rediss://me@n2:7000/set", "n2", "10.0.0.1"]),
        (b"", [[]], ["rediss://me@n1:7000/set", "n1", "10.0.0.1"]),
    ],
)
def test_a_shard_is_where_the_cluster_says(endpoint: bytes, more: list[Any], shard: list[str]) -> None:
    primary, replica = [endpoint, 7000, b"id", *more], [b"10.0.0.9", 7000, b"id"]
    found = _shards(ASKED, Answering([[0, 99, primary, replica], [200, 16383, primary]]))
    assert found == ([*shard, [0, 99, 200, 16383]],)
    (server,) = ASKED._replace(shards=found).servers().values()
    assert server == Node(shard[0], shard[1], [shard[2]])


@pytest.mark.parametrize(
    "answer",
    [
        None,
        7,
        [7],
        [[0, 1]],
        [[0, 1, [b"\xff", 7000, b"id"]]],
        [[0, 1, [b"n2", 7000, b"id"]]],
        [[0, 1, [b"?", 7000, b"id", [b"ip", b"10.0.0.2"]]]],
        [[5, 1, [b"10.0.0.2", 7000, b"id"]]],
        [[-5, 1, [b"10.0.0.2", 7000, b"id"]]],
        [[0, 16384, [b"10.0.0.2", 7000, b"id"]]],
        [["0", "1", [b"10.0.0.2", 7000, b"id"]]],
    ],
)
def test_what_is_no_map_of_a_cluster_is_not_taken_for_one(answer: object) -> None:
    with pytest.raises(errors()):
        _shards(ASKED, Answering(answer))


@pytest.mark.parametrize("answer", [b"+OK\r\n", b":7\r\n", b"*0\r\n", b"$2\r\nno\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_is_none_of_redis_changes_nothing(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answers() -> None:
            with suppress(OSError):
                while True:
                    connected, _ = server.accept()
                    with connected:
                        while connected.recv(1 << 16):
                            connected.sendall(answer)

        answering = threading.Thread(target=answers)
        answering.start()
        node = as_named(f"redis://127.0.0.1:{server.getsockname()[1]}/set")
        with closing(Survey(node.url, finds_room=True)) as survey:
            shown = survey.look(node)
            assert shown._replace(room=GROUPS) == node
            assert shown.room in (7, GROUPS)
        server.shutdown(socket.SHUT_RDWR)
        answering.join()


def test_room_is_found_where_the_first_address_does_not_answer(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, closing(redis.Redis("127.0.0.1", server.port)) as client:
        client.set("spiderfs:set:groups", GROUPS // 2)
        node = Node(f"redis://n1:{server.port}/set", "n1", ["127.0.0.2", "127.0.0.1"])
        with closing(Survey(node.url, finds_room=True)) as survey:
            assert survey.look(node).room == GROUPS // 2
            server.kill()
            assert survey.look(node._replace(room=7)).room == 7


def test_a_shard_that_knows_of_no_others_any_more_keeps_no_one_from_the_map(tmp_path: Path) -> None:
    with RedisCluster(tmp_path) as cluster, closing(cluster.client(0)) as first, closing(cluster.client(1)) as second:
        node = Node(f"{cluster.url}/set", "localhost", ["127.0.0.1"])
        with closing(Survey(node.url, finds_room=True)) as survey:
            known = survey.look(node)
            lost = first.execute_command("CLUSTER MYID")
            first.execute_command("CLUSTER", "RESET", "HARD")
            second.execute_command("CLUSTER", "FORGET", lost)
            shown = survey.look(known)
            assert len(known.shards) == 3
            assert sorted(shown.shards) == sorted(shard for shard in known.shards if shard[0] != node.url)


def test_a_server_that_is_in_no_cluster_any_more_has_no_shards(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        node = as_named(f"{server.url}/set")
        url = f"redis://127.0.0.1:{server.port}/set"
        known = node._replace(shards=([url, "127.0.0.1", "127.0.0.1", [0, 16383]],))
        with closing(Survey(node.url, finds_room=True)) as survey:
            assert survey.look(known) == node
            server.kill()
            assert survey.look(known) == known


def test_a_shard_that_has_lost_the_others_is_not_trusted(tmp_path: Path) -> None:
    quickly = "--cluster-node-timeout", "2000"
    with RedisCluster(tmp_path, *quickly) as cluster, closing(cluster.client(0)) as first:
        node = Node(f"{cluster.url}/set", "localhost", ["127.0.0.1"])
        with closing(Survey(node.url, finds_room=True)) as survey:
            known = survey.look(node)
            for server in cluster.servers[1:]:
                server.signal(signal.SIGSTOP)
            until = time.monotonic() + 60
            while first.execute_command("CLUSTER INFO")["cluster_state"] == "ok":
                assert time.monotonic() < until
                time.sleep(0.1)
            assert survey.look(node).shards == ()
            assert survey.look(known) == known
            for server in cluster.servers[1:]:
                server.signal(signal.SIGCONT)


def test_a_lower_room_is_published_before_samples_are_removed_by_one_mount_of_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "_SETTLED_S", 1)
    monkeypatch.setattr(redis_client, "_REMOVAL_S", 0.0)
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer(tmp_path, "--maxmemory", "8mb"))
        client = stack.enter_context(closing(redis.Redis("127.0.0.1", server.port)))
        one, two = (stack.enter_context(closing(Survey(f"{server.url}/set", finds_room=True))) for _ in range(2))
        node = as_named(f"{server.url}/set")
        refused = iter(range(1 << 20))

        def fill() -> None:
            with suppress(redis.OutOfMemoryError):
                while True:
                    client.set(f"spiderfs:set:{GROUPS * 1000 + 7 * next(refused):016x}", bytes(200))

        for survey in (one, two):
            survey.look(node)
        fill()
        count, lower = client.dbsize(), GROUPS * 9 // 10
        assert one.look(node).room == lower
        # Most is there still, and the server is full again.
        assert client.dbsize() > 0.97 * count
        fill()
        known = node._replace(room=lower)
        # The other mount hears of it, and lowers it no further while samples are removed.
        for _ in range(3):
            assert two.look(known).room == lower
            fill()
        assert client.ttl("spiderfs:{spiderfs:set:groups}") > 50
        monkeypatch.setattr(redis_client, "_REMOVAL_S", 10.0)
        assert one.look(known).room == lower
        assert not any(int(key[-16:], 16) % GROUPS >= lower for key in client.scan_iter("*:????????????????"))
        # What has been refused meanwhile says nothing, also to the other one.
        for _ in range(2):
            assert two.look(known).room == lower
        time.sleep(1.1)
        fill()
        assert two.look(known).room == lower * 9 // 10


def test_mounts_of_another_source_in_one_name_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer(tmp_path, "--maxmemory", "40mb") as server, ExitStack() as stack:
        node = as_named(f"{server.url}/set")
        of_one, of_other, of_one_too = (
            stack.enter_context(closing(Survey(node.url, finds_room=False, source=source)))
            for source in ("nas:/a", "nas:/b", "nas:/a")
        )
        for _ in range(3):
            for survey in (of_one, of_other, of_one_too):
                assert survey.look(node) == node
    (said,) = (record.getMessage() for record in caplog.records)
    assert "is used by another mount, too: its source is 'nas:/a', and this mount's 'nas:/b'" in said
