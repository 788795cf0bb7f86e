"""The job of a training: its id, who shares it, when a new one begins, and what the daemon is told of it."""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hook_daemon import HookDaemon, until
from tiny_training import Network, loader, train_epoch
from two_ranks import in_two_ranks

from spiderfs.protocol import VERSION, Batch, Decoder, EpochEnd, Error, Hello, Plan, encode
from trainer_hook import Declaration, HookClient, HookOptions, attach, plan
from trainer_hook.connection.client import ConnectPatience, socket_finder
from trainer_hook.connection.introduce import hooks_job

QUICK = ConnectPatience(first_pause_s=0.01, longest_pause_s=0.05)


def hellos(daemon: HookDaemon, count: int) -> list[Hello]:
    """What the first `count` trainers said, once the last of them has declared its list."""
    until(lambda: len(dict.fromkeys(trainer for trainer, _ in daemon.sink.lists)) >= count)
    return [trainer.hello for trainer in dict.fromkeys(trainer for trainer, _ in daemon.sink.lists)]


def test_the_daemon_knows_of_the_training(daemon: HookDaemon) -> None:
    told = {"job": "run-7", "epoch": 4, "epochs": 90, "resume": True, "scores_from": "run-6"}
    options = HookOptions(job_name="the best one", epochs=90, resume=True, scores_from="run-6")
    hook = attach(daemon.mount, Network(), loader(), job="run-7", epoch=4, options=options)
    (hello,) = hellos(daemon, 1)
    assert {name: getattr(hello, name) for name in told} == told
    assert (hello.name, hello.rank, hello.world_size) == ("the best one", 0, 1)
    assert (hook.job, hook.epoch) == ("run-7", 4)
    hook.close()


def test_epochs_count_from_the_one_that_begins(daemon: HookDaemon) -> None:
    model, batches = Network(), loader()
    hook = attach(daemon.mount, model, batches, epoch=4)
    for _ in range(2):
        train_epoch(model, batches)
        hook.epoch_end(0.5)
    until(lambda: len(daemon.sink.ends) == 2)
    assert [end.epoch for _, end in daemon.sink.ends] == [4, 5]
    assert {batch.epoch for _, batch in daemon.sink.batches} == {4, 5}
    assert [plan.epoch for _, plan in daemon.sink.plans if plan.begun] == [4, 5]
    hook.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"job": ""}, "job '': give an id of 1 to 128 bytes"),
        ({"job": "two words"}, "job 'two words'"),
        ({"job": "x" * 129}, "128 bytes"),
        ({"job": 7}, "job: str, not 7"),
        ({"options": HookOptions(scores_from="a\nb")}, "scores_from"),
        ({"options": HookOptions(job_name="a\nb")}, "name"),
        ({"epoch": -1}, "epoch: int, not -1"),
        ({"options": HookOptions(epochs=0)}, "epochs 0: give 1 or more"),
        ({"options": HookOptions(resume=True)}, "give the id of the training that goes on, as job="),
    ],
)
def test_what_can_be_no_job_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as refusal:
        attach(tmp_path, Network(), loader(), **options)
    assert words in str(refusal.value)


def test_each_attach_begins_a_job_and_a_plan_has_one_of_its_own(daemon: HookDaemon) -> None:
    held_out = loader()
    planned = plan(daemon.mount, held_out, split="val")
    (alone,) = hellos(daemon, 1)
    ids = []
    for number in (2, 3):
        hook = attach(daemon.mount, Network(), loader())
        hello = hellos(daemon, number)[-1]
        assert hello.job == hook.job
        # The process has one connection, so what it plans goes with the training.
        until(lambda job=hook.job: {"val", "train"} <= _lists_of(daemon, job))  # type: ignore[misc]
        ids.append(hook.job)
        hook.close()
    assert len({alone.job, *ids}) == 3
    planned.close()


def _lists_of(daemon: HookDaemon, job: str) -> set[str]:
    return {declared.name for trainer, declared in daemon.sink.lists if trainer.hello.job == job}


def test_a_hook_says_with_its_list_that_it_will_send_batches_and_a_plan_does_not(daemon: HookDaemon) -> None:
    def declared() -> list[tuple[str, bool]]:
        return [(samples.name, samples.sends_batches) for _, samples in daemon.sink.lists]

    train, held_out = loader(), loader()
    first = plan(daemon.mount, train)
    until(lambda: declared() == [("train", False)])
    hook = attach(daemon.mount, Network(), loader(), job="a")
    # The hook's job is another one, which declares the list again.
    until(lambda: declared()[-1:] == [("train", True)])
    others = plan(daemon.mount, held_out, split="val"), plan(daemon.mount, loader())
    until(lambda: declared()[-2:] == [("val", False), ("train", True)])
    for used in (first, *others, hook):
        used.close()


