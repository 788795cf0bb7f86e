"""Has the kernel read planned samples ahead: the way of mounts whose files the kernel opens by itself.

A process that is a client of the mount like any other one (`push_process.py`) asks the kernel for the pages of a file.
The worker that gets the READ fetches the file, if it is not in the store, and reports its answer. So store and page
cache are filled before the reader comes, and what is in the store alone is pushed too.

All that comes within a window is pushed, in the order in which it will be read, and waits in the page cache for its
reader. The engine decides what enters the store, as for every file that lands; but a draw whose sample is in the page
cache is no reason to keep it there too (`PlannedEpoch.serve`). What the engine would not keep is not written to the
store, which costs as much as all else of a fetch. A sample that is drawn twice within a window is pushed again when the
first draw has been taken. The window ends at `most_bytes` that were pushed and not taken yet.

What the engine would keep is fetched in batches (`fetch_ahead.py`): the process that has stored it gives it to the
kernel, which costs less than half as much as a push. If the kernel does not know the file yet, it is pushed from the
store, and so are members of archives that were fetched with their neighbours.

As many pushes wait for the source at a time as raise the speed (`core/plans/fetch_limits.py`). In all the kernel has
far fewer of our requests than its limit on those in the background (`fuse/wire.py`): a source that hangs must not hold
up readers of what is cached.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import subprocess
import sys
from bisect import bisect, insort
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import trio

from spiderfs.core.events import FETCHED, FORGOTTEN, HIT, PUSHED, UNREAD, Access
from spiderfs.core.plans.fetch_limits import Concurrency
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.core.plans.schedule import PlannedReader
from spiderfs.daemon.caching import push_process
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.caching.fetch_ahead import FetchAhead
from spiderfs.daemon.caching.planned_reads import Chunk
from spiderfs.daemon.caching.prefetch_backend import Admission, Done, PrefetchResult, first_fetches, positions_ahead
from spiderfs.daemon.caching.push_process import ANSWER, HELLO, HERE, IN_MEMORY, MOST_BYTES, packed_order
from spiderfs.linux import steady_clock
from spiderfs.linux.memory import memory_bytes
from spiderfs.linux.mounts import mounted_at
from spiderfs.metrics import Counters
from spiderfs.options.model import Options
from spiderfs.shared.shared_memory import SharedSlots
from spiderfs.vfs.catalogue import Node

log = logging.getLogger(__name__)

# A process that dies at once must not keep the processor busy: the pause doubles with each one that did nothing.
PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
# How long a process may take to begin: it imports a few modules of the standard library.
BEGIN_S = 20.0
# The process is asked for a word after this time without one.
ASK_S = 5.0
# The orders of one message. Each message wakes a thread, which costs both processes more than an order does.
# But a thread carries out its orders one after the other, so where each has to ask the source for a name, more of them
# would leave other threads idle.
ORDERS_AT_ONCE = 4


class Pusher:
    """Keeps the process (`push_process.py`), which opens `at_a_time` files, and never waits for it.

    If the process dies, another one is started after a pause, and what it had not carried out is lost. One that has
    been silent is asked for an answer; one that gives none for longer than `patience_s` is replaced: the mount has to
    answer its requests sooner. `answered` is called with the number and the outcome of an order; `lost`, when all
    others will not be answered.
    """

    def __init__(
        self,
        mountpoint: Path,
        at_a_time: int,
        threads: SharedSlots,
        patience_s: float,
        answered: Callable[[int, int], None],
        lost: Callable[[], None],
    ) -> None:
        self._mountpoint, self._at_a_time, self._threads = mountpoint, at_a_time, threads
        self._patience_s, self._answered, self._lost = patience_s, answered, lost
        self._needed = trio.Event()
        self._orders: trio.socket.SocketType | None = None
        self._mount_path = os.path.join(os.fsencode(mountpoint), b"")
        self._to_send: list[tuple[int, bytes]] = []
        self.broken = False
        """Whether the last process could not begin, or did nothing."""
        # A manager before this one may have had another pusher.
        threads.replace(())

    @property
    def ready(self) -> bool:
        return self._orders is not None

    def need(self) -> None:
        """Have the process started, unless it is there."""
        self._needed.set()

    def order(self, number: int, path: bytes) -> None:
        """Have a file pushed, by its path in the mount, from the next `send` on."""
        self._to_send.append((number, packed_order(number, self._mount_path + path)))

    def send(self) -> list[int]:
        """Send all orders; returns the numbers of those that the process does not take now."""
        to_send, self._to_send = self._to_send, []
        refused: list[int] = []
        for first in range(0, len(to_send), ORDERS_AT_ONCE):
            bunch = to_send[first : first + ORDERS_AT_ONCE]
            message = b"".join(order for _, order in bunch)
            if len(message) > MOST_BYTES or not self._send(message):
                refused += [number for number, _ in bunch]
        return refused

    def _send(self, message: bytes) -> bool:
        if self._orders is None:
            return False
        try:
            # Not through trio: that would be a pass of its loop, and this never waits.
            os.write(self._orders.fileno(), message)
        except OSError:
            return False
        return True

    async def run(self) -> None:
        """Have one process after the other until cancelled, from the time when it is needed."""
        await self._needed.wait()
        pause_s = PAUSE_S
        while True:
            try:
                worked = await self._live()
            except OSError as exc:
                log.warning("cannot start the process that pushes files ahead: %s", exc)
                worked = False
            self.broken = not worked
            pause_s = PAUSE_S if worked else min(2 * pause_s, LONGEST_PAUSE_S)
            await trio.sleep(pause_s)

    async def _live(self) -> bool:
        """The life of one process; returns whether it worked. Raises OSError if it cannot be started."""
        if (mount := mounted_at(self._mountpoint)) is None:
            return False
        major, minor = map(int, mount.device.split(":"))
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with trio.socket.from_stdlib_socket(ours) as answers:
            with its:
                # The package's own modules are left out, and so is whatever the user's environment adds.
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", push_process.__file__),
                        *map(str, (os.getpid(), os.makedev(major, minor), self._at_a_time)),
                    ],
                    stdin=its.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                )
            try:
                return await self._begin(answers) and await self._receive(answers)
            finally:
                was_ready, self._orders = self.ready, None
                self._threads.replace(())
                process.kill()
                # If it waits in the kernel, it ends later, and is waited for when the next one is made.
                if was_ready and process.poll() is None:
                    log.debug("the process that pushes files ahead ends")
                self._lost()

    async def _begin(self, answers: trio.socket.SocketType) -> bool:
        """Wait until all threads of the process take orders; returns whether they do."""
        threads: list[int] = []
        with trio.move_on_after(BEGIN_S) as waiting:
            while len(threads) < self._at_a_time:
                if not (hello := await _received(answers)):
                    log.warning("the process that pushes files ahead has ended before it could begin")
                    return False
                threads.append(*HELLO.unpack(hello))
        if waiting.cancelled_caught:
            log.warning("the process that pushes files ahead has not begun within %g s: another one starts", BEGIN_S)
            return False
        self._threads.replace(threads)
        self._orders = answers
        self.broken = False
        return True

    async def _receive(self, answers: trio.socket.SocketType) -> bool:
        """Pass answers on until the process has ended, or is to be ended because it does nothing: False."""
        asked_at_s: float | None = None
        while True:
            answer: bytes | None = None
            with trio.move_on_after(ASK_S):
                answer = await _received(answers)
            now_s = trio.current_time()
            if answer:
                asked_at_s = None
                number, outcome = ANSWER.unpack(answer)
                if outcome != HERE:
                    self._answered(number, outcome)
            elif answer is not None:
                log.warning("the process that pushes files ahead has ended: another one starts in %g s", PAUSE_S)
                return True
            elif asked_at_s is not None and now_s >= asked_at_s + self._patience_s:
                log.warning(
                    "the process that pushes files ahead does nothing (no answer for %.0f s): another one starts",
                    now_s - asked_at_s,
                )
                return False
            else:
                # Once more each time, since a socket that is full of orders takes no question.
                self._send(packed_order(0, b""))
                asked_at_s = now_s if asked_at_s is None else asked_at_s


async def _received(answers: trio.socket.SocketType) -> bytes:
    """The next message of the process; empty once it has ended."""
    try:
        return await answers.recv(MOST_BYTES)
    except ConnectionResetError:
        # It has ended with orders that it had not read (unix(7) has the error of a peer that is gone).
        return b""


# Requests that pushes have in the kernel at a time: at least so many, and so many for each push that may wait for the
# source. A file may be several.
MOST_REQUESTS, _REQUESTS_PER_PUSH = 128, 4 / 3
# The most bytes that may wait in the page cache for their readers, as a share of the machine's memory, or of what the
# daemon's control group may have.
MEMORY_SHARE = 1 / 16
# The largest file that the store is not given. The kernel asks for a longer one in many READs, and by the last of them
# its bytes may be nowhere else: the transit has 32 MiB (`vfs/fetcher.py`).
_PASSING_BYTES = 256 << 10
# How many files the pusher opens at a time.
MOST_THREADS = 16
# The most of a file that the kernel asks for at a time.
_REQUEST_BYTES = 128 << 10
# A push that no worker has reported by then is given up: its READ was never sent, or its worker was killed.
# The first is rare: a reader asked for the file's pages in the same moment.
_LOST_S = 5.0
# How long samples come alone after something of a chunk has failed, or has found no room in the store.
_ALONE_S = 10.0
# How long samples are pushed alone after the kernel did not know one that was given to it.
_UNKNOWN_S = 1.0
# How many samples are looked at in one turn: 1 ms.
_SWEPT = 2000


class _Order(NamedTuple):
    node: Node
    reader: PlannedReader
    epoch: PlannedEpoch
    position: int
    done: Done
    stored: bool
    requests: int
    ordered_s: float
    """By the clock of the workers' events."""


