"""Takes a profile: mounts the source beside a mount, once for originals and once for each view, and reads there.

The process in which the loader is measured runs `trainer_hook/refurbishing/profiled_loader.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from spiderfs.errors import UsageError
from spiderfs.forms.profile import Cost, Form, Profile, Reads, Record, SourceSpeed
from spiderfs.profiling.private_mount import PrivateMount, await_end, private_mount
from spiderfs.views.recipe import NO_VIEW

# Which samples a pass takes: as the loader makes them, as it has given them before, or these, to be kept again.
KeptSamples = Literal["no", "read", "again"]
# The loader's workers and its main process end with their input, after the batch that they are at.
_PATIENCE_S = 30.0


@dataclass(frozen=True)
class MeasuredPass:
    cost: Cost
    kept_bytes: float
    """Bytes of a sample as the loader has given it, if it was kept so."""


class LoaderProcess:
    """The loader that `module:function` makes of one directory after the other."""

    def __init__(self, process: subprocess.Popen[str], named: str) -> None:
        """Raises UsageError if there is no such function."""
        self._process, self._named = process, named
        # Until it has imported what it needs, SIGINT would make it print where it was.
        self._interrupt = signal.SIGTERM
        self._answer()
        self._interrupt = signal.SIGINT

    def open(self, mount: PrivateMount) -> Loader:
        """The loader of what this mount shows, in place of those that were opened before; raises UsageError."""
        return Loader(self, mount, **self.ask(directory=os.fspath(mount.root)))

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        # If it has ended, its last answer says why.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            line = self._process.stdout.readline()
        except BaseException:
            self._process.send_signal(self._interrupt)
            raise
        if not line:
            raise UsageError(f"--loader {self._named}: its process ended with status {self._process.wait()}; see above")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise UsageError(f"--loader {self._named}: {reply['error']}")
        return reply


@dataclass(frozen=True)
class Loader:
    """One loader of what a mount shows: samples of its data set and of a batch, and whether there are steps."""

    process: LoaderProcess
    mount: PrivateMount
    samples: int
    workers: int
    batch: int
    steps: bool

    def measure(self, first: int, count: int, kept: KeptSamples = "no") -> MeasuredPass:
        """A pass over samples from the `first` on."""
        before_s = self.mount.cpu_s()
        reply = self.process.ask(first=first, count=count, kept=kept)
        mount_s = self.mount.cpu_s() - before_s
        samples = reply["samples"]
        took_s = reply["worker_cpu_s"], reply["worker_wait_s"], mount_s + reply["main_cpu_s"]
        return MeasuredPass(Cost(*(seconds / samples for seconds in took_s)), reply["kept_bytes"] / samples)

    def step_s(self, count: int) -> float:
        """Seconds of a step of the training, on batches of the last pass."""
        return float(self.process.ask(steps=count)["step_s"])


@contextmanager
def loader_process(named: str) -> Iterator[LoaderProcess]:
    """The process for this `module:function`, which is looked for where the user is, as `python -m` does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer_hook.refurbishing.profiled_loader", named],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # Ctrl-C reaches all processes of a terminal's group; this one is ended by its parent
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield LoaderProcess(process, named)
    finally:
        # What it has not read of a question is of no use any more.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        await_end(process, _PATIENCE_S)
        process.stdout.close()


# Files of one look at the source, for each reader; the more readers, the more files.
_FILES_EACH = 12
# More readers count only if they bring this many times the bytes.
_GREW = 1.15
_FIRST_FILES = 16
# Files whose names and bytes are read to see how fast they come.
_FILES, _READ_AGAIN = 2_000, 64
_STEPS = 20
# Equal passes, the fastest of which counts, because others may have used the cores meanwhile. What is not cached needs
# a mount for each.
_PASSES = 3


def files_below(root: Path, most: int) -> list[Path]:
    """The first regular files that are listed, which makes their names known to the mount."""
    return list(islice(_walk(root), most))


def _walk(directory: Path) -> Iterator[Path]:
    with os.scandir(directory) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)
    for entry in listed:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def source_speed(files: list[Path], most_readers: int) -> SourceSpeed:
    """Read files, at least one and each once, by one, two, four readers..., while there are two for each of these."""
    left = iter(files)
    first = list(islice(left, _FIRST_FILES))
    took_s = [_read_all([path], 1).seconds for path in first]
    rates = {1: sum(path.stat().st_size for path in first) / sum(took_s)}
    readers = 2
    while readers <= most_readers and len(chosen := list(islice(left, _FILES_EACH * readers))) >= 2 * readers:
        rates[readers] = _read_all(chosen, readers).bytes_per_s
        readers *= 2
    most = max(rates.values())
    useful = next(readers for readers, rate in rates.items() if rate * _GREW >= most)
    return SourceSpeed(statistics.median(took_s), useful, most)


def cached_reads(files: list[Path], readers: int) -> Reads:
    _read_all(files, readers)  # now they are cached
    return _read_all(files, readers)


def _read_all(files: list[Path], readers: int) -> Reads:
    begin_s = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        total = sum(pool.map(lambda path: len(path.read_bytes()), files))
    return Reads(len(files), total, time.perf_counter() - begin_s, readers)


@dataclass(frozen=True)
class Wanted:
    """What to measure: the loader as `module:function`, the views, and how many samples at most.

    `total` is how many samples the training has; None: those of the loader, or of the source if there is no loader.
    `rate` is how many samples a second its steps take, if the loader comes without a step. `network` and `model_bytes`
    are as in `Profile`.
    """

    loader: str | None
    views: tuple[str, ...]
    samples: int
    planned: bool
    uses: float
    total: int | None = None
    nodes: int = 1
    rate: float | None = None
    network: float | None = None
    model_bytes: float = 0.0


