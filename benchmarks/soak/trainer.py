"""A trainer of a soak: it speaks the hook's protocol without torch, and reports what it reads as the readers do.

It learns nothing: the embedding of a sample is drawn around the centre of its label. A trainer gets substitutes, so it
runs in a process of its own; half of the trainers read in a child process, as loader workers do.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.soak.reader import Reader, Timed, Waits
from spiderfs.protocol import (
    Batch,
    CachedRequest,
    EpochEnd,
    Goodbye,
    Hello,
    Message,
    Pin,
    Plan,
    Progress,
    Samples,
    ScoresRequest,
    encode,
)
from spiderfs.protocol.extents import Extent

WIDTH = 16
BATCH = 16
RANGE_BYTES = 64 << 10
# If the manager is dead or stopped, the trainer tries to connect again after so long.
PAUSE_S = 0.2
ANSWER_S = 5.0


class Hook:
    """A connection to the daemon, which connects again after it has ended."""

    def __init__(self, mount: str) -> None:
        self._mount = mount
        self._socket: socket.socket | None = None

    def send(self, *messages: Message) -> bool:
        """Send messages; returns False if there is no daemon, and the next call connects again."""
        try:
            if self._socket is None:
                self._connect()
            assert self._socket is not None
            for message in messages:
                self._socket.sendall(encode(message))
            self._drain()
        except OSError:
            self.close()
            return False
        return True

    @property
    def connected(self) -> bool:
        return self._socket is not None

    def garbage(self, rng: random.Random) -> None:
        """Send random bytes, or a frame with some wrong bytes."""
        with contextlib.suppress(OSError):
            if self._socket is not None:
                frame = bytearray(encode(ScoresRequest("train", 1)))
                for _ in range(rng.randrange(1, 4)):
                    frame[rng.randrange(12, len(frame))] = rng.randrange(256)
                self._socket.sendall(frame if rng.random() < 0.7 else rng.randbytes(100))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _connect(self) -> None:
        with open(f"{self._mount}/.spiderfs/hook", "rb") as file:
            path = file.read().rstrip(b"\n")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(ANSWER_S)
        self._socket.connect(path)

    def _drain(self) -> None:
        """Receive the answers and ignore them, so that the daemon does not have to wait."""
        assert self._socket is not None
        while select.select([self._socket], [], [], 0)[0]:
            if not self._socket.recv(1 << 16):
                raise ConnectionError("the daemon has gone")


def label_of(path: str) -> int:
    return int(path.partition("/")[0].partition(".")[0])


def declared(files: list[tuple[int, str]], ranges: bool) -> Samples:
    """Of large files a range is a sample, if there are to be `ranges`."""
    labels = np.array([label_of(path) for _, path in files], np.int32)
    samples = [
        Extent(path.encode(), number % 8 * RANGE_BYTES, (number % 8 + 1) * RANGE_BYTES).path
        if ranges and "large" in path
        else path.encode()
        for number, path in files
    ]
    paths = b"".join(sample + b"\0" for sample in samples)
    return Samples("train", "train", len(files), 0, labels, np.frombuffer(paths, np.uint8))


def train(given: dict[str, Any]) -> None:
    """Train for the time in the arguments, then end in the way that they name."""
    rng = random.Random(given["seed"])
    numbers = np.random.default_rng(given["seed"])
    files = [(number, path) for number, path in given["files"]]
    timed = Timed(Waits(Path(given["waits"]), given["slots"]), given["slot"])
    reader = Reader(given["mount"], files, timed, rng)
    hook = Hook(given["mount"])
    centres = numbers.normal(size=(1 + max(label_of(path) for _, path in files), WIDTH))
    until = time.monotonic() + given["for_s"]
    epoch = 0
    while time.monotonic() < until:
        if not hook.connected and not hook.send(Hello("soak", "soak"), declared(files, given["ranges"])):
            time.sleep(PAUSE_S)
            continue
        order = numbers.permutation(len(files)).astype(np.uint32)
        if given["plans"] != "none":
            said = order if given["plans"] == "true" else numbers.permutation(order)
            hook.send(Plan("train", epoch, 0, True, said))
        if rng.random() < 0.3:
            hook.send(Pin("train", epoch, order[: rng.randrange(len(order))]))
        for step, begin in enumerate(range(0, len(order), BATCH)):
            indices = order[begin : begin + BATCH]
            if given["plans"] != "none":
                hook.send(Progress("train", epoch, begin + len(indices), begin))
            read(reader, files, indices, rng, given["forks"])
            labels = [label_of(files[index][1]) for index in indices]
            embeddings = (centres[labels] + numbers.normal(size=(len(indices), WIDTH))).astype(np.float16)
            losses = np.abs(numbers.normal(size=len(indices))).astype(np.float16)
            hook.send(Batch("train", epoch, step, indices, embeddings, losses))
            if given["garbage"] and rng.random() < 0.1:
                hook.garbage(rng)
            if time.monotonic() > until:
                break
        hook.send(ScoresRequest("train", epoch), CachedRequest("train", epoch), EpochEnd(epoch, rng.random()))
        epoch += 1
    if given["end"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if given["end"] == "goodbye":
        hook.send(Goodbye())
    hook.close()


def read(reader: Reader, files: list[tuple[int, str]], indices: Any, rng: random.Random, forks: bool) -> None:
    child = os.fork() if forks else 0
    if child:
        os.waitpid(child, 0)
        return
    for index in indices:
        number, path = files[index]
        reader.see(number, path, rng.choice(("read", "pread", "client", "mmap", "stat")), by_trainer=True)
    if forks:
        os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    train(json.loads(sys.argv[1]))
