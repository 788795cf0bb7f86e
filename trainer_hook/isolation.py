"""How the hook is kept apart from the training: its failures, and its use of the global random generators.

Every call from the training's code into the hook's goes through `ErrorBoundary.call`: if the hook fails, that is logged
once and the training goes on. What a signal handler of the training raises meanwhile comes through: a job that is
asked to end must end.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import random
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

log = logging.getLogger("trainer_hook")

P = ParamSpec("P")
R = TypeVar("R")


def by_signal_handler(exc: Exception) -> bool:
    """Whether a signal handler of the program has raised this, at a time when our code ran: it is not our failure.

    Python calls a handler with the frame that it interrupts, and nothing else gives a function its caller's frame.
    """
    frames = [frame for frame, _ in traceback.walk_tb(exc.__traceback__)]
    for interrupted, frame in itertools.pairwise(frames):
        given = list(frame.f_locals.values())
        if any(value is interrupted for one in given for value in (one if isinstance(one, tuple) else (one,))):
            return True
    return False


def callers() -> Iterator[Any]:
    """The `self` of each function that runs in this thread, from the caller's own on: for what a library calls us."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # A generator that calls this stands between the frames.
        if "self" in frame.f_locals:
            yield frame.f_locals["self"]
        frame = frame.f_back


class ErrorBoundary:
    """The boundary of one hook, or of one loader's plans. After the first failure it makes no more calls."""

    def __init__(self) -> None:
        self.broken = False
        # A training may take its batches in one thread and run its model in another.
        self.lock = threading.RLock()
        _boundaries.add(self)
        self._step_aside: weakref.WeakMethod[Callable[[float], object]] | None = None

    def on_failure(self, step_aside: Callable[[float], object]) -> None:
        """Call the method `step_aside` after a failure, with no time to wait; its object is referred to weakly."""
        self._step_aside = weakref.WeakMethod(step_aside)

    def call(self, ours: Callable[P, R], *args: P.args, **named: P.kwargs) -> R | None:
        """Call `ours`, a function of the hook; returns None if it fails, or if an earlier call has failed."""
        with self.lock:
            if self.broken:
                return None
            try:
                return ours(*args, **named)
            except Exception as exc:
                if by_signal_handler(exc):
                    raise
                self.broken = True
                log.warning(
                    "the hook has failed: the training continues without it; please report the error below",
                    exc_info=True,
                )
                step_aside = None if self._step_aside is None else self._step_aside()
                # The hook has failed, so stepping aside may fail too.
                with contextlib.suppress(Exception):
                    if step_aside is not None:
                        step_aside(0.0)
                return None


_boundaries: weakref.WeakSet[ErrorBoundary] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    # Iterators that are alive are freed when the modules that their code uses have gone.
    for boundary in _boundaries:
        boundary.broken = True


def _after_fork() -> None:
    # The thread that held a lock does not exist in the child.
    for boundary in _boundaries:
        boundary.lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Put the global generators of torch (on the CPU), NumPy and Python back into their states at the end."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
