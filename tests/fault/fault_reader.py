"""A process that reads a mount, compares every byte with what it must be, and measures how long each call takes.

The program takes its Task as JSON. It reads until its standard input is closed, and then prints its Report as JSON. The
bytes of each file name the file and their offset, so wrong bytes show from where they come. A training reads its whole
list in an order of its own in each epoch; if it is attached it also sends embeddings, and with "plan" its order.
"""

from __future__ import annotations

import errno
import functools
import json
import mmap
import os
import random
import select
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RECORD_BYTES = 32
MIB = 1 << 20
# For the process that watches: the number of calls so far, and when the present call began (0 if there is none).
PROGRESS = struct.Struct("<Qd")
# These errors say that the mount has ended, and every further call would return them again.
_END = {"ENOTCONN", "ECONNABORTED", "UNMOUNTED"}
# Readers of several mounts share two cores; without a pause, each reader would keep one core busy.
_PAUSE_S = 0.01
_BATCH = 8


@dataclass(frozen=True)
class Task:
    point: str
    sizes: dict[str, int]
    progress: str
    seed: int
    attach: str | None = None
    """None for an ordinary reader; for a training "no trainer" (not attached), "hook" or "plan"."""


@dataclass
class Report:
    calls: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    """The longest wait that ended with each error, by the error's name."""
    longest_s: float = 0.0
    longest_call: str = ""
    substituted: int = 0


# A reader compares with it at each read, and to make that of a large file takes 0.05 s.
@functools.cache
def content(name: str, size: int) -> bytes:
    records = (f"{name:>20}:{at:010d}\n".encode() for at in range(0, size, RECORD_BYTES))
    return b"".join(records)[:size]


class Reader:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._point = Path(task.point)
        self._random = random.Random(task.seed)
        self._small = sorted(name for name, size in task.sizes.items() if size < MIB)
        self._large = sorted(name for name, size in task.sizes.items() if size >= MIB)
        self.report = Report()
        self.ended = False
        with open(task.progress, "r+b") as file:
            self._progress = mmap.mmap(file.fileno(), PROGRESS.size)

    def stopped(self) -> bool:
        return self.ended or bool(select.select([0], [], [], 0)[0])

    def step(self) -> None:
        """Do one thing that programs do, chosen at random."""
        chance = self._random.random()
        if chance < 0.7:
            self.read(self._random.choice(self._small))
        elif chance < 0.8:
            self.read_piece(self._random.choice(self._large))
        elif chance < 0.9:
            self.list(os.path.dirname(self._random.choice(self._small)))
        else:
            self.miss()

    def read(self, name: str, may_be: Callable[[str], bool] | None = None) -> str | None:
        """Read a small file; `may_be` says which files may stand in for it. Returns the file whose bytes came."""
        whole = self._bytes_of(name, 0, MIB)
        if whole is None:
            return None
        given = whole[:20].decode(errors="replace").strip() if may_be else name
        if given != name and not (may_be and may_be(given)):
            self.report.wrong.append(f"{name} began with {whole[:40]!r}")
        elif whole != content(given, self._task.sizes[given]):
            self.report.wrong.append(f"{name} got other bytes than those of {given}")
        self.report.substituted += given != name
        return given

    def read_piece(self, name: str) -> None:
        size = self._task.sizes[name]
        at = self._random.randrange(0, size, RECORD_BYTES)
        length = self._random.choice((4096, 100_000))
        piece = self._bytes_of(name, at, min(length, size - at))
        if piece is not None and piece != content(name, size)[at : at + length]:
            self.report.wrong.append(f"{name} at {at}: {len(piece)} bytes that are not its own")

    def list(self, directory: str) -> None:
        names = self._timed("list", lambda: os.listdir(self._point / directory))
        wanted = {os.path.basename(name) for name in self._small if os.path.dirname(name) == directory}
        if names is not None and set(names) != wanted:
            self.report.wrong.append(f"{directory} was listed as {sorted(names)}")

    def miss(self) -> None:
        """Look up a name that does not exist, about which the mount must ask the source."""
        directory = os.path.dirname(self._random.choice(self._small))
        path = self._point / directory / f"missing-{self._random.randrange(1 << 30)}"
        if self._timed("miss", lambda: _exists(path)):
            self.report.wrong.append(f"{path} exists")

    def _bytes_of(self, name: str, at: int, length: int) -> bytes | None:
        """Call stat, open and read; half of the times the pages are dropped first, so that the daemon must answer."""
        path = self._point / name
        if self._timed("stat", lambda: os.stat(path)) is None:
            return None
        fd = self._timed("open", lambda: os.open(path, os.O_RDONLY))
        if fd is None:
            return None
        try:
            if self._random.random() < 0.5:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            found = bytearray()
            # Like read(2), a call returns what could be read, and only the next call returns the error.
            while len(found) < length:
                rest = length - len(found)
                piece = self._timed("read", lambda rest=rest: os.pread(fd, rest, at + length - rest))
                if piece is None:
                    return None
                if not piece:
                    break
                found += piece
            return bytes(found)
        finally:
            os.close(fd)

    def _timed(self, what: str, call: Callable[[], Any]) -> Any:
        if self.ended:
            return None
        began = time.monotonic()
        PROGRESS.pack_into(self._progress, 0, self.report.calls, began)
        try:
            return call()
        except OSError as exc:
            name = errno.errorcode[exc.errno or 0]
            if name == "ENOENT" and not os.path.ismount(self._point):
                name = "UNMOUNTED"
            self.report.errors[name] = max(self.report.errors.get(name, 0.0), time.monotonic() - began)
            self.ended = name in _END
            return None
        finally:
            took_s = time.monotonic() - began
            if took_s > self.report.longest_s:
                self.report.longest_s, self.report.longest_call = took_s, what
            self.report.calls += 1
            PROGRESS.pack_into(self._progress, 0, self.report.calls, 0.0)


