"""What a loader's worker does for one sample: the program that `spiderfs profile` runs beside a mount.

`python -m trainer_hook.refurbishing.profiled_loader MODULE:FUNCTION` answers questions, a line of JSON each, until its
input ends. The first answer, to no question, says that there is such a function. The question with a directory calls
the function with it. The function returns the loader of a training that reads there, or that and the function which
does one step of the training with a batch. The other questions ask for a pass over some samples of that loader, in an
order that is the same for each directory, or for steps. Whatever the training prints goes to standard error.

A pass uses one worker, whatever the loader has. Its waits are those for bytes: time in which the worker could have run,
but other processes had the cores, is left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainer_hook.refurbishing.stores import Missing, MountStore, PartialStore, StoreUnusable

log = logging.getLogger("trainer_hook")

# A training's transforms draw random numbers; which samples are measured is the same each time.
_ORDER_SEED = 0
# The first steps of a device compile, and find out which algorithms are fast.
_STEPS_BEFORE = 2
_SCHEDULED = Path("/proc/thread-self/schedstat")
_PR_SET_PDEATHSIG = 1
# The name of what is kept, and more generations of it than there are passes.
_STORE, _GENERATIONS = "measuring", 1 << 10


class LoaderUnusable(Exception):
    """The loader cannot be measured; the text says why, in one line."""


class LoaderTimes(NamedTuple):
    """What one worker and the training's main process took for some samples, in seconds."""

    samples: int
    elapsed_s: float
    worker_cpu_s: float
    worker_wait_s: float
    main_cpu_s: float
    kept_bytes: int
    """How many bytes the samples take as the loader gives them, if they were kept so."""


class _Clock:
    """The times of the process that makes samples: a loader's worker, or the measuring process itself."""

    def __init__(self) -> None:
        self.begin_cpu_s: float | None = None
        self.waited_s = 0.0

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        if self.begin_cpu_s is None:
            self.begin_cpu_s = time.process_time()
        # The wall clock is the outer one: who is put aside between two looks has then not waited for less than it did.
        wall_s, ran_s = time.perf_counter(), _ran_or_queued_s()
        yield
        ran_s = _ran_or_queued_s() - ran_s
        self.waited_s += time.perf_counter() - wall_s - ran_s


def _ran_or_queued_s() -> float:
    """How long this thread has run, or could have run if a core had been free: see proc_pid_schedstat(5)."""
    try:
        queued_ns = int(_SCHEDULED.read_text().split()[1])
    except OSError:
        # A kernel without CONFIG_SCHED_INFO does not report it.
        queued_ns = 0
    return time.thread_time() + queued_ns / 1e9


_clock = _Clock()


class _Kept:
    """Samples as the loader gives them, kept by a mount as `refurbish` has it keep them; or else in memory."""

    def __init__(self, mount: str | None, samples: int) -> None:
        self._store: MountStore | PartialStore
        self._mount = mount
        try:
            if mount is None:
                raise StoreUnusable("there is none")
            self._store = MountStore(Path(mount), [mount] * samples, _STORE, 0)
        except StoreUnusable:
            self._use_memory()
        self._generation = 0

    def _use_memory(self) -> None:
        self._mount, self._store = None, PartialStore.in_memory()

    def all_put(self, indices: list[int]) -> bool:
        """Go on with what was put; if the mount has not taken all of it, with nothing, in memory, and returns False."""
        if self._mount is not None and self._section()["entries"] < len(indices):
            self.close()
            self._use_memory()
            return False
        self._generation += 1
        return True

    def sample_bytes(self, indices: list[int]) -> int:
        if self._mount is not None:
            section = self._section()
            return round(len(indices) * section["bytes"] / section["entries"])
        assert isinstance(self._store, PartialStore)
        return sum((self._store.directory / str(index)).stat().st_size for index in indices)

    def _section(self) -> dict[str, int]:
        stats = json.loads(Path(f"{self._mount}/.spiderfs/stats.json").read_bytes())
        section: dict[str, int] = stats["sections"]["partials"]
        return section

    def begin(self) -> None:
        """Do what a worker does once: it connects to the mount, and opens its cache."""
        if isinstance(self._store, MountStore):
            with contextlib.suppress(StoreUnusable):
                self._store.connect()
        with contextlib.suppress(Missing):
            self.get(0)

    def get(self, index: int) -> Any:
        """The sample as it was put in the last pass that put some; raises Missing."""
        return self._store.get(index, self._number(index))

    def put(self, index: int, sample: Any) -> None:
        """Keep a sample in the place of its earlier generation."""
        self._store.put(index, self._number(index) + 1, sample)

    def _number(self, index: int) -> int:
        # A mount tells samples apart by their files, and a loader does not report which file it makes a sample of.
        return index * _GENERATIONS + self._generation

    def end(self) -> None:
        if isinstance(self._store, MountStore):
            self._store.settle()

    def close(self) -> None:
        """Delete the samples in memory; the program that made the mount deletes it as a whole."""
        self._store.close()