def test_two_hooks_of_a_process_are_one_job(daemon: HookDaemon) -> None:
    loaders = loader(), loader()
    first = attach(daemon.mount, Network(), loaders[0], job="a")
    second = attach(daemon.mount, Network(), loaders[1], split="other")
    with pytest.raises(ValueError, match="job='b': a hook of this process belongs to the job 'a': close it first"):
        attach(daemon.mount, Network(), loader(), split="third", job="b")
    assert (first.job, second.job) == ("a", "a")
    until(lambda: _lists_of(daemon, "a") == {"train", "other"})
    assert len(hellos(daemon, 1)) == 1, "one connection"
    first.close()
    second.close()
    third = attach(daemon.mount, Network(), loader(), job="b")
    assert hellos(daemon, 2)[-1].job == third.job == "b"
    third.close()


def test_a_hook_beside_another_leaves_the_epoch_to_the_daemon(daemon: HookDaemon) -> None:
    loaders = loader(), loader()
    first = attach(daemon.mount, Network(), loaders[0], job="a", epoch=4)
    first.epoch_end(0.5)
    second = attach(daemon.mount, Network(), loaders[1], split="other", options=HookOptions(epochs=9))
    before, after = hellos(daemon, 2)
    assert (before.job, before.epoch, before.epochs) == ("a", 4, None)
    assert (after.job, after.epoch, after.epochs) == ("a", None, 9)
    first.close()
    second.close()


def test_a_hook_that_was_freed_does_not_hold_its_job(daemon: HookDaemon) -> None:
    def one_fold() -> str:
        model, batches = Network(), loader()
        hook = attach(daemon.mount, model, batches)
        train_epoch(model, batches)
        hook.epoch_end(0.5)
        return hook.job

    # So that each hook is freed by the next `attach`.
    gc.disable()
    try:
        jobs = [one_fold() for _ in range(3)]
        until(lambda: len(daemon.sink.ends) == 3)
    finally:
        gc.enable()
    assert len(set(jobs)) == 3
    assert {trainer.hello.job for trainer, _ in daemon.sink.ends} == set(jobs)


def test_what_was_said_before_belongs_to_the_job_before(tmp_path: Path) -> None:
    with HookDaemon(tmp_path) as daemon:
        client = HookClient(socket_finder(tmp_path, None), Hello("test", "one"), patience=QUICK)
        client.declare(Declaration("train", "train", [b"a", b"b"], np.zeros(2, np.int32)))
        for epoch in range(20):
            client.epoch_end(EpochEnd(epoch, None))
        client.become(Hello("test", "two", epoch=40), {"train"})
        for epoch in range(40, 60):
            client.epoch_end(EpochEnd(epoch, None))
        client.close(10)
        until(lambda: len(daemon.sink.ends) == 40)
    assert [(trainer.hello.job, end.epoch) for trainer, end in daemon.sink.ends] == [
        *(("one", epoch) for epoch in range(20)),
        *(("two", epoch) for epoch in range(40, 60)),
    ]
    assert [trainer.hello.job for trainer, _ in daemon.sink.lists] == ["one", "two"]
    assert not daemon.counted["hook_malformed"]


def test_what_waits_for_the_job_before_keeps_the_list_of_that_job(tmp_path: Path) -> None:
    client = HookClient(socket_finder(tmp_path, None), Hello("test", "0"), patience=QUICK)
    for job in range(3):
        if job:
            client.become(Hello("test", str(job)), set())
        client.declare(Declaration("train", "train", [b"%d" % n for n in range(3 - job)], np.zeros(3 - job, np.int32)))
        indices = np.arange(3 - job, dtype=np.uint32)
        batch = Batch("train", 0, 0, indices, np.zeros((3 - job, 2), np.float16))
        client.batch(lambda batch=batch: batch)  # type: ignore[misc]
    # Only now is there a daemon.
    with HookDaemon(tmp_path) as daemon:
        until(lambda: len(daemon.sink.batches) == 3)
        client.close(10)
    assert [(trainer.hello.job, len(declared)) for trainer, declared in daemon.sink.lists] == [
        ("0", 3),
        ("1", 2),
        ("2", 1),
    ]
    assert [(trainer.hello.job, len(batch.indices)) for trainer, batch in daemon.sink.batches] == [
        ("0", 3),
        ("1", 2),
        ("2", 1),
    ]
    assert not daemon.counted["hook_malformed"]


