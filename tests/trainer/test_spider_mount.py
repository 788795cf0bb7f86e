"""Two trainers and plain readers on one mount: trainers get substitutes of the same label, others each file itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mounting import Mounted, eventually, mounted
from ordinary_user import let_everybody_in
from programs import program
from reading import digest, readers, source_with, together

from spiderfs import client as around_fuse

CLASSES = 3
# Samples per class. The second half of a class is labelled otherwise by the second trainer.
EACH = 30

# Trains without a model: embeddings are read off the bytes, so that samples of a class lie close together. Says for
# every read what was asked for and what was given, by the file's own first line.
_TRAINER = r"""
import json, mmap, os, random, select, sys, time
from pathlib import Path
import numpy as np
from spiderfs import client as around_fuse
from spiderfs.protocol import Batch, EpochEnd, Hello
from trainer_hook.connection.client import HookClient
from trainer_hook.connection.sample_list import Declaration
from trainer_hook.connection.client import socket_finder

point, seed, samples = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
names = [name for name, _ in samples]
validation = sorted(str(path.relative_to(point)) for path in (point / "val").iterdir())
rng, order = np.random.default_rng(seed), random.Random(seed)
client = HookClient(socket_finder(point, None), Hello("test", "test"))
labels = np.array([label for _, label in samples], np.int32)
client.declare(Declaration("train", "train", [os.fsencode(name) for name in names], labels))
scores = client.scores("train", 20.0)
print(json.dumps(None if scores is None else len(scores)), flush=True)
given, odd, errors = set(), [], []
def read(name):
    path = point / name
    if sys.argv[4] == "around":
        return around_fuse.read_bytes(path).split(b"\n", 1)[0].decode()
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        content = file.read()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            same = mapped[:] == content
    if len(content) != status.st_size or not same:
        odd.append(name)
    return content.split(b"\n", 1)[0].decode()
epoch = 0
while not select.select([0], [], [], 0)[0]:
    order.shuffle(chosen := list(range(len(names))))
    for first in range(0, len(chosen), 16):
        batch = chosen[first : first + 16]
        vectors = []
        for index in batch:
            try:
                served = read(names[index])
            except OSError as exc:
                errors.append([names[index], str(exc)])
                served = names[index]
            given.add((names[index], served))
            vector = np.zeros(8)
            vector[int(served.split("/")[1])] = 1
            vectors.append(vector + 0.05 * rng.standard_normal(8))
        made = Batch("train", epoch, first, np.array(batch, np.uint32), np.array(vectors).astype(np.float16), None)
        client.batch(lambda made=made: made)
    given.update((name, read(name)) for name in validation)
    client.epoch_end(EpochEnd(epoch, min(0.99, 0.5 + epoch / 100)))
    epoch += 1
client.close()
print(json.dumps({"given": sorted(given), "odd": odd, "errors": errors, "epochs": epoch}), flush=True)
"""


class Training:
    def __init__(self, point: Path, seed: int, samples: dict[str, int], way: str) -> None:
        self.samples = samples
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TRAINER, str(point), str(seed), json.dumps(list(samples.items())), way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        assert self.process.stdout is not None
        self.scores_at_start: int | None = json.loads(self.process.stdout.readline())

    def end(self) -> dict[str, Any]:
        """Let it end its epoch and check what it was given."""
        found = self.told()
        for wanted, given in found["given"]:
            if wanted in self.samples:
                assert self.samples[given] == self.samples[wanted], f"{given} for {wanted}"
            else:
                assert given == wanted, "validation is never redirected"
        return found

    def told(self) -> dict[str, Any]:
        """Let the trainer end its epoch and report what each read returned."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        told = self.process.stdout.readline()
        self.process.wait(30)
        found: dict[str, Any] = json.loads(told)
        assert found["odd"] == []
        assert found["errors"] == []
        return found


@contextlib.contextmanager
def training(point: Path, seed: int, samples: dict[str, int], way: str = "mount") -> Iterator[Training]:
    """A trainer that reads through the mount, or "around" it through `spiderfs.client`."""
    begun = Training(point, seed, samples, way)
    with begun.process:
        try:
            yield begun
        finally:
            begun.process.kill()


def lists() -> tuple[dict[str, int], dict[str, int]]:
    """The lists of two trainers: one by class, one of a part of the files with two labels in each class."""
    names = [(f"train/{label}/{number:03d}", label, number) for label in range(CLASSES) for number in range(EACH)]
    one = {name: label for name, label, _ in names}
    two = {name: 2 * label + (number % 2) for name, label, number in names if number >= 5}
    return one, two


# Each file has its own size and content, and its first line names it.
source = source_with(
    {
        name: name.encode() + b"\n" + name[-1].encode() * (500 + 13 * int(name[-3:]))
        for name in (*lists()[0], *(f"val/{number:03d}" for number in range(10)))
    }
)


def digests(source: Path) -> dict[str, str]:
    return {str(path.relative_to(source)): digest(path.read_bytes()) for path in source.rglob("*") if path.is_file()}


def redirected(mount: Mounted, more_than: float) -> None:
    eventually(lambda: mount.metric("redirects") > more_than, what="redirects")


OPTIONS: dict[str, object] = {"capacity": "20KiB", "policy": "spider", "ratio_start": 0.5, "ratio_end": 0.5}


