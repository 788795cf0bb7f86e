"""How long passing new worths to a policy takes, when a second training begins to score, ends an epoch, and ends.

    .venv-dev/bin/python -m benchmarks.engine.worths [--quick] [--json FILE]

Two job datasets of one list: the first has scored all samples, and a fifth of them are cached. The second scores a
batch, then all others a batch at a time, ends an epoch, and ends. After each of these the worths that are due are
passed on with reads alone (`spiderfs/core/learning/feed.py`). The stall is the longest time for which the manager's
event loop would have stood still: one call, or as many reads as it acts on at once. Times are wall times of one thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from rich.console import Console

from benchmarks.common.command import command_line
from benchmarks.common.interruption import exit_status
from benchmarks.common.results import machine, plain_table, save, wide_console
from spiderfs.core.engine import Engine
from spiderfs.core.learning.feed import DUE_WITH_READ, PolicyFeed
from spiderfs.core.policy import Key
from spiderfs.daemon.pipes import READ_EVENTS
from spiderfs.policies import POLICIES

GUIDED = ("spider", "shade", "impact")
BATCH, SIZE = 1000, 1000
CACHED_SHARE = 0.2


@dataclass(frozen=True)
class Row:
    policy: str
    event: str
    samples: int
    call_s: float  # the longest call by which trainings feed
    reads_s: float  # the longest time of READ_EVENTS reads
    total_s: float  # of all calls and reads, until no worth is due

    @property
    def stall_s(self) -> float:
        return max(self.call_s, self.reads_s)


class FilledPolicy:
    def __init__(self, policy: str, samples: int) -> None:
        self.policy, self.samples = policy, samples
        cached = int(samples * CACHED_SHARE)
        engine = Engine(POLICIES[policy](), cached * SIZE)
        self.feed = PolicyFeed(engine, lambda key: None)
        self.keys: list[Key] = list(range(samples))
        self.feed.begin("first", "first", dict.fromkeys(self.keys, 0))
        for call in self.scores("first", 1):
            call()
        for key in self.keys[:cached]:
            engine.opened(key, SIZE)
        self.feed.begin("second", "second", dict.fromkeys(self.keys, 0))

    def scores(self, job_dataset_id: str, seed: int) -> list[Callable[[], object]]:
        """The calls that pass a job dataset's scores of all samples, a batch each."""
        scores = (np.random.default_rng(seed).random(self.samples) + 0.01).tolist()
        batches = [slice(first, first + BATCH) for first in range(0, self.samples, BATCH)]
        return [partial(self.feed.scored, job_dataset_id, self.keys[some], scores[some]) for some in batches]

    def row(self, event: str, calls: list[Callable[[], object]]) -> Row:
        calls_s = [_timed(call) for call in calls]
        # With so many reads all that can be due is passed on.
        rounds = self.samples // (DUE_WITH_READ * READ_EVENTS) + 1
        reads_s = [_timed(self._reads) for _ in range(rounds)]
        return Row(self.policy, event, self.samples, max(calls_s), max(reads_s), sum(calls_s) + sum(reads_s))

    def _reads(self) -> None:
        for _ in range(READ_EVENTS):
            self.feed.served("first", 0, 0)


def measure(policy: str, samples: int) -> list[Row]:
    learned = FilledPolicy(policy, samples)
    first, *others = learned.scores("second", 2)
    return [
        learned.row("a second one scores", [first]),
        learned.row("it scores all", others),
        learned.row("it ends an epoch", [lambda: learned.feed.epoch_ended("second", 0, {})]),
        learned.row("it ends", [lambda: learned.feed.end("second")]),
    ]


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def run(options: argparse.Namespace, console: Console) -> None:
    samples = 50_000 if options.quick else 1_000_000
    rows = [row for policy in GUIDED for row in measure(policy, samples)]
    headings = ("policy", "event", "longest call", f"longest {READ_EVENTS} reads", "stall", "total")
    table = plain_table(f"Seconds for {samples:,} samples", *headings, words=headings[:2])
    for row in rows:
        times_s = (row.call_s, row.reads_s, row.stall_s, row.total_s)
        table.add_row(row.policy, row.event, *(f"{time_s:.3f}" for time_s in times_s))
    console.print(table)
    if options.json is not None:
        save(options.json, {"machine": machine(), "rows": [asdict(row) for row in rows]})


def main() -> int:
    arguments = command_line(__doc__).parse_args()
    return exit_status("worths", lambda: run(arguments, wide_console(90)), "interrupted")


if __name__ == "__main__":
    sys.exit(main())