def test_a_daemon_that_comes_back_gets_the_job_and_the_epoch_by_then(tmp_path: Path, caplog: Any) -> None:
    daemon = HookDaemon(tmp_path)
    client = HookClient(socket_finder(tmp_path, None), Hello("test", "one", epoch=3, epochs=9), patience=QUICK)
    with daemon:
        client.declare(Declaration("train", "train", [b"a", b"b"], np.zeros(2, np.int32)))
        client.plan(Plan("train", 3, 0, True, np.array([1, 0], np.uint32)))
        client.epoch_end(EpochEnd(3, None))
        until(lambda: len(daemon.sink.ends) == 1)
    until(lambda: "cannot be reached" in caplog.text)
    with daemon:
        before, after = hellos(daemon, 2)
        client.close()
    assert (before.job, before.epoch, before.epochs) == ("one", 3, 9)
    assert (after.job, after.epoch, after.epochs) == ("one", 4, 9)


def _attach_in_a_rank(rank: int, mount: str) -> None:
    for _ in range(2):
        hook = attach(mount, Network(), loader())
        torch.distributed.barrier()
        hook.close()


def test_all_ranks_are_one_job(daemon: HookDaemon) -> None:
    in_two_ranks(_attach_in_a_rank, daemon.mount)
    found = hellos(daemon, 4)
    assert sorted((hello.rank, hello.world_size) for hello in found) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    jobs = [hello.job for hello in found]
    assert len(set(jobs)) == 2
    assert all(jobs.count(job) == 2 for job in jobs)


def _attach_on_the_first_rank_only(rank: int, mount: str) -> None:
    if rank == 0:
        attach(mount, Network(), loader()).close()
    else:
        # The other way round: rank 0 begins no second job.
        hooks_job(None, timeout_s=5)
        assert hooks_job("given") == "given"
        assert len(hooks_job(None, timeout_s=0.2)) == 12


def test_a_hook_of_rank_0_alone_waits_for_no_one(daemon: HookDaemon) -> None:
    in_two_ranks(_attach_on_the_first_rank_only, daemon.mount)
    (hello,) = hellos(daemon, 1)
    assert (hello.rank, hello.world_size) == (0, 2)


def _plan_again_each_epoch(rank: int, mount: str) -> None:
    held: list[Any] = []
    for _ in range(3):
        batches = loader()
        planned = plan(mount, batches)
        assert [*batches]
        torch.distributed.barrier()
        # The other rank frees its loader, and its plan ends with it.
        held += [] if rank else [batches]
        del batches, planned
        gc.collect()


def _attach_again_each_epoch(rank: int, mount: str) -> None:
    kept = None if rank else (first := loader(), attach(mount, Network(), first, split="kept"))
    if rank:
        attach(mount, Network(), loader(), split="kept").close()
    for _ in range(3):
        hook = attach(mount, Network(), loader())
        torch.distributed.barrier()
        hook.close()
    del kept


@pytest.mark.parametrize("train", [_plan_again_each_epoch, _attach_again_each_epoch])
def test_ranks_stay_one_job_if_one_of_them_keeps_its_connection_longer(daemon: HookDaemon, train: Any) -> None:
    in_two_ranks(train, daemon.mount)
    until(lambda: len(dict.fromkeys(trainer for trainer, _ in daemon.sink.lists)) >= 4)
    assert len({hello.job for hello in hellos(daemon, 4)}) == 1


@contextlib.contextmanager
def answered_by_the_test(mount: Path) -> Iterator[socket.socket]:
    """The socket to which a client connects, where the test itself answers."""
    (mount / ".spiderfs").mkdir()
    (mount / ".spiderfs" / "hook").write_bytes(bytes(mount / "s"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(mount / "s"))
        listening.listen()
        client = HookClient(socket_finder(mount, None), Hello("test", "one"), patience=QUICK)
        yield listening
        client.close()


def test_a_mount_of_another_version_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with answered_by_the_test(tmp_path) as old:
        for _ in range(2):
            stream = old.accept()[0]
            (hello,) = Decoder().feed(stream.recv(1 << 16))
            assert isinstance(hello, Hello)
            stream.sendall(encode(Error("version", "version 2 of the hook protocol: this is 1"), version=1))
            stream.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [
        "spiderfs: the daemon cannot be reached (its answer cannot be understood: it speaks version 1 of the hook "
        f"protocol, and this is {VERSION}: update the older spiderfs): training continues"
        " without it"
    ]


def test_an_answer_about_the_version_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A newer daemon answers in the frames of this version."""
    with answered_by_the_test(tmp_path) as newer:
        stream = newer.accept()[0]
        stream.sendall(encode(Error("version", "update spiderfs where the training runs")))
        until(lambda: "cannot be reached" in caplog.text)
        stream.close()
    assert [record.getMessage() for record in caplog.records] == [
        "spiderfs: the daemon cannot be reached (update spiderfs where the training runs): training continues"
        " without it"
    ]