@pytest.mark.parametrize(("workers", "index"), [(1, "hnsw"), (2, "auto")])
@pytest.mark.opened_and_immutable
@pytest.mark.both_bindings
def test_substitutes_have_the_trainers_own_label_and_other_readers_get_none(
    source: Path, tmp_path: Path, workers: int, index: str
) -> None:
    one, two = lists()
    with mounted(source, tmp_path, workers=workers, index=index, **OPTIONS) as mount:
        with (
            readers(1, mount.point, digests(source)) as outside,
            training(mount.point, 1, one) as first,
            training(mount.point, 2, two) as second,
        ):
            redirected(mount, 100)
            scored = len(one) + len(two)
            eventually(lambda: len(mount.control("scores").read_bytes().splitlines()) == scored, what="both lists")
            redirected(mount, mount.metric("redirects") + 100)
            shown = {name: eventually(mount.control(name).read_bytes, what=name) for name in ("redirects", "graph")}
            assert b" -> " in shown["redirects"]
            assert b"radius" in shown["graph"]
            found = [first.end(), second.end()]
            report = together(outside)
        assert all(any(wanted != given for wanted, given in each["given"]) for each in found)
        assert (report.wrong, report.errors) == ([], [])
        assert report.reads >= len(one) + 10
        # A reader that comes after them gets each file itself, whatever the kernel has cached.
        for name in one:
            assert (mount.point / name).read_bytes() == (source / name).read_bytes()


def test_trainers_that_read_around_fuse_get_the_same_substitutes(source: Path, tmp_path: Path) -> None:
    one, two = lists()
    with mounted(source, tmp_path, **OPTIONS) as mount:
        with (
            readers(1, mount.point, digests(source)) as outside,
            training(mount.point, 1, one, "around") as first,
            training(mount.point, 2, two, "around") as second,
        ):
            redirected(mount, 100)
            for name, content in ((name, (source / name).read_bytes()) for name in one):
                assert around_fuse.read_bytes(mount.point / name) == content, "this process belongs to no trainer"
            redirected(mount, mount.metric("redirects") + 100)
            assert mount.metric("client_opens") > mount.metric("redirects") / 2
            found = [first.end(), second.end()]
            report = together(outside)
        assert all(any(wanted != given for wanted, given in each["given"]) for each in found)
        assert (report.wrong, report.errors) == ([], [])


# Reads some files again and again as another user; says at its end whose content it was given for which.
_NOBODY = r"""
import json, os, select, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
names = json.loads(sys.argv[1])
seen, rounds = set(), 0
while not select.select([0], [], [], 0)[0] or rounds < 2:
    for name in names:
        with open(name, "rb") as file:
            seen.add((name, file.readline().decode().strip()))
    rounds += 1
    print(flush=True)
json.dump(sorted(seen), sys.stdout)
"""


def as_nobody(point: Path, names: list[str], until: Callable[[], object]) -> list[list[str]]:
    """What another user reads from these files until a condition becomes true."""
    command = [sys.executable, "-I", "-S", "-c", _NOBODY, json.dumps([str(point / name) for name in names])]
    with program(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        until()
        process.stdin.close()
        last = process.stdout.read().splitlines()[-1]
    found: list[list[str]] = json.loads(last)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_substitutes_are_only_those_that_the_reader_could_open(source: Path, tmp_path: Path) -> None:
    """One class, of which a part lies in a directory that is closed after a while."""
    names = [f"train/0/{number:03d}" for number in range(EACH)]
    closed = [name for name in names if int(name[-3:]) % 2]
    (source / "train/closed").mkdir()
    for name in closed:
        (source / name).rename(source / name.replace("0/", "closed/"))
    labels = {name.replace("0/", "closed/") if name in closed else name: 0 for name in names}
    open_names = [name for name in names if name not in closed]
    let_everybody_in(tmp_path)
    options = OPTIONS | {"capacity": "6KiB", "allow_other": "on", "substitute": "all", "substitute_when": "miss"}
    with mounted(source, tmp_path, **options) as mount, training(mount.point, 1, labels) as trainer:

        def foreign(given: list[list[str]]) -> list[list[str]]:
            return [[name, content] for name, content in given if content in closed]

        def redirects() -> None:
            redirected(mount, mount.metric("redirects") + 100)

        # The directory is open still.
        eventually(
            lambda: foreign(as_nobody(mount.point, open_names, redirects)), what="substitutes from that directory"
        )
        (source / "train/closed").chmod(0o700)
        # The kernel would trust the old mode for as long.
        wait = time.monotonic() + 1.5
        eventually(lambda: time.monotonic() > wait)

        def given_what_lies_beside() -> bool:
            given = as_nobody(mount.point, open_names, redirects)
            assert foreign(given) == []
            return any(not name.endswith(content) for name, content in given)

        # All substitutes of a moment may lie in the closed directory.
        eventually(given_what_lies_beside, what="substitutes that lie beside it")
        assert foreign(trainer.told()["given"]), "root may open all of them"


def test_a_remount_keeps_scores_and_a_dead_manager_is_survived(source: Path, tmp_path: Path) -> None:
    one = lists()[0]
    with mounted(source, tmp_path, **OPTIONS) as mount, training(mount.point, 1, one) as trainer:
        assert trainer.scores_at_start is None
        redirected(mount, 50)
        mount.expect("the manager ended")
        os.kill(mount.manager(), signal.SIGKILL)
        eventually(lambda: mount.metric("manager_restarts") == 1, what="another manager")
        redirected(mount, mount.metric("redirects") + 50)
        trainer.end()
    killed = ["the manager ended"]  # both mounts share a log
    with mounted(source, tmp_path, allowed=killed, **OPTIONS) as mount, training(mount.point, 2, one) as trainer:
        assert trainer.scores_at_start == len(one)
        redirected(mount, 20)
        trainer.end()