@dataclass
class _Chosen(Dataset[Any]):
    """Some samples of a data set: those in `kept`, if it is given. `renewed` ones get their next generation."""

    whole: Any
    indices: list[int]
    kept: _Kept | None
    renewed: bool

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> Any:
        index = self.indices[number]
        if self.kept is None:
            with _clock.working():
                return self.whole[index]
        if number == 0:
            self.kept.begin()
        with _clock.working():
            try:
                sample = self.kept.get(index)
            except Missing:
                sample = self.whole[index]
            if self.renewed:
                self.kept.put(index, sample)
        if number == len(self) - 1:
            self.kept.end()
        return sample


@dataclass
class _Collate:
    """What a loader makes of a batch's samples, and what the worker has taken until then; `alone`: it batches none."""

    inner: Callable[[Any], Any]
    alone: bool

    def __call__(self, samples: Any) -> tuple[Any, float, float]:
        with _clock.working():
            batch = self.inner(samples[0] if self.alone else samples)
        assert _clock.begin_cpu_s is not None
        # All threads of the process: one of them hands batches to the training.
        return batch, time.process_time() - _clock.begin_cpu_s, _clock.waited_s


class Measuring:
    """The passes over one loader. Raises LoaderUnusable if it has no samples that can be asked for by their indices."""

    def __init__(self, loader: Any, step: Callable[[Any], object] | None, mount: str | None = None) -> None:
        """`mount` keeps samples as the loader gives them; None: they are kept in memory."""
        if not isinstance(loader, DataLoader):
            raise LoaderUnusable(
                f"a {type(loader).__name__} is no torch.utils.data.DataLoader: have the function return one"
            )
        if isinstance(loader.dataset, IterableDataset):
            raise LoaderUnusable("an iterable data set has no indices to measure samples by: use one with __getitem__")
        self._loader = loader
        self._step = step
        self._batches: list[Any] = []
        samples = len(cast(Any, loader.dataset))
        sampler = loader.batch_sampler
        if not samples or not len(loader):
            raise LoaderUnusable("the loader gives no batches: its data set has no samples, or fewer than one batch")
        self._batch = 1 if sampler is None else len(next(iter(sampler)))
        generator = torch.Generator().manual_seed(_ORDER_SEED)
        self._order = torch.randperm(samples, generator=generator).tolist()
        self._mount = mount
        self._kept: _Kept | None = None

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "samples": len(self._order),
            "workers": self._loader.num_workers,
            "batch": self._batch,
            "steps": self._step is not None,
        }

    def measure(self, first: int, count: int, kept: str) -> LoaderTimes:
        """A pass over the samples at these places of the order.

        With `kept` "no", the loader makes them; with "read", they come as it has given them in an earlier pass, and
        with "again" they are kept once more then, or for the first time.
        """
        global _clock
        loader, chosen = self._loader, self._order[first : first + count]
        if kept != "no" and self._kept is None:
            self._kept = _Kept(self._mount, len(self._order))
        keeper = None if kept == "no" else self._kept
        dataset = _Chosen(loader.dataset, chosen, keeper, kept == "again")
        arguments: dict[str, Any] = {"num_workers": 0}
        if loader.num_workers:
            arguments = {"num_workers": 1, "multiprocessing_context": loader.multiprocessing_context}
            arguments |= {"worker_init_fn": loader.worker_init_fn, "timeout": loader.timeout}
        collate = _Collate(cast(Any, loader.collate_fn), alone=loader.batch_sampler is None)
        timed: DataLoader[Any] = DataLoader(dataset, batch_size=self._batch, collate_fn=collate, **arguments)
        _clock = _Clock()
        self._batches.clear()
        begin_s, cpu_s = time.perf_counter(), time.process_time()
        worker_cpu_s = waited_s = 0.0
        for batch, until_now_s, waited_until_now_s in timed:
            worker_cpu_s, waited_s = until_now_s, waited_until_now_s
            if len(self._batches) <= _STEPS_BEFORE:
                self._batches.append(batch)
        main_cpu_s = time.process_time() - cpu_s if loader.num_workers else 0.0
        if keeper is not None and kept == "again" and not keeper.all_put(chosen):
            return self.measure(first, count, kept)
        size = 0 if keeper is None else keeper.sample_bytes(chosen)
        return LoaderTimes(
            len(chosen), time.perf_counter() - begin_s, worker_cpu_s, max(0.0, waited_s), main_cpu_s, size
        )

    def steps(self, count: int) -> float:
        """The mean of `count` steps of the training, in seconds, on the first batches of the last pass."""
        assert self._step is not None
        for batch in islice(self._batches, _STEPS_BEFORE):
            self._step(batch)
        _wait_for_device()
        begin_s = time.perf_counter()
        for number in range(count):
            self._step(self._batches[number % len(self._batches)])
        _wait_for_device()
        return (time.perf_counter() - begin_s) / count

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def function_named(named: str) -> Callable[[str], Any]:
    """The function `module:name`; raises LoaderUnusable."""
    module_name, _, name = named.partition(":")
    if not module_name or not name:
        raise LoaderUnusable("write it as module:function, as in train:make_loader")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{module_name}.".startswith(f"{exc.name}."):
            raise LoaderUnusable(f"importing {module_name} failed: {exc}") from exc
        raise LoaderUnusable(
            f"there is no module {exc.name} here: run the command where it is, or set PYTHONPATH"
        ) from exc
    except Exception as exc:
        raise LoaderUnusable(f"importing {module_name} failed: {_in_words(exc)}") from exc
    found = getattr(module, name, None)
    if not callable(found):
        raise LoaderUnusable(
            f"{module_name} has no function {name}: name one that takes a directory and returns a loader"
        )
    return cast("Callable[[str], Any]", found)


