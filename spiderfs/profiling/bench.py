"""Compares ways to read a source as a training does, and recommends options: directly, by LRU, by a plan, and as views.

An **epoch** reads a random choice of the files once, in random order, as many as can be read in some seconds. The
caches hold the share of these files that the real one would hold of all, and are warm from an epoch before. Each pass
begins with the files dropped from the page cache, as if the data were larger than memory.

A **round** is one pass of each way, in an order that rotates from round to round, so that other load on the machine
affects all ways alike. Rounds continue until the confidence intervals separate the ways, or time is up.

**Readers** are processes that read and decode as the workers of a training's loader do. They get batches as from
DataLoader: the next free worker gets the next one, two for each worker ahead of the loop, which takes them in order.

`demo` reads made-up images from a slow source in the same ways, two epochs or more in random order. The images are
small enough for every machine, so what was read leaves the kernel's memory, as if the data were larger than that.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import multiprocessing
import os
import random
import signal
import stat
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import AsyncResult, Pool
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

import numpy as np
from PIL import Image

from spiderfs.errors import MountError, UsageError
from spiderfs.linux.process_table import end_with_parent
from spiderfs.options.model import Options
from spiderfs.options.paths import on_one_disk
from spiderfs.options.units import format_size, round_size
from spiderfs.profiling.private_mount import private_mount
from spiderfs.protocol import Decoder, Hello, Message, Ok, Plan, Progress, Samples, encode
from spiderfs.protocol.requests import connected
from spiderfs.sources.local import LocalSource
from spiderfs.sources.object_source import StoreSettings
from spiderfs.sources.open import is_url, open_source
from spiderfs.sources.slow import SlowSettings, SlowSource
from spiderfs.sources.source import Source, Version
from spiderfs.views.recipe import NO_VIEW, READY

BATCH = 32
_AHEAD = 2
# A pass ends with the batches that are under way, which should not take longer than this.
_BATCH_S = 0.5
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


class ReadPass(NamedTuple):
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


def short_side(path: str) -> int:
    """The pixels of the shorter side of an image; 0 for what is none."""
    try:
        with Image.open(path) as image:
            return min(image.size)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return 0


class Readers:
    """The workers; use it in a `with` block. Where a worker cannot read a file, the error is raised here."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._batch = 1
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

    def fit(self, per_s: float) -> None:
        """Have batches of BATCH files, or fewer where the source is so slow."""
        self._batch = max(1, min(BATCH, int(_BATCH_S * per_s / self.workers)))

    def read(
        self, way: Way, files: Sequence[File], decode: bool, plan: PlanPublisher | None = None, limit_s: float = 60.0
    ) -> ReadPass:
        """Read the files in this order; ends early once the time is over."""
        begun_s = time.perf_counter()
        waiting: deque[AsyncResult[tuple[int, int, int]]] = deque()
        batches = [files[first : first + self._batch] for first in range(0, len(files), self._batch)]
        count = size = decoded = begun = 0
        while begun < len(batches) or waiting:
            late = time.perf_counter() - begun_s > limit_s
            if late and not waiting:
                break
            while not late and begun < len(batches) and len(waiting) < _AHEAD * self.workers:
                waiting.append(self._pool.apply_async(_read, (way, batches[begun], decode)))
                begun += 1
                if plan is not None:
                    plan.progress(min(len(files), begun * self._batch), count)
            done = waiting.popleft().get()
            count, size, decoded = count + done[0], size + done[1], decoded + done[2]
        if plan is not None:
            plan.progress(count, count)
        return ReadPass(count, size, decoded, time.perf_counter() - begun_s)


