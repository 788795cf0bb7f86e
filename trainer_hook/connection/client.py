"""The client: the connection to the daemon. One thread sends messages, so that the training never waits for the daemon.

The training's threads put messages into a queue of limited length, and go on. When the queue is full, batches are
dropped and counted. Only the sending thread uses the socket. When the daemon dies, the client logs that once and tries
to connect again, with growing pauses. What `ListsAndPlans` keeps is then published again.

What a training calls takes no lock and, but for `close`, waits for no thread. So a data loader can fork at any time,
and the garbage collector may run finalizers that call the client in any thread, in the midst of any call.

`root_of` and `socket_finder` find the daemon: by the mount in which a directory lies, or by what is served as a name.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import select
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spiderfs.protocol import (
    Batch,
    Cached,
    CachedRequest,
    Decoder,
    EpochEnd,
    Error,
    Exchange,
    Given,
    Goodbye,
    Hello,
    Message,
    Ok,
    Pin,
    Pinned,
    Plan,
    Progress,
    ProtocolError,
    Samples,
    Scores,
    ScoresRequest,
    WarmUp,
    Warn,
    encode,
)
from spiderfs.protocol.requests import SCHEME, address_of, connected, hook_socket_of
from trainer_hook.connection.sample_list import Declaration

# A file of every mount, below its root; it holds the path of the socket.
_HOOK_FILE = ".spiderfs/hook"


@dataclass(frozen=True)
class ConnectPatience:
    """How long a client waits to connect, and between two attempts, in seconds."""

    connect_s: float = 5.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 30.0


DEFAULT_PATIENCE = ConnectPatience()


class Root(NamedTuple):
    """The directory below which a data set's files lie for the daemon, and the place there that the user has named."""

    path: str
    """The real path of a mount, or `spiderfs://NAME`; any other real path if there is no daemon."""
    directory: str
    has_daemon: bool


def root_of(directory: str | os.PathLike[str]) -> Root:
    """Raises ValueError for an impossible name. What is served need not be served now."""
    address = address_of(directory)
    if address is not None:
        return Root(f"{SCHEME}{address.name}", os.fspath(directory).rstrip("/"), has_daemon=True)
    here = os.path.abspath(directory)
    mount = find_mount(here)
    return Root(os.fspath(mount or os.path.realpath(here)), here, has_daemon=mount is not None)


def find_mount(directory: str | os.PathLike[str]) -> Path | None:
    """The real path of the spiderfs mount in which `directory` lies; None if it lies in none.

    A symbolic link may lead into the mount. If the mount's daemon has died, this is the outermost directory that gives
    the error ENOTCONN.
    """
    for path in (os.path.abspath(directory), os.path.realpath(directory)):
        dead = None
        for above in (Path(path), *Path(path).parents):
            try:
                os.stat(above / _HOOK_FILE)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as exc:
                if exc.errno == errno.ENOTCONN:
                    dead = above
                continue
            return Path(os.path.realpath(above))
        if dead is not None:
            return dead
    return None


def socket_finder(directory: str | os.PathLike[str], given: str | os.PathLike[str] | None) -> Callable[[], Path]:
    """A function that returns the path of the socket; it raises FileNotFoundError while there is no mount.

    `given` overrides the path that the mount names: in a container the socket may have another path.
    """

    def find() -> Path:
        if given is not None:
            return Path(given)
        if (address := address_of(directory)) is not None:
            return hook_socket_of(address.name, DEFAULT_PATIENCE.connect_s)
        mount = find_mount(directory)
        if mount is None:
            raise FileNotFoundError(f"{os.fspath(directory)} lies in no spiderfs mount")
        return Path(os.fsdecode((mount / _HOOK_FILE).read_bytes().rstrip(b"\n")))

    return find


# The progress in a list's plan is sent at most once in this time. The sending thread looks 20 times a second, and each
# time it looks it is to find that it is time.
PROGRESS_EVERY_S = 0.04


