"""Programs that a test starts, which end with it whatever happened."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def program(*command: str | Path, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A program that runs; `options` are those of `subprocess.Popen`.

    When the context ends, its pipes are closed and it is waited for. If the test has failed, it is killed before, with
    all that it has started in its session.
    """
    given = {"start_new_session": True, **options}
    with subprocess.Popen(command, **given) as process:
        try:
            yield process
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                if given["start_new_session"]:
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
            raise


def not_ignoring_interrupts() -> None:
    """Have the programs that this process starts end by SIGINT, as those do that someone starts at a terminal.

    A script's background, nohup and some CI systems have it ignored, and whoever is started with it ignored ignores it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