class PlanPublisher:
    """A trainer's connection to a mount, which publishes the order of each pass before it begins."""

    def __init__(self, mount: Path, files: Sequence[File]) -> None:
        path = Path(os.fsdecode((mount / ".spiderfs/hook").read_bytes().rstrip(b"\n")))
        self._decoder = Decoder()
        self._socket = connected(path, _ANSWER_TIMEOUT_S)
        self._send(Hello(_LIST, _LIST))
        self._receive_ok()
        paths = np.frombuffer(b"".join(file.path + b"\0" for file in files), np.uint8)
        self._send(Samples(_LIST, _LIST, len(files), 0, np.full(len(files), -1, np.int32), paths))
        self._receive_ok()
        self._number = {file.path: number for number, file in enumerate(files)}
        self._epoch = -1

    def publish(self, *epochs: Sequence[File]) -> None:
        """Begin the first of these epochs; the others come after it."""
        self._epoch += 1
        for after, epoch in enumerate(epochs):
            order = np.array([self._number[file.path] for file in epoch], np.uint32)
            self._send(Plan(_LIST, self._epoch + after, 0, after == 0, order))

    def progress(self, dispatched: int, taken: int) -> None:
        self._send(Progress(_LIST, self._epoch, dispatched, taken))

    def close(self) -> None:
        self._socket.close()

    def _send(self, message: Message) -> None:
        self._socket.sendall(encode(message))

    def _receive_ok(self) -> None:
        while data := self._socket.recv(1 << 16):
            if any(isinstance(answer, Ok) for answer in self._decoder.feed(data)):
                return
        raise MountError("a mount to measure by has ended")


def _begin(parent: int, all_there: Barrier) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever has started this process ends it
    end_with_parent(parent)
    all_there.wait(_START_TIMEOUT_S)  # no pass has to wait for a process that is still starting


@functools.cache
def _source(way: Way) -> Source:
    source: Source = open_source(way.named, way.settings)
    return SlowSource(source, SlowSettings.open(way.faults)) if way.faults else source


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


LOADER, SOURCE, DIRECT, LRU, PLAN = "loader", "source", "direct", "lru", "plan"
WAYS = {
    LOADER: "loader, files in memory",
    SOURCE: "source, not decoding",
    DIRECT: "directly from the source",
    LRU: "mount, LRU cache",
    PLAN: "mount, plan",
}
# A way counts as faster by so much, and a loader as waiting below that share of what it does with files in memory.
_GAIN, _WAITS = 1.15, 0.9
# Student's t of 95 % for so many passes: a mean of few is known the less.
_STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57}


class Speed(NamedTuple):
    """What the passes of one way took."""

    passes: Sequence[ReadPass]

    @property
    def per_s(self) -> float:
        return fmean(done.per_s for done in self.passes)

    @property
    def error(self) -> float:
        """Half of the 95 % confidence interval of `per_s`."""
        count = len(self.passes)
        if count < 2:
            return math.inf
        return _STUDENT[count] * stdev(done.per_s for done in self.passes) / math.sqrt(count)

    @property
    def bytes_per_s(self) -> float:
        return sum(done.bytes for done in self.passes) / sum(done.seconds for done in self.passes)

    def beyond(self, other: Speed) -> bool:
        """Whether this is faster by more than passes differ by chance."""
        return self.per_s - self.error > other.per_s + other.error

    def __str__(self) -> str:
        return f"{_rate(self.per_s)} ± {_rate(self.error)}" if len(self.passes) > 1 else _rate(self.per_s)