class ListsAndPlans:
    """What a daemon has to know at any time: the lists of a training, and its latest plans.

    A connection may end, and a daemon that comes back knows nothing. So each connection gets them once more, the
    current plan from the position that the training has reached by then. The training's threads change them, and the
    sending thread alone takes messages from them. Each change of a table is one step, which no other thread and no
    finalizer can interrupt; a table is copied before it is read entry by entry.
    """

    def __init__(self) -> None:
        # The training's threads declare lists, and the sending thread withdraws them.
        self._declarations: dict[str, Declaration] = {}
        # The current plan of each list, and the plans of later epochs: by list and number of the epoch.
        self._plans: dict[tuple[str, int], Plan] = {}
        # The current plan of each list, and how far the training has come in it.
        self._begun: dict[str, Plan] = {}
        self._progress_of: dict[str, Progress] = {}
        # The progress of lists that has not been sent, when it was sent last, and the last one in epochs that are over.
        # Who takes what is unsaid takes it out in one step: both the training's threads and the sending thread do.
        self._unsaid: dict[str, Progress] = {}
        self._said_at: dict[str, float] = {}
        self._finished: deque[Progress] = deque()
        # The names of the lists and plans that have not been sent through this connection.
        self._undeclared: deque[str] = deque()
        self._unplanned: deque[tuple[str, int]] = deque()
        # The plans among these that began before this connection; its daemon has not seen what was read by then.
        self._begun_before: set[tuple[str, int]] = set()
        # The lists that were declared through this connection. No plan is sent for one that was withdrawn before.
        self._declared: set[str] = set()
        self._chunks: Iterator[Samples] = iter(())

    # -- the training's threads

    def of_lists(self, names: Collection[str]) -> ListsAndPlans:
        """A copy with these lists and their plans, for another job."""
        following = ListsAndPlans()
        following._declarations = {name: found for name, found in self._declarations.copy().items() if name in names}
        following._plans = {key: plan for key, plan in self._plans.copy().items() if key[0] in names}
        following._begun = {name: plan for name, plan in self._begun.copy().items() if name in names}
        following._progress_of = {name: come for name, come in self._progress_of.copy().items() if name in names}
        return following

    def declare(self, declaration: Declaration) -> None:
        before = self._declarations.get(declaration.name, declaration)
        if before.paths != declaration.paths:
            # The numbers in its plans are of entries of the list before.
            for key in [key for key in list(self._plans) if key[0] == declaration.name]:
                self._plans.pop(key, None)
        self._declarations[declaration.name] = declaration
        self._undeclared.append(declaration.name)

    def current(self, name: str) -> tuple[Declaration | None, Plan | None]:
        """The list of this name, and its plan that began last, if there are any."""
        return self._declarations.get(name), self._begun.get(name)

    def plan(self, plan: Plan) -> None:
        key = plan.list, plan.epoch
        if plan.begun:
            drawn_ahead, last = self._plans.get(key), self._begun.get(plan.list)
            as_expected = (last is None or last.epoch <= plan.epoch) and (
                drawn_ahead is None or drawn_ahead.begun or np.array_equal(drawn_ahead.order, plan.order)
            )
            for name, epoch in list(self._plans):
                if name == plan.list and not (as_expected and epoch > plan.epoch):
                    self._plans.pop((name, epoch), None)
            if (unsaid := self._unsaid.pop(plan.list, None)) is not None:
                self._finished.append(unsaid)
            self._begun_before.discard(key)
            self._begun[plan.list] = plan
            self._progress_of[plan.list] = Progress(plan.list, plan.epoch, plan.position, plan.position)
        self._plans[key] = plan
        # If the plan replaces one that waits to be sent, it must not be sent before plans that came earlier.
        with contextlib.suppress(ValueError):
            self._unplanned.remove(key)
        self._unplanned.append(key)

    def set_progress(self, name: str, dispatched: int, taken: int) -> None:
        """Keep how far the training is in the list's current plan, if the list has one."""
        plan = self._begun.get(name)
        if plan is not None:
            self._progress_of[name] = self._unsaid[name] = Progress(name, plan.epoch, dispatched, taken)

    # -- the sending thread

    def withdraw(self, declaration: Declaration) -> None:
        """No longer declare this list, unless another declaration has taken its place."""
        if self._declarations.get(declaration.name) is declaration:
            found = self._declarations.pop(declaration.name, declaration)
            if found is not declaration:
                # It was declared in this moment, and perhaps once more since.
                self._declarations.setdefault(declaration.name, found)

    def begin(self) -> None:
        """A connection begins, whose daemon knows nothing."""
        # `declare` and `plan` write their table before the queue, so a name may come twice here but is never missing.
        self._declared = set()
        self._undeclared = deque(self._declarations)
        self._unplanned = deque(sorted(key for key in list(self._plans) if key[0] in self._declarations))
        self._begun_before = set(self._unplanned)
        self._finished.clear()
        for name, come in self._progress_of.copy().items():
            self._unsaid.setdefault(name, come)
        self._said_at = {}
        self._chunks = iter(())

    def next(self) -> Message | None:
        """The next message of a list, or else of a plan, that has not been sent; None if there is none.

        What is left to say of the progress in an epoch comes before the plan of the next one.
        """
        chunk = next(self._chunks, None)
        while chunk is None and self._undeclared:
            declaration = self._declarations.get(self._undeclared.popleft())
            if declaration is not None:
                self._declared.add(declaration.name)
                self._chunks = declaration.chunks()
                chunk = next(self._chunks, None)
        while chunk is None and self._finished:
            finished = self._finished.popleft()
            if finished.list in self._declared:
                return finished
        while chunk is None and self._unplanned:
            key = self._unplanned.popleft()
            plan = self._plans.get(key)
            if plan is not None and plan.list in self._declared:
                if not plan.begun:
                    return plan
                # How far the training has come meanwhile is said next.
                self._said_at.pop(plan.list, None)
                position = self._progress_of[plan.list].taken if key in self._begun_before else plan.position
                return replace(plan, position=min(position, len(plan.order)))
        return chunk

    def progress(self, now_s: float, hurry: bool) -> Progress | None:
        """Some progress that has not been sent; None if there is none. The caller asks `next` first.

        Without `hurry` the progress of a list waits if some of it was sent a moment ago.
        """
        for name in list(self._unsaid):
            due = hurry or now_s >= self._said_at.get(name, -math.inf) + PROGRESS_EVERY_S
            if not due or name not in self._declared or (said := self._unsaid.pop(name, None)) is None:
                continue
            if (name, said.epoch) not in self._unplanned:
                self._said_at[name] = now_s
                return said
            # Its plan came after `next` was asked, and is sent first.
            self._unsaid.setdefault(name, said)
        return None


