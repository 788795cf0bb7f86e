"""Processes that read and decode files as the workers of a training's loader do, and the plan that they follow.

Batches are handed out as DataLoader does: to the next worker that is free, two for each worker ahead of the loop, which
takes them in order. What a worker has read of a directory or a mount leaves the kernel's memory afterwards, as if the
data were larger than memory.
"""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.pool import AsyncResult, Pool
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from spiderfs.errors import MountError
from spiderfs.linux.process_table import end_with_parent
from spiderfs.linux.sockets import socket_address
from spiderfs.protocol import Decoder, Hello, Message, Ok, Plan, Progress, Samples, encode
from spiderfs.sources.faults import FaultState, SlowSource
from spiderfs.sources.object_source import StoreSettings
from spiderfs.sources.open import open_source
from spiderfs.sources.source import Source, Version

BATCH = 32
_AHEAD = 2
# What torchvision's transforms make of a photo in most trainings.
_PIXELS = 224
_LIST = "bench"
_ANSWER_TIMEOUT_S = 30.0
_START_TIMEOUT_S = 120.0


class File(NamedTuple):
    path: bytes
    version: Version


class Way(NamedTuple):
    """Where files are read: below a directory, or at a source with its faults, if `named`; `kept`: stay in memory."""

    root: str = ""
    named: str = ""
    settings: StoreSettings = StoreSettings()
    faults: str = ""
    kept: bool = False


class Pass(NamedTuple):
    """What one pass over files took; `decoded` of them were images."""

    files: int
    bytes: int
    decoded: int
    seconds: float

    @property
    def per_s(self) -> float:
        return self.files / self.seconds


def drop(path: bytes | str) -> None:
    """Have the kernel forget the bytes of a file; does nothing where the file cannot be opened."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class Readers:
    """The workers; use it in a `with` block. Where a worker cannot read a file, the error is raised here."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        # No fork: threads and connections of this process would not go on in it.
        context = multiprocessing.get_context("spawn")
        all_there = context.Barrier(workers + 1)
        self._pool: Pool = context.Pool(workers, _begin, (os.getpid(), all_there))
        all_there.wait(_START_TIMEOUT_S)

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()
        self._pool.join()

    def read(
        self, way: Way, files: Sequence[File], decode: bool, plan: Planned | None = None, limit_s: float = 60.0
    ) -> Pass:
        """Read the files in this order; ends early once the time is over."""
        begun_s = time.perf_counter()
        waiting: deque[AsyncResult[tuple[int, int, int]]] = deque()
        batches = [files[first : first + BATCH] for first in range(0, len(files), BATCH)]
        count = size = decoded = begun = 0
        while begun < len(batches) or waiting:
            late = time.perf_counter() - begun_s > limit_s
            if late and not waiting:
                break
            while not late and begun < len(batches) and len(waiting) < _AHEAD * self.workers:
                waiting.append(self._pool.apply_async(_read, (way, batches[begun], decode)))
                begun += 1
                if plan is not None:
                    plan.progress(min(len(files), begun * BATCH), count)
            done = waiting.popleft().get()
            count, size, decoded = count + done[0], size + done[1], decoded + done[2]
        if plan is not None:
            plan.progress(count, count)
        return Pass(count, size, decoded, time.perf_counter() - begun_s)


class Planned:
    """A trainer's connection to a mount, which publishes the order of each pass before it begins."""

    def __init__(self, mount: Path, files: Sequence[File]) -> None:
        path = Path(os.fsdecode((mount / ".spiderfs/hook").read_bytes().rstrip(b"\n")))
        self._decoder = Decoder()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_ANSWER_TIMEOUT_S)
        with socket_address(path) as address:
            self._socket.connect(address)
        self._tell(Hello(_LIST, _LIST))
        self._hear_ok()
        paths = np.frombuffer(b"".join(file.path + b"\0" for file in files), np.uint8)
        self._tell(Samples(_LIST, _LIST, len(files), 0, np.full(len(files), -1, np.int32), paths))
        self._hear_ok()
        self._number = {file.path: number for number, file in enumerate(files)}
        self._epoch = -1

    def publish(self, *epochs: Sequence[File]) -> None:
        """Begin the first of these epochs; the others come after it."""
        self._epoch += 1
        for after, epoch in enumerate(epochs):
            order = np.array([self._number[file.path] for file in epoch], np.uint32)
            self._tell(Plan(_LIST, self._epoch + after, 0, after == 0, order))

    def progress(self, dispatched: int, taken: int) -> None:
        self._tell(Progress(_LIST, self._epoch, dispatched, taken))

    def close(self) -> None:
        self._socket.close()

    def _tell(self, message: Message) -> None:
        self._socket.sendall(encode(message))

    def _hear_ok(self) -> None:
        while data := self._socket.recv(1 << 16):
            if any(isinstance(answer, Ok) for answer in self._decoder.feed(data)):
                return
        raise MountError("a mount to measure by has ended")


# -- in a worker


def _begin(parent: int, all_there: Barrier) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever has started this process ends it
    end_with_parent(parent)
    all_there.wait(_START_TIMEOUT_S)  # no pass has to wait for a process that is still starting


@functools.cache
def _source(way: Way) -> Source:
    source: Source = open_source(way.named, way.settings)
    return SlowSource(source, FaultState.open(way.faults), seed=os.getpid()) if way.faults else source


def _read(way: Way, files: Sequence[File], decode: bool) -> tuple[int, int, int]:
    size = decoded = 0
    for file in files:
        content = _content(way, file)
        size += len(content)
        decoded += decode and _decodes(content)
    return len(files), size, decoded


def _content(way: Way, file: File) -> bytes:
    if not way.named:
        with open(os.path.join(os.fsencode(way.root), file.path), "rb") as opened:
            content = opened.read()
            if not way.kept:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return content
    content = _source(way).read(file.path, 0, file.version.size, file.version)
    if way.root:
        drop(os.path.join(os.fsencode(way.root), file.path))
    return content


def _decodes(content: bytes) -> bool:
    """Make of an image what a training's transforms do; whether it is one."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.convert("RGB").resize((_PIXELS, _PIXELS), Image.Resampling.BILINEAR).tobytes()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False
    return True
