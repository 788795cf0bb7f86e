"""What the figures of a mount mean where the page cache answers unseen, and how names in its texts are written."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from spiderfs.daemon.caching.prefetcher import PlanStatus, PrefetcherStatus
from spiderfs.daemon.control import texts
from spiderfs.daemon.control.status import of_all_opens
from spiderfs.daemon.training.trainer import Trainer
from spiderfs.protocol import Hello
from spiderfs.sources.members import PeerStatus


@pytest.mark.parametrize(
    ("opens", "hits", "unseen", "ratio", "bytes_per_open"),
    [(0, 0, 0, 0.0, 0.0), (10, 4, 0, 0.4, 100.0), (10, 4, 30, 0.85, 25.0), (0, 0, 5, 1.0, 200.0)],
)
def test_what_the_page_cache_answered_is_an_open_and_a_hit(
    opens: int, hits: int, unseen: int, ratio: float, bytes_per_open: float
) -> None:
    counters = {"opens": opens, "opens_hit": hits, "page_cache_reads": unseen, "origin_bytes": 1000}
    found = of_all_opens(counters)
    assert found == {"hit_ratio": pytest.approx(ratio), "origin_bytes_per_open": pytest.approx(bytes_per_open)}


def test_a_name_of_a_trainers_adds_no_line_to_a_text() -> None:
    plan = PlanStatus(1, "two\nlines", 0, 5, 4, 10, 0, True, 1.0, 2.0, 3, 1.5, 6, 4, 0, 0.0)
    text = texts.plan(PrefetcherStatus((plan,), 0, 1, 1, 0.0, 0.0)).decode()
    assert text.startswith("trainer 1, list two\\x0alines, epoch 0\n  dispatched    5 of 10\n")
    trainer = Trainer(5, 0, Hello("my\nloop", "job"), {"two\nlines": 7}, 3)
    assert texts._trainer_line(trainer) == "my\\x0aloop (pid 5, rank 0): two\\x0alines with 7 samples; 3 batches"
    assert texts._plan_line(plan) == "two\\x0alines, epoch 0: 4 of 10, 1.5 s ready ahead, 0.0% late"


def test_a_text_says_of_what_a_share_is() -> None:
    plan = PlanStatus(1, "train", 0, 500, 500, 500, 0, True, 1.0, 2.0, 3, 1.5, 6, 80, 420, 0.125)
    text = texts.plan(PrefetcherStatus((plan,), 0, 1, 1, 0.0, 0.0)).decode()
    assert "  late          12.50% of 80 opens and 420 reads that the kernel answered\n" in text
    heard = dataclasses.replace(plan, unseen=0)
    assert "12.50% of 80 opens\n" in texts.plan(PrefetcherStatus((heard,), 0, 1, 1, 0.0, 0.0)).decode()
    nothing = texts.plan(PrefetcherStatus((), 0, 1, 1, 0.0, 0.0))
    assert nothing == b"no training with a plan is connected now; .spiderfs/epochs has the epochs that have ended\n"


def test_of_many_peers_those_are_shown_that_fail_most() -> None:
    peers = {f"http://n{number}:8443": PeerStatus(number != 150, 10, 1024, 0, number % 100) for number in range(200)}
    status: Any = SimpleNamespace(options=SimpleNamespace(peers=tuple(peers)), peers=peers, is_member=True)
    (total, *shown, others) = texts._peer_rows(status)
    assert total == ("from peers", "200.0 KiB in 2,000 reads")
    assert [name.strip() for name, _ in shown[:3]] == ["http://n150:8443", "http://n99:8443", "http://n199:8443"]
    assert shown[0][1].startswith("down, ")
    assert len(shown) == 16
    assert others == ("  184 others", "better than these; of all 200, 1 down")
    status.peers = dict(list(peers.items())[:3])
    assert [name.strip() for name, _ in texts._peer_rows(status)[1:]] == list(status.peers)