log = logging.getLogger("trainer_hook")

# This many batches may wait for the daemon: a few seconds of training, some megabytes.
QUEUE_BATCHES = 64
_RECEIVE_BYTES = 1 << 18
# The sending thread looks for batches this often. When each batch woke it up, the training waited 0.3
# ms for the interpreter's lock, because the thread took the lock to encode the batch at once.
COLLECT_MS = 50


class _WakeUp:
    """An eventfd(2) by which other threads wake the sending thread; it is closed when no one has it any more."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        os.eventfd_read(self._fd)


class HookClient:
    """A trainer's connection to the daemon.

    Every attempt to connect calls `find_socket`; it raises OSError while there is no socket. `counts` has the number of
    batches that were sent ("sent"), and of those that were not, by the reason. `follows_plans` is whether the daemon
    followed plans when it last answered with scores.
    """

    def __init__(
        self,
        find_socket: Callable[[], Path],
        hello: Hello,
        *,
        queue_batches: int = QUEUE_BATCHES,
        patience: ConnectPatience = DEFAULT_PATIENCE,
    ) -> None:
        self._find_socket = find_socket
        self._hello = hello
        self._queue_batches = queue_batches
        self._patience = patience
        # Those of the training's job, and those of the job that is published to the daemon: an earlier job, while
        # messages of it still wait.
        self._lists = self._published = ListsAndPlans()
        # Messages to build, and whether all plans and progress are sent before.
        self._queue: deque[tuple[bool, Callable[[], Message | None]]] = deque()
        # Where the answer to each question is awaited, by its number; None stands for no answer.
        self._answers: dict[int, SimpleQueue[Message | None]] = {}
        self._requests = itertools.count(1)
        # What finalizers have left to the sending thread: it calls each until that returns True.
        self._left: deque[Callable[[], bool]] = deque()
        # The sending thread lets go of it at its end. Who sets it just then has it still, so its number means no other
        # file.
        self._wake: _WakeUp | None = _WakeUp()
        # A forked child has no sending thread.
        self._pid = os.getpid()
        self._closing = False
        self._gone_said = False
        # Whether a goodbye was sent through this connection: nothing more is sent then.
        self._leaving = False
        self._said: set[str] = set()
        self.connected = threading.Event()
        self.follows_plans = True
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="spiderfs hook", daemon=True)
        self._thread.start()

    # -- what the training calls

    def become(self, hello: Hello, lists: Collection[str]) -> None:
        """Begin another job, which goes on with these lists and their plans.

        The daemon is notified after all messages of the job before.
        """
        following = self._lists.of_lists(lists)

        def change() -> Message:
            self._hello, self._published = hello, following
            return Goodbye()

        self._lists = following
        self._put(change, last=True)

    def declare(self, declaration: Declaration) -> None:
        """Declare a list to the daemon, now and whenever the daemon comes back."""
        self._lists.declare(declaration)
        self._wake_up()

    def plan(self, plan: Plan) -> None:
        """Send a plan to the daemon, now and whenever the daemon comes back.

        A plan that has begun replaces the list's plans of this epoch and of earlier ones. The plans of later epochs
        stay valid, except in two cases: if another plan was sent before for this epoch, or if the epoch is earlier than
        the last one that began. In both cases the later plans followed from an epoch that did not come.
        """
        self._lists.plan(plan)
        self._wake_up()

    def withdraw(self, name: str) -> None:
        """No longer use a list: the daemon gets an empty plan for it, and knows the list until the connection ends.

        It stays declared until what was put before this call has been sent, also to a daemon that comes back.
        """
        lists = self._lists
        declaration, plan = lists.current(name)
        if plan is not None:
            self.plan(Plan(name, plan.epoch + 1, 0, True, np.empty(0, np.uint32)))
        if declaration is None:
            return
        # A weak reference: the message may wait for ever for a dead daemon, and must not keep a list alive in whose
        # place another was declared.
        current = weakref.ref(declaration)

        def withdraw() -> None:
            if (found := current()) is not None:
                lists.withdraw(found)

        # Behind its batches, which the daemon would refuse without the list.
        self._put(withdraw)

    def set_progress(self, name: str, dispatched: int, taken: int) -> None:
        """Say how far the training is in the list's current plan; the daemon is notified some 20 times a second.

        The loader's workers were given `dispatched` samples of the plan, and the training has taken `taken` of them.
        """
        self._lists.set_progress(name, dispatched, taken)

    def batch(self, build: Callable[[], Batch | None]) -> None:
        """Send the batch that `build` returns, unless it is None; the sending thread calls `build`."""
        if not self._is_here():
            return
        if len(self._queue) >= self._queue_batches:
            self.counts["dropped"] += 1
        else:
            self._queue.append((False, partial(self._finite, build)))

    def epoch_end(self, end: EpochEnd) -> None:
        """Send the end of an epoch; if the daemon comes back after it, the job goes on with the next epoch."""

        def build() -> Message:
            self._hello = replace(self._hello, epoch=end.epoch + 1)
            return end

        self._put(build, last=True)

    def scores(self, name: str, timeout_s: float) -> npt.NDArray[np.float32] | None:
        """The daemon's scores of a list; None if the daemon has none, or does not answer in time."""
        message = self._question(lambda number: ScoresRequest(name, number))(timeout_s)
        return message.scores if isinstance(message, Scores) and len(message.scores) else None

    def exchange(
        self,
        name: str,
        epoch: int,
        position: int,
        taken: int,
        dispatched: Sequence[int],
        wanted: Sequence[int],
        partials: tuple[str, str] | None = None,
    ) -> Callable[[float], Sequence[int] | None]:
        """Send an `Exchange`; returns a function that waits this many seconds for the answer (None: there is none).

        `partials` are the store and the job by which jobs share partial samples.
        """
        indices, shared = (np.array(dispatched, np.uint32), np.array(wanted, np.uint32)), partials or ()
        wait = self._question(lambda number: Exchange(name, number, epoch, position, taken, *indices, *shared))

        def given(timeout_s: float) -> Sequence[int] | None:
            message = wait(timeout_s)
            return message.indices.tolist() if isinstance(message, Given) else None

        return given

    def cached(self, name: str, timeout_s: float) -> npt.NDArray[np.bool_] | None:
        """Which samples of a list are in the cache; None if the daemon does not answer in time."""
        message = self._question(lambda number: CachedRequest(name, number))(timeout_s)
        return message.flags() if isinstance(message, Cached) else None

    def pin(self, name: str, indices: npt.NDArray[np.integer[Any]], timeout_s: float) -> int | None:
        """Pin these samples of a list, in place of those that were pinned before; pins end when the client closes.

        Returns how many of them are pinned, or None if the daemon does not answer in time. A daemon that comes back
        after a crash has forgotten the pins.
        """
        pinned = indices.astype(np.uint32)
        message = self._question(lambda number: Pin(name, number, pinned))(timeout_s)
        return message.count if isinstance(message, Pinned) else None

    def warm_up(self, name: str, active: bool) -> None:
        """Say whether the training on a list warms up: the cache then evicts nothing for it.

        Declaring the list again ends the warm-up too, as for a daemon that comes back: say it before each epoch.
        """
        message = WarmUp(name, active)
        self._put(lambda: message)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what waits in the queue and a goodbye, and end the thread; give up after `timeout_s`.

        In the sending thread itself, which does that then, this returns at once.
        """
        if not self._closing and self._is_here():
            self._closing = True
            self._set_wake_up()
            if threading.get_ident() != self._thread.ident:
                self._thread.join(timeout_s)

    def leave(self, task: Callable[[], bool]) -> None:
        """Have the sending thread call this soon, and again until it returns True; for finalizers.

        After the client has closed, or in a forked child, it is not called.
        """
        if os.getpid() == self._pid:
            self._left.append(task)
            self._set_wake_up()

    # -- the queue

    def _put(self, build: Callable[[], Message | None], last: bool = False) -> None:
        """`last`: after all plans and progress that were set until now, however lately."""
        if not self._is_here():
            return
        self._queue.append((last, build))
        self._wake_up()

    def _question(self, request: Callable[[int], Message]) -> Callable[[float], Message | None]:
        """Send a question; returns a function that waits for the answer, at most the seconds it is given."""
        answer: SimpleQueue[Message | None] = SimpleQueue()
        if self._gone_said or not self._is_here():
            return lambda timeout_s: None
        number = next(self._requests)
        self._answers[number] = answer
        if self._gone_said:
            # The daemon died just now. The sending thread has woken all who wait for an answer, but not this one.
            answer.put(None)
        message = request(number)
        self._put(lambda: message)

        def wait(timeout_s: float) -> Message | None:
            try:
                return answer.get(timeout=timeout_s)
            except Empty:
                return None
            finally:
                self._answers.pop(number, None)

        return wait

    def _is_here(self) -> bool:
        """Whether this process has the sending thread; logs once if it has not."""
        if os.getpid() == self._pid:
            return True
        self._log_once("forked", "this process was forked after the hook was attached: attach in the one that trains")
        return False

    def _wake_up(self) -> None:
        if self._is_here():
            self._set_wake_up()

    def _set_wake_up(self) -> None:
        if (wake := self._wake) is not None:
            wake.set()

    # -- the sending thread

    def _run(self) -> None:
        assert self._wake is not None
        try:
            self._keep_talking(self._wake)
        finally:
            self._wake = None

    def _keep_talking(self, wake: _WakeUp) -> None:
        pause_s = self._patience.first_pause_s
        while True:
            try:
                with connected(self._find_socket(), self._patience.connect_s) as stream:
                    self._talk(stream, wake)
                if self._closing and not self._queue:
                    return
                # The goodbye was the former job's.
                continue
            except OSError as exc:
                if self.connected.is_set():
                    pause_s = self._patience.first_pause_s
                self._lost(exc)
            except Exception:
                # An error of ours must not stop the training; a message that cannot be built is not tried again.
                log.exception("the hook had to connect again")
                self.connected.clear()
            if self._closes_within(pause_s, wake):
                return
            pause_s = min(2 * pause_s, self._patience.longest_pause_s)

    def _closes_within(self, pause_s: float, wake: _WakeUp) -> bool:
        """Wait so long, or until the client closes; whether it does."""
        until_s = time.monotonic() + pause_s
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        while not self._closing and (left_s := until_s - time.monotonic()) > 0:
            if poll.poll(COLLECT_MS if self._left else 1000 * left_s):
                wake.clear()
            self._do_left()
        return self._closing

    def _do_left(self) -> None:
        for _ in range(len(self._left)):
            task = self._left.popleft()
            if not task():
                self._left.append(task)

    def _lost(self, exc: OSError) -> None:
        self.connected.clear()
        if not self._gone_said:
            log.warning("the daemon cannot be reached (%s): training continues without it", exc)
        self._gone_said = True
        # Wake all who wait for an answer: none will come.
        for answer in list(self._answers.values()):
            answer.put(None)

    def _talk(self, stream: socket.socket, wake: _WakeUp) -> None:
        """Send and receive until the daemon has answered a goodbye; raises OSError if it dies."""
        stream.setblocking(False)
        self._published.begin()
        decoder = Decoder()
        unsent = memoryview(encode(self._hello))
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        self._leaving = False
        while True:
            self._do_left()
            if not unsent and not self._leaving:
                unsent = memoryview(self._next_frame())
            poll.register(stream, select.POLLIN | (select.POLLOUT if unsent else 0))
            for fd, event in poll.poll(COLLECT_MS):
                if fd == wake.fileno():
                    wake.clear()
                elif event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    data = stream.recv(_RECEIVE_BYTES)
                    if not data:
                        raise ConnectionResetError("it closed the connection")
                    if self._receive(decoder.feed(data)):
                        return
                elif event & select.POLLOUT:
                    unsent = unsent[stream.send(unsent) :]

    def _next_frame(self) -> bytes:
        while True:
            try:
                # In this order: what was put before the close, or before what waits, is seen when it is asked for.
                closing = self._closing
                last, build = self._queue[0] if self._queue else (closing, None)
                message = self._published.next() or self._published.progress(time.monotonic(), hurry=last)
                if message is None and build is not None:
                    self._queue.popleft()
                    message = build()
                elif message is None:
                    if not closing:
                        return b""
                    message = Goodbye()
                if message is not None:
                    frame = encode(message)
                    if isinstance(message, Plan) and message.begun and len(message.order):
                        text = f"the mount has the plan of the list {message.list!r}: {len(message.order):,} samples"
                        self._log_once(f"plan {message.list}", text, logging.INFO)
                    if isinstance(message, Batch):
                        self.counts["sent"] += 1
                    self._leaving = isinstance(message, Goodbye)
                    return frame
            except (ProtocolError, ValueError, RuntimeError) as exc:
                self.counts["unusable"] += 1
                self._log_once("unusable", f"a message could not be sent: {exc}")

    def _finite(self, build: Callable[[], Batch | None]) -> Batch | None:
        batch = build()
        if batch is None:
            self.counts["not finite"] += 1
        return batch

    def _receive(self, received: list[Any]) -> bool:
        """Act on the daemon's answers; returns whether it has answered the goodbye."""
        for message in received:
            match message:
                case Ok(answers=Hello.TYPE):
                    self.connected.set()
                    if self._gone_said:
                        log.info("the daemon is back")
                    self._gone_said = False
                case Ok(answers=Goodbye.TYPE):
                    return True
                case Error(code="version"):
                    raise ConnectionAbortedError(message.text)
                case Error():
                    self.counts["errors"] += 1
                    self._log_once(message.code, f"the daemon refused a message: {message.text}")
                case Warn():
                    self._log_once(message.text, message.text)
                case Scores() | Cached() | Pinned() | Given():
                    if isinstance(message, Scores):
                        self.follows_plans = message.follows_plans
                    answer = self._answers.pop(message.request, None)
                    if answer is not None:
                        answer.put(message)
                case ProtocolError():
                    raise ConnectionAbortedError(f"its answer cannot be understood: {message}")
        return False

    def _log_once(self, kind: str, text: str, level: int = logging.WARNING) -> None:
        if kind not in self._said:
            self._said.add(kind)
            log.log(level, "%s", text)
