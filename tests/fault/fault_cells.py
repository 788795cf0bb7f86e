"""Makes the faults of a cell of the table happen on a mount of its own, and lists what did not hold.

The way of a cell: mount; readers and a training read, and check every byte; the source gets its state and the victim
its signal; one reader is killed meanwhile; everybody must get on, and no call may outlast its limit. With the source
still in its state the mount is taken away; nothing may be left; and the next mount must serve everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path

from fault_reader import MIB, PROGRESS, Report, Task, content
from fault_table import SETTINGS, Cell, Seen, seen
from mounting import (
    PATIENCE_S,
    Mounted,
    Process,
    attach,
    children,
    detach,
    eventually,
    is_running,
    lock_holder,
    mounts_at,
    options_text,
    run_spiderfs,
)

from benchmarks.fakes.faulty_source import FAULTS, Faults, registering

SIZES = {f"class{number % 3}/{number:02d}": 9_000 + 1_700 * number for number in range(36)} | {
    f"large/{name}": 2 * MIB + 777 for name in "ab"
}
# The cache is smaller than the files, so that something is always fetched; large files are read in blocks.
OPTIONS = {"capacity": "1500KiB", "sample_max_bytes": "256KiB", "policy": "spider", "ttl": 0.2, "dir_ttl": 0}
OPTIONS |= {"negative_ttl": 0, "source.attempts": 2, "ratio_start": 0.5, "ratio_end": 0.5}
READERS = 2
# So many calls each reader must have finished before the fault, and so many it must begin and finish after it.
CALLS_BEFORE, CALLS_AFTER = 25, 4
# One reader is killed so long after the fault, while it waits for what the fault holds up.
KILL_AFTER_S = 0.3
_TROUBLES = (
    r"(worker \d+|the manager) ended \((signal (9|15)|exit [01])\)",
    "the process ends",
    "the source has not answered within",
    "the source (failed|hangs|is gone)",
    "the process that reads from the source has ended",
    "removed a mount that a crash had left",
    "is in use: it is detached",
)


@dataclass(frozen=True)
class Setting:
    """The times of a cell; two busy cores may add `slack_s` to each limit."""

    timeout_s: float = 2.0
    stop_s: float = 20.0
    slack_s: float = 4.0
    workers: int = 0
    end_s: float = 20.0
    """The seconds after which an unmount must have finished, and a daemon that was told to end must have ended."""


# For the suite, and for a look. What a stop of 20 s shows beyond one of 3 is that nothing gives up on the way, which
# takes what is longer than 3 s: the kernel and the daemon have no such limit but source.timeout_s.
QUICK = Setting(timeout_s=1.0, stop_s=3.0)


@dataclass
class Outcome:
    cell: Cell
    problems: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    longest_call: str = ""
    limit_s: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    killed_s: float = 0.0
    """The seconds until a reader that was killed had ended."""
    end_s: float = 0.0
    took_s: float = 0.0


def write_source(source: Path) -> None:
    for name, size in SIZES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content(name, size))
        # A mount does not cache a file that has just been written, so the files get an old mtime.
        os.utime(source / name, (1e9, 1e9))


def run_all(cells: Sequence[Cell], scratch: Path, setting: Setting, jobs: int) -> Iterator[Outcome]:
    """Yield the outcome of each cell when it is known; unless the setting says how many, mounts have 1 and 2 workers in
    turns.
    """
    source = scratch / "source"
    write_source(source)

    def run_one(number: int) -> Outcome:
        own = replace(setting, workers=setting.workers or 1 + number % 2)
        return run(cells[number], source, scratch / f"{number}", own)

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(run_one, number) for number in range(len(cells))]):
            yield done.result()


def run(cell: Cell, source: Path, place: Path, setting: Setting) -> Outcome:
    """Run a cell; an error of the product does not raise, but is one of the outcome's `problems`."""
    began = time.monotonic()
    outcome = Outcome(cell)
    place.mkdir(parents=True)
    trial = _Trial(cell, source, place, setting, outcome)
    try:
        trial.run()
    except (AssertionError, OSError, subprocess.SubprocessError) as exc:
        outcome.problems.append(f"{type(exc).__name__}: {exc}")
    finally:
        trial.clean_up()
    outcome.took_s = time.monotonic() - began
    return outcome