@dataclass(frozen=True)
class Speeds:
    """What is known of a mount without a loader; `samples` is how many the training has."""

    source: SourceSpeed
    reads: dict[str, Reads]
    """Of cached files in each form: by the view's name, or NO_VIEW for originals."""
    samples: int

    def record(self, found: Profile | None) -> Record:
        """What later mounts find of this, and of a profile, if a loader was measured."""
        sizes = {name: reads.bytes / reads.files for name, reads in self.reads.items()}
        if found is not None:
            sizes = {NO_VIEW: found.encoded.sample_bytes}
            sizes |= {view: form.sample_bytes for view, form in found.views.items()}
        return Record(self.samples, sizes, found)


def measure(
    options: Mapping[str, str], above: Path, cache_bytes: float, wanted: Wanted, say: Callable[[str], None]
) -> tuple[Speeds, Profile | None]:
    """The speeds of the mount with these options, and with a loader its profile.

    `say` is called with what is measured next. Raises UsageError for a loader that cannot be measured and a source
    without files, MountError if the source cannot be mounted beside.
    """
    with ExitStack() as stack:
        process = loader = None
        uncached: list[MeasuredPass] = []
        if wanted.loader is not None:
            say("the loader")
            process = stack.enter_context(loader_process(wanted.loader))
            for number in range(_PASSES):
                with ExitStack() as only:
                    last = number == _PASSES - 1
                    mount = (stack if last else only).enter_context(private_mount(options, above, NO_VIEW))
                    files_below(mount.root, _FILES)  # their names are known to a mount that has been read before
                    loader = process.open(mount)
                    first, count = _samples(loader, wanted.samples)
                    _warm_up(loader, first)
                    uncached.append(loader.measure(first, count))
        say("the source")
        with private_mount(options, above, NO_VIEW) as mount:
            if not (files := files_below(mount.root, _FILES)):
                raise UsageError(f"{options['source']} has no files to read: name a mount of a data set")
            source = source_speed(files, int(options["fetches"]))
            samples = wanted.total or (sum(1 for _ in _walk(mount.root)) if loader is None else loader.samples)
            readers = 1 if loader is None else max(1, loader.workers)
            speeds = Speeds(source, {NO_VIEW: cached_reads(files[:_READ_AGAIN], readers)}, samples)
        say("originals")
        found = None if loader is None else _originals(loader, _fastest(uncached).cost, speeds, cache_bytes, wanted)
        for view in wanted.views:
            say(f"the view {view}")
            with private_mount(options, above, view) as mount:
                speeds.reads[view] = cached_reads(files_below(mount.root, _READ_AGAIN), readers)
                if process is not None and found is not None:
                    loader = process.open(mount)
                    first, count = _samples(loader, wanted.samples)
                    _warm_up(loader, first)
                    loader.measure(first, count)  # makes the views
                    cost = _repeated(loader, first, count).cost
                    found.views[view] = Form(mount.bytes_of_a_sample(), speeds.reads[view], cost)
    return speeds, found


def _originals(loader: Loader, uncached: Cost, speeds: Speeds, cache_bytes: float, wanted: Wanted) -> Profile:
    """A profile without views, by a loader whose samples are cached; `uncached` is what they took before that."""
    first, count = _samples(loader, wanted.samples)
    encoded = _repeated(loader, first, count)
    step_s = loader.step_s(_STEPS) if loader.steps else None if wanted.rate is None else loader.batch / wanted.rate
    if not (sample_bytes := loader.mount.bytes_of_a_sample()):
        raise UsageError(
            "the loader has read nothing from the mount: let its function give a loader of files with content below the"
            " directory that it gets"
        )
    loader.measure(first, count, "again")  # makes them
    augmented = _repeated(loader, first, count, "read")
    kept_again = _repeated(loader, first, count, "again").cost
    return Profile(
        cache_bytes=cache_bytes,
        cores=len(os.sched_getaffinity(0)),
        source=speeds.source,
        samples=speeds.samples,
        workers=loader.workers,
        batch=loader.batch,
        step_s=step_s,
        uncached=uncached,
        encoded=Form(sample_bytes, speeds.reads[NO_VIEW], encoded.cost),
        augmented=Form(augmented.kept_bytes, None, augmented.cost),
        # What is kept is sent, and not waited for, unless sample follows on sample as here.
        keeping=Cost(
            max(0.0, kept_again.cpu_s - augmented.cost.cpu_s),
            0.0,
            max(0.0, kept_again.other_cpu_s - augmented.cost.other_cpu_s),
        ),
        planned=wanted.planned,
        uses=wanted.uses,
        nodes=wanted.nodes,
        network_bandwidth=wanted.network,
        model_bytes=wanted.model_bytes,
    )


def _samples(loader: Loader, wanted: int) -> tuple[int, int]:
    """Where the samples begin that are measured, and how many there are; those before warm the loader up."""
    before = min(2 * loader.batch, loader.samples // 4)
    return before, min(wanted, loader.samples - before)


def _warm_up(loader: Loader, samples: int) -> None:
    if samples:
        loader.measure(0, samples)


def _repeated(loader: Loader, first: int, count: int, kept: KeptSamples = "no") -> MeasuredPass:
    return _fastest([loader.measure(first, count, kept) for _ in range(_PASSES)])


def _fastest(passes: list[MeasuredPass]) -> MeasuredPass:
    return min(passes, key=lambda taken: taken.cost.cpu_s + taken.cost.wait_s)