@dataclass(frozen=True)
class BenchFindings:
    """What was measured: `speeds` by LOADER (on files in memory), SOURCE (no decoding), DIRECT, and ways to mount."""

    named: str
    files_seen: int
    bytes_seen: int
    whole: bool
    workers: int
    share: float
    capacity: str
    images: bool
    files_read: int
    one_disk: bool
    speeds: Mapping[str, Speed]

    @property
    def local(self) -> Speed:
        return self.speeds[LOADER]

    @property
    def direct(self) -> Speed:
        return self.speeds[DIRECT]

    @property
    def mounted(self) -> list[str]:
        """The ways to mount that were measured."""
        return [way for way in (LRU, PLAN, *READY) if way in self.speeds]

    @property
    def noun(self) -> str:
        return "images" if self.images else "files"

    def expected(self, way: str) -> Speed:
        """What a mount gives: what was measured, and never more than files in memory give."""
        return min(self.speeds[way], self.speeds.get(in_memory(way), self.local), key=lambda speed: speed.per_s)

    def brings(self, way: str, than: Speed) -> bool:
        """Whether this way seems to be worth it, whatever chance has to do with that."""
        return self.expected(way).per_s >= _GAIN * than.per_s

    def best(self) -> str | None:
        """The way to mount that is worth it; None: no way is, as far as is known."""

        def better(way: str, than: Speed) -> bool:
            return self.brings(way, than) and self.speeds[way].beyond(than)

        worth = [way for way in self.mounted if better(way, self.direct)]
        way = max(worth, key=lambda name: self.expected(name).per_s, default=None)
        # A plan needs a line in the training, and a view changes the images: each has to bring more.
        simpler = (name for name in (LRU, PLAN) if name in worth and not better(way or name, self.expected(name)))
        return next(simpler, way)

    @property
    def unclear(self) -> bool:
        """Whether passes differ by more than a way brings that seems to be worth it."""
        return any(self.brings(way, self.direct) and not self.speeds[way].beyond(self.direct) for way in self.mounted)

    def verdict(self) -> str:
        work = "decodes" if self.images else "reads"
        why = f"your loader {work} {self.local} {self.noun}/s from memory and {self.direct} from the source"
        if (way := self.best()) is None:
            return f"{why}: {self._why_not()}"
        options = f"immutable,capacity={self.capacity}" + (f",view={way}" if way in READY else "")
        plan = " and give the training trainer_hook.plan()" if way != LRU else ""
        others = {LRU: "with an LRU cache", PLAN: "with a plan alone"}
        simpler = [name for name in others if name in self.mounted and name != way != LRU]
        beside = "".join(f", {self.expected(name)} {others[name]}" for name in simpler)
        verdict = f"{why}: mount with -o {options}{plan}; expect {self.expected(way)} {self.noun}/s{beside}"
        if way in READY:
            verdict += f". This view replaces the images by smaller ones, of {READY[way].short_side} pixels"
        return verdict

    def _why_not(self) -> str:
        if self.unclear:
            return "no verdict, because rates vary more than the ways differ: run it again while nothing else runs"
        if self.direct.per_s >= _WAITS * self.local.per_s:
            return "read the source directly, because the loader hardly waits for it"
        return f"no mount gains {_GAIN - 1:.0%}: a larger cache may help, or more loader workers"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.1f}"


def in_memory(view: str) -> str:
    """How the loader's speed on files of this view in memory is named."""
    return f"{LOADER}, {view}"


VIEWS = ("jpeg256", "bmp256")
# All rounds together end before two minutes are over, by _ALL_S from the start; the last pass may be late.
_LISTING_S, _SPEED_S, _EPOCH_S, _MOST_S, _ALL_S = 10.0, 1.0, 2.5, 5.0, 100.0
_STEPS, _LEAST_ROUNDS, _MOST_ROUNDS = 3, 3, 6
_MOST_LISTED, _MOST_FILES, _COPIED, _COPIED_BYTES = 200_000, 20_000, 256, 64 << 20
# Views are tried where a plan brings the loader to that share of what it does with files in memory.
_DECODES = 0.5


class FoundFiles(NamedTuple):
    """Small files that were found; `whole` if these are all."""

    files: list[File]
    bytes: int
    whole: bool


