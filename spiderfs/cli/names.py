"""`spiderfs warm --names`: walks through a mount as readers do, for the names and attributes alone.

Another process walks than that of the command: no signal ends one that waits in the kernel for a source that hangs, and
Ctrl-C is to end the command at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager

import click

from spiderfs.cli.control_files import printable
from spiderfs.errors import SpiderfsError
from spiderfs.linux.mounts import Mount
from spiderfs.linux.process_table import end_with_parent

# Directories that are listed at a time: 1,000 that are 20 ms away take 2.5 s. One after the other they take 3.8 to
# 5.4 s, though the daemon lists ahead.
_WALKERS = 32

Show = Callable[[str, int, int | None], None]
"""Shows a line, and how many of how many files are done; None: it is not known of how many."""


def look_up(mount: Mount, wanted: Iterator[str], shown: Callable[[], AbstractContextManager[Show]]) -> None:
    """Look up all names at and below these paths, and show how far that is; raises SpiderfsError if some failed."""
    # This import is here because only this way to warm needs it.
    from multiprocessing.connection import Pipe

    heard, told = Pipe(duplex=False)
    parent, walker = os.getpid(), os.fork()
    if walker == 0:
        try:
            # Ctrl-C is for the command, which then ends this process; nobody is to wait for what this one might print.
            os.setsid()
            os.closerange(1, 3)
            if end_with_parent(parent):
                _walk((os.fspath(mount.mountpoint / relative) for relative in wanted), told.send)
        finally:
            os._exit(0)
    told.close()
    names = directories = 0
    try:
        with shown() as show:
            while not isinstance(said := heard.recv(), list):
                if isinstance(said, SpiderfsError):
                    raise said
                names, directories = said
                show(_names(names, directories), names, None)
    except KeyboardInterrupt as exc:
        raise SpiderfsError(f"ended after {_names(names, directories)}: the same command goes on from there") from exc
    except EOFError as exc:
        raise SpiderfsError(f"the process that walked through {mount.mountpoint} has ended: run this again") from exc
    finally:
        os.kill(walker, signal.SIGKILL)
        os.waitpid(walker, os.WNOHANG)
    click.echo(_names(names, directories))
    if said:
        name, reason = said[0]
        raise SpiderfsError(f"{len(said):,} paths could not be looked up, one is {printable(name)} ({reason})")


def _names(names: int, directories: int) -> str:
    return f"{names:,} names in {directories:,} directories"


def _walk(paths: Iterator[str], tell: Callable[[object], object]) -> None:
    """Walk as readers do, many directories at a time.

    Tells how many names in how many directories there are so far, and at the end a list of the paths that could not be
    looked up, each with the reason; or a SpiderfsError.
    """
    names = directories = 0
    failures: list[tuple[str, str]] = []
    below: list[str] = []
    pending: set[Future[tuple[int, list[str] | None]]] = set()
    with ThreadPoolExecutor(_WALKERS) as pool:
        while True:
            try:
                while len(pending) < _WALKERS and (path := below.pop() if below else next(paths, None)):
                    pending.add(pool.submit(_names_at, path))
            except SpiderfsError as exc:
                tell(exc)
                return
            if not pending:
                break
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for each in done:
                try:
                    found, further = each.result()
                except OSError as exc:
                    failures.append((str(exc.filename), exc.strerror or ""))
                    continue
                names += found
                directories += further is not None
                below += further or []
            tell((names, directories))
    tell(failures)


def _names_at(path: str) -> tuple[int, list[str] | None]:
    """How many names there are, and the directories among them; None: the path is a file. Raises OSError."""
    try:
        with os.scandir(path) as found:
            entries = list(found)
    except NotADirectoryError:
        os.lstat(path)
        return 1, None
    return len(entries), [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
