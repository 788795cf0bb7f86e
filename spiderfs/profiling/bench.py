"""Compares ways to read a source as a training does: directly, by an LRU cache, by a plan, and as views.

An **epoch** reads a random choice of the files once, in random order, as many as come in some seconds. The caches hold
the share of these files that the real one would hold of all, and have seen an epoch before. Each pass begins with the
files out of the kernel's memory, as they are where the data are larger than that.
"""

from __future__ import annotations

import os
import random
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from spiderfs.errors import UsageError
from spiderfs.options.model import Options
from spiderfs.options.units import round_size
from spiderfs.profiling.bench_readers import BATCH, File, Pass, Planned, Readers, Way, drop
from spiderfs.profiling.private_mount import private_mount
from spiderfs.sources.faults import FaultState, SlowSource
from spiderfs.sources.open import is_url, open_source
from spiderfs.sources.source import Source
from spiderfs.views.recipe import NO_VIEW

LRU, PLAN, VIEWS = "lru", "plan", ("jpeg256", "bmp256")
# All passes together stay below two minutes.
_LISTING_S, _SPEED_S, _EPOCH_S, _MOST_S = 10.0, 3.0, 8.0, 12.0
_MOST_LISTED, _MOST_FILES, _COPIED, _COPIED_BYTES = 200_000, 20_000, 256, 64 << 20
# A way counts as faster by so much, and a source as what limits below that share of what the loader can do.
_GAIN, _LIMITS = 1.15, 0.9


class Listing(NamedTuple):
    """Small files that were found; `whole` if these are all."""

    files: list[File]
    bytes: int
    whole: bool


@dataclass(frozen=True)
class Found:
    """What was measured; `local` is the loader on files in memory, `source` the source without decoding."""

    named: str
    files_seen: int
    bytes_seen: int
    whole: bool
    workers: int
    share: float
    capacity: str
    images: bool
    files_read: int
    local: Pass
    source: Pass
    direct: Pass
    mounted: dict[str, Pass] = field(default_factory=dict)

    @property
    def noun(self) -> str:
        return "images" if self.images else "files"

    @property
    def waits(self) -> bool:
        """Whether the loader waits for the source."""
        return min(self.direct.per_s, self.source.per_s) < _LIMITS * self.local.per_s

    def best(self) -> str | None:
        """The way to mount that is worth it; None: no way is."""
        way = max(self.mounted, key=lambda name: self.mounted[name].per_s)
        if self.mounted[way].per_s < _GAIN * self.direct.per_s:
            return None
        # A plan needs a line in the training, and a view changes the images: each has to bring more.
        for simpler in (LRU, PLAN):
            if simpler in self.mounted and self.mounted[way].per_s < _GAIN * self.mounted[simpler].per_s:
                return simpler
        return way

    def verdict(self) -> str:
        """What to mount with, and why."""
        local, source = _rate(self.local.per_s), _rate(self.source.per_s)
        work = "decodes" if self.images else "reads"
        why = f"your loader {work} at {local} {self.noun}/s, the source gives {source}"
        way = self.best()
        if way is None:
            most = _rate(max(done.per_s for done in self.mounted.values()))
            rest = "read the source directly" if not self.waits else "a larger cache may help, or more loader workers"
            return f"{why}: {rest}; a mount would give {most} in place of {_rate(self.direct.per_s)}"
        view = f",view={way}" if way in VIEWS else ""
        plan = " and give the training trainer_hook.plan()" if way != LRU else ""
        return (
            f"{why}: mount with -o immutable,capacity={self.capacity}{view}{plan}; expect"
            f" {_rate(self.mounted[way].per_s)} {self.noun}/s in place of {_rate(self.direct.per_s)}"
            + (f", and an LRU cache gives {_rate(self.mounted[LRU].per_s)}" if way != LRU else "")
        )


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.1f}"