class _Steps:
    """Reports which step of how many begins, and how many seconds are left at most."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._ends_s = time.perf_counter() + _ALL_S
        self._number, self._total = 0, _STEPS + _LEAST_ROUNDS

    def left_s(self) -> float:
        return self._ends_s - time.perf_counter()

    def begin(self, what: str, most_s: float = math.inf) -> None:
        self._number += 1
        self._total = max(self._total, self._number)
        left_s = max(1, min(most_s, self.left_s()))
        self._report(f"{self._number} of {self._total}: {what}, at most {left_s:.0f} s left")


def bench(options: Options, workers: int, report: Callable[[str], None]) -> BenchFindings:
    """Measure all ways, and `report` each step; raises UsageError without small files, SpiderfsError, OSError."""
    named, settings, steps = str(options.source), options.store_settings, _Steps(report)
    if options.archives:
        raise UsageError(
            "bench compares with files read directly, and members of archives are none: leave out archives"
        )
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spiderfs-bench-")))
        faults = ""
        if any(options.slow_settings().values()):
            faults = f"{scratch}/faults"
            SlowSettings.create(faults, **options.slow_settings()).close()
        direct = Way("" if is_url(named) else named, named, settings, faults)
        source: Source = open_source(named, settings)
        source = SlowSource(source, SlowSettings.open(faults)) if faults else source
        steps.begin("listing files")
        listing = list_files(source, options.sample_max_bytes)
        files = listing.files
        if len(files) < BATCH:
            raise UsageError(
                f"{named} has {len(files)} files of up to {round_size(options.sample_max_bytes)}, too few to measure:"
                " name the directory of the training's data"
            )
        share = cached_share(options, listing)
        steps.begin("the loader and the source")
        random.Random(0).shuffle(files)
        readers = stack.enter_context(Readers(workers))
        cold = files[: _forget(direct, files[:_MOST_FILES], _SPEED_S)]
        readers.fit(readers.read(direct, cold, decode=False, limit_s=_SPEED_S).per_s)
        memory, copied = _copy(lambda file: source.read(file.path, 0, file.version.size, file.version), files, scratch)
        tried = readers.read(memory, copied, decode=True, limit_s=_SPEED_S)
        images = tried.decoded * 2 > tried.files
        _forget(direct, cold)
        count = int(readers.read(direct, cold, images, limit_s=_SPEED_S).per_s * _EPOCH_S)
        epoch = _RepeatedReads(readers, direct, files[: min(max(count, BATCH), _MOST_FILES)], images)
        steps.begin("filling the caches of the mounts")
        ways = _ways(
            epoch, memory, copied, tried, lambda way: stack.enter_context(_mounted(epoch, way, options, share))
        )
        one_disk = not faults and not is_url(named) and on_one_disk(Path(named), options.cache_dir.first)
        known = (named, len(files), listing.bytes, listing.whole, workers, share, str(options.capacity))
        return _rounds(ways, steps, lambda speeds: BenchFindings(*known, images, len(epoch.files), one_disk, speeds))


@dataclass
class _RepeatedReads:
    """Files that are read again and again, in another order each time."""

    readers: Readers
    direct: Way
    files: Sequence[File]
    images: bool

    def order(self) -> list[File]:
        return random.sample(self.files, len(self.files))

    def read_directly(self, decode: bool, limit_s: float) -> ReadPass:
        _forget(self.direct, self.files)
        return self.readers.read(self.direct, self.order(), decode, limit_s=limit_s)

    def read_memory(self, memory: Way, copied: Sequence[File]) -> ReadPass:
        again = [*copied] * (_MOST_FILES // len(copied))
        return self.readers.read(memory, again, self.images, limit_s=_SPEED_S)


@dataclass
class _Mounted:
    """A mount by which an epoch is read, with a cache that holds this share of it."""

    epoch: _RepeatedReads
    way: Way
    plan: PlanPublisher | None
    share: float

    def content(self, file: File) -> bytes:
        return Path(self.way.root, os.fsdecode(file.path)).read_bytes()

    def measure(self) -> ReadPass:
        before, order = self.epoch.order(), self.epoch.order()
        # What a cache holds after an epoch follows from its end.
        self.read(False, before[-math.ceil(min(1.0, self.share + 0.1) * len(before)) :], order)
        _forget(self.epoch.direct, order)
        return self.read(self.epoch.images, order)

    def read(self, decode: bool, *orders: Sequence[File]) -> ReadPass:
        """Read the first of these orders; a plan knows the others too."""
        if self.plan is not None:
            self.plan.publish(*orders)
        return self.epoch.readers.read(self.way, orders[0], decode, self.plan, limit_s=_MOST_S)


@contextmanager
def _mounted(epoch: _RepeatedReads, way: str, options: Options, share: float) -> Iterator[_Mounted]:
    given = {row.name: row.value for row in options.as_table()}
    capacity = str(max(1 << 20, int(share * sum(file.version.size for file in epoch.files))))
    view, policy = (way if way in READY else NO_VIEW), ("lru" if way == LRU else "spider")
    with private_mount(given, options.cache_dir.first.parent, view, policy=policy, capacity=capacity) as mount:
        learn_names(mount.root, epoch.files)
        with nullcontext() if way == LRU else closing(PlanPublisher(mount.root, epoch.files)) as plan:
            yield _Mounted(epoch, Way(str(mount.root)), plan, share)


def _ways(
    epoch: _RepeatedReads, memory: Way, copied: Sequence[File], tried: ReadPass, mount: Callable[[str], _Mounted]
) -> dict[str, Callable[[], ReadPass]]:
    """How a pass of each way is made; `copied` are in memory, and `tried` is a pass over these."""
    ways: dict[str, Callable[[], ReadPass]] = {
        LOADER: partial(epoch.read_memory, memory, copied),
        SOURCE: partial(epoch.read_directly, False, _SPEED_S),
        DIRECT: partial(epoch.read_directly, epoch.images, _MOST_S),
    }
    pixels = median(short_side(os.path.join(memory.root, os.fsdecode(file.path))) for file in copied)
    for way in (LRU, PLAN, *VIEWS):
        if way in READY and not (epoch.images and READY[way].short_side < pixels):
            continue
        mounted = mount(way)
        ways[way] = mounted.measure
        # A view spares decoding; a loader that waits for the source even with a plan gains by fewer bytes alone.
        if way == PLAN and epoch.images and mounted.measure().per_s < _DECODES * tried.per_s:
            pixels = 0
        if way in READY:
            mounted.read(False, epoch.files)  # of views all are made in a first epoch
            ways[in_memory(way)] = partial(
                epoch.read_memory, *_copy(mounted.content, epoch.files, Path(memory.root).parent)
            )
    return ways


def _rounds(
    ways: Mapping[str, Callable[[], ReadPass]], steps: _Steps, found: Callable[[Mapping[str, Speed]], BenchFindings]
) -> BenchFindings:
    """Measure all ways in turn until their rates differ clearly, or time is up."""
    passes: dict[str, list[ReadPass]] = {way: [] for way in ways}
    names, took_s = list(ways), 0.0
    while True:
        before_s, number = steps.left_s(), len(passes[names[-1]])
        steps.begin(f"round {number + 1} of all ways", took_s * max(1, _LEAST_ROUNDS - number) if number else math.inf)
        first = number % len(names)
        for way in names[first:] + names[:first]:
            passes[way].append(ways[way]())
        took_s = before_s - steps.left_s()
        known = found({way: Speed(tuple(of_way)) for way, of_way in passes.items()})
        settled = number + 1 >= _LEAST_ROUNDS and not known.unclear
        if settled or number + 1 == _MOST_ROUNDS or steps.left_s() < took_s:
            return known


def cached_share(options: Options, listing: FoundFiles) -> float:
    """Which share of the files the capacity holds; raises UsageError."""
    capacity = options.capacity
    if capacity.unit == "percent":
        return float(capacity.amount) / 100
    if not listing.whole:
        raise UsageError(
            f"{options.source} has more files than could be listed, so what share {capacity} are is not known: write it"
            " as percent, capacity=20%"
        )
    return min(1.0, capacity.budget_bytes(0) / listing.bytes)


def list_files(source: Source, most_bytes: int) -> FoundFiles:
    """Files of 1 to `most_bytes` bytes, by a walk through directories in random order that ends after some seconds."""
    begun_s, chance = time.perf_counter(), random.Random(0)
    files: list[File] = []
    directories, total = [b""], 0
    while directories and len(files) < _MOST_LISTED and time.perf_counter() - begun_s < _LISTING_S:
        directory = directories.pop(chance.randrange(len(directories)))
        for name, found in source.scan(directory):
            path = directory + b"/" + name if directory else name
            if name == b".":
                continue
            if stat.S_ISDIR(found.mode):
                directories.append(path)
            elif stat.S_ISREG(found.mode) and 0 < found.size <= most_bytes:
                files.append(File(path, found.version))
                total += found.size
    return FoundFiles(files, total, not directories)


def _copy(content: Callable[[File], bytes], files: Sequence[File], scratch: Path) -> tuple[Way, list[File]]:
    """Some of the files in a directory of their own, by numbers, which stays in memory."""
    root = Path(tempfile.mkdtemp(dir=scratch))

    def copy(numbered: tuple[int, File]) -> File:
        number, file = numbered
        (root / str(number)).write_bytes(content(file))
        return file._replace(path=b"%d" % number)

    chosen, size = [], 0
    for numbered in enumerate(files[:_COPIED]):
        chosen.append(numbered)
        size += numbered[1].version.size
        if size > _COPIED_BYTES:
            break
    with ThreadPoolExecutor(16) as pool:
        return Way(str(root), kept=True), list(pool.map(copy, chosen))


def _forget(direct: Way, files: Sequence[File], limit_s: float = _MOST_S) -> int:
    """Have the kernel forget what it has of these files at the source; returns how many before the time was over."""
    begun_s, count = time.perf_counter(), 0
    with ThreadPoolExecutor(16) as pool:
        while direct.root and count < len(files) and time.perf_counter() - begun_s < limit_s:
            some = [os.path.join(os.fsencode(direct.root), file.path) for file in files[count : count + _COPIED]]
            count += len(list(pool.map(drop, some)))
    return count if direct.root else len(files)


def learn_names(root: Path, files: Sequence[File]) -> None:
    """List all directories of the files, as a data set does before it is read."""
    directories = {os.path.join(os.fsencode(root), os.path.dirname(file.path)) for file in files}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(os.listdir, directories))


IMAGES, CLASSES = 480, 10
LATENCY_MS = 20.0
CACHED_SHARE = 0.2
# A mount's last prefetches and counts may come after its last read.
_SETTLE_S = 0.2


class DemoEpoch(NamedTuple):
    """One pass over all images; `hits` of them did not wait for the source, which sent `fetched_bytes`."""

    seconds: float
    hits: int
    fetched_bytes: int


def demo(epochs: int, workers: int, say: Callable[[str], None]) -> Iterator[list[DemoEpoch]]:
    """Measure each of WAYS, whose name `say` is given before; raises MountError if nothing can be mounted."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spiderfs-demo-")))
        images = scratch / "images"
        for number in range(IMAGES):
            directory = images / f"class{number % CLASSES}"
            directory.mkdir(parents=True, exist_ok=True)
            noise = Image.effect_noise((_PIXELS, _PIXELS), 40).convert("RGB")
            noise.save(directory / f"{number:03}.jpg")
        files = list_files(LocalSource(str(images)), 1 << 20).files
        SlowSettings.create(scratch / "line", latency_ms=LATENCY_MS).close()
        orders = [random.Random(number).sample(files, len(files)) for number in range(epochs)]
        readers = stack.enter_context(Readers(workers))
        readers.fit(workers * 1000 / LATENCY_MS)
        source = Way(str(images), str(images), faults=str(scratch / "line"))
        for way in (DIRECT, LRU, PLAN):
            say(WAYS[way])
            if way == DIRECT:
                passes = [readers.read(source, order, decode=True) for order in orders]
                yield [DemoEpoch(done.seconds, 0, done.bytes) for done in passes]
            else:
                yield _demo_mounted(readers, source, way, orders)