def _exists(path: Path) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def label_of(name: str) -> int:
    return int(name[len("class") : name.index("/")])


def train(reader: Reader, task: Task) -> None:
    """Train over all small files; the embeddings of a label lie close together, so that there are substitutes."""
    import logging

    import numpy as np

    from spiderfs.protocol import Batch, EpochEnd, Hello, Plan
    from trainer_hook.connection.client import HookClient, socket_finder
    from trainer_hook.connection.sample_list import Declaration

    # The faults end the daemon on purpose, so the hook's warnings about that are not needed.
    logging.getLogger("trainer_hook").setLevel(logging.CRITICAL)
    names = sorted(name for name, size in task.sizes.items() if size < MIB)
    labels = np.array([label_of(name) for name in names], np.int32)
    client = HookClient(socket_finder(Path(task.point), None), Hello("faults", "faults"))
    client.declare(Declaration("train", "train", [os.fsencode(name) for name in names], labels))
    client.connected.wait(30)
    print("attached", flush=True)
    generator = np.random.default_rng(task.seed)
    epoch = 0
    while not reader.stopped():
        order = generator.permutation(len(names)).astype(np.uint32)
        if task.attach == "plan":
            client.plan(Plan("train", epoch, 0, True, order))
        for first in range(0, len(order), _BATCH):
            batch = order[first : first + _BATCH]
            client.set_progress("train", first + len(batch), first)
            for index in batch:
                wanted = names[index]
                reader.read(wanted, lambda given, wanted=wanted: given in names and label_of(given) == label_of(wanted))
                time.sleep(_PAUSE_S)
                if reader.stopped():
                    return
            vectors = np.eye(8)[labels[batch]] + 0.05 * generator.standard_normal((len(batch), 8))
            made = Batch("train", epoch, first, batch, vectors.astype(np.float16), None)
            client.batch(lambda made=made: made)
        client.epoch_end(EpochEnd(epoch, 0.5))
        epoch += 1


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    reader = Reader(task)
    if task.attach in ("hook", "plan"):
        train(reader, task)
    else:
        print("attached", flush=True)
        while not reader.stopped():
            reader.step()
            time.sleep(_PAUSE_S)
    print(json.dumps(asdict(reader.report)), flush=True)
    # At a normal exit, the interpreter would wait for the hook's thread.
    os._exit(0)


if __name__ == "__main__":
    main()
