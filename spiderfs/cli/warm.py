"""`spiderfs warm` has the daemon fetch files beforehand, `pin` keep them, `evict` drop them.

They write to the control files of these names and read there, as any program can. However `warm` or `pin` ends before
the files are there, by Ctrl-C or an error, it ends the daemon's work too, unless `warm` was called with --detach.

`spiderfs warm --names` walks through a mount as readers do, for the names and attributes alone. Another process walks
than that of the command: no signal ends one that waits in the kernel for a source that hangs, and Ctrl-C is to end the
command at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from glob import iglob
from typing import Any

import click

from spiderfs.cli import control_files
from spiderfs.cli.control_files import find_mount, place_of, printable, read_control, read_stats, warn, write_control
from spiderfs.errors import ConfigError, MountError, SpiderfsError
from spiderfs.linux.mounts import CONTROL_DIR, FAILURE_XATTR, Mount, within
from spiderfs.linux.process_table import end_with_parent, ended_by_signals
from spiderfs.options.units import counted, round_size
from spiderfs.protocol.requests import SCHEME
from spiderfs.shared.escapes import escaped
from spiderfs.shared.warming import Warming

# Less than the kernel's largest write, so that the daemon gets each piece of a list whole.
_PIECE_BYTES = 512 << 10


def wanted_paths(
    mount: Mount, mountpoint: str, paths: Iterable[str], globs: bool = True, gone: list[str] | None = None
) -> Iterator[str]:
    """The paths, and with `globs` globs, relative to the mount; those without a file in `gone`. Raises ConfigError."""
    # Of a source that hangs one path is asked, and not each: every question takes seconds.
    answers = True
    for path in paths:
        if path == "-":
            name = ""
            for line in () if sys.stdin is None else sys.stdin.buffer:
                if line != b"\n":
                    name = os.fsdecode(line.rstrip(b"\n"))
                    yield _relative(mount, mountpoint, name)
            if not name:
                raise ConfigError("there is no path on the standard input: write one a line")
        else:
            relative = _relative(mount, mountpoint, path)
            is_glob = globs and any(letter in relative for letter in "*?[")
            if is_glob or not answers:
                yield relative
            elif (found := _at_end_of_links(mount, relative)) is not None:
                there, answers = found
                yield there
            elif gone is None:
                raise ConfigError(f"{place_of(mount)} has no file or directory {relative}: check the path")
            else:
                gone.append(relative)


def _relative(mount: Mount, mountpoint: str, path: str) -> str:
    relative = path
    for root in (str(mount.mountpoint), place_of(mount), os.path.abspath(mountpoint)):
        if path == root or path.startswith(root.rstrip("/") + "/"):
            relative = path[len(root) :].lstrip("/")
            break
    relative = os.path.normpath(relative)
    if relative.startswith("/") or relative.split("/")[0] == "..":
        raise ConfigError(f"{path} lies outside of the mount at {place_of(mount)}: write a path below it")
    if "\n" in relative:
        raise ConfigError(f"{path} has a newline, and a list has one path a line: write ? in its place")
    return relative


def _at_end_of_links(mount: Mount, relative: str) -> tuple[str, bool] | None:
    """The path of the file that a path means, which must be one of the mount, and whether that was answered in time.

    None if there is no such file; raises ConfigError.
    """
    path = f"{mount.mountpoint}/{relative}"
    if mount.fstype == control_files.SERVED:
        from spiderfs.client.served import Served

        served = Served(mount.mountpoint.name, control_files.ANSWER_TIMEOUT_S)
        return (relative, True) if served.exists(relative) else None
    try:
        found = within(control_files.ANSWER_TIMEOUT_S, lambda: os.path.realpath(path, strict=True))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        # The source may answer the daemon, and if not the daemon says so.
        return relative, not isinstance(exc, TimeoutError)
    return _relative(mount, str(mount.mountpoint), found), True


def any_file(mount: Mount, wanted: Sequence[str]) -> bool:
    """Whether one of these paths and globs means a file of the mount, or the source does not say so in time."""
    if mount.fstype == control_files.SERVED:
        return True  # the paths were looked up

    def found() -> bool:
        root = mount.mountpoint
        return any(
            os.path.lexists(root / one) or any(iglob(one, root_dir=root, recursive=True, include_hidden=True))
            for one in wanted
        )

    try:
        return within(control_files.ANSWER_TIMEOUT_S, found)
    except TimeoutError:
        return True


def pieces(lines: Iterable[str]) -> Iterator[str]:
    """The lines, as many at a time as the daemon takes at once."""
    piece, size = "", 0
    for line in lines:
        piece += f"{line}\n"
        size += len(os.fsencode(line)) + 1
        if size >= _PIECE_BYTES:
            yield piece
            piece, size = "", 0
    if piece:
        yield piece


# Directories that are listed at a time: 1,000 that are 20 ms away take 2.5 s. One after the other they take 3.8 to
# 5.4 s, though the daemon lists ahead.
_WALKERS = 32

Show = Callable[[str, int, int | None], None]
"""Shows a line, and how many of how many files are done (None: the total is unknown)."""


def look_up(mount: Mount, wanted: Iterator[str], shown: Callable[[], AbstractContextManager[Show]]) -> None:
    """Look up all names at and below these paths, and show how far that is; raises SpiderfsError if some failed."""
    # This import is here because only this way to warm needs it.
    from multiprocessing.connection import Pipe

    receiver, sender = Pipe(duplex=False)
    parent, walker = os.getpid(), os.fork()
    if walker == 0:
        try:
            # Ctrl-C is for the command, which then ends this process; no one is to wait for what this one might print.
            os.setsid()
            os.closerange(1, 3)
            if end_with_parent(parent):
                _walk((os.fspath(mount.mountpoint / relative) for relative in wanted), sender.send)
        finally:
            os._exit(0)
    sender.close()
    names = directories = 0
    try:
        with shown() as show:
            while not isinstance(said := receiver.recv(), list):
                if isinstance(said, SpiderfsError):
                    raise said
                names, directories = said
                show(_names(names, directories), names, None)
    except KeyboardInterrupt as exc:
        raise SpiderfsError(f"ended after {_names(names, directories)}: run it again to resume") from exc
    except EOFError as exc:
        raise SpiderfsError(f"the process that walked through {place_of(mount)} has ended: run this again") from exc
    finally:
        os.kill(walker, signal.SIGKILL)
        os.waitpid(walker, os.WNOHANG)
    click.echo(_names(names, directories))
    if said:
        name, reason = said[0]
        paths = counted(len(said), "path")
        raise SpiderfsError(f"{paths} could not be looked up, for example {printable(name)} ({reason})")


def _names(names: int, directories: int) -> str:
    return f"{names:,} names in {directories:,} directories"


def _walk(paths: Iterator[str], report: Callable[[object], object]) -> None:
    """Walk as readers do, many directories at a time.

    Reports how many names in how many directories there are so far, and at the end a list of the paths that could not
    be looked up, each with the reason; or a SpiderfsError.
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
                report(exc)
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
            report((names, directories))
    report(failures)


