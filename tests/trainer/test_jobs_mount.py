"""Jobs on a real mount: each has the scores that it has alone, comes back to them, and is listed.

Substitutes are off, so that a training is served the same bytes whatever else runs. No row is left out (`one_job.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import one_job
import pytest
from mounting import Mounted, eventually, mounted
from training_process import TrainingProcess, training_process
from vector_files import write_vectors

from spiderfs.protocol import Batch, EpochEnd, Hello
from trainer_hook import Declaration, HookClient
from trainer_hook.connection.client import ConnectPatience, socket_finder

CLASSES, EACH = 2, 20
STEPS = CLASSES * EACH // 10
OPTIONS: dict[str, object] = {"capacity": "6KiB", "policy": "spider", "substitute": "off"}
PATIENCE_S = 30.0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_vectors(tmp_path / "source", CLASSES, EACH)


class Training:
    """A training in a process, which goes on step by step."""

    def __init__(self, process: TrainingProcess) -> None:
        self.pid = process.pid
        self._process = process
        self.begun: dict[str, Any] = process.hear()

    def do(self, what: str) -> dict[str, Any]:
        self._process.tell(what)
        found: dict[str, Any] = self._process.hear()
        return found

    def epochs(self, count: int) -> Iterator[dict[str, Any]]:
        for _ in range(count):
            for _ in range(STEPS):
                yield self.do("step")
            yield self.do("epoch")


@contextlib.contextmanager
def training(mount: Mounted, model: str) -> Iterator[Training]:
    with training_process(one_job.main, mount.point, model) as process:
        yield Training(process)
        assert process.ended_well(PATIENCE_S)


def test_two_models_on_one_list_have_the_scores_that_they_have_alone(source: Path, tmp_path: Path) -> None:
    alone = {}
    for model, epochs in (("one", 3), ("two", 2)):
        with mounted(source, tmp_path / model, **OPTIONS) as mount, training(mount, model) as only:
            assert only.begun["scores"] == "", "a new job starts afresh"
            alone[model] = list(only.epochs(epochs))
            assert mount.metric("hook_rows_left_out") == 0
    with mounted(source, tmp_path / "both", **OPTIONS) as mount:
        with training(mount, "one") as one, training(mount, "two") as two:
            assert one.begun["job"] != two.begun["job"]
            together: dict[str, list[dict[str, Any]]] = {"one": [], "two": []}
            going = {"one": one.epochs(3), "two": two.epochs(2)}
            # In turns, three steps of the one for two of the other: their epochs end at different times.
            for model in ["one", "two", "one", "two", "one"] * 20:
                together[model] += [found for found in [next(going[model], None)] if found is not None]
            figures = {job["job"]: job for job in mount.stats()["jobs"]}
            told = {name: (job["name"], job["epoch"], job["epochs"]) for name, job in figures.items()}
            assert mount.metric("hook_rows_left_out") == 0
        # Each number of each step: 40 scores to the last digit, and the losses.
        assert together == alone
        assert together["one"][-1]["scores"] != together["two"][-1]["scores"]
        assert told == {one.begun["job"]: ("model one", 3, 5), two.begun["job"]: ("model two", 2, 5)}
        for begun in (one, two):
            job = figures[begun.begun["job"]]
            assert job["pids"] == [begun.pid]
            # With a plan the loader's next epoch may have begun.
            assert job["samples"] >= len(together["one" if begun is one else "two"]) - 3
            assert (job["ranks"], job["world_size"], job["lists"]) == ([0], 1, {"train": 40})
        eventually(lambda: mount.stats()["jobs"] == [], what="both to have left")


class Job:
    """A training without torch: it sends what its seed says of each sample."""

    def __init__(self, mount: Mounted, job: str, **told: Any) -> None:
        hello = Hello("test", job, **told)
        self.client = HookClient(socket_finder(mount.point, None), hello, patience=ConnectPatience(first_pause_s=0.05))
        paths = [b"class%d/%02d.npy" % (kind, number) for kind in range(CLASSES) for number in range(EACH)]
        labels = np.repeat(np.arange(CLASSES, dtype=np.int32), EACH)
        self.client.declare(Declaration("train", "train", paths, labels))

    def learn(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for first in range(0, CLASSES * EACH, 10):
            vectors = rng.normal(size=(10, 8)).astype(np.float16)
            batch = Batch("train", 0, first, np.arange(first, first + 10, dtype=np.uint32), vectors)
            self.client.batch(lambda batch=batch: batch)  # type: ignore[misc]
            assert self.scores() is not None
        self.client.epoch_end(EpochEnd(0, 0.5))

    def scores(self) -> list[float] | None:
        found: npt.NDArray[np.float32] | None = self.client.scores("train", PATIENCE_S)
        return None if found is None else found.tolist()


@contextlib.contextmanager
def job(mount: Mounted, name: str, **told: Any) -> Iterator[Job]:
    begun = Job(mount, name, **told)
    try:
        yield begun
    finally:
        begun.client.close(10)


def test_jobs_come_back_after_a_remount_and_after_their_manager_died(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path, **OPTIONS) as mount, job(mount, "one", epochs=4) as one, job(mount, "two") as two:
        one.learn(1)
        two.learn(2)
        learned = one.scores(), two.scores()
    assert learned[0] != learned[1]
    killed = ["the manager ended"]
    with (
        mounted(source, tmp_path, allowed=killed, **OPTIONS) as mount,
        job(mount, "one", epochs=4, epoch=1, resume=True) as one,
        job(mount, "two", resume=True) as two,
    ):
        assert (one.scores(), two.scores()) == learned
        os.kill(mount.manager(), signal.SIGKILL)
        eventually(lambda: mount.metric("manager_restarts") == 1, what="another manager")
        eventually(lambda: len(mount.stats()["jobs"]) == 2, what="both jobs")
        eventually(lambda: one.scores() is not None and two.scores() is not None, what="scores")
        assert (one.scores(), two.scores()) == learned
        assert {found["job"]: found["epoch"] for found in mount.stats()["jobs"]} == {"one": 1, "two": 1}
        with job(mount, "new") as new, job(mount, "heir", scores_from="two") as heir:
            assert new.scores() is None
            assert heir.scores() == learned[1]
        assert "one" in [found["job_id"] for found in mount.stats()["ratio"]["jobs"]]
