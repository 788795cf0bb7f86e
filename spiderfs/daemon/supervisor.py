"""The supervisor mounts, forks workers and a manager, and replaces those that die. It does nothing else.

It holds the FUSE descriptor and never answers a request, so it has no reason to die itself. If someone kills it, the
kernel kills its children (PR_SET_PDEATHSIG), the guard ends the connection and unlocks the cache directory
(`guard.py`), readers get ENOTCONN and the next mount cleans up. When a child ends, the supervisor acts so:

    worker, exit 0              the file system was unmounted: stop everything
    any, EXIT_STORE_CORRUPT     wipe the store, start all children again
    worker, anything else       start another one, and have the kernel hand out its requests again
    manager, anything else      start another one; reads go on meanwhile

A crash may be a symptom of a damaged store (SIGBUS); then the store is walked first. A cache directory that was deleted
or moved is made again. If workers keep dying without having answered any request, the mount ends (`restarts.py`). A
child counts as ended when its first thread has ended: others may wait in a source that hangs, and cannot be killed.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import NoReturn

import trio

from spiderfs.daemon import cache_directory
from spiderfs.daemon.background import detach, notify_systemd, start_logging
from spiderfs.daemon.context import FIRST_WORKER_ROW, MANAGER_ROW, SUPERVISOR_ROW, MountContext
from spiderfs.daemon.guard import Guard
from spiderfs.daemon.manager import manage
from spiderfs.daemon.published_options import publish_options
from spiderfs.daemon.restarts import DEATHS, Restarts, Suspects
from spiderfs.daemon.worker import work
from spiderfs.errors import MountError, SpiderfsError, StoreCorrupt
from spiderfs.fuse.bindings import mount
from spiderfs.fuse.kernel import Kernel
from spiderfs.fuse.resent_requests import ResentRequests
from spiderfs.linux import mounts
from spiderfs.linux.memory import allow_open_files
from spiderfs.linux.process_table import end_with_parent, ended_status
from spiderfs.metrics import SharedCounters
from spiderfs.options.model import Options
from spiderfs.options.types import CacheDirectories
from spiderfs.shared.layout import CacheLayout
from spiderfs.sources.open import open_source
from spiderfs.store import environment
from spiderfs.trace import TraceWriter

log = logging.getLogger(__name__)


def live(main: Callable[[], Awaitable[None]]) -> NoReturn:
    """Live the whole life of a child, and end without unwinding: a thread that hangs in the source cannot be joined."""
    status = 1
    try:
        # Only the supervisor acts on Ctrl-C in the terminal.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        # What was imported is never garbage, so no collection has to look at it.
        gc.freeze()
        trio.run(main)
        status = 0
    except BaseException as exc:
        status = 1
        if (damage := _damage_in(exc)) is not None:
            log.error("%s: it is rebuilt", damage)
            status = environment.EXIT_STORE_CORRUPT
        else:
            log.exception("the process ends")
    finally:
        logging.shutdown()
        os._exit(status)


def _damage_in(exc: BaseException) -> StoreCorrupt | None:
    """The damage to the store that ends the process; None if something else ends it."""
    if isinstance(exc, BaseExceptionGroup):
        return next((damage for inner in exc.exceptions if (damage := _damage_in(inner))), None)
    return exc if isinstance(exc, StoreCorrupt) else None


MANAGER = -1  # where a worker has its index
# A manager that dies at once must not keep the processor busy. Readers wait for workers, so these pause less.
MANAGER_PAUSE_S = 0.5


class Deaths:
    """Brings the facts about starts and deaths to the rules of `restarts.py`; they lie in memory that all share."""

    def __init__(
        self,
        counters: SharedCounters,
        resent: ResentRequests,
        workers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counters, self._resent = counters, resent
        self._workers = range(workers)
        self._clock = clock
        self._restarts = Restarts(workers, DEATHS)
        self._manager_restarts = Restarts(1)
        self._suspects = Suspects(sole=workers == 1)
        self._since: dict[int, float] = {}  # worker index, or MANAGER -> when the present one was started

    def started(self, index: int, again: bool) -> None:
        """Note that a worker, or the manager, is about to be forked; `again`: in the place of one that has ended."""
        self._since[index] = self._clock()
        if index != MANAGER:
            self._resent.forget(index)
        if again:
            self._counters.row(SUPERVISOR_ROW).add(_counter(index))

    def lived_s(self, index: int) -> float:
        """How long this process has lived, until `pause_s` is asked for it; 0 if it is not there."""
        now = self._clock()
        return now - self._since.get(index, now)

    def pause_s(self, index: int) -> float | None:
        """Note a death, before requests are sent again: seconds until the next start; None: end the mount."""
        pause_s: float | None
        if index == MANAGER:
            applied = self._counters.row(MANAGER_ROW).value("events_folded")
            pause_s = self._manager_restarts.died(0, [applied], [self.lived_s(MANAGER)])
            pause_s = max(pause_s or 0.0, MANAGER_PAUSE_S)
        else:
            self._suspects.died(*self._resent.held_by(index))
            self._resent.publish(self._suspects.alone())
            # To refuse a request is no progress.
            rows = [self._counters.row(FIRST_WORKER_ROW + worker) for worker in self._workers]
            answered = [row.value("answers") - row.value("deadly_requests") for row in rows]
            pause_s = self._restarts.died(index, answered, [self.lived_s(worker) for worker in self._workers])
        del self._since[index]
        if pause_s is not None:
            so_often = self._counters.row(SUPERVISOR_ROW).value(_counter(index)) + 1
            log.info("%s starts again in %g s (%s: %d)", name_of(index), pause_s, _counter(index), so_often)
        return pause_s


def name_of(index: int) -> str:
    return "the manager" if index == MANAGER else f"worker {index}"


def _counter(index: int) -> str:
    """The metric that counts restarts of this kind of process."""
    return "manager_restarts" if index == MANAGER else "worker_restarts"


# How long workers serve open handles after an unmount, and how long the manager may take to save.
DRAIN_S = 5.0
SAVE_S = 10.0
# How long the supervisor waits for the end of a process that it has killed. A process that has not ended by then waits
# in the kernel: for answers of the mount, until the connection ends, or for a source or a disk that hangs.
KILLED_S = 5.0
READY_POLL_S = 0.002
# How often the supervisor looks for guard and cache directory, and for children whose end no signal reports.
LOOK_S = 2.0
# A process begins in 0.1 s, on two busy cores in 2 s. A process that has not begun after START_S waits for a lock of
# the store whose holder is dead. The kernel frees such locks (robust futexes), but not if it had no memory for that
# when it killed the holder, as in a control group at its limit. When all processes have closed the store, the next one
# to open it makes new locks.
START_S = 10.0
# This many deaths by a signal of _CRASHES within this time mean a damaged store, even if a walk finds no damage.
CRASHES, CRASHES_WITHIN_S = 4, 60.0
# Deaths by these may come from a page of the store that is not there.
_CRASHES = {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT}
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


Attach = Callable[[Options], Kernel]
"""Makes the way by which requests come; raises MountError."""


def mounting(options: Options) -> Kernel:
    """Mount; raises MountError."""
    return mount(
        options.binding,
        options.mountpoint,
        os.fspath(options.source),
        options.allow_other,
        options.exec,
        immutable=options.immutable,
    )


def run(options: Options, foreground: bool, attach: Attach = mounting) -> int:
    """Mount and serve; returns the exit status when the mount is there (or over: foreground). Raises UsageError."""
    if foreground:
        _serve(options, foreground, lambda failure: None, attach)
        return 0
    if (report := detach()) is None:
        return 0
    status = 1
    try:
        _serve(options, foreground, report, attach)
        status = 0
    except SpiderfsError as exc:
        # No one waits for the report of a mount that ends after it was ready.
        log.error("%s", exc)
        report(str(exc))
    except BaseException as exc:
        log.exception("the mount failed")
        report(f"unexpected {type(exc).__name__}: {' '.join(str(exc).split())}")
    finally:
        logging.shutdown()
        os._exit(status)


def _serve(options: Options, foreground: bool, report: Callable[[str], None], attach: Attach) -> None:
    # From here on the directory is named by its real path, which no later change of a link can lead somewhere else.
    first, *others = map(cache_directory.real_path, options.cache_dir.all)
    options = options.model_copy(update={"cache_dir": CacheDirectories(first, tuple(others))})
    allow_open_files()
    lock = cache_directory.lock_cache_directory(first, options.mountpoint)
    start_log = partial(start_logging, options.log_level, options.log_file, first, foreground)
    log_place = start_log()
    layout = CacheLayout(first)
    if options.trace is not None:
        # Here the user gets one line about a trace that cannot be written; the manager only goes on without a trace.
        TraceWriter(options.trace, options.number_for_traces()).close()
    if mounts.clean_stale(options.mountpoint):
        log.warning("removed a mount that a crash had left at %s", options.mountpoint)
    # What is cached belongs to the place where the source is found to be now; all processes of the mount ask there.
    source = open_source(options.source, options.store_settings)
    cache_directory.bind_to_source(layout, source.identity)
    locks = cache_directory.lock_other_directories(others, options.mountpoint, source.identity)
    context = MountContext(options, source, [path for path in others if path not in locks])
    if rebuilt := context.claim_store():
        log.warning("the cache starts empty: %s", rebuilt)
        context.row(SUPERVISOR_ROW).add("store_rebuilds")
    publish_options(layout.run, options)
    # These signals are blocked from here on, so that none is lost between two waits; children unblock them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    kernel = attach(options)
    connection = mounts.open_abort(options.mountpoint)
    Supervisor(context, kernel, connection, lock, log_place, start_log, list(locks.values())).run(report)


class Supervisor:
    def __init__(
        self,
        context: MountContext,
        kernel: Kernel,
        connection: int | None,
        lock: int,
        log_place: str,
        start_log: Callable[[], str],
        other_locks: Collection[int] = (),
    ) -> None:
        """`connection`: see `mounts.open_abort`. `lock`, `other_locks`: descriptors of the cache directories' locks."""
        self._lock, self._other_locks = lock, other_locks
        self._log_place, self._start_log, self._context = log_place, start_log, context
        self._kernel, self._connection = kernel, connection
        self._guard = Guard(connection, lock)
        self._counters = context.row(SUPERVISOR_ROW)
        self._children: dict[int, int] = {}  # pid -> worker index, or MANAGER
        self._due: dict[int, float] = {}  # worker index, or MANAGER -> when it is to be started again
        self._deaths = Deaths(context.counters, context.resent, context.options.workers)
        # Worker index, or MANAGER -> how often it will have begun when the present one has; the time limit for that.
        self._starts: dict[int, int] = {}
        self._late_at = math.inf
        self._crashes: deque[float] = deque(maxlen=CRASHES)
        self._cache_is_lost = self._ready = False

    def run(self, report: Callable[[str], None]) -> None:
        """Serve until unmounted or signalled to stop; children and mount are gone when this returns.

        If this raises once the mount was ready, the mount stays and answers ENOTCONN: a reader must not take the empty
        directory underneath for an empty data set.
        """
        failed = True
        try:
            for index in (MANAGER, *range(self._context.options.workers)):
                self._start(index)
            self._watch(report)
            failed = False
        finally:
            notify_systemd("STOPPING=1")
            if failed and self._ready:
                self._disconnect()
            else:
                self._kernel.unmount(self._context.options.mountpoint)
            self._stop()

    def _start(self, index: int, again: bool = False) -> None:
        supervisor = os.getpid()
        self._starts[index] = self._begun(index) + 1
        self._deaths.started(index, again)
        if pid := os.fork():
            self._children[pid] = index
            return
        if not end_with_parent(supervisor):
            os._exit(1)
        # They are the supervisor's alone, and so end with it.
        for lock in self._other_locks:
            os.close(lock)
        if index == MANAGER:
            live(partial(manage, self._context, self._kernel))
        live(partial(work, self._context, self._kernel, index, again))

    def _reap(self) -> list[tuple[int, int]]:
        """Forget the children that have ended; returns index and os.waitstatus_to_exitcode of each."""
        ended = []
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if (index := self._children.pop(pid, None)) is not None:
                ended.append((index, os.waitstatus_to_exitcode(status)))
        for pid in list(self._children):
            if (held_up := ended_status(pid)) is not None:
                ended.append((self._children.pop(pid), os.waitstatus_to_exitcode(held_up)))
        return ended

    def _watch(self, report: Callable[[str], None]) -> None:
        """Replace children that die until the end; raises MountError if one cannot begin. `report`: all are at work."""
        while True:
            if not self._ready and self._all_at_work():
                self._ready = True
                report("")
                notify_systemd("READY=1")
            self._guard.keep()
            received = signal.sigtimedwait(_SIGNALS, self._pause_s())
            if received and received.si_signo in (signal.SIGTERM, signal.SIGINT):
                log.info("stopping on signal %d", received.si_signo)
                return
            ended = self._reap()
            if any(index != MANAGER and status == 0 for index, status in ended):
                log.info("unmounted")
                return
            for index, status in ended:
                how = f"signal {-status}" if status < 0 else f"exit {status}"
                log.warning("%s ended (%s), %.1f s after its start", name_of(index), how, self._deaths.lived_s(index))
            damaged = any(self._store_is_damaged(status) for _, status in ended)
            if ended and not self._ready and not damaged:
                raise MountError(f"a process of the mount ended before it could begin: {self._log_place} says why")
            self._plan_restarts([index for index, _ in ended])
            if damaged:
                self._rebuild()
            elif self._cache_is_lost or ended or self._all_at_work():
                self._look_for_cache()
            elif time.monotonic() >= self._late_at and not self._due:
                log.warning("a process has not begun within %g s: all are started again", START_S)
                self._end_all_and_start_again()
            self._start_due()

    def _begun(self, index: int) -> int:
        """How often the manager, or this worker, has been ready to work."""
        row = MANAGER_ROW if index == MANAGER else FIRST_WORKER_ROW + index
        return self._context.row(row).value("process_starts")

    def _all_at_work(self) -> bool:
        return not self._due and all(self._begun(index) >= starts for index, starts in self._starts.items())

    def _pause_s(self) -> float:
        """How long to wait for a signal."""
        if not self._ready:
            return READY_POLL_S
        return max(0.0, min([LOOK_S, *(due - time.monotonic() for due in self._due.values())]))

    def _plan_restarts(self, ended: list[int]) -> None:
        """Decide when to replace the children with these indices; raises MountError if workers keep dying."""
        for index in ended:
            if index == MANAGER:
                # No one waits for what a dead manager was fetching.
                self._context.flights.clear()
            if (pause_s := self._deaths.pause_s(index)) is None:
                raise MountError(
                    f"{DEATHS} workers in a row died, and no request was answered in between:"
                    f" giving up, {self._log_place} says why"
                )
            self._due[index] = time.monotonic() + pause_s

    def _start_due(self) -> None:
        now = time.monotonic()
        due = [index for index, when in self._due.items() if when <= now]
        if due:
            self._late_at = now + START_S
        for index in due:
            del self._due[index]
            self._start(index, again=True)
        if any(index != MANAGER for index in due):
            self._counters.add("resends")
            if not self._kernel.resend():
                # The readers of the dead worker would wait for ever, and an error is better for them.
                raise MountError("this kernel cannot hand requests out again (Linux 6.9 can): the mount ends")

    def _store_is_damaged(self, status: int) -> bool:
        if status == environment.EXIT_STORE_CORRUPT:
            return True
        if -status not in _CRASHES:
            return False
        self._crashes.append(time.monotonic())
        if len(self._crashes) == CRASHES and self._crashes[-1] - self._crashes[0] < CRASHES_WITHIN_S:
            # The walk does not see LMDB's list of free pages; damage there crashes the processes that write.
            self._crashes.clear()
            return True
        return not all(environment.is_sound(path) for path in self._context.layout.environments if path.exists())

    def _rebuild(self) -> None:
        """Start over with an empty store; requests in flight are answered by the new workers."""
        log.warning("the cache is damaged and is built again")
        self._end_all_and_start_again()
        environment.wipe(self._context.layout.store)
        self._context.disks.bind()
        self._forget_what_inodes_mean()

    def _forget_what_inodes_mean(self) -> None:
        """The store is a new one, and all workers have ended."""
        self._counters.add("store_rebuilds")
        if self._context.options.immutable:
            # The kernel trusts names for good, and would read by inodes whose path no worker knows.
            self._kernel.forget_names()

    def _end_all_and_start_again(self) -> None:
        """Kill all children, and start them again at once, or when the last of the planned restarts is due."""
        self._end_children(signal.SIGKILL, KILLED_S)
        latest = max(self._due.values(), default=time.monotonic())
        self._due = dict.fromkeys([MANAGER, *range(self._context.options.workers)], latest)

    def _look_for_cache(self) -> None:
        """If the cache directory or a part of it was deleted or moved, begin again with what is left."""
        context = self._context
        context.disks.look()
        if (missing := context.lost_part(self._lock)) is None:
            self._cache_is_lost = False
            return
        try:
            if not cache_directory.same_file(context.layout.lock, self._lock):
                lost = self._lock
                self._lock = cache_directory.lock_cache_directory(context.layout.cache, context.options.mountpoint)
                os.close(lost)
                self._guard.follow(self._lock)
            self._log_place = self._start_log()
            cache_directory.bind_to_source(context.layout, context.identity)
            context.begin_run_directory()
            publish_options(context.layout.run, context.options)
            log.warning("%s has gone: the cache is made again with what is left of it", missing)
            self._end_all_and_start_again()
            wiped = context.claim_store()
            if wiped or not all(path.exists() for path in context.layout.environments):
                self._forget_what_inodes_mean()
            self._cache_is_lost = False
        except (SpiderfsError, OSError) as exc:
            # Perhaps someone is still deleting it.
            if not self._cache_is_lost:
                log.warning("%s has gone, and cannot be made again (%s): make its place writable", missing, exc)
            self._cache_is_lost = True

    def _stop(self) -> None:
        workers = [pid for pid, index in self._children.items() if index != MANAGER]
        self._await(workers, DRAIN_S)
        self._disconnect()
        self._end_children(signal.SIGKILL, KILLED_S, workers)
        self._end_children(signal.SIGTERM, SAVE_S)
        try:
            disks = self._context.disks
            environment.release(self._context.layout.store, [disks.places[number] for number in disks.numbers[1:]])
        except OSError as exc:
            log.warning("the cache could not be written to disk (%s): it is built again after a power loss", exc)
        self._context.source.close()
        for lock in self._other_locks:
            os.close(lock)
        # Children that the source still holds would hold it too.
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _disconnect(self) -> None:
        """Give readers an error from now on, or once all children have ended if the connection cannot be aborted."""
        if self._connection is not None:
            mounts.abort(self._connection)
        self._kernel.leave()

    def _end_children(self, number: int, patience_s: float, pids: list[int] | None = None) -> None:
        """Send a signal to these children, or to all; kill the ones that are still there after `patience_s`."""
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
                log.warning("process %d waits in the kernel, for the source or a disk: it ends when that answers", pid)

    def _await(self, pids: list[int], patience_s: float) -> bool:
        """Whether all of these children have ended, after `patience_s` at the latest."""
        deadline = time.monotonic() + patience_s
        while any(pid in self._children for pid in pids):
            if time.monotonic() >= deadline:
                return False
            self._reap()
            time.sleep(0.005)
        return True
