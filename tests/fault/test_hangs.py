"""A source that hangs holds up only the readers that wait for it, and trainers still get their substitutes."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mounting import (
    NO_MANAGER,
    PATIENCE_S,
    Mounted,
    eventually,
    mounted,
)
from programs import program
from reading import source_with

CLASSES, EACH = 3, 40
# A call that waits for nothing takes milliseconds; two busy cores may add seconds. The pending look-up takes 30 s.
QUICK_S = 20.0

# This program trains without reading: every batch has new random embeddings, which make new hubs and new redirects.
_TRAINER = r"""
import json, os, sys, select, time
from pathlib import Path
from typing import Any
import numpy as np
from spiderfs.protocol import Batch, Hello
from trainer_hook.connection.client import HookClient
from trainer_hook.connection.sample_list import Declaration
from trainer_hook.connection.client import socket_finder

point = Path(sys.argv[1])
names = sorted(str(path.relative_to(point)) for path in point.glob("train/*/*"))
labels = np.array([int(name.split("/")[1]) for name in names], np.int32)
client = HookClient(socket_finder(point, None), Hello("test", "test"))
client.declare(Declaration("train", "train", [os.fsencode(name) for name in names], labels))
rng = np.random.default_rng(1)
number = 0
print("training", flush=True)
while not select.select([0], [], [], 0.01)[0]:
    chosen = rng.choice(len(names), 16, replace=False).astype(np.uint32)
    vectors = (np.eye(8)[labels[chosen]] + 0.05 * rng.standard_normal((16, 8))).astype(np.float16)
    made = Batch("train", 0, number, chosen, vectors, None)
    client.batch(lambda: made)
    number += 1
# All names were opened before the trainer came, so the kernel trusts that it knows what they mean.
said, label_of = (point / ".spiderfs/redirects").read_text(), dict(zip(names, labels.tolist()))
given = {name: (point / name).read_bytes().split(b"\n")[0].decode() for name in names}
print(json.dumps({"redirects": said, "given": given}), flush=True)
client.close()
"""


# This program lists a directory as ls(1) does, but without a stat of the directory, for which the source is asked.
_LIST = """
import ctypes, os, sys

libc, names = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(1 << 16)
assert libc.getdents64(os.open(sys.argv[1], os.O_RDONLY), names, len(names)) > 0, os.strerror(ctypes.get_errno())
"""


@contextlib.contextmanager
def talking(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    with program(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


source = source_with(
    {
        f"train/{label}/{number:03d}": f"{label} {number}\n".encode() * 400
        for label in range(CLASSES)
        for number in range(EACH)
    }
)


def redirects(mount: Mounted) -> str:
    try:
        return mount.control("redirects").read_text()
    except OSError as exc:
        if exc.errno in NO_MANAGER:
            return ""
        raise


def seconds_of(*command: str | Path) -> float:
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)
    return time.monotonic() - began


@contextlib.contextmanager
def training_over_a_hanging_source(mount: Mounted) -> Iterator[subprocess.Popen[str]]:
    """Run a trainer whose redirects change, while in each of its directories a look-up waits for the source."""
    for path in sorted(mount.point.glob("train/*/*")):
        path.read_bytes()
    with talking(sys.executable, "-c", _TRAINER, mount.point) as trainer, contextlib.ExitStack() as waiting:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "training\n"
        eventually(lambda: redirects(mount), what="redirects")
        mount.change("source.hang", "on")
        for label in range(CLASSES):
            waiting.enter_context(program("stat", mount.point / "train" / str(label) / "unknown"))
        before = redirects(mount)
        eventually(lambda: redirects(mount) != before, what="other redirects")
        yield trainer


OPTIONS = {"capacity": 200_000, "ttl": "1h", "dir_ttl": "1h", "substitute_when": "miss"}


@pytest.mark.clock
@pytest.mark.parametrize("workers", [1, 2])
def test_a_pending_look_up_holds_up_no_one_who_knows_the_names(source: Path, tmp_path: Path, workers: int) -> None:
    options = {**OPTIONS, "workers": workers}
    with mounted(source, tmp_path / "m", **options) as mount, training_over_a_hanging_source(mount) as trainer:
        for _ in range(3):
            for label in range(CLASSES):
                assert seconds_of(sys.executable, "-c", _LIST, mount.point / "train" / str(label)) < QUICK_S
        # All files must stay cached while they are read, and the manager still works on batches that wait.
        trainer.send_signal(signal.SIGSTOP)
        looks: list[list[str]] = []

        def at_rest() -> bool:
            looks.append(mount.control("cache").read_text().splitlines())
            time.sleep(0.1)
            return len(looks) > 10 and all(look == looks[-1] for look in looks[-10:])

        eventually(at_rest, what="the end of the batches")
        # A file that has just landed is offered to the policy when it is read, and may push out another file.
        cached = [line for line in looks[-1] if not line.startswith("landing")]
        assert cached
        assert seconds_of("cat", *(mount.point / line.split()[-1] for line in cached)) < QUICK_S
        trainer.send_signal(signal.SIGCONT)
        mount.change("source.hang", "off")


@pytest.mark.parametrize("mode", [{"workers": 2}, {"immutable": "on"}])
def test_a_trusted_name_still_gets_its_substitute(source: Path, tmp_path: Path, mode: dict[str, Any]) -> None:
    with mounted(source, tmp_path / "m", **OPTIONS, **mode) as mount:
        for path in sorted(mount.point.glob("train/*/*")):
            path.read_bytes()
        with talking(sys.executable, "-c", _TRAINER, mount.point) as trainer:
            assert trainer.stdin is not None
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "training\n"
            eventually(lambda: len(redirects(mount).splitlines()) > EACH // 2, what="redirects")
            looked_up = mount.metric("lookups")
            trainer.stdin.close()
            said = json.loads(trainer.stdout.readline())
        given = {name: found for name, found in said["given"].items() if found != _content_of(name)}
        assert given
        assert all(name.split("/")[1] == found.split()[0] for name, found in given.items()), "another label"
        assert mount.metric("redirects") == len(given)
        # The kernel has asked for what it was sent back for, with the directories above, and for those that had a
        # substitute when it was told of them.
        assert mount.metric("lookups") > looked_up
        # Everybody else gets what they ask for, by the names that the trainer was sent back for.
        for name in given:
            assert (mount.point / name).read_bytes() == (source / name).read_bytes()


def _content_of(name: str) -> str:
    _, label, number = name.split("/")
    return f"{label} {int(number)}"
