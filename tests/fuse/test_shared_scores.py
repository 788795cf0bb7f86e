"""Two real mounts, which share what trainings learn and plan by a real server."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import numpy.typing as npt
from mounting import Mounted, eventually, mounted
from planning import Trainer
from reading import write_files

from benchmarks.common.redis_server import RedisServer
from spiderfs.protocol import Batch, Hello, Scores, ScoresRequest

NAMES = [f"c{number % 3}/{number:02d}" for number in range(48)]
# Files of the same class lie near each other.
CENTRES = np.random.default_rng(1).standard_normal((3, 16))


class Rank(Trainer):
    """One rank of a training, on its node's mount."""

    def __init__(self, mount: Mounted, rank: int, world_size: int = 2) -> None:
        hello = Hello("test", "job", rank=rank, world_size=world_size)
        super().__init__(mount, NAMES, sends_batches=True, hello=hello, classes=3)
        self._mount, self._rng, self._request = mount, np.random.default_rng(rank), 0

    def train(self, *samples: int) -> None:
        for sample in samples:
            (self._mount.point / NAMES[sample]).read_bytes()
        vectors = CENTRES[np.array(samples) % 3] + 0.5 * self._rng.standard_normal((len(samples), 16))
        self.tell(Batch("train", 0, 0, np.array(samples, np.uint32), vectors.astype(np.float16)))

    def scores(self) -> npt.NDArray[np.float32]:
        self._request += 1
        answer = self.ask(ScoresRequest("train", self._request), Scores)
        found: npt.NDArray[np.float32] = answer.scores
        return found


def alike(one: Rank, other: Rank) -> bool:
    found = one.scores()
    return len(found) > 0 and np.array_equal(found, other.scores())


def test_two_mounts_of_a_training_have_the_scores_of_one(source: Path, tmp_path: Path) -> None:
    write_files(source, dict.fromkeys(NAMES, 1000))
    with (
        RedisServer(tmp_path) as server,
        mounted(source, tmp_path / "one", substitute="off", cluster=server.url) as one,
        mounted(source, tmp_path / "two", substitute="off", cluster=server.url) as two,
    ):
        first, second = Rank(one, 0), Rank(two, 1)
        for start in range(0, len(NAMES), 16):
            first.train(*range(start, start + 8))
            second.train(*range(start + 8, start + 16))
        eventually(lambda: one.metric("cluster_rows_received") == two.metric("cluster_rows_sent") == len(NAMES) // 2)
        eventually(lambda: alike(first, second), what="the same scores on both mounts")
        lines = two.status().splitlines()
        assert f"{'cluster':16} {server.url} up" in lines
        assert any("24 samples sent, 0 received, 0 lost;" in line for line in lines)
        assert two.metric("cluster_up") == 1

        # The manager that scores for all is another one now; what was sent to it meanwhile waits for it.
        one.expect("the manager ended")
        os.kill(one.manager(), signal.SIGKILL)
        second.train(*range(8))
        first.close()
        eventually(lambda: one.metric("manager_restarts") == 1)
        first = Rank(one, 0)
        eventually(lambda: one.metric("cluster_rows_received") == 32)
        first.train(*range(40, 48))
        eventually(lambda: np.array_equal(first.scores()[:8], second.scores()[:8]))

        for mount in (one, two):
            mount.expect("continues with its scores")
        server.kill()
        kept = second.scores()
        second.train(*range(16))
        eventually(lambda: two.metric("cluster_up") == 0)
        assert np.array_equal(second.scores(), kept)
        assert any("fails: this mount continues" in line for line in two.status().splitlines())
        first.close()
        second.close()


def test_a_home_receives_the_plan_of_a_job_on_another_node(tmp_path: Path) -> None:
    source, urls = tmp_path / "source", ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    write_files(source, dict.fromkeys(NAMES, 1000))
    with (
        RedisServer(tmp_path) as server,
        mounted(source, tmp_path / "one", cluster=server.url, peers="+".join(urls), peer_self=urls[0]) as one,
        mounted(source, tmp_path / "two", cluster=server.url, peers="+".join(urls), peer_self=urls[1]) as two,
    ):
        first, second = Rank(one, 0, 1), Rank(two, 0, 1)
        first.plan(range(len(NAMES)))
        eventually(lambda: two.metric("cluster_plans_received") == 1)
        assert any("1 of jobs on other nodes" in line for line in two.status().splitlines())
        assert one.metric("cluster_plans_received") == 0
        first.close()
        second.close()
