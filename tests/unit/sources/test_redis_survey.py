"""What the manager makes of the answers of a server of Redis, also of one that is none."""

from __future__ import annotations

import socket
import threading
from contextlib import closing, suppress
from typing import Any

import pytest

from spiderfs.core.homes import GROUPS
from spiderfs.sources.node_names import Node, as_named
from spiderfs.sources.redis_client import errors
from spiderfs.sources.redis_survey import Survey, _shards

ASKED = Node("rediss://me@n1:6379/set", "n1", ["10.0.0.1"])


class Answering:
    def __init__(self, answer: object) -> None:
        self._answer = answer

    def execute_command(self, _: str) -> Any:
        return self._answer


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
