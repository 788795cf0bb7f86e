"""The supervisor: mounts, forks workers and a manager, and starts again what dies. It does nothing else.

It holds the FUSE descriptor and never answers a request, so it has no reason to die itself; if it is killed, the kernel
kills its children (PR_SET_PDEATHSIG), the guard ends the connection (`guard.py`), readers get ENOTCONN and the next
mount cleans up.

What it does when a child ends:
    worker, exit 0              the file system was unmounted: stop everything
    any, EXIT_STORE_CORRUPT     wipe the store, start all children again
    worker, anything else       start another one, and have the kernel hand out its requests again
    manager, anything else      start another one; reads go on meanwhile
A crash may be a symptom of a damaged store (SIGBUS): then the store is walked first. Children that keep dying end the
mount, with an error to readers, rather than making them wait for ever.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import NoReturn

import trio

from spiderfs import mountpoint
from spiderfs.config import Options
from spiderfs.daemon.background import detach, notify_systemd, start_logging
from spiderfs.daemon.cache_directory import CHOOSE_ANOTHER, open_cache_directory, real_path, tighten
from spiderfs.daemon.context import (
    SUPERVISOR_ROW,
    Directories,
    MountContext,
    bind_to_source,
    create_context,
    publish_options,
)
from spiderfs.daemon.guard import Guard
from spiderfs.daemon.manager import manage
from spiderfs.daemon.worker import work
from spiderfs.errors import MountError, SpiderfsError, StoreCorrupt
from spiderfs.fuse import session
from spiderfs.store import environment
from spiderfs.trace import TraceWriter

log = logging.getLogger(__name__)

# After an unmount: how long open handles go on being served, and how long the manager may take to save.
DRAIN_S = 5.0
SAVE_S = 10.0
# How long the end of a killed process is waited for. One that has not ended by then waits in the kernel: for answers of
# the mount, which the end of the connection ends, or for a source or a disk that hangs.
KILLED_S = 5.0
# Children that die more often than this are not worth starting again.
DEATHS, DEATHS_WITHIN_S = 20, 60.0
READY_POLL_S = 0.002
# This many by a signal of _CRASHES are taken for damage to the store even if a walk finds none.
CRASHES = 4
# A manager that dies at once must not keep the processor busy; workers are waited for by readers.
MANAGER_PAUSE_S = 0.5
# Deaths by these may come from a page of the store that is not there.
_CRASHES = {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT}
_PR_SET_PDEATHSIG = 1
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_MANAGER = -1  # where a worker has its index


def run(options: Options, foreground: bool) -> int:
    """Mount and serve; returns the exit status when the mount is there (background) or has ended (foreground).

    Raises ConfigError, MountError and other UsageErrors with one line that says what to do.
    """
    if foreground:
        _serve(options, foreground, lambda failure: None)
        return 0
    report = detach()
    if report is None:
        return 0
    status = 1
    try:
        _serve(options, foreground, report)
        status = 0
    except SpiderfsError as exc:
        # Nobody waits for the report of a mount that ends after it was ready.
        log.error("%s", exc)
        report(str(exc))
    except BaseException as exc:
        log.exception("the mount failed")
        report(f"unexpected {type(exc).__name__}: {' '.join(str(exc).split())}")
    finally:
        logging.shutdown()
        os._exit(status)


def _serve(options: Options, foreground: bool, report: Callable[[str], None]) -> None:
    # By its real path from here on: of links on the way only those are trusted that there are now.
    options = options.model_copy(update={"cache_dir": real_path(options.cache_dir)})
    lock = open_cache_directory(options.cache_dir)
    try:
        # Children inherit it, so the next mount waits for the last of them.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        raise MountError(
            f"the cache directory {options.cache_dir} is in use by another mount: unmount it, or {CHOOSE_ANOTHER}"
        ) from exc
    tighten(options.cache_dir)
    log_place = start_logging(options.log_level, options.log_file, options.cache_dir, foreground)
    directories = Directories(options.cache_dir)
    bind_to_source(directories, options.source)
    if options.trace is not None:
        # Found out here, a trace that cannot be written is one line for the user; the manager goes on without it.
        TraceWriter(options.trace).close()
    if mountpoint.clean_stale(options.mountpoint):
        log.warning("took away what a crash had left mounted at %s", options.mountpoint)
    context = create_context(options)
    rebuilt = environment.claim(directories.store)
    if rebuilt:
        log.warning("the cache starts empty: %s", rebuilt)
        context.row(SUPERVISOR_ROW).add("store_rebuilds")
    publish_options(directories, options)
    # Blocked from here on, so that none is lost between two waits; children unblock them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    descriptor = session.mount(options.mountpoint, os.fspath(options.source), options.allow_other, options.exec)
    connection = mountpoint.open_abort(options.mountpoint)
    Supervisor(context, descriptor, connection, log_place).run(report)


class Supervisor:
    def __init__(self, context: MountContext, descriptor: int, connection: int | None, log_place: str) -> None:
        """`descriptor`: of /dev/fuse. `connection`: see `mountpoint.open_abort`."""
        self._log_place = log_place
        self._context = context
        self._descriptor = descriptor
        self._connection = connection
        self._guard = None if connection is None else Guard(connection)
        self._counters = context.row(SUPERVISOR_ROW)
        self._children: dict[int, int] = {}  # pid -> worker index, or _MANAGER
        self._deaths: deque[float] = deque(maxlen=DEATHS)
        self._crashes: deque[float] = deque(maxlen=CRASHES)
        self._manager_due: float | None = None
        self._ready = False

    def run(self, report: Callable[[str], None]) -> None:
        """Serve until unmounted or told to stop; children and mount are gone when this returns.

        If it raises once the mount was ready, the mount stays and answers ENOTCONN: whoever reads it must not take the
        empty directory underneath for an empty data set.
        """
        failed = True
        try:
            self._start_all()
            self._watch(report)
            failed = False
        finally:
            notify_systemd("STOPPING=1")
            if failed and self._ready:
                self._disconnect()
            else:
                self._unmount()
            self._stop()

    def _start_all(self) -> None:
        self._start(_MANAGER)
        for index in range(self._context.options.workers):
            self._start(index)

    # -- children

    def _start(self, index: int) -> None:
        supervisor = os.getpid()
        pid = os.fork()
        if pid:
            self._children[pid] = index
            return
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)
        if index == _MANAGER:
            session.leave()
            _live(partial(manage, self._context))
        _live(partial(work, self._context, self._descriptor, index))

    def _reap(self) -> list[tuple[int, int]]:
        """(index, exit status as of os.waitstatus_to_exitcode) of every child that has ended."""
        ended = []
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            index = self._children.pop(pid, None)
            if index is not None:
                ended.append((index, os.waitstatus_to_exitcode(status)))
        return ended

    def _watch(self, report: Callable[[str], None]) -> None:
        """`report` is called when all children are at work; one that cannot begin ends the mount."""
        while True:
            if not self._ready and self._context.counters.totals()["process_starts"] >= len(self._children):
                self._ready = True
                report("")
                notify_systemd("READY=1")
            pause_s = READY_POLL_S if not self._ready else 0.25 if self._manager_due else 5.0
            if self._guard is not None:
                self._guard.keep()
            received = signal.sigtimedwait(_SIGNALS, pause_s)
            if received and received.si_signo in (signal.SIGTERM, signal.SIGINT):
                log.info("told to stop by signal %d", received.si_signo)
                return
            ended = self._reap()
            if any(index != _MANAGER and status == 0 for index, status in ended):
                log.info("unmounted")
                return
            for index, status in ended:
                self._deaths.append(time.monotonic())
                who = "the manager" if index == _MANAGER else f"worker {index}"
                log.warning("%s ended (%s)", who, f"signal {-status}" if status < 0 else f"exit {status}")
            damaged = any(self._store_is_damaged(status) for _, status in ended)
            if ended and not self._ready and not damaged:
                raise MountError(f"a process of the mount ended before it could begin: {self._log_place} says why")
            if len(self._deaths) == DEATHS and self._deaths[-1] - self._deaths[0] < DEATHS_WITHIN_S:
                raise MountError(f"{DEATHS} processes died within a minute: giving up, {self._log_place} says why")
            if damaged:
                self._rebuild()
            else:
                self._replace(index for index, _ in ended)
            if self._manager_due is not None and time.monotonic() >= self._manager_due:
                self._manager_due = None
                self._start(_MANAGER)

    def _replace(self, ended: Iterable[int]) -> None:
        workers = 0
        for index in ended:
            if index == _MANAGER:
                self._counters.add("manager_restarts")
                self._manager_due = time.monotonic() + MANAGER_PAUSE_S
            else:
                workers += 1
                self._counters.add("worker_restarts")
                self._start(index)
        if workers:
            self._resend()

    def _resend(self) -> None:
        self._counters.add("resends")
        if not session.resend(self._descriptor):
            # The dead worker's readers would wait for ever; an error is better.
            raise MountError("this kernel cannot hand requests out again (Linux 6.9 can): the mount ends")

    def _store_is_damaged(self, status: int) -> bool:
        if status == environment.EXIT_STORE_CORRUPT:
            return True
        if -status not in _CRASHES:
            return False
        self._crashes.append(time.monotonic())
        if len(self._crashes) == CRASHES and self._crashes[-1] - self._crashes[0] < DEATHS_WITHIN_S:
            # The walk does not see LMDB's list of free pages, which crashes those who write.
            self._crashes.clear()
            return True
        store = self._context.directories
        return not all(environment.is_sound(path) for path in (store.content, store.names) if path.exists())

    def _rebuild(self) -> None:
        """Start over with an empty store; requests in flight are answered by the new workers."""
        log.warning("the cache is damaged and is built anew")
        self._end_children(signal.SIGKILL, KILLED_S)
        environment.wipe(self._context.directories.store)
        self._counters.add("store_rebuilds")
        self._manager_due = None
        self._start_all()
        self._resend()

    # -- the end

    def _stop(self) -> None:
        workers = [pid for pid, index in self._children.items() if index != _MANAGER]
        self._await(workers, DRAIN_S)
        self._disconnect()
        self._end_children(signal.SIGKILL, KILLED_S, workers)
        self._end_children(signal.SIGTERM, SAVE_S)
        try:
            environment.release(self._context.directories.store)
        except OSError as exc:
            log.warning("the cache could not be written to disk (%s): it is built anew after a power loss", exc)
        self._context.source.close()

    def _disconnect(self) -> None:
        """Readers get an error from now on, whatever becomes of the children; without `abort`, once these end."""
        if self._connection is not None:
            mountpoint.abort(self._connection)
        session.leave()

    def _unmount(self) -> None:
        path = self._context.options.mountpoint
        if mountpoint.mounted_at(path) is None:
            return
        try:
            mountpoint.unmount(path)
        except MountError:
            log.warning("%s is in use: detached, it goes when the last file is closed", path)
            try:
                mountpoint.unmount(path, lazy=True)
            except MountError as exc:
                log.warning("%s", exc)

    def _end_children(self, number: int, patience_s: float, pids: list[int] | None = None) -> None:
        """Send a signal to these children, or all; kill those that are still there after `patience_s`."""
        going = [pid for pid in (self._children if pids is None else pids) if pid in self._children]
        for pid in going:
            os.kill(pid, number)
        if self._await(going, patience_s):
            return
        if number != signal.SIGKILL:
            self._end_children(signal.SIGKILL, KILLED_S, going)
            return
        for pid in going:
            if self._children.pop(pid, None) is not None:
                log.warning("process %d cannot be killed: it waits in the kernel, for the source or a disk", pid)

    def _await(self, pids: list[int], patience_s: float) -> bool:
        """Whether all of these children have ended, after `patience_s` at the latest."""
        deadline = time.monotonic() + patience_s
        while any(pid in self._children for pid in pids):
            if time.monotonic() >= deadline:
                return False
            self._reap()
            time.sleep(0.005)
        return True


def _live(main: Callable[[], Awaitable[None]]) -> NoReturn:
    """The whole life of a child; ends without unwinding, for a thread that hangs in the source cannot be joined."""
    status = 1
    try:
        # Of the terminal's Ctrl-C the supervisor alone makes something.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        trio.run(main)
        status = 0
    except BaseException as exc:
        status = 1
        if (damage := _damage_in(exc)) is not None:
            log.error("%s", damage)
            status = environment.EXIT_STORE_CORRUPT
        else:
            log.exception("the process ends")
    finally:
        logging.shutdown()
        os._exit(status)


def _damage_in(exc: BaseException) -> StoreCorrupt | None:
    """The damage to the store that a process ends of, if it does."""
    if isinstance(exc, BaseExceptionGroup):
        return next((damage for inner in exc.exceptions if (damage := _damage_in(inner))), None)
    return exc if isinstance(exc, StoreCorrupt) else None