class _Waiting:
    """The samples of one reader that wait in the page cache, by position."""

    def __init__(self, epochs: tuple[PlannedEpoch, ...]) -> None:
        self.epochs = epochs
        """The reader's epoch and the later ones, from whose beginning positions count on."""
        self.samples: deque[tuple[int, Node, Done]] = deque()
        self.prefetched_to = 0
        """One past the furthest position that was to be prefetched."""
        self.exchanged = False
        """Whether samples may have changed places since they were pushed."""

    def count_from(self, epochs: tuple[PlannedEpoch, ...]) -> list[tuple[Node, Done]]:
        """Go on with these epochs; returns the samples that wait for a draw of none of them."""
        before, begins = list(_with_begins(self.epochs)), dict(_with_begins(epochs))
        samples, prefetched_to, left = self.samples, self.prefetched_to, []
        self.epochs, self.samples, self.prefetched_to = epochs, deque(), 0
        for epoch, began in before:
            if epoch in begins and prefetched_to > began:
                self.prefetched_to = begins[epoch] + min(prefetched_to - began, len(epoch))
        for position, node, done in samples:
            epoch, began = before[bisect(before, position, key=itemgetter(1)) - 1]
            if epoch in begins:
                self.samples.append((begins[epoch] + position - began, node, done))
            else:
                left.append((node, done))
        return left


