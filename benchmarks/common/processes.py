"""Forked processes that run trio, each at the other end of a pipe."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import signal
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any


def forked(stack: ExitStack, act: Callable[..., Any], *arguments: object) -> Connection:
    """Run `act`, an async function of a pipe and the arguments, in a process that ends with the stack; returns ours."""
    forking = multiprocessing.get_context("fork")
    talk, parent = forking.Pipe()
    process = forking.Process(target=_run, args=(act, parent, *arguments), daemon=True)
    process.start()
    stack.callback(_end, process)
    parent.close()
    return talk


def _run(act: Callable[..., Any], *arguments: object) -> None:
    import trio

    # The benchmark's own process turns it into an interrupt.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    trio.run(act, *arguments)


def _end(process: multiprocessing.process.BaseProcess) -> None:
    process.join(1)
    process.terminate()
    process.join()