class _Program:
    """A reading program and its progress."""

    def __init__(self, task: Task) -> None:
        progress = Path(task.progress)
        progress.write_bytes(bytes(PROGRESS.size))
        self._progress = progress
        self._before = 0
        self.killed = False
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("fault_reader.py"), json.dumps(task.__dict__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def attached(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "attached\n", "a reader has not begun"

    def calls(self) -> int:
        count: int = PROGRESS.unpack(self._progress.read_bytes())[0]
        return count

    def waits_s(self) -> float:
        """The seconds for which its present call has lasted."""
        began: float = PROGRESS.unpack(self._progress.read_bytes())[1]
        return time.monotonic() - began if began else 0.0

    def mark(self) -> None:
        """Begin to count the calls for `got_on`, which leaves out the present call."""
        self._before = self.calls() + 1

    def got_on(self, calls: int) -> bool:
        return self.killed or self.process.poll() is not None or self.calls() >= self._before + calls

    def report(self, within_s: float) -> Report:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a reader has been in one call for {self.waits_s():.1f} s") from None
        text = self.process.stdout.read()
        assert text, f"a reader ended without a report (exit status {self.process.returncode})"
        return Report(**json.loads(text))

    def close(self) -> None:
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        # A process that even SIGKILL cannot end must not keep the test from saying so.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE_S)


class _Trial:
    def __init__(self, cell: Cell, source: Path, place: Path, setting: Setting, outcome: Outcome) -> None:
        self._cell = cell
        self._source = source
        self._place = place
        self._setting = setting
        self._outcome = outcome
        self._seen: Seen = seen(cell.victim, cell.signal, cell.source)
        self._limit_s = self._seen.limit_s(setting.timeout_s, setting.stop_s) + setting.slack_s
        # Where no call may take as long as the source's time limit, a busy machine must not make one do so. A call that
        # waits for it all the same outlasts its own limit.
        self._timeout_s = setting.timeout_s if self._seen.timeouts else 2 * setting.slack_s
        outcome.limit_s = self._limit_s
        self._point = place / "mnt"
        self._log = place / "log"
        self._cache = place / "cache"
        # The name that all processes of the mount inherit (proc_pid_comm(5)), of 15 bytes at most.
        self._faults = Faults.made()
        self._mark = f"sf{os.getpid():x}.{place.name}"
        self._programs: list[_Program] = []
        self._doomed: _Program | None = None
        self._killed_at = 0.0

    # -- the way of a cell

    def run(self) -> None:
        self._point.mkdir()
        mount = self._mount()
        *readers, training = self._begin_reading()
        self._wait(lambda: all(program.got_on(CALLS_BEFORE) for program in self._programs), "readers before the fault")
        descriptors = _descriptors(mount.supervisor.pid)
        victims = self._victims(mount, training)
        for name, value in SETTINGS[self._cell.source].items():
            mount.change(name, value)
        self._hurt(victims, readers[0])
        if not self._seen.ends:
            self._check_whole(mount, victims, descriptors)
        self._end_reading()
        self._end(mount)
        self._check_nothing_is_left()
        self._check_log()
        self._serve_again()

    def _mount(self) -> Mounted:
        options = OPTIONS | {"source.timeout_s": self._timeout_s, "workers": self._setting.workers}
        text = options_text(options | {"cache_dir": self._cache, "log_file": self._log})
        named = f"open('/proc/self/comm', 'w').write({self._mark!r})"
        done = run_spiderfs("mount", self._source, self._point, "-o", text, first=registering(self._faults) + named)
        assert done.returncode == 0, f"not mounted: {done.stderr.strip()}"
        return attach(self._source, self._point, self._cache, self._log, self._setting.workers, self._faults)

    def _begin_reading(self) -> list[_Program]:
        """Start the readers, the training last."""
        for number, attached in enumerate((None,) * READERS + (self._cell.trainer,)):
            task = Task(os.fspath(self._point), SIZES, f"{self._place}/progress{number}", number, attached)
            self._programs.append(_Program(task))
        for program in self._programs:
            program.attached()
        return self._programs

    def _victims(self, mount: Mounted, training: _Program) -> list[int]:
        match self._cell.victim:
            case "supervisor":
                return [mount.supervisor.pid]
            case "worker":
                return mount.workers()[:1]
            case "manager":
                return [mount.manager()]
            case "reading process":
                # The reading processes of a worker and of the manager: they fetch for readers, and ahead of them.
                return [eventually(lambda pid=pid: children(pid))[0] for pid in (mount.workers()[0], mount.manager())]
        return [training.process.pid]

    def _hurt(self, victims: list[int], doomed: _Program) -> None:
        for program in self._programs:
            program.mark()
        number = signal.Signals[self._cell.signal]
        began = time.monotonic()
        for pid in victims:
            os.kill(pid, number)
        for program in self._programs:
            program.killed = program.process.pid in victims and number != signal.SIGSTOP
        self._until(began + KILL_AFTER_S)
        self._kill(doomed)
        if number == signal.SIGSTOP:
            self._until(began + self._setting.stop_s)
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            for program in self._programs:
                program.mark()
        self._wait(lambda: doomed.process.poll() is not None, "the end of the reader that was killed")
        self._wait(lambda: all(program.got_on(CALLS_AFTER) for program in self._programs), "readers after the fault")

    def _kill(self, doomed: _Program) -> None:
        doomed.killed = True
        doomed.process.kill()
        self._doomed, self._killed_at = doomed, time.monotonic()

    def _watch_the_doomed(self) -> None:
        """Wait until a reader that was killed has ended, which must not take longer than the limit either."""
        if self._doomed is not None:
            self._outcome.killed_s = time.monotonic() - self._killed_at
            assert self._outcome.killed_s < self._limit_s, "a reader that was killed is there still"
            if self._doomed.process.poll() is not None:
                self._doomed = None

    def _check_whole(self, mount: Mounted, victims: list[int], descriptors: int) -> None:
        """Check that all processes of the mount live again and the supervisor has as many descriptors as before."""
        mount.workers()
        mount.manager()
        if self._cell.signal == "SIGSTOP" or self._cell.victim == "trainer":
            eventually(lambda: mount.stats()["metrics"]["internal_errors"] == 0, what="no internal errors")
        supervisor = mount.supervisor.pid
        eventually(
            lambda: _descriptors(supervisor) == descriptors,
            what=lambda: f"the supervisor holds {_descriptors(supervisor)} descriptors, before the fault {descriptors}",
        )

    def _end_reading(self) -> None:
        limit_s = self._limit_s + self._setting.slack_s
        *_, training = self._programs
        for program in self._programs:
            if not program.killed:
                self._take(program.report(limit_s), program is training and self._cell.victim == "trainer")

    def _take(self, report: Report, stopped: bool) -> None:
        outcome = self._outcome
        if stopped:
            # The mount was not the reason for this wait.
            report.longest_s = 0.0
        outcome.calls += report.calls
        outcome.problems += [f"wrong bytes: {text}" for text in report.wrong[:3]]
        for name, waited_s in report.errors.items():
            outcome.errors[name] = max(outcome.errors.get(name, 0.0), waited_s)
            if name not in self._seen.errors:
                outcome.problems.append(f"a reader got {name} after {waited_s:.1f} s")
        if report.longest_s > outcome.longest_s:
            outcome.longest_s, outcome.longest_call = report.longest_s, report.longest_call
        if report.longest_s > self._limit_s:
            waited = f"{report.longest_call} took {report.longest_s:.1f} s"
            outcome.problems.append(f"{waited}, and the limit is {self._limit_s:.1f} s")

    def _end(self, mount: Mounted) -> None:
        began = time.monotonic()
        if not self._seen.ends:
            done = run_spiderfs("umount", self._point)
            if done.returncode or done.stderr:
                self._outcome.problems.append(f"umount: exit {done.returncode}, {done.stderr.strip()}")
        assert mount.supervisor.ended(self._setting.end_s), f"the daemon is there after {self._setting.end_s:g} s"
        self._outcome.end_s = time.monotonic() - began
        if self._outcome.end_s > self._setting.end_s:
            self._outcome.problems.append(f"the end took {self._outcome.end_s:.1f} s")
        mount.supervisor.close()

    def _check_nothing_is_left(self) -> None:
        deadline = time.monotonic() + self._setting.slack_s
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._outcome.problems += [f"left behind: {_described(pid)}" for pid in self._left()]
        dead_mount = self._cell.victim == "supervisor" and self._cell.signal == "SIGKILL"
        if not dead_mount and mounts_at(self._point):
            self._outcome.problems.append("left behind: the mount")

    def _left(self) -> list[int]:
        """The processes of the mount and the readers that have not ended."""
        readers = [program.process.pid for program in self._programs if program.process.poll() is None]
        return [*readers, *_named(self._mark)]

    def _check_log(self) -> None:
        lines = self._log.read_text(errors="replace").splitlines()
        troubles = (line for line in lines if re.search(r" (WARNING|ERROR|CRITICAL) ", line))
        odd = [line for line in troubles if not any(re.search(allowed, line) for allowed in _TROUBLES)]
        self._outcome.problems += [f"logged: {line[24:300]}" for line in odd[:3]]

    def _serve_again(self) -> None:
        """Check that the next mount, of a source without faults, shows every byte."""
        for name in FAULTS:
            self._faults.set(name, 0)
        mount = self._mount()
        for name, size in SIZES.items():
            if (self._point / name).read_bytes() != content(name, size):
                self._outcome.problems.append(f"the next mount gives wrong bytes of {name}")
        done = run_spiderfs("umount", self._point)
        assert done.returncode == 0, f"the next mount cannot be unmounted: {done.stderr.strip()}"
        assert mount.supervisor.ended(self._setting.end_s), "the next mount's daemon does not end"
        mount.supervisor.close()

    # -- waiting

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds, while no call of a reader may take longer than its limit."""
        deadline = time.monotonic() + (CALLS_BEFORE + CALLS_AFTER) * self._limit_s
        while not condition():
            self._watch_readers()
            self._watch_the_doomed()
            assert time.monotonic() < deadline, what
            time.sleep(0.02)

    def _until(self, moment: float) -> None:
        while time.monotonic() < moment:
            self._watch_readers()
            self._watch_the_doomed()
            time.sleep(min(0.05, max(0.0, moment - time.monotonic())))

    def _watch_readers(self) -> None:
        stopped = self._cell.victim == "trainer"
        for program in self._programs[: -1 if stopped else None]:
            if not program.killed and program.process.poll() is None:
                waited_s = program.waits_s()
                assert waited_s < self._limit_s + self._setting.slack_s, f"a reader waits since {waited_s:.1f} s"

    # -- whatever happens

    def clean_up(self) -> None:
        for program in self._programs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(program.process.pid, signal.SIGCONT) if program.process.poll() is None else None
            program.close()
        detach(self._point)
        with contextlib.suppress(AssertionError, OSError):
            holder = Process(lock_holder(self._cache))
            holder.signal(signal.SIGKILL)
            holder.ended(PATIENCE_S)
            holder.close()


def _named(name: str) -> list[int]:
    """The processes of this name that have not ended."""
    found = []
    for entry in _processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{entry}/comm").read_text() == f"{name}\n" and is_running(entry):
                found.append(entry)
    return found


def _processes() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _described(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        threads = [Path(f"/proc/{pid}/task/{thread}") for thread in os.listdir(f"/proc/{pid}/task")]
        states = [f"{_state(thread)} in {(thread / 'wchan').read_text()}" for thread in threads]
    except OSError:
        return f"process {pid}, just now"
    return f"process {pid} ({command[:60]}): {', '.join(states[:4])}"


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(") ")[2][:1]


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
