"""The hook's connection: the training never waits for a daemon that is slow, dies, comes back, or never existed."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hook_daemon import PATIENCE_S, HookDaemon, until

from benchmarks.fakes import RecordingSink
from spiderfs.daemon.training.connection.hook_server import ServerLimits
from spiderfs.protocol import DEFAULT_LIMITS, Batch, EpochEnd, Hello, Plan, Progress, Samples
from trainer_hook import Declaration, HookClient
from trainer_hook.connection import client
from trainer_hook.connection.client import (
    PROGRESS_EVERY_S,
    ConnectPatience,
    ListsAndPlans,
    find_mount,
    socket_finder,
)

pytestmark = pytest.mark.clock

QUICK = ConnectPatience(first_pause_s=0.01, longest_pause_s=0.05)
# What does not wait for the daemon takes milliseconds; two busy cores may add seconds.
STALL_S = 20.0


def client_of(directory: Path, queue_batches: int = 64) -> HookClient:
    return HookClient(
        socket_finder(directory, None), Hello("test", "test"), queue_batches=queue_batches, patience=QUICK
    )


def declaration(size: int = 2, name: str = "train") -> Declaration:
    return Declaration(name, name, [b"%d" % number for number in range(size)], np.zeros(size, np.int32))


def batch(step: int = 0) -> Batch:
    return Batch("train", 0, step, np.array([1], np.uint32), np.ones((1, 4), np.float16))


def test_finds_the_mount_above_a_directory(tmp_path: Path) -> None:
    mount, inside = tmp_path / "mount", tmp_path / "mount" / "train" / "deep"
    inside.mkdir(parents=True)
    assert find_mount(inside) is None
    with pytest.raises(FileNotFoundError, match="lies in no spiderfs mount"):
        socket_finder(inside, None)()
    HookDaemon(mount)
    assert find_mount(inside) == mount
    assert socket_finder(inside, None)() == mount / "hook.sock"
    assert socket_finder(inside, "/run/other.sock")() == Path("/run/other.sock")


def test_a_long_list_is_declared_in_several_messages(tmp_path: Path) -> None:
    with HookDaemon(tmp_path) as daemon:
        talking = client_of(tmp_path)
        talking.declare(declaration(150_000))
        until(lambda: len(daemon.sink.lists) == 1)
        talking.close()
    ((_, declared),) = daemon.sink.lists
    assert (len(declared), declared.paths[149_999]) == (150_000, b"149999")


def test_requests_are_answered(tmp_path: Path) -> None:
    with HookDaemon(tmp_path, RecordingSink(scores_given=np.array([1, 2], np.float32))) as daemon:
        talking = client_of(tmp_path)
        talking.declare(declaration())
        scores, cached = talking.scores("train", 10), talking.cached("train", 10)
        assert scores is not None
        assert cached is not None
        assert (scores.tolist(), cached.tolist()) == ([1, 2], [True, False])
        assert talking.pin("train", np.array([1, 0]), 10) == 2
        assert [indices for _, indices in daemon.sink.pins] == [[1, 0]]
        daemon.sink.scores_given = None
        assert talking.scores("train", 10) is None
        talking.close()


def test_a_daemon_that_was_never_there_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    talking = client_of(tmp_path, queue_batches=3)
    talking.declare(declaration())
    until(lambda: "cannot be reached" in caplog.text)
    for step in range(10):
        talking.batch(lambda step=step: batch(step))  # type: ignore[misc]
    begin = time.monotonic()
    assert talking.scores("train", 60) is None
    assert time.monotonic() - begin < STALL_S
    assert talking.counts["dropped"] == 7
    talking.close()
    assert len(caplog.records) == 1


def test_connects_again_and_sends_lists_and_plans_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    daemon = HookDaemon(tmp_path)
    with daemon:
        talking = client_of(tmp_path)
        talking.declare(declaration())
        talking.plan(Plan("train", 4, 0, True, np.array([1, 0], np.uint32)))
        talking.batch(lambda: batch(0))
        until(lambda: len(daemon.sink.batches) == 1)
    until(lambda: "cannot be reached" in caplog.text)
    talking.batch(lambda: batch(1))
    with daemon:
        until(lambda: len(daemon.sink.batches) == 2)
        assert [len(daemon.sink.lists), len(daemon.sink.plans)] == [2, 2]
        talking.epoch_end(EpochEnd(0, 0.5))
        until(lambda: len(daemon.sink.ends) == 1)
        talking.close()
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "spiderfs: the daemon cannot be reached"
    ]
    assert not daemon.counted["hook_malformed"]


def test_a_withdrawn_list_is_not_declared_again(tmp_path: Path) -> None:
    daemon = HookDaemon(tmp_path)
    with daemon:
        talking = client_of(tmp_path)
        for name in ("train", "val"):
            talking.declare(declaration(name=name))
            talking.plan(Plan(name, 4, 0, True, np.array([1, 0], np.uint32)))
        until(lambda: len(daemon.sink.plans) == 2)
        talking.withdraw("val")
        until(lambda: len(daemon.sink.plans) == 3)
        _, withdrawn = daemon.sink.plans[-1]
        assert (withdrawn.list, withdrawn.epoch, len(withdrawn.order)) == ("val", 5, 0)
        # This is asked behind the withdrawal.
        assert talking.cached("train", PATIENCE_S) is not None
    with daemon:
        until(lambda: len(daemon.sink.plans) == 4)
        assert [plan.list for _, plan in daemon.sink.plans[3:]] == ["train"]
        assert [declared.name for _, declared in daemon.sink.lists[2:]] == ["train"]
        talking.close()
    assert not talking.counts["errors"]


def said(daemon: HookDaemon) -> list[tuple[str, int, int, int]]:
    return [(said.list, said.epoch, said.dispatched, said.taken) for _, said in daemon.sink.progress]


def test_progress_is_sent_now_and_then_and_the_last_of_it_always(tmp_path: Path) -> None:
    order = np.arange(1000, dtype=np.uint32)
    daemon = HookDaemon(tmp_path)
    with daemon:
        talking = client_of(tmp_path)
        talking.declare(declaration(1000))
        talking.set_progress("train", 7, 7)
        talking.plan(Plan("train", 0, 0, True, order))
        until(lambda: len(daemon.sink.plans) == 1)
        began = time.monotonic()
        for at in range(500):
            talking.set_progress("train", at + 1, at)
            time.sleep(0.001)
        most = (time.monotonic() - began) / PROGRESS_EVERY_S + 2
        until(lambda: said(daemon)[-1:] == [("train", 0, 500, 499)])
        assert 2 < len(daemon.sink.progress) <= most
        # Before the plan of the next epoch, and before the end of one.
        talking.set_progress("train", 1000, 1000)
        talking.plan(Plan("train", 1, 0, True, order))
        talking.set_progress("train", 1000, 900)
        talking.set_progress("train", 1000, 1000)
        talking.epoch_end(EpochEnd(1, None))
        until(lambda: len(daemon.sink.ends) == 1)
        assert said(daemon)[-2:] == [("train", 0, 1000, 1000), ("train", 1, 1000, 1000)]
        told = [name for name, _ in daemon.sink.calls if name in ("plan", "epoch_end")]
        assert told == ["plan", "plan", "epoch_end"]
        talking.plan(Plan("train", 2, 0, True, order))
        talking.set_progress("train", 64, 32)
        until(lambda: said(daemon)[-1:] == [("train", 2, 64, 32)])
        before = len(daemon.sink.progress)
    with daemon:
        # Another daemon hears at once where the training is.
        until(lambda: len(daemon.sink.progress) == before + 1)
        (_, plan) = daemon.sink.plans[-1]
        assert (plan.epoch, plan.position, said(daemon)[-1]) == (2, 32, ("train", 2, 64, 32))
        talking.set_progress("train", 96, 64)
        talking.close()
    assert said(daemon)[-1] == ("train", 2, 96, 64)
    assert not talking.counts["errors"]


@pytest.mark.parametrize("ending", ["epoch", "close"])
def test_the_last_progress_is_sent_though_the_end_comes_while_the_sending_thread_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(client, "PROGRESS_EVERY_S", 3600.0)
    with HookDaemon(tmp_path) as daemon:
        talking = client_of(tmp_path)
        talking.declare(declaration())
        talking.plan(Plan("train", 0, 0, True, np.array([1, 0], np.uint32)))
        talking.set_progress("train", 1, 1)
        until(lambda: said(daemon) == [("train", 0, 1, 1)])
        look, ended = talking._published.progress, threading.Event()

        def look_and_end(now_s: float, hurry: bool) -> Progress | None:
            found = look(now_s, hurry)
            if found is None and not ended.is_set():
                ended.set()
                talking.set_progress("train", 2, 2)
                if ending == "epoch":
                    talking.epoch_end(EpochEnd(0, None))
                else:
                    threading.Thread(target=talking.close).start()
                    until(lambda: talking._closing)
            return found

        monkeypatch.setattr(talking._published, "progress", look_and_end)
        until(lambda: ("detached" if ending == "close" else "epoch_end") in [name for name, _ in daemon.sink.calls])
        calls = [name for name, _ in daemon.sink.calls]
        talking.close()
    assert said(daemon) == [("train", 0, 1, 1), ("train", 0, 2, 2)]
    assert calls[-2:] == ["come", "detached" if ending == "close" else "epoch_end"]


def test_finalizers_may_call_the_client_at_any_line_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector runs them in any thread, in the midst of a call of the client."""
    monkeypatch.setattr(client, "PROGRESS_EVERY_S", 0.0)
    lines: set[int] = set()
    order = np.array([1, 0], np.uint32)
    talking: list[HookClient] = []

    def interrupted(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != client.__file__:
            return None
        if talking and event == "line" and frame.f_lineno not in lines:
            lines.add(frame.f_lineno)
            talking[0].set_progress("train", 1, 1)
            talking[0].plan(Plan("train", 5, 0, False, order))
            talking[0].batch(lambda: None)
            talking[0].withdraw("val")
            talking[0].leave(lambda: True)
        return interrupted

    def train() -> None:
        sys.settrace(interrupted)
        for name in ("train", "val"):
            talking[0].declare(declaration(name=name))
            talking[0].plan(Plan(name, 4, 0, True, order))
        assert talking[0].cached("train", PATIENCE_S) is not None
        talking[0].epoch_end(EpochEnd(4, None))
        talking[0].become(Hello("test", "another"), {"train"})
        talking[0].epoch_end(EpochEnd(5, None))
        talking[0].close(PATIENCE_S)

    with HookDaemon(tmp_path) as daemon:
        threading.settrace(interrupted)
        talking.append(client_of(tmp_path))
        threading.settrace(None)  # type: ignore[arg-type]
        training = threading.Thread(target=train, daemon=True)
        training.start()
        training.join(2 * PATIENCE_S)
        assert not training.is_alive()
        assert not talking[0]._thread.is_alive()
    assert len(lines) > 100
    assert [(trainer.hello.job, end.epoch) for trainer, end in daemon.sink.ends] == [("test", 4), ("another", 5)]


@contextlib.contextmanager
def sending_thread_held(talking: HookClient) -> Iterator[None]:
    """What is put into the queue meanwhile waits there."""
    holds, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        holds.set()
        assert may_go_on.wait(PATIENCE_S)

    talking.batch(hold)
    assert holds.wait(PATIENCE_S)
    yield
    may_go_on.set()


def test_batches_that_wait_arrive_though_their_list_was_withdrawn(tmp_path: Path) -> None:
    with HookDaemon(tmp_path) as daemon:
        talking = client_of(tmp_path)
        talking.declare(declaration())
        until(lambda: len(daemon.sink.lists) == 1)
        with sending_thread_held(talking):
            talking.declare(declaration(name="val"))
            talking.plan(Plan("val", 0, 0, True, np.array([1, 0], np.uint32)))
            talking.batch(lambda: replace(batch(), list="val"))
            talking.withdraw("val")
        until(lambda: len(daemon.sink.batches) == 1)
        talking.close()
    assert not talking.counts["errors"]
    assert not daemon.counted["hook_malformed"]
    assert [(sent.list, sent.epoch, len(sent.order)) for _, sent in daemon.sink.plans] == [("val", 1, 0)]


def test_a_list_that_is_declared_once_more_before_it_is_withdrawn_stays_declared(tmp_path: Path) -> None:
    daemon = HookDaemon(tmp_path)
    talking = client_of(tmp_path)
    talking.declare(declaration())
    with daemon:
        until(lambda: len(daemon.sink.lists) == 1)
        with sending_thread_held(talking):
            talking.withdraw("train")
            talking.declare(declaration(3))
        assert talking.cached("train", PATIENCE_S) is not None
    with daemon:
        until(lambda: len(daemon.sink.lists) == 3)
        talking.close()
    assert [len(declared) for _, declared in daemon.sink.lists] == [2, 3, 3]


def test_when_the_daemon_does_not_read_batches_are_dropped_and_the_training_does_not_wait(tmp_path: Path) -> None:
    control = tmp_path / ".spiderfs"
    control.mkdir()
    (control / "hook").write_bytes(bytes(tmp_path / "deaf.sock"))
    with socket.socket(socket.AF_UNIX) as deaf:
        directory = os.open(tmp_path, os.O_RDONLY)
        deaf.bind(f"/proc/self/fd/{directory}/deaf.sock")
        os.close(directory)
        deaf.listen()
        talking = client_of(tmp_path, queue_batches=8)
        large = Batch("train", 0, 0, np.zeros(8192, np.uint32), np.zeros((8192, 64), np.float16))
        begin = time.monotonic()
        for _ in range(100):
            talking.batch(lambda: large)
        assert time.monotonic() - begin < STALL_S
        assert talking.counts["dropped"] >= 80
        talking.close(0.1)
        deaf.accept()[0].close()
        talking._thread.join(20)


def test_each_refusal_of_the_daemon_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with HookDaemon(tmp_path, RecordingSink(known=frozenset([b"0"])), ServerLimits(lists=1)) as daemon:
        talking = client_of(tmp_path)
        talking.declare(declaration())
        for name in ("a", "b"):
            talking.declare(declaration(name=name))
        until(lambda: talking.counts["errors"] == 2)
        talking.batch(lambda: batch())
        talking.batch(lambda: None)
        wider = np.ones((1, DEFAULT_LIMITS.dimension + 1), np.float16)
        talking.batch(lambda: Batch("train", 0, 0, np.array([1], np.uint32), wider))
        until(lambda: talking.counts["unusable"] == 1)
        until(lambda: len(daemon.sink.batches) == 1)
        talking.close()
    texts = [record.getMessage() for record in caplog.records]
    assert sum("more than 1 lists" in text for text in texts) == 1
    assert sum("1 of 2 paths are ignored: no such file" in text for text in texts) == 1
    assert sum(f"dimension {DEFAULT_LIMITS.dimension + 1}" in text for text in texts) == 1
    assert talking.counts == {"errors": 2, "sent": 1, "not finite": 1, "unusable": 1}


# -- the messages that wait, and in which order they are sent


def lists() -> ListsAndPlans:
    lists = ListsAndPlans()
    lists.declare(Declaration("train", "train", [b"1", b"2"], np.zeros(2, np.int32)))
    lists.begin()
    assert isinstance(lists.next(), Samples)
    return lists


def sent_plan(lists: ListsAndPlans) -> Plan:
    plan = lists.next()
    assert isinstance(plan, Plan)
    return plan


def plan(epoch: int) -> Plan:
    return Plan("train", epoch, 0, True, np.arange(100, dtype=np.uint32) % 2)


def test_a_plan_that_came_after_its_list_was_asked_for_is_sent_before_its_progress() -> None:
    told = lists()
    told.plan(plan(0))
    assert sent_plan(told).epoch == 0
    told.set_progress("train", 100, 100)
    # The sending thread has asked `next`, and is about to ask for progress.
    told.plan(plan(1))
    told.set_progress("train", 8, 8)
    assert told.progress(1.0, hurry=True) is None
    finished, following, come = told.next(), sent_plan(told), told.progress(1.0, hurry=True)
    assert isinstance(finished, Progress)
    assert isinstance(come, Progress)
    assert [(finished.epoch, finished.taken), following.epoch, (come.epoch, come.taken)] == [(0, 100), 1, (1, 8)]
    assert told.next() is None
    assert told.progress(1.0, hurry=True) is None


def test_the_first_progress_is_sent_at_once_on_a_machine_that_has_just_booted() -> None:
    told = lists()
    told.plan(plan(0))
    told.set_progress("train", 64, 56)
    assert sent_plan(told).epoch == 0
    assert isinstance(told.progress(0.0, hurry=False), Progress)
    told.set_progress("train", 72, 64)
    assert told.progress(0.0, hurry=False) is None, "some was sent a moment ago"
