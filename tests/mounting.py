"""Real mounts for tests, which are watched while they last and unmounted whatever happens.

Every process that was started is ended by its own pid file descriptor, never by its name. `mounted` fails the test if
the daemon's log holds a warning that the test did not announce.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from command_forks import command_forks

from benchmarks.common.sources import make_older
from benchmarks.fakes.faulty_source import FAULTS, Faults, registering
from spiderfs.cli import figures
from spiderfs.linux import mounts
from spiderfs.shared.layout import CacheLayout

T = TypeVar("T")

# The program itself, for tests of how it starts; others use `run_spiderfs`.
_INSTALLED = Path(sys.executable).with_name("spiderfs")
SPIDERFS = _INSTALLED
# Two busy cores may need seconds for what an idle core does in 0.1 s; only a test that fails waits for so long.
PATIENCE_S = 30.0
# The pause between two looks is a tenth of the time that has passed, so it adds a tenth to the wait at most. A look at
# a figure of a mount is work for the manager, for which others wait.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.05
_TROUBLE = re.compile(r" (WARNING|ERROR|CRITICAL) |^Traceback|^\w*(Error|Exception):")
# What mounts are made with that say nothing of it, a binding or `immutable`: see the fixture of this name.
binding = "kernel"
# The answer of a control file while there is no manager: from open(2), or in an immutable mount from read(2).
NO_MANAGER = (errno.EAGAIN, errno.EBUSY)
_SIGTERM_BIT = 1 << (signal.SIGTERM - 1)


def eventually(condition: Callable[[], T], within_s: float = PATIENCE_S, what: str | Callable[[], str] = "") -> T:
    """Call `condition` until it returns a true value, and return that; raises AssertionError after the deadline.

    The error says what was waited for: `what`, or what it returns then.
    """
    began = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        waited_s = time.monotonic() - began
        assert waited_s < within_s, f"not within {within_s:g} s: {what() if callable(what) else what or condition}"
        time.sleep(min(max(waited_s / 10, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))


def as_root(*command: str | Path) -> subprocess.CompletedProcess[bytes]:
    """Run a command that needs root, through sudo for an ordinary user."""
    prefix: list[str | Path] = [] if os.geteuid() == 0 else ["sudo", "-n"]
    return subprocess.run([*prefix, *command], capture_output=True, check=True, timeout=60)


def run_spiderfs(*arguments: str | Path, first: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command, in a fork of a process that has imported the program, which runs the Python `first` before.

    If a test has put another program in the place of `SPIDERFS`, that runs.
    """
    if SPIDERFS != _INSTALLED:
        return subprocess.run([SPIDERFS, *arguments], capture_output=True, text=True, timeout=60)
    return command_forks().run([os.fspath(argument) for argument in arguments], os.environ, 60, first)


@contextlib.contextmanager
def dead_mount(place: str | Path) -> Iterator[None]:
    """A FUSE mount whose daemon is dead: lstat answers ENOTCONN."""
    os.close(mounts.mount(place, "dead", allow_other=False, programs_run=False))
    try:
        yield
    finally:
        mounts.unmount(place, lazy=True)


def options_text(options: Mapping[str, object]) -> str:
    """Options for -o; `source__latency_ms` stands for source.latency_ms."""
    return ",".join(f"{name.replace('__', '.')}={value}" for name, value in options.items())


def options_of(binding: str) -> dict[str, object]:
    """The options by which a mount has a binding, or is immutable."""
    return {"binding": "kernel", "immutable": "on"} if binding == "immutable" else {"binding": binding}


def refused_by_modes(binding: str) -> bool:
    """Whether this user cannot open files to write: in an immutable mount the modes say who may, and root overrides."""
    return options_of(binding).get("immutable") == "on" and os.geteuid() != 0


class Process:
    """A process that is not our child, held by a descriptor, so that its pid can never mean another process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def ended(self, within_s: float = 0.0) -> bool:
        return bool(select.select([self._fd], [], [], within_s)[0])

    def close(self) -> None:
        os.close(self._fd)


def children(pid: int) -> list[int]:
    """The pids of a process's live children, from /proc."""
    found = []
    # A process that has ended has no directory any more. The file needs CONFIG_PROC_CHILDREN, as distributions have it.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    return [child for child in map(int, found) if is_running(child)]


def descendants(pid: int, program: bytes = b"") -> list[int]:
    """The pids of all live processes below this one, or of those of them whose command line has these bytes."""
    found, waiting = [], [pid]
    while waiting:
        below = children(waiting.pop())
        waiting += below
        for each in below:
            # It may end in this moment.
            with contextlib.suppress(OSError):
                found += [each] if program in Path(f"/proc/{each}/cmdline").read_bytes() else []
    return found


