"""Replays of what ranks published of their plans: traces with several jobs that exchange samples."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from spiderfs.cli.main import main
from spiderfs.core.engine import Engine
from spiderfs.core.events import Disconnected, Dispatched, Planned, Progressed, RankNews
from spiderfs.core.plans.exchange import SharedList
from spiderfs.policies.baselines import LRU
from spiderfs.simulation import Replay, replay
from spiderfs.trace import Accesses, TraceWriter, read_trace
from trainer_hook.loader.epoch_order import EpochOrder

SAMPLES, CACHED, BATCH, IN_HAND, EPOCHS = 500, 100, 5, 3, 3


class Recorded:
    """Jobs that exchange through an engine, and start apart; what a mount would record of them."""

    def __init__(self, jobs: int, apart: int = 0) -> None:
        """Each job begins `apart` batches after the one before it."""
        self.rng = random.Random(1)
        self.engine = Engine(LRU(), CACHED)
        self.news: list[tuple[int, RankNews]] = []
        self.keys: list[int] = []
        self.fetched = 0
        index_of = {sample + 1: sample for sample in range(SAMPLES)}
        self.shared = SharedList(range(1, SAMPLES + 1), index_of, self.rng.random, self.engine.exchange_pending.changed)
        self.engine.share("list", self.shared)
        running = [self.job(job) for job in range(jobs)]
        for step in itertools.count():
            begun = running[: step // apart + 1] if apart else running
            if sum(next(one, True) for one in begun) == jobs:
                return

    def job(self, job: int) -> Iterator[bool]:
        """Read all epochs, batch by batch; gives False after each."""
        job_dataset_id, shared = str(job + 1), self.shared
        for epoch in range(EPOCHS):
            order = EpochOrder(self.rng.sample(range(SAMPLES), SAMPLES), SAMPLES)
            self.report(Planned(job, job_dataset_id, epoch, 0, True, [sample + 1 for sample in order.order.tolist()]))
            shared.begin(job, job, order.order)
            self.engine.rerank()
            in_hand: deque[list[int]] = deque()
            for _ in range(SAMPLES // BATCH + IN_HAND):
                first = order.position
                handed = order.hand_on(shared.ask(job, order.coming(BATCH)), BATCH)
                shared.dispatched(job, handed)
                self.report(Dispatched(job, job_dataset_id, epoch, first, [sample + 1 for sample in handed]))
                in_hand.append(handed)
                if len(in_hand) > IN_HAND:
                    self.read(in_hand.popleft())
                    shared.taken(job, BATCH)
                    taken = order.position - sum(map(len, in_hand))
                    self.report(Progressed(job, job_dataset_id, epoch, order.position, taken))
                yield False
        self.report(Disconnected(job))
        shared.end(job)
        self.engine.rerank()

    def report(self, news: RankNews) -> None:
        self.news.append((len(self.keys), news))

    def read(self, samples: list[int]) -> None:
        for sample in samples:
            self.fetched += sample + 1 not in self.engine.members
            self.keys.append(sample + 1)
            self.engine.opened(sample + 1, 1)

    def replay(self, capacity: int = CACHED, news: bool = True) -> Replay:
        accesses = Accesses.of(self.keys, [1] * len(self.keys))
        return replay(Engine(LRU(), capacity), accesses, len(self.keys), news=self.news if news else ())


def test_a_replay_of_jobs_that_exchange_fetches_what_they_have_fetched() -> None:
    recorded = Recorded(3, apart=SAMPLES // BATCH // 3)
    with_news = recorded.replay().origin_bytes_per_sample
    # Of samples that are pending for equally many jobs a random one leaves, and the recorded orders fit those that have
    # left.
    assert with_news == pytest.approx(recorded.fetched / len(recorded.keys), rel=0.15)
    assert with_news < 0.8 * recorded.replay(news=False).origin_bytes_per_sample


def test_a_trace_keeps_what_ranks_published(tmp_path: Path) -> None:
    news: list[RankNews] = [
        Planned(3, "1", 0, 2, True, [5, 6, 7, 8]),
        Planned(3, "1", 1, 0, False, [8, 7]),
        Progressed(3, "1", 0, 4, 3),
        Dispatched(4, "2", 7, 1, [6, 5]),
        Planned(3, "1", 1, 0, True, []),
        Disconnected(3),
    ]
    writer = TraceWriter(tmp_path / "trace")
    for number, one in enumerate(news):
        writer.event(float(number), one)
        writer.append(float(number), 5, 10)
    writer.close()
    trace = read_trace(tmp_path / "trace")
    assert trace.rank_news() == list(enumerate(news))
    assert len(trace.accesses()) == len(news)
    assert trace.has_plans


def test_simulate_follows_recorded_plans(tmp_path: Path) -> None:
    recorded = Recorded(2)
    path = tmp_path / "trace"
    writer = TraceWriter(path)
    waiting = deque(recorded.news)
    for number, key in enumerate(recorded.keys):
        while waiting and waiting[0][0] == number:
            writer.event(float(number), waiting.popleft()[1])
        writer.append(float(number), key, 1, list_number=1)
    writer.close()
    shown = CliRunner().invoke(main, ["simulate", str(path), "--plans", "--policy", "lru", "--capacity", "20%"])
    assert shown.exit_code == 0, shown.output
    assert "overrule all policies" in " ".join(shown.output.split())
    (tmp_path / "plain").write_text("a 1\nb 1\n")
    refused = CliRunner().invoke(main, ["simulate", str(tmp_path / "plain"), "--plans"])
    assert refused.exit_code != 0
    assert "holds no plans" in refused.output