def bench(options: Options, workers: int, say: Callable[[str], None]) -> Found:
    """Measure all ways; `say` hears what is done next.

    Raises UsageError for a source without small files, SpiderfsError or OSError where one cannot be read.
    """
    named, settings = str(options.source), options.store_settings
    if options.archives:
        raise UsageError(
            "bench compares with files read directly, and members of archives are none: leave out archives"
        )
    with tempfile.TemporaryDirectory(prefix="spiderfs-bench-") as scratch, Readers(workers) as readers:
        faults = ""
        if any(options.source_faults().values()):
            faults = f"{scratch}/faults"
            FaultState.create(faults, **options.source_faults()).close()
        direct = Way("" if is_url(named) else named, named, settings, faults)
        source: Source = open_source(named, settings)
        source = SlowSource(source, FaultState.open(faults)) if faults else source
        say("listing files")
        listing = list_files(source, options.sample_max_bytes)
        files = listing.files
        if len(files) < BATCH:
            raise UsageError(
                f"{named} has {len(files)} files of up to {round_size(options.sample_max_bytes)}, too few to measure:"
                " name the directory of the training's data"
            )
        share = cached_share(options, listing)
        random.Random(0).shuffle(files)
        say("the source alone")
        cold = _forget(direct, files[:_MOST_FILES], _SPEED_S)
        alone = readers.read(direct, files[:cold], decode=False, limit_s=_SPEED_S)
        say("the loader alone")
        copied = _copy(source, files, Path(scratch))
        kept = Way(scratch, kept=True)
        readers.read(kept, copied, decode=True, limit_s=_SPEED_S)
        local = readers.read(kept, copied * (_MOST_FILES // len(copied)), decode=True, limit_s=_SPEED_S)
        images = local.decoded * 2 > local.files
        count = int(min(local.per_s, alone.per_s) * _EPOCH_S)
        epoch = files[: min(max(count, 4 * BATCH), _MOST_FILES)]
        say("directly from the source")
        _forget(direct, epoch)
        read = readers.read(direct, epoch, images, limit_s=_MOST_S)
        known = (named, len(files), listing.bytes, listing.whole, workers, share, str(options.capacity))
        found = Found(*known, images, len(epoch), local, alone, read)
        _mounted(found, options, readers, direct, epoch, say)
        return found


def cached_share(options: Options, listing: Listing) -> float:
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


def _mounted(
    found: Found,
    options: Options,
    readers: Readers,
    direct: Way,
    files: Sequence[File],
    say: Callable[[str], None],
) -> None:
    given = {row.name: row.value for row in options.as_table()}
    capacity = str(max(1 << 20, int(found.share * sum(file.version.size for file in files))))
    for way in (LRU, PLAN, *VIEWS):
        # A view spares decoding; a loader that waits for the source even with a plan gains by fewer bytes alone.
        if way in VIEWS and (not found.images or found.mounted[PLAN].per_s < found.local.per_s / 2):
            continue
        say({LRU: "an LRU cache", PLAN: "a plan"}.get(way, f"a plan with the view {way}"))
        policy = "lru" if way == LRU else "spider"
        view = way if way in VIEWS else NO_VIEW
        with private_mount(given, options.cache_dir.parent, view, policy=policy, capacity=capacity) as mount:
            _learn_names(mount.root, files)
            through = Way(str(mount.root))
            orders = [random.Random(seed).sample(files, len(files)) for seed in (1, 2)]
            # What a cache holds after an epoch follows from its end; of views all were made.
            before = orders[0] if way in VIEWS else orders[0][-int(min(1.0, found.share + 0.1) * len(files)) :]
            if way == LRU:
                readers.read(through, before, decode=False, limit_s=_MOST_S)
                _forget(direct, files)
                found.mounted[way] = readers.read(through, orders[1], found.images, limit_s=_MOST_S)
                continue
            with closing(Planned(mount.root, files)) as plan:
                plan.publish(before, orders[1])
                readers.read(through, before, decode=False, plan=plan, limit_s=_MOST_S)
                _forget(direct, files)
                plan.publish(orders[1])
                found.mounted[way] = readers.read(through, orders[1], found.images, plan, limit_s=_MOST_S)


def list_files(source: Source, most_bytes: int) -> Listing:
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
    return Listing(files, total, not directories)


def _copy(source: Source, files: Sequence[File], scratch: Path) -> list[File]:
    """Some of the files in a directory of their own, by numbers."""

    def copy(numbered: tuple[int, File]) -> File:
        number, file = numbered
        content = source.read(file.path, 0, file.version.size, file.version)
        (scratch / str(number)).write_bytes(content)
        return file._replace(path=b"%d" % number)

    chosen, size = [], 0
    for numbered in enumerate(files[:_COPIED]):
        chosen.append(numbered)
        size += numbered[1].version.size
        if size > _COPIED_BYTES:
            break
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(copy, chosen))


def _forget(direct: Way, files: Sequence[File], limit_s: float = _MOST_S) -> int:
    """Have the kernel forget what it has of these files at the source; returns how many before the time was over."""
    begun_s, count = time.perf_counter(), 0
    with ThreadPoolExecutor(16) as pool:
        while direct.root and count < len(files) and time.perf_counter() - begun_s < limit_s:
            some = [os.path.join(os.fsencode(direct.root), file.path) for file in files[count : count + _COPIED]]
            count += len(list(pool.map(drop, some)))
    return count if direct.root else len(files)


def _learn_names(root: Path, files: Sequence[File]) -> None:
    """List all directories of the files, as a data set does before it is read."""
    for directory in {os.path.dirname(file.path) for file in files}:
        with os.scandir(os.path.join(os.fsencode(root), directory)) as names:
            for _ in names:
                pass
