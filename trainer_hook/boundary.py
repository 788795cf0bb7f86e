"""The boundary between a training's code and the hook's: if the hook fails, that is logged once and the training goes
on.

Every call from the training's code into the hook's goes through `Boundary.enter`. What a signal handler of the training
raises meanwhile comes through: a job that is told to end must end.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

log = logging.getLogger("trainer_hook")

P = ParamSpec("P")
R = TypeVar("R")


def by_signal_handler(exc: Exception) -> bool:
    """Whether a signal handler of the program has raised this, at a time when our code ran: it is not our failure.

    Python calls a handler with the frame that it interrupts, and nothing else gives a function its caller's frame.
    """
    frames = [frame for frame, _ in traceback.walk_tb(exc.__traceback__)]
    return any(_is_given(frame, interrupted) for interrupted, frame in itertools.pairwise(frames))


def _is_given(frame: FrameType, interrupted: FrameType) -> bool:
    given = list(frame.f_locals.values())
    return any(value is interrupted for one in given for value in (one if isinstance(one, tuple) else (one,)))


class Boundary:
    """The boundary of one hook, or of one loader's plans. After the first failure it makes no more calls."""

    def __init__(self) -> None:
        self.broken = False
        # A training may take its batches in one thread and run its model in another.
        self._lock = threading.RLock()
        _boundaries.add(self)
        self._step_aside: weakref.WeakMethod[Callable[[], object]] | None = None

    def on_failure(self, step_aside: Callable[[], object]) -> None:
        """Call the method `step_aside` after a failure; the boundary holds only a weak reference to its object."""
        self._step_aside = weakref.WeakMethod(step_aside)

    def enter(self, ours: Callable[P, R], *args: P.args, **named: P.kwargs) -> R | None:
        """Call `ours`, a function of the hook; returns None if it fails, or if an earlier call has failed."""
        with self._lock:
            return self._enter(ours, *args, **named)

    def after_fork(self) -> None:
        """Make a new lock in a forked child: the thread that held the old one does not exist there."""
        self._lock = threading.RLock()

    def _enter(self, ours: Callable[P, R], *args: P.args, **named: P.kwargs) -> R | None:
        if self.broken:
            return None
        try:
            return ours(*args, **named)
        except Exception as exc:
            if by_signal_handler(exc):
                raise
            self.broken = True
            log.warning(
                "the spiderfs hook has failed: the training goes on without it; please report the error below",
                exc_info=True,
            )
            step_aside = None if self._step_aside is None else self._step_aside()
            # The hook has failed, so stepping aside may fail too.
            with contextlib.suppress(Exception):
                if step_aside is not None:
                    step_aside()
            return None


_boundaries: weakref.WeakSet[Boundary] = weakref.WeakSet()


def _after_fork() -> None:
    for boundary in _boundaries:
        boundary.after_fork()


os.register_at_fork(after_in_child=_after_fork)
