"""Trainings on several cores, one process for each: a small training does not gain from a second thread."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

from rich.console import Console

from benchmarks.common.results import machine, save

T = TypeVar("T")
R = TypeVar("R")
P = TypeVar("P")


def side_by_side(prepare: Callable[[], P], work: Callable[[P, T], R], tasks: Iterable[T], jobs: int) -> Iterator[R]:
    """The result of `work(prepared, task)` for each task, as they come; at most `jobs` tasks are worked on at a time.

    With one job the work is done here, in order. Otherwise each process calls `prepare` once for itself, and pickle
    must be able to carry both functions, tasks and results. If the caller stops, the processes end with it.
    """
    if jobs == 1:
        prepared = prepare()
        for task in tasks:
            yield work(prepared, task)
        return
    # A forked process would inherit locks that threads of torch hold.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(jobs, context, _begin, (prepare,))
    try:
        for done in as_completed([executor.submit(_do, work, task) for task in tasks]):
            yield done.result()
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def counted(results: Iterator[R], tasks: Sequence[T], console: Console) -> Iterator[R]:
    """The results of these tasks, and after each of them how long the others take."""
    began = time.monotonic()
    for number, result in enumerate(results, 1):
        yield result
        left = len(tasks) - number
        minutes = (time.monotonic() - began) / number * left / 60
        console.print(f"{left} left, some {minutes:.0f} minutes", style="dim", highlight=False)


class Task(NamedTuple):
    seed: int
    configuration: str


def measure_seeds(
    arguments: argparse.Namespace,
    console: Console,
    configurations: Mapping[str, Any],
    common: dict[str, Any],
    prepare: Callable[[], P],
    work: Callable[[P, Task], Any],
    show: Callable[[dict[str, Any]], None],
) -> None:
    """Measure all seeds of the chosen configurations, and show the result; an interrupted one shows what it has.

    `common` is what all runs of a file must have in common, beside the extent. What the file of --json has is not
    measured again; raises RuntimeError if that was measured with other settings.
    """
    identity = asdict(arguments.extent) | {"seeds": 0} | common
    known: dict[str, Any] = json.loads(json.dumps({name: asdict(of) for name, of in configurations.items()}))
    result: dict[str, Any] = {"extent": identity, "configurations": {}, "runs": []}
    if (path := arguments.json) is not None and path.exists():
        result = json.loads(path.read_text())
        if result["extent"] != identity:
            raise RuntimeError(f"{path} holds runs of another extent: {result['extent']}; choose another file")
        if other := [name for name, saved in result["configurations"].items() if known.get(name) != saved]:
            raise RuntimeError(f"{path} holds runs of another configuration named {other[0]}; choose another file")
    done = {Task(run["seed"], run["configuration"]) for run in result["runs"]}
    asked = itertools.starmap(Task, itertools.product(range(1, arguments.extent.seeds + 1), arguments.configs))
    tasks = [task for task in asked if task not in done]
    console.print(f"{len(done)} runs are there already, {len(tasks)} to do", highlight=False)
    try:
        for run in counted(side_by_side(prepare, work, tasks, arguments.jobs), tasks, console):
            result["runs"].append(asdict(run))
            result["configurations"][run.configuration] = known[run.configuration]
            save(path, {"machine": machine()} | result)
            text = f"{run.configuration}, seed {run.seed}: top-1 {run.top1:.1%} ({run.seconds:.0f} s)"
            console.print(text, highlight=False)
    finally:
        if result["runs"]:
            show(result)


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """Add --jobs N, the number of trainings at a time."""
    parser.add_argument(
        "--jobs", type=_positive, default=1, metavar="N", help="train so many side by side (default %(default)s)"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("choose 1 or more")
    return number


# In a process of its own: what prepares, and then what it has prepared.
_preparing: list[Callable[[], Any]] = []


def _begin(prepare: Callable[[], Any]) -> None:
    # Ctrl-C reaches every process of the terminal; the one that began them ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _preparing[:] = [functools.cache(prepare)]


def _do(work: Callable[[Any, T], R], task: T) -> R:
    return work(_preparing[0](), task)
