"""What each job reads is added up for it, by the trainers that its ranks are."""

from __future__ import annotations

from spiderfs.core.events import FETCHED, HIT, OPENED, REFUSED, UNSEEN, WARMED, Access
from spiderfs.core.feed import JobRatio, RatioStatus
from spiderfs.daemon.control import texts
from spiderfs.daemon.training.job_datasets.job_accounts import JobAccounts
from spiderfs.daemon.training.trainer import Trainer
from spiderfs.protocol import Hello

NOBODY = RatioStatus(None, None, ())


def access(trainer: int, where: int, wanted: int = 7, given: int = 7, time_s: float = 100.0) -> Access:
    return Access(time_s, given, wanted, 1000, 0, 1, trainer, where)


def accounts(*jobs: str) -> tuple[JobAccounts, list[Trainer]]:
    """Trainer n + 1 is the n-th of these."""
    made = JobAccounts()
    trainers = []
    for number, job in enumerate(jobs, 1):
        made.attached(number, job)
        rank = jobs[: number - 1].count(job)
        trainer = Trainer(1000 + number, 0, Hello("torch", job, f"the {job}", rank, jobs.count(job), 2, 90))
        trainer.lists["train"] = 4
        trainers.append(trainer)
    return made, trainers


def test_what_the_ranks_of_a_job_read_is_added_up() -> None:
    made, trainers = accounts("one", "two", "one")
    made.record_accesses(
        [access(1, HIT), access(3, FETCHED), access(3, HIT, wanted=8), access(2, REFUSED), access(0, FETCHED)]
    )
    made.record_accesses([access(1, OPENED), access(1, WARMED), access(9, HIT)])
    made.fetched_ahead(3, 500)
    made.fetched_ahead(9, 500)
    one, two = made.statuses(trainers, NOBODY, now_s=101.0)
    assert one == {
        "job": "one",
        "name": "the one",
        "clients": ["torch"],
        "pids": [1001, 1003],
        "ranks": [0, 1],
        "world_size": 2,
        "lists": {"train": 4},
        "epoch": 2,
        "epochs": 90,
        "samples_per_s": 0.3,
        "samples": 3,
        "hits": 2,
        "page_cache_reads": 0,
        "origin_bytes": 1500,
        "substitutes": 1,
    }
    assert [two[name] for name in ("samples", "hits", "origin_bytes", "substitutes")] == [1, 0, 1000, 0]


def test_what_the_page_cache_answered_is_read_without_waiting() -> None:
    made, trainers = accounts("one")
    made.record_accesses([access(1, FETCHED)])
    for _ in range(2):
        made.drawn(access(1, UNSEEN), 0)
    (one,) = made.statuses(trainers, NOBODY, now_s=101.0)
    assert [one[name] for name in ("samples", "hits", "page_cache_reads", "origin_bytes")] == [3, 2, 2, 1000]


def test_the_pace_is_that_of_the_last_seconds() -> None:
    made, trainers = accounts("one")
    for second in range(100):
        made.record_accesses([access(1, HIT, time_s=second + share / 50) for share in range(50)])
    # Events of several workers do not come in the order of their times.
    made.record_accesses([access(1, HIT, time_s=98.0)] * 50)

    def pace(now_s: float) -> float:
        (status,) = made.statuses(trainers, NOBODY, now_s)
        return float(status["samples_per_s"])

    assert [pace(now_s) for now_s in (100.5, 105.0, 200.0)] == [55.0, 30.0, 0.0]


def test_each_epoch_is_counted_for_itself_and_kept() -> None:
    made = JobAccounts(lambda trainer, inode: inode == 7, unix_s=1e9)
    made.attached(1, "one", "best", 3)
    # Events of several workers do not come in the order of their times. What a plan names is counted by its draws.
    opened = access(1, HIT, time_s=10.0)
    made.drawn(opened, 3)
    made.record_accesses([opened, access(1, HIT, wanted=8, given=9, time_s=12.5)])
    made.drawn(access(1, FETCHED, time_s=12.0)._replace(waited_us=250_000), 3)
    made.drawn(access(1, UNSEEN, time_s=13.0), 3)
    made.fetched_ahead(1, 500)
    made.begin_epoch("one", 4, now_s=20.0)
    made.begin_epoch("two", 4, now_s=20.0)
    # The news of an epoch may come when the next one has begun, with a time of either.
    made.drawn(access(1, UNSEEN, time_s=19.5), 3)
    made.drawn(access(1, HIT, time_s=19.0), 3)
    first = {"job": "one", "name": "best", "epoch": 3, "ended": 1e9 + 19.5, "seconds": 9.5, "samples": 6, "waited": 1}
    first |= {"waited_s": 0.25, "planned": 5, "late": 1, "page_cache_reads": 2, "substitutes": 1, "read_bytes": 6000}
    first |= {"origin_bytes": 1500}
    assert made.epochs() == [first]
    made.record_accesses([access(1, HIT, wanted=8, time_s=60.0 + second, given=8) for second in (0, 1)])
    assert [(epoch["epoch"], epoch["seconds"]) for epoch in made.epochs()] == [(3, 9.5), (4, 1.0)]
    # A manager that was started again, or a later mount: the epoch goes on, and the pause is none of its time.
    again = JobAccounts(unix_s=1e9)
    again.restore([*made.epochs(), {"job": "of another version"}])
    again.attached(5, "one", "best", 4)
    again.record_accesses([access(5, HIT, time_s=900.0), access(5, HIT, time_s=902.0)])
    again.keep_only(())
    assert [(epoch["epoch"], epoch["seconds"], epoch["samples"]) for epoch in again.epochs()] == [
        (3, 9.5, 6),
        (4, 3.0, 4),
    ]
    assert texts.epochs(again.epochs()).count(b"\n") == 2


def test_the_epoch_is_the_one_that_the_job_has_come_to() -> None:
    made, trainers = accounts("one", "two")
    ratios = RatioStatus(0.9, None, [JobRatio("two", 0.9, 0.1, 0, 0.0, 0.0, 17, 90)])
    assert [status["epoch"] for status in made.statuses(trainers, ratios, 0.0)] == [2, 17]


def test_the_account_of_a_job_that_is_over_is_forgotten_and_that_of_one_that_comes_back_is_not() -> None:
    made, trainers = accounts("one", "two")
    made.record_accesses([access(1, HIT), access(2, HIT)])
    made.keep_only({"one"})
    made.attached(3, "one")
    made.attached(4, "two")
    made.record_accesses([access(3, HIT), access(2, HIT)])
    assert [status["samples"] for status in made.statuses(trainers, NOBODY, 0.0)] == [2, 0]