def loader_of(make: Callable[[str], Any], directory: str) -> Measuring:
    """What the function makes of a directory; raises LoaderUnusable."""
    try:
        made = make(directory)
    except Exception as exc:
        raise LoaderUnusable(f"the function failed for the directory {directory}: {_in_words(exc)}") from exc
    if not isinstance(made, tuple):
        return Measuring(made, None, directory)
    if len(made) != 2 or not callable(made[1]):
        raise LoaderUnusable("the function gives a tuple that is not (loader, step), where step takes a batch")
    return Measuring(*made, directory)


def _in_words(exc: Exception) -> str:
    # A loader's worker sends its error as a traceback of many lines; the last one says what is wrong.
    lines = str(exc).strip().splitlines()
    return f"{type(exc).__name__}: {lines[-1]}" if lines else type(exc).__name__


def main(named: str) -> None:
    """Answer until standard input ends, or until there is nothing to measure."""
    measuring = None
    # The program that asks may be killed while the training's code runs, which looks for no end of the questions.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    with os.fdopen(os.dup(0)) as questions, os.fdopen(os.dup(1), "w", buffering=1) as answers:
        # The training must neither read a question nor print an answer: the program that asks would wait for ever.
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        try:
            make = function_named(named)
            print(json.dumps({}), file=answers)
            for line in questions:
                asked = json.loads(line)
                if "directory" in asked:
                    if measuring is not None:
                        measuring.close()
                    measuring = loader_of(make, asked["directory"])
                    answer = measuring.facts
                elif measuring is not None and "steps" in asked:
                    answer = {"step_s": measuring.steps(asked["steps"])}
                else:
                    assert measuring is not None
                    answer = measuring.measure(asked["first"], asked["count"], asked["kept"])._asdict()
                print(json.dumps(answer), file=answers)
        except KeyboardInterrupt:
            log.debug("the program that asks has ended")
        except Exception as exc:
            print(json.dumps({"error": str(exc) if isinstance(exc, LoaderUnusable) else _in_words(exc)}), file=answers)
        finally:
            if measuring is not None:
                measuring.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
