"""Work on several cores: one process for each job, since a small training does not gain from a second thread."""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

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


def time_left(done: int, tasks: int, seconds: float) -> str:
    """How many of the tasks are left, and how long they take if `done` of them took so many seconds."""
    left = tasks - done
    return f"{left} left, some {seconds / done * left / 60:.0f} minutes"


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