def _names_at(path: str) -> tuple[int, list[str] | None]:
    """How many names there are, and the directories among them (None: a file). Raises OSError, as an archive has it."""
    try:
        with os.scandir(path) as found:
            entries = list(found)
    except NotADirectoryError:
        os.lstat(path)
        return 1, None
    except OSError as exc:
        with contextlib.suppress(OSError):
            exc.strerror = os.getxattr(path, FAILURE_XATTR).decode()
        raise
    return len(entries), [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


_LOOK_INTERVAL_S = 0.2
# Where no one looks at a terminal, a line is printed this often.
_LINE_INTERVAL_S = 5.0
# To go through a cache of a million records takes the daemon some seconds.
_EVICT_TIMEOUT_S = 300.0
# The rate that is shown is that of the last few seconds.
_RATE_LOOKS = 25


@click.command()
@click.argument("mountpoint", shell_complete=control_files.mountpoints)
@click.argument("paths", metavar="[PATH]...", nargs=-1)
@click.option("--names", is_flag=True, help="Only look up names and attributes; fetch no file. Takes no globs.")
@click.option("--detach", is_flag=True, help="Return at once; the daemon continues.")
def warm(mountpoint: str, paths: tuple[str, ...], names: bool, detach: bool) -> None:
    """Fetch all files at and below each PATH into the cache of the mount at MOUNTPOINT; without a PATH, all its files.

    A PATH is a file, a directory or a glob, below MOUNTPOINT or relative to it; `-` is a list of such paths on the
    standard input, one per line. Ctrl-C stops; files that are cached by then stay, and the same command resumes.
    """
    if names and mountpoint.startswith(SCHEME):
        raise click.UsageError("--names walks through a mount, and there is none: leave it out")
    if names and detach:
        raise click.UsageError("--names is done by this command itself: leave out --detach, or write & behind it")
    mount = find_mount(mountpoint)
    wanted = wanted_paths(mount, mountpoint, paths or (place_of(mount),), globs=not names)
    with _ending_well():
        if names:
            _stats(mount)  # who walks waits for a daemon that does not answer, without a word
            look_up(mount, wanted, _shown)
        elif (warming := _fetch(mount, wanted, detach=detach)) is not None:
            _check(mount, warming)


@click.command()
@click.argument("mountpoint", shell_complete=control_files.mountpoints)
@click.argument("paths", metavar="[PATH]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs, and no bar.")
def pin(mountpoint: str, paths: tuple[str, ...], as_json: bool) -> None:
    """Keep all files at and below each PATH in the cache of the mount at MOUNTPOINT, whatever the policy.

    Uncached files are fetched. Pinned files may take half of the cache. They stay pinned in later mounts, until `unpin`
    or `evict` names them. Files that changed or appeared at the source since then are not pinned: repeat the command.
    Without a PATH, show how many files are pinned.

    A PATH is as for `warm`. Ctrl-C stops; files that are pinned by then stay, and the same command resumes.
    """
    mount = find_mount(mountpoint)
    with _ending_well():
        _look(mount)  # a daemon of another version may know no pins
        warming = _fetch(mount, wanted_paths(mount, mountpoint, paths), "pin", quiet=as_json) if paths else None
        pins = _stats(mount)["pins"]
        if as_json:
            request = warming.counts() if warming is not None else None
            click.echo(json.dumps({"pinned": pins, "request": request}, indent=2))
        else:
            of = f"{round_size(pins['bytes'])} of at most {round_size(pins['limit_bytes'])}"
            click.echo(f"{counted(pins['files'], 'file')} pinned, {of}, half of the room for kept files")
        if warming is not None:
            _check(mount, warming)


@click.command()
@click.argument("mountpoint", shell_complete=control_files.mountpoints)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def unpin(mountpoint: str, paths: tuple[str, ...], as_json: bool) -> None:
    """Unpin all files at and below each PATH in the cache of the mount at MOUNTPOINT.

    A PATH is as for `evict`.
    """
    with _acting(mountpoint, paths, "unpin") as unpinned:
        click.echo(json.dumps({"unpinned": unpinned}) if as_json else f"{counted(unpinned, 'file')} unpinned")


@click.command()
@click.argument("mountpoint", shell_complete=control_files.mountpoints)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
def evict(mountpoint: str, paths: tuple[str, ...]) -> None:
    """Drop all files at and below each PATH from the cache of the mount at MOUNTPOINT; they stay readable.

    A PATH is as for `warm`; MOUNTPOINT itself means all files.
    """
    with _acting(mountpoint, paths, "evict") as evicted:
        click.echo(f"{counted(evicted, 'record')} evicted")


@contextmanager
def _acting(mountpoint: str, paths: Iterable[str], control: str) -> Iterator[int]:
    """Have the daemon act on these paths, and give on how many records or files it has.

    Raises SpiderfsError at the end if there are paths that the mount does not have, and none of them meant any; or
    globs and paths of a list that mean neither a record nor a file.
    """
    mount = find_mount(mountpoint)
    gone: list[str] = []

    def act(some: Iterable[str]) -> int:
        done = 0
        for piece in some:
            with _explaining(mount):
                write_control(mount, control, piece, _EVICT_TIMEOUT_S)
                done += int(read_control(mount, control).split()[0])
        return done

    with _ending_well():
        _stats(mount)  # one that does not answer at all is not waited for as long
        there = list(wanted_paths(mount, mountpoint, paths, gone=gone))
        # Before the others, which may mean the directory above.
        of_gone = act(pieces(gone))
        done = of_gone + act(pieces(there))
        without = gone if gone and not of_gone else [] if done or any_file(mount, there) else there
        if done or not without:
            yield done
        if without:
            raise SpiderfsError(_no_file(mount, len(without), escaped(without[0])))


@contextmanager
def _ending_well() -> Iterator[None]:
    """End as Ctrl-C does at a signal, and say in one line what failed here."""
    try:
        with ended_by_signals():
            yield
    except BrokenPipeError:
        # No one reads what this command prints any more: click ends it without a word, as any command.
        raise
    except OSError as exc:
        raise SpiderfsError(f"the list cannot be read, or the progress cannot be shown: {exc.strerror}") from exc


def _fetch(
    mount: Mount, wanted: Iterator[str], control: str = "warm", detach: bool = False, quiet: bool = False
) -> Warming | None:
    """Have the daemon fetch files, and show how far it is until they are there; None: it goes on by itself.

    Unless `quiet`, print what has become of them; raises SpiderfsError then if someone has ended it.
    """
    before = _look(mount)
    if before.working:
        raise MountError(
            f"{place_of(mount)} is being warmed already, {_counts(before)}: wait until that is done, or end it with"
            f" 'echo > {place_of(mount)}/{CONTROL_DIR}/warm'"
        )
    began, restarts, asked = time.monotonic(), _stats(mount)["metrics"]["manager_restarts"], False
    try:
        for piece in pieces(wanted):
            asked = True
            _ask(mount, piece, control)
        if detach:
            click.echo(f"the daemon continues: {place_of(mount)}/{CONTROL_DIR}/warm shows the progress")
            return None
        warming = _followed(mount, nullcontext(lambda line, done, of: None) if quiet else _shown())
    except BaseException as exc:
        if asked:
            _ask(mount, "\n")
        if asked and isinstance(exc, KeyboardInterrupt):
            raise _ended(_look(mount)) from exc
        raise
    stats = _stats(mount)
    if stats["metrics"]["manager_restarts"] != restarts:
        raise MountError(
            f"the manager of {place_of(mount)} was restarted, and lost the request: run this command again to resume"
        )
    if not quiet:
        if warming.ended:
            raise _ended(warming)
        click.echo(
            f"{counted(warming.fetched, 'file')} fetched ({round_size(warming.fetched_bytes)}) in"
            f" {_duration(time.monotonic() - began)}, {warming.present:,} were cached before"
        )
        if warming.fetched_bytes > stats["capacity_bytes"]:
            warn(f"the cache holds {round_size(stats['capacity_bytes'])}, so it does not have all of these files")
    return warming


@contextmanager
def _explaining(mount: Mount) -> Iterator[None]:
    """Have the mount's errors say what to do."""
    try:
        yield
    except OSError as exc:
        if exc.errno == errno.EINVAL:
            raise ConfigError(
                f"the daemon refused the list: {place_of(mount)}/{CONTROL_DIR}/config has the reason in its first line"
            ) from exc
        raise control_files.explained(mount, exc) from exc


def _ask(mount: Mount, text: str, control: str = "warm") -> None:
    with _explaining(mount):
        write_control(mount, control, text)


def _stats(mount: Mount) -> dict[str, Any]:
    with _explaining(mount):
        return read_stats(mount)


def _look(mount: Mount) -> Warming:
    try:
        with _explaining(mount):
            return Warming.of_line(read_control(mount, "warm"))
    except ValueError as exc:
        raise MountError(f"{place_of(mount)} has a daemon of another version of spiderfs: mount it again") from exc


def _followed(mount: Mount, shown: AbstractContextManager[Show]) -> Warming:
    """Show how far the daemon is until it is at an end."""
    seen: deque[tuple[float, int]] = deque(maxlen=_RATE_LOOKS)
    with shown as show:
        while True:
            warming = _look(mount)
            if not warming.working:
                return warming
            seen.append((time.monotonic(), warming.fetched_bytes))
            (first_s, first), (last_s, last) = seen[0], seen[-1]
            rate = (last - first) / (last_s - first_s) if last > first else 0.0
            show(_said(warming, rate), warming.found - warming.left, None if warming.searching else warming.found)
            time.sleep(_LOOK_INTERVAL_S)


def _counts(warming: Warming) -> str:
    so_far = " found so far" if warming.searching else ""
    return f"{warming.found - warming.left:,} of {warming.found:,} files{so_far}"


def _said(warming: Warming, rate: float) -> str:
    parts = [_counts(warming), round_size(warming.fetched_bytes), f"{round_size(warming.left_bytes)} left"]
    if rate:
        parts.append(f"{round_size(rate)}/s")
    if rate and not warming.searching:
        parts.append(f"{_duration(warming.left_bytes / rate)} to go")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _check(mount: Mount, warming: Warming) -> None:
    """Raises SpiderfsError if some files are not there."""
    if warming.ended:
        raise _ended(warming)
    troubles = []
    if warming.failed:
        troubles.append(f"{warming.failed:,} files or directories could not be read (see the daemon's log)")
    if warming.missing:
        troubles.append(_no_file(mount, warming.missing, warming.unknown))
    if warming.roomless:
        troubles.append(
            f"{warming.roomless:,} files are not pinned: pinned files may take half of the cache, so give it more with"
            f" 'spiderfs config {place_of(mount)} capacity=SIZE', or unpin others"
        )
    if warming.unkept:
        troubles.append(f"{warming.unkept:,} files are not kept: make room on the full disk of the cache and try again")
    if troubles:
        raise SpiderfsError("; ".join(troubles))


def _no_file(mount: Mount, paths: int, first: str) -> str:
    if paths == 1:
        return f"{place_of(mount)} has no file or directory {first}: check the path"
    return f"{place_of(mount)} has no file or directory for {paths:,} of these paths, for example {first}"


def _ended(warming: Warming) -> SpiderfsError:
    return SpiderfsError(f"ended after {_counts(warming)}: run it again to resume")


def _shown() -> AbstractContextManager[Show]:
    """A bar on a terminal; somewhere else a line now and then."""
    return _bar() if sys.stdout is not None and sys.stdout.isatty() else _lines()


@contextmanager
def _bar() -> Iterator[Show]:
    # This import is here because rich takes as long to import as everything else together.
    from rich.console import Group
    from rich.progress import BarColumn, Progress, Task
    from rich.text import Text

    class Below(BarColumn):
        """A line of text, and a bar as wide as the terminal below it."""

        def render(self, task: Task) -> Group:  # type: ignore[override]
            return Group(Text(task.description), super().render(task))

    with Progress(Below(bar_width=None), transient=True, expand=True) as progress:
        task = progress.add_task("", total=None)

        def show(line: str, done: int, of: int | None) -> None:
            progress.update(task, description=line, completed=done, total=of)

        yield show


@contextmanager
def _lines() -> Iterator[Show]:
    shown_at = time.monotonic()

    def show(line: str, done: int, of: int | None) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= _LINE_INTERVAL_S:
            shown_at = time.monotonic()
            click.echo(line)

    yield show
