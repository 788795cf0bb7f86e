"""Where a hook is attached: before other tools, without a mount, over a dead one, by a link, in a forked child."""

from __future__ import annotations

import copy
import errno
import logging
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hook_daemon import HookDaemon, until
from tiny_training import SIZE, WIDTH, Network, Numbered, loader, recorded, train, train_epoch
from torch.utils.data import DataLoader

from trainer_hook import SpiderSampler, attach, plan
from trainer_hook.connection.client import find_mount

BATCHES = 7  # of 50 samples in eights
# The sampler would wait for scores 5 s.
STALL_S = 4.0


def train_with_scores(directory: Path) -> float:
    """How long an epoch took that begins with a question to the daemon."""
    model, batches = Network(), loader(shuffle=False, sampler=SpiderSampler(SIZE))
    hook = attach(directory, model, batches)
    begin = time.monotonic()
    train_epoch(model, batches)
    took_s = time.monotonic() - begin
    hook.close(0.1)
    return took_s


def trains_at_once(directory: Path, caplog: pytest.LogCaptureFixture) -> bool:
    """Whether it takes no stall this time: one that does so on a busy machine does so at times."""
    caplog.clear()
    return train_with_scores(directory) < STALL_S


def test_without_a_mount_nothing_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    until(lambda: trains_at_once(tmp_path, caplog))
    assert caplog.text.count("cannot be reached") == 1


def test_in_a_forked_child_nothing_waits_and_one_warning_says_so(daemon: HookDaemon) -> None:
    model, batches = Network(), loader(shuffle=False, sampler=SpiderSampler(SIZE))
    hook = attach(daemon.mount, model, batches)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        handler = logging.StreamHandler(os.fdopen(writing, "w"))
        logging.getLogger("trainer_hook").addHandler(handler)
        begin = time.monotonic()
        # A forked child must not use torch's threads, so no training: what its loop would ask of us.
        assert [*batches.sampler]
        hook.epoch_end(0.5)
        hook.close()
        handler.flush()
        os._exit(int(time.monotonic() - begin >= STALL_S))
    os.close(writing)
    with os.fdopen(reading) as said:
        assert said.read().count("attach in the one that trains") == 1
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    train_epoch(model, batches)
    hook.close()
    assert sorted(recorded(daemon, BATCHES)) == [*range(SIZE)]


def test_a_dead_mount_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mount, inside = tmp_path / "mount", tmp_path / "mount" / "train"
    inside.mkdir(parents=True)
    stat = os.stat

    def dead(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(str(mount)):
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), os.fspath(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", dead)
    assert find_mount(inside) == mount
    until(lambda: trains_at_once(inside, caplog))
    assert caplog.text.count("cannot be reached") == 1


def test_through_a_link_to_a_part_of_the_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mount" / "train").mkdir(parents=True)
    (tmp_path / "data").symlink_to(tmp_path / "mount" / "train")
    monkeypatch.chdir(tmp_path)
    with HookDaemon(tmp_path / "mount") as daemon:
        for directory in ("data", "mount/train", tmp_path / "data"):
            attach(directory, Network(), loader()).close()
        assert len(daemon.sink.lists) == 3
        assert {bytes(declared.paths[0]) for _, declared in daemon.sink.lists} == {b"train/class0/0.png"}


def test_attaching_before_a_tool_makes_a_new_loader_is_logged(
    daemon: HookDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    model, batches = Network(), loader()
    hook = attach(daemon.mount, model, batches)
    prepared, others = Accelerator(cpu=True).prepare(model, batches)
    for _ in range(2):
        train_epoch(prepared, others)
    hook.close()
    assert caplog.text.count("attach after the call that makes new loaders (Accelerator.prepare)") == 1
    assert not daemon.sink.batches


def test_copies_of_a_followed_loader_are_plain_loaders(daemon: HookDaemon) -> None:
    batches = DataLoader(list(range(12)), 4)  # type: ignore[arg-type]
    with plan(daemon.mount, batches, samples=[(str(number), 0) for number in range(12)]):
        copies = [copy.copy(batches), copy.deepcopy(batches), pickle.loads(pickle.dumps(batches))]
        sampler = pickle.loads(pickle.dumps(batches.batch_sampler))
    assert [*sampler] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    for copied in copies:
        assert type(copied) is DataLoader
        assert [*map(len, copied)] == [4, 4, 4]
    assert not [plan for _, plan in daemon.sink.plans if len(plan.order)]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_model_can_be_traced_and_exported(daemon: HookDaemon) -> None:
    model, batches, rows = Network(), loader(), torch.ones(8, WIDTH)
    hook = attach(daemon.mount, model, batches)
    traced = torch.jit.trace(model, rows)  # type: ignore[attr-defined, no-untyped-call]
    exported = torch.export.export(model, (rows,)).module()
    with pytest.raises(RuntimeError, match=r"call hook.close\(\) before"):
        torch.jit.script(model)  # type: ignore[attr-defined]
    for _ in train(model, batches):
        traced(rows)
        exported(rows)
    hook.close()
    assert sorted(recorded(daemon, BATCHES)) == [*range(SIZE)]
    torch.jit.script(model)  # type: ignore[attr-defined]


def test_where_there_is_no_mount_that_is_all_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = Numbered()
    data.samples = [(f"/nfs/{name}", label) for name, label in data.samples]
    with plan(tmp_path / "none", loader(data)):
        until(lambda: bool(caplog.records))
    assert [record.getMessage() for record in caplog.records] == [
        f"spiderfs: the daemon cannot be reached ({tmp_path}/none lies in no spiderfs mount): "
        "training continues without it"
    ]


def test_a_plan_that_works_says_so(daemon: HookDaemon, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trainer_hook")
    with plan(daemon.mount, batches := loader()) as planning:
        hello = planning._connection.hello
        assert repr(planning) == f"Planning({daemon.mount}, 50 samples, job {hello.job})"
        for _ in range(3):
            assert len([*batches]) == BATCHES
        until(lambda: "has the plan" in caplog.text)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.INFO] == [
        "spiderfs: the mount has the plan of the list 'train': 50 samples"
    ]