def threads_of(pid: int) -> list[str]:
    """The states of a process's threads that have not ended: of one whose first thread has ended too."""
    states = []
    with contextlib.suppress(OSError):
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                states.append(stat.read_text().rpartition(")")[2].split()[0])
    return [state for state in states if state not in "ZX"]


def is_running(pid: int) -> bool:
    """Whether the process lives; a process that has ended and waits until init reaps it does not."""
    try:
        return not _status(pid)["State"].startswith("Z")
    except OSError:
        return False


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _catches_sigterm(pid: int) -> bool:
    try:
        return bool(int(_status(pid)["SigCgt"], 16) & _SIGTERM_BIT)
    except OSError:
        return False


@dataclass
class Mounted:
    """One mount, with the paths of its source, mount point, cache directory and log."""

    source: Path | str
    point: Path
    cache: Path
    log: Path
    workers_wanted: int
    supervisor: Process
    faults: Faults
    allowed: list[str] = field(default_factory=list)

    # -- processes: the manager is the one child that handles SIGTERM, the workers leave it alone

    def manager(self) -> int:
        """The manager's pid, once it runs."""
        return eventually(
            lambda: next((pid for pid in children(self.supervisor.pid) if _catches_sigterm(pid)), 0), what="a manager"
        )

    def workers(self) -> list[int]:
        """The workers' pids, once all of them run."""

        def found() -> list[int]:
            pids = children(self.supervisor.pid)
            managers = [pid for pid in pids if _catches_sigterm(pid)]
            return [pid for pid in pids if pid not in managers] if len(managers) == 1 else []

        return eventually(lambda: pids if len(pids := found()) == self.workers_wanted else [], what="all workers")

    # -- control files

    def control(self, name: str) -> Path:
        return self.point / ".spiderfs" / name

    def stats(self) -> dict[str, Any]:
        """stats.json, asked again while the manager is being started.

        Without room on the disk several workers may each answer a part of it, and from different moments.
        """

        def read() -> dict[str, Any] | None:
            try:
                stats: dict[str, Any] = json.loads(self.control("stats.json").read_bytes())
            except json.JSONDecodeError:
                return None
            except OSError as exc:
                if exc.errno in NO_MANAGER:
                    return None
                raise
            return stats

        found = eventually(read, what="stats.json")
        assert found is not None
        return found

    def status(self) -> str:
        """What `spiderfs status` shows."""
        return "".join(f"{row}\n" for row in figures.all_rows(self.stats()))

    def cached(self) -> set[str]:
        """The names of what is cached, as the control file shows them."""
        return {line.split(maxsplit=3)[3] for line in self.control("cache").read_text().splitlines()}

    def metric(self, name: str) -> int | float:
        value: int | float = self.stats()["metrics"][name]
        return value

    def change(self, name: str, value: object) -> None:
        """Change an option live, an OSError if it is refused; or a fault of the source (`FAULTS`)."""
        if name in FAULTS:
            self.faults.set(name, value)
            return
        fd = os.open(self.control("config"), os.O_WRONLY)
        try:
            os.write(fd, f"{name}={value}\n".encode())
        finally:
            os.close(fd)

    # -- the log

    def expect(self, *patterns: str) -> None:
        """Announce warnings (regular expressions) that belong to what the test does."""
        self.allowed += patterns

    def log_lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []

    def logged(self, pattern: str) -> list[str]:
        return [line for line in self.log_lines() if re.search(pattern, line)]

    def unexpected_log_lines(self) -> list[str]:
        troubles = (line for line in self.log_lines() if _TROUBLE.search(line))
        return [line for line in troubles if not any(re.search(pattern, line) for pattern in self.allowed)]

    # -- the end

    def is_mounted(self) -> bool:
        return mounts_at(self.point) > 0

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Tell the daemon to end, and wait until it has ended; `mounted` checks its log."""
        self.supervisor.signal(number)
        assert self.supervisor.ended(PATIENCE_S), "the daemon has not ended"


def mounts_at(point: Path) -> int:
    """How many file systems are mounted at exactly this path."""
    escaped = os.fsencode(point).replace(b"\\", b"\\134").replace(b" ", b"\\040")
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    return sum(line.split(b" ")[4] == escaped for line in lines)


def detach(point: Path) -> None:
    """Detach whatever is mounted there, after a failure or a crash."""
    for _ in range(8):
        if not mounts_at(point):
            return
        unmount(point, "-l")


def unmount(point: Path, *flags: str) -> None:
    """Unmount by umount(8) or, for an ordinary user, by fusermount3; the flag `-l` unmounts lazily."""
    if os.geteuid() == 0 or not _is_fuse(point):
        as_root("umount", *flags, point)
    else:
        lazily = ["-z"] if "-l" in flags else []
        subprocess.run(["fusermount3", "-u", *lazily, point], capture_output=True, check=True, timeout=60)


def _is_fuse(point: Path) -> bool:
    lines = Path("/proc/self/mounts").read_bytes().splitlines()
    return any(line.split(b" ")[1:3] == [os.fsencode(point), b"fuse.spiderfs"] for line in lines)


def lock_holder(cache: Path) -> int:
    """The pid of the supervisor that runs in the background and has locked this cache directory."""
    status = os.stat(CacheLayout(cache).lock)
    inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    # The kernel gives the list in pieces: a line can be missing where another process unlocks between two of them.
    for _ in range(5):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == inode:
                return int(fields[4])
    raise AssertionError(f"no one holds {cache}/lock")


def attach(source: Path | str, point: Path, cache: Path, log: Path, workers: int, faults: Faults) -> Mounted:
    """The `Mounted` of a mount that a command has made, after the Python `registering(faults)`."""
    return Mounted(source, point, cache, log, workers, Process(lock_holder(cache)), faults)


def settle(source: Path, age_s: float = 3600.0) -> None:
    """Make files older that have just been written; otherwise the mount would cache them only some seconds later."""
    since_ns = time.time_ns() - 60 * 10**9
    for directory, _, names in os.walk(os.fsencode(source)):
        for name in names:
            path = os.path.join(directory, name)
            if os.lstat(path).st_mtime_ns > since_ns:
                make_older(path, age_s)


@contextlib.contextmanager
def mounted(
    source: Path | str,
    place: Path,
    *,
    workers: int = 1,
    allowed: Sequence[str] = (),
    point: Path | None = None,
    cache: Path | None = None,
    first: str = "",
    **options: object,
) -> Iterator[Mounted]:
    """Mount `source`; mount point, cache and log lie below the directory `place`, unless arguments name them.

    The source is a directory or a URL; a directory's files are made older before that (`settle`). When the context
    ends, the daemon is stopped, nothing may stay mounted, and the log may hold no warnings but those that `allowed`
    names. A mount with binding=pyfuse3 has one worker, whatever `workers` says. `first` is Python that runs before the
    mount: a test that would wait for one of the daemon's constants makes it smaller. Faults of the source (`FAULTS`)
    stand among the options, and begin once it is mounted.
    """
    begin = {name: options.pop(name) for name in FAULTS if name in options}
    faults = Faults.made()
    if isinstance(source, Path):
        settle(source)
    place.mkdir(parents=True, exist_ok=True)
    point, cache, log = point or place / "mnt", cache or place / "cache", place / "daemon.log"
    # mkdir(exist_ok=True) would call stat on what a crash has left mounted there.
    if point.name not in os.listdir(point.parent):
        point.mkdir()
    if options.get("binding", binding) == "pyfuse3":
        workers = 1
    kind = {} if "binding" in options else options_of(binding)
    chosen = options_text({"cache_dir": cache, "log_file": log, "workers": workers, **kind, **options})
    with ending(place, point, cache):
        done = run_spiderfs("mount", source, point, "-o", chosen, first=registering(faults) + first)
        assert done.returncode == 0, done.stderr
        mount = attach(source, point, cache, log, workers, faults)
        mount.expect(*allowed)
        for name, value in begin.items():
            faults.set(name, value)
        try:
            yield mount
            if not mount.supervisor.ended() and mount.is_mounted():
                assert mount.metric("internal_errors") == 0, mount.log.read_text()
            mount.stop()
            assert mount.unexpected_log_lines() == []
            assert not mount.is_mounted()
        finally:
            mount.supervisor.signal(signal.SIGTERM)
            if not mount.supervisor.ended(PATIENCE_S):
                mount.supervisor.signal(signal.SIGKILL)
                mount.supervisor.ended(PATIENCE_S)
            mount.supervisor.close()
            faults.close()


@contextlib.contextmanager
def ending(place: Path, point: Path, cache: Path) -> Iterator[None]:
    """End the mount and the daemon when the context ends; prints the daemon's log if the test fails."""
    try:
        yield
    except BaseException:
        log = place / "daemon.log"
        if log.exists():
            sys.stderr.write(f"--- {log}\n{log.read_text(errors='replace')[-8000:]}")
        raise
    finally:
        if mounts_at(point):
            detach(point)
        # No process may hold the lock any more, or one of root's does, whose mount ends with its namespace.
        with contextlib.suppress(AssertionError, OSError):
            os.kill(lock_holder(cache), signal.SIGKILL)