def _demo_mounted(readers: Readers, source: Way, way: str, orders: list[list[File]]) -> list[DemoEpoch]:
    total = sum(file.version.size for file in orders[0])
    options = {"source": source.named, "immutable": "on", "source.latency_ms": str(LATENCY_MS)}
    others = {"capacity": format_size(int(total * CACHED_SHARE) & ~1023), "policy": LRU if way == LRU else "spider"}
    with ExitStack() as stack:
        mount = stack.enter_context(private_mount(options, Path(source.root).parent, NO_VIEW, **others)).root
        learn_names(mount, orders[0])
        plan = stack.enter_context(closing(PlanPublisher(mount, orders[0]))) if way == PLAN else None
        epochs, before = [], _counts(mount)
        for number, order in enumerate(orders):
            if plan is not None:
                plan.publish(*orders[number : number + 2])
            done = readers.read(Way(str(mount)), order, decode=True, plan=plan)
            time.sleep(_SETTLE_S)
            after = _counts(mount)
            epochs.append(DemoEpoch(done.seconds, done.files - (after[0] - before[0]), after[1] - before[1]))
            before = after
        return epochs


def _counts(mount: Path) -> tuple[int, int]:
    """Opens that have waited for the source so far, and bytes that it has sent."""
    metrics = json.loads((mount / ".spiderfs/stats.json").read_bytes())["metrics"]
    return metrics["opens"] - metrics["opens_hit"], metrics["origin_bytes"]