def _with_begins(epochs: tuple[PlannedEpoch, ...]) -> Iterator[tuple[PlannedEpoch, int]]:
    """Each epoch, and the position at which it begins."""
    return zip(epochs, accumulate(map(len, epochs), initial=0), strict=False)


def _epochs_of(reader: PlannedReader) -> tuple[PlannedEpoch, ...]:
    return (reader.epoch, *reader.later)


class PushAhead:
    """See `PrefetchBackend`."""

    def __init__(
        self,
        options: Options,
        threads: SharedSlots,
        pushed: SharedSlots,
        passing: SharedSlots,
        counters: Counters,
        cache: CacheControl,
        most: int,
        asks_for_names: Callable[[], bool],
        fetch: FetchAhead,
        most_bytes: int,
    ) -> None:
        """At most `most` pushes wait for the source at a time; `fetch` fetches what the store is to keep."""
        self._fetch, self._asks_for_names = fetch, asks_for_names
        # What is being fetched: all samples, and those of them with a request of their own, the first of chunks.
        self._coming: set[int] = set()
        self._requested: set[int] = set()
        self._alone_until_s = self._unknown_until_s = -math.inf
        self.concurrency = Concurrency(most, first_fetches(options))
        self._most_requests = max(MOST_REQUESTS, int(most * _REQUESTS_PER_PUSH))
        # Look-ups may have to ask the source, of which readers need half of what a worker may ask at a time.
        at_a_time = max(1, min(options.fetches // 2, MOST_THREADS))
        # How long an order, or any other request of the pusher, may take at a source that hangs.
        self._patience_s = options.source_timeout_s + _LOST_S
        self._pusher = Pusher(options.mountpoint, at_a_time, threads, self._patience_s, self._answered, self._lost)
        self._counters, self._engine = counters, cache.engine
        self._most_bytes = min(most_bytes, int(memory_bytes() * MEMORY_SHARE))
        self._orders: dict[int, _Order] = {}
        self._fetching = self._requests = self.waiting_bytes = 0
        self._waiting: dict[PlannedReader, _Waiting] = {}
        # How many pushes of each sample no reader has taken yet.
        self._untaken: dict[int, int] = {}
        # Those of them that the kernel had already, perhaps by an order that was lost: its READ may be reported yet.
        self._unreported: set[int] = set()
        # The same for workers. A manager before this one may have had others.
        self._pushed, self._passing = pushed, passing
        for slots in (pushed, passing):
            slots.replace(())
        # Samples that were taken, or have come in a chunk, and whose next draws were passed by meanwhile.
        self._passed: deque[tuple[Node, Done]] = deque()
        self.looks_again = False
        self._kernel_reports = True

    @property
    def able(self) -> bool:
        """False if no process can be started, or the kernel does not say what it has: pushes would not be reported."""
        return self._kernel_reports and not self._pusher.broken

    @property
    def under_way(self) -> int:
        return self._fetching + len(self._coming)

    def start(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._pusher.run)

    def look(self, readers: tuple[PlannedReader, ...], again: bool, idle: bool) -> None:
        if readers:
            self._pusher.need()
        for reader in [reader for reader in self._waiting if reader not in readers]:
            self._forget(reader)
        for reader in readers:
            waiting = self._waiting_of(reader)
            while waiting.samples and waiting.samples[0][0] < reader.taken:
                self._take(waiting)
            waiting.exchanged |= reader.exchanges
            if again and waiting.exchanged:
                self._take_exchanged(waiting)
        if again:
            self.looks_again = False
            overdue_s = steady_clock.now() - self._patience_s
            while self._orders and (inode := next(iter(self._orders))) and self._orders[inode].ordered_s < overdue_s:
                self._not_prefetched(inode, failed=True)
        self._push_passed()

    def _waiting_of(self, reader: PlannedReader) -> _Waiting:
        """What waits for a reader, by positions as they are now."""
        epochs = _epochs_of(reader)
        if (waiting := self._waiting.get(reader)) is None:
            waiting = self._waiting[reader] = _Waiting(epochs)
        if waiting.epochs != epochs:
            for node, done in waiting.count_from(epochs):
                self._taken(node, done)
        return waiting

    def _push_passed(self) -> None:
        """Push the samples that were passed by, as far as they may wait in the page cache."""
        while self._passed and self.has_room() and self.judge(self._passed[0][0]) is Admission.PREFETCH:
            node, done = self._passed.popleft()
            for reader in self._waiting:
                if (position := self._passed_by(reader, node.inode)) is not None:
                    self._push(node, reader, position, done)

    def _passed_by(self, reader: PlannedReader, inode: int) -> int | None:
        """The next position of a sample, if it was to be prefetched before."""
        position = reader.next_position(inode)
        return position if position is not None and position < self._waiting[reader].prefetched_to else None

    def _reader_passed_by(self, inode: int) -> PlannedReader | None:
        return next((reader for reader in self._waiting if self._passed_by(reader, inode) is not None), None)

    def _forget(self, reader: PlannedReader) -> None:
        waiting = self._waiting.pop(reader, None)
        while waiting is not None and waiting.samples:
            self._take(waiting)

    def _take_exchanged(self, waiting: _Waiting) -> None:
        """Take what was read at other positions than those for which it was pushed; some samples at a time."""
        for _ in range(min(len(waiting.samples), _SWEPT)):
            if waiting.epochs[0].next_position(waiting.samples[0][1].inode) is None:
                self._take(waiting)
            else:
                waiting.samples.rotate(-1)

    def _take(self, waiting: _Waiting) -> None:
        _, node, done = waiting.samples.popleft()
        self._taken(node, done)

    def _taken(self, node: Node, done: Done) -> None:
        self.waiting_bytes -= node.stat.size
        self._untaken[node.inode] -= 1
        if not self._untaken[node.inode]:
            del self._untaken[node.inode]
            self._unreported.discard(node.inode)
            self._pushed.discard(node.inode)
            if self._reader_passed_by(node.inode) is not None:
                self._passed.append((node, done))

    def window(self, reader: PlannedReader) -> int:
        return max(1, int(positions_ahead(reader, self.concurrency)))

    def has_room(self) -> bool:
        fetching = self._fetching + len(self._requested)
        return self._pusher.ready and fetching < self.concurrency.limit and self._requests < self._most_requests

    def is_resident(self, inode: int) -> bool:
        return inode in self._orders or inode in self._coming

    def judge(self, node: Node) -> Admission:
        # One sample may wait, however large it is.
        full = self.waiting_bytes and self.waiting_bytes + node.stat.size > self._most_bytes
        return Admission.ENOUGH if full else Admission.PREFETCH

    def prefetch(self, node: Node, reader: PlannedReader, position: int, done: Done) -> int:
        waiting = self._waiting_of(reader)
        waiting.prefetched_to = max(waiting.prefetched_to, position + 1)
        return self._fetch_into_store(node, reader, position, done) or self._push(node, reader, position, done)

    def _fetch_into_store(self, node: Node, reader: PlannedReader, position: int, done: Done) -> int:
        """Have a sample fetched that the store is to keep, and its neighbours; returns the bytes, 0 if it is pushed."""
        fetch, inode, now_s = self._fetch, node.inode, steady_clock.now()
        if inode in self._untaken or inode in self._engine.members or len(self._requested) >= fetch.concurrency.most:
            return 0
        # The store has to take it until it is pushed.
        if not self._engine.would_keep(inode, node.stat.size):
            return 0
        # Pending samples of jobs may be on their way already. This looks into the store, so it comes last.
        if fetch.is_resident(inode):
            return 0

        def is_resident(inode: int) -> bool:
            return inode in self._untaken or fetch.is_resident(inode)

        if now_s >= self._alone_until_s:
            chunk = fetch.chunk(node, reader, position, is_resident, self.concurrency)
            if chunk is not None:
                self._requested.add(inode)
                self._coming.update(member.inode for member in chunk.nodes)
                return fetch.begin(chunk, reader, partial(self._come, done))
        # A name that the kernel has forgotten takes the pages of its file along when it is looked up again.
        if not fetch.pushes or node.stat.viewed or now_s < self._unknown_until_s or self._asks_for_names():
            return 0
        epoch, place = reader.located(position)
        # From now on only later draws are a reason to keep it.
        self._engine.served(epoch, place)
        if not self._engine.would_keep(inode, node.stat.size):
            return 0
        order = self._await(node, reader, position, done, stored=False)
        self._requested.add(inode)
        self._coming.add(inode)
        return fetch.begin(Chunk.of(node), reader, partial(self._given, order), push=True)

    def _given(self, order: _Order, node: Node, reader: PlannedReader, result: PrefetchResult) -> None:
        """A sample has come that was to be given to the kernel."""
        self._coming.discard(node.inode)
        self._requested.discard(node.inode)
        if result.where is None:
            self._pushed.discard(node.inode)
            self._unserve(order)
        elif node.inode not in self._untaken:
            # The kernel has dropped what waited, and perhaps this too; meanwhile it was passed by as one that comes.
            self._unserve(order)
            self.looks_again = True
        elif result.pushed:
            self._counters.add("pushed")
        else:
            # The kernel does not know the file, or the store has no room.
            if result.placed or result.failed:
                self._unknown_until_s = steady_clock.now() + (_ALONE_S if result.failed else _UNKNOWN_S)
            if not result.failed:
                self._unserve(order)
            self._order(order._replace(stored=not result.failed, ordered_s=steady_clock.now()))
            self.send()
        # What the store did not take is in memory that workers look into, or the kernel's.
        order.done(node, reader, result if result.where is None else result._replace(failed=False))

    def _come(self, done: Done, node: Node, reader: PlannedReader, result: PrefetchResult) -> None:
        """A sample of a chunk has come: it is pushed if the plan has been followed beyond it."""
        self._coming.discard(node.inode)
        self._requested.discard(node.inode)
        if result.failed:
            self._alone_until_s = steady_clock.now() + _ALONE_S
            # Those that were to come along are looked at again.
            self.looks_again = True
        if result.where is not None:
            # What the store did not take is in memory that workers look into.
            result = result._replace(failed=False)
            self._passed.append((node, done))
        done(node, reader, result)

    def _push(self, node: Node, reader: PlannedReader, position: int, done: Done) -> int:
        # It waits for another draw, which may be the last that finds it in memory.
        if node.inode in self._orders or (node.inode in self._untaken and not reader.exchanges):
            return 0
        if not (stored := node.inode in self._engine.members):
            # From now on only later draws are a reason to keep it.
            self._engine.served(*reader.located(position))
            if node.stat.size <= _PASSING_BYTES and not self._engine.would_keep(node.inode, node.stat.size):
                self._passing.put(node.inode)
        self._order(self._await(node, reader, position, done, stored))
        return node.stat.size

    def _order(self, order: _Order) -> None:
        self._pusher.order(order.node.inode, order.node.path)
        self._orders[order.node.inode] = order
        self._requests += order.requests
        self._fetching += not order.stored

    def _await(self, node: Node, reader: PlannedReader, position: int, done: Done, stored: bool) -> _Order:
        insort(self._waiting_of(reader).samples, (position, node, done), key=itemgetter(0))
        self.waiting_bytes += node.stat.size
        self._untaken[node.inode] = self._untaken.get(node.inode, 0) + 1
        self._pushed.put(node.inode)
        requests = -(-node.stat.size // _REQUEST_BYTES)
        return _Order(node, reader, *reader.located(position), done, stored, requests, steady_clock.now())

    def send(self) -> None:
        for inode in self._pusher.send():
            self._pushed.discard(inode)
            self._not_prefetched(inode)

    def is_ready(self, inode: int) -> bool:
        coming = inode in self._orders or inode in self._coming
        return inode in self._engine.members or (inode in self._untaken and not coming)

    def on_events(self, accesses: list[Access]) -> Iterator[tuple[int, PlannedReader | None]]:
        """Note workers' events; gives each inode that landed without an order, and for which reader, if known."""
        for access in accesses:
            if access.where == FORGOTTEN:
                self._pages_lost()
                continue
            pushed = bool(access.where & PUSHED)
            where: int | None = access.where & ~PUSHED
            if where == UNREAD:
                where = None
            order = self._pop(access.inode)
            # There may be two events of a file: if a look-up had to fetch it, or another READ than the first one did.
            # The second one ends no order.
            late = order is None and access.inode in self._untaken and access.inode not in self._unreported
            self._unreported.discard(access.inode)
            if pushed and where is not None and (order is not None or (where == FETCHED and not late)):
                self._counters.add("pushed")
            if order is None:
                if pushed and where == FETCHED:
                    yield access.inode, self._reader_passed_by(access.inode)
                continue
            took_s = max(0.0, access.time_s - order.ordered_s)
            # The reader itself may have been quicker.
            self._done(order, PrefetchResult(where if pushed else HIT, access.size, took_s, where is None))

    def _answered(self, inode: int, outcome: int) -> None:
        if outcome in (errno.ENOSYS, errno.EPERM) and self._kernel_reports:
            self._kernel_reports = False
            log.info(
                "the kernel does not report its page cache (cachestat): planned samples are prefetched into the store"
            )
        if (order := self._pop(inode)) is None:
            return
        if failed := outcome != IN_MEMORY:
            log.debug("%s could not be pushed: %s", os.fsdecode(order.node.path), os.strerror(outcome))
        else:
            self._unreported.add(inode)
        self._done(order, PrefetchResult(None if failed else HIT, failed=failed))

    def _done(self, order: _Order, result: PrefetchResult) -> None:
        if result.failed:
            self._pushed.discard(order.node.inode)
            self._unserve(order)
        elif order.stored:
            self._engine.served(order.epoch, order.position)
        order.done(order.node, order.reader, result)

    def _pages_lost(self) -> None:
        """The kernel has dropped what waited."""
        for reader, waiting in self._waiting.items():
            for position, _, _ in waiting.samples if waiting.epochs == _epochs_of(reader) else ():
                self._engine.unserved(*reader.located(position))
        self._lost()

    def _lost(self) -> None:
        # What was pushed is still in memory after the end of a process; the next process finds that out.
        self.looks_again = True
        for reader in list(self._waiting):
            self._forget(reader)
        for inode in list(self._orders):
            self._not_prefetched(inode)
        self._passed.clear()

    def _not_prefetched(self, inode: int, failed: bool = False) -> None:
        order = self._pop(inode)
        assert order is not None
        self._unserve(order)
        order.done(order.node, order.reader, PrefetchResult(None, failed=failed))

    def _unserve(self, order: _Order) -> None:
        if not order.stored:
            self._engine.unserved(order.epoch, order.position)

    def _pop(self, inode: int) -> _Order | None:
        if (order := self._orders.pop(inode, None)) is not None:
            self._requests -= order.requests
            self._fetching -= not order.stored
            self._passing.discard(inode)
        return order
