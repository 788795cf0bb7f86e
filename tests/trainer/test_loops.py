"""Whatever a training loop does, following it changes nothing in it, and files nothing under a wrong sample."""

from __future__ import annotations

import functools
import gc
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hook_daemon import HookDaemon, until
from loops import LOOPS, Loop, Sent, Training, Way
from tiny_training import features
from torch import Tensor

from trainer_hook import Hook


class Outcome(NamedTuple):
    weights: Tensor
    reads: list[int]
    random: Tensor


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HookDaemon]:
    # What a first training imports has not to be looked through by each collection.
    alone("plain", Way.NOTHING)
    gc.freeze()
    with HookDaemon(tmp_path_factory.mktemp("mount")) as daemon:
        yield daemon


@functools.cache
def alone(name: str, way: Way) -> Outcome:
    return run(LOOPS[name], way, Path())


def run(loop: Loop, way: Way, mount: Path) -> Outcome:
    """The training, and nothing left of it: no descriptor, no thread, no object."""
    gc.collect()
    gc.freeze()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    torch.manual_seed(7)
    training = Training(way, mount)
    training.model.train()
    loop.run(training)
    training.close()
    check_counts(training)
    weights = torch.cat([weight.detach().flatten() for weight in training.model.parameters()])
    outcome = Outcome(weights, list(training.reads), torch.get_rng_state())
    model = weakref.ref(training.model)
    del training
    gc.collect()
    assert model() is None
    # What an earlier test had left may have ended meanwhile.
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors and threading.active_count() <= threads)
    return outcome


def check_counts(training: Training) -> None:
    for hook in training.hooks:
        if isinstance(hook, Hook):
            assert not hook.counts["errors"]
            assert not hook.counts["unusable"]
            assert not hook.counts["dropped"]


def check_sent(daemon: HookDaemon, sent: Sent, reads: list[int]) -> None:
    """Every row that arrived is the sample's own; those that had to come came."""
    arrived: Counter[int] = Counter()
    paths = {}
    for trainer, declared in daemon.sink.lists:
        paths[trainer, declared.name] = declared.paths
    for trainer, batch in daemon.sink.batches:
        names = paths[trainer, batch.list]
        samples = [int(Path(os.fsdecode(names[index])).stem) for index in batch.indices.tolist()]
        expected = np.stack([features(sample).numpy() for sample in samples])
        np.testing.assert_allclose(batch.embeddings.astype(np.float32), expected, atol=8e-3)
        arrived.update(samples)
    if sent is Sent.ALL:
        assert arrived == Counter(reads)
    elif sent is Sent.SOME:
        assert arrived
        assert arrived <= Counter(reads)
    else:
        assert not arrived


def cases() -> Iterator[Any]:
    """Each loop in each way in which it is followed; without --all, attached and in one more way, which takes turns."""
    for number, (name, loop) in enumerate(LOOPS.items()):
        others = [way for way in (Way.PLAN, Way.ATTACH_SAMPLER) if way in loop.ways]
        for way in (Way.ATTACH, *others):
            chosen = way is Way.ATTACH or way is others[number % len(others)]
            yield pytest.param(name, way, marks=() if chosen else pytest.mark.thorough, id=f"{name}-{way.value}")


@pytest.mark.parametrize(("name", "way"), [*cases()])
def test_following_changes_nothing_and_files_each_row_rightly(
    daemon: HookDaemon, name: str, way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    loop = LOOPS[name]
    plain = alone(name, Way.SAMPLER if way.sampled else Way.NOTHING)
    daemon.sink.lists.clear()
    daemon.sink.batches.clear()
    daemon.counted.clear()
    caplog.set_level(logging.WARNING)
    caplog.clear()
    followed = run(loop, way, daemon.mount)
    assert followed.reads == plain.reads
    assert torch.equal(followed.weights, plain.weights)
    assert torch.equal(followed.random, plain.random)
    check_sent(daemon, Sent.NONE if way is Way.PLAN else loop.sent, followed.reads)
    # What a hook has to say it says once; no loop has more than two.
    said = Counter(record.getMessage() for record in caplog.records)
    assert max(said.values(), default=0) <= 2
    assert len(said) <= 2
    assert not daemon.counted["hook_malformed"]
