"""Which file a reader is given for the one it asked for: looked up by workers, decided by the manager.

Only a thread of a process below an attached trainer is ever given another file, only for a sample of a list that this
trainer declared, and only another sample of that list with the same label (the manager writes no other rows). All
others, and every thread that cannot be placed, get what they ask for.

A thread is placed by walking up /proc from it to a trainer's process; what was found holds for a second, so that a
reused thread id is not taken for long for what it was (proc_pid_status(5)). A trainer may be the first process of its
pid namespace, to which the namespace's orphans come as children; who comes to it so, and is of another session, is
nobody's. A choice holds for a short lease, so that who asks for attributes and then opens gets one file.
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from spiderfs.linux.process_table import Status, is_our_own, session_of, started_at, status_of
from spiderfs.store.store import Records
from spiderfs.vfs.permissions import Credentials

TABLE = "redirect"
LEASE_S = 2.0
PLACED_S = 1.0
# The open of a system call follows its look-up at once, however long a busy machine takes for that.
NOTED_S = 5.0
# What is remembered of threads and of leases before it is thrown away as a whole.
_REMEMBERED = 65536
# Processes on the way up from a loader's worker to the trainer; a container's init is further than any trainer.
_DEPTH = 32
# Rows of the table that are read at a time.
_ROWS_AT_A_TIME = 1000
_KEY = struct.Struct(">QI")
_INODE = struct.Struct(">Q")

Who = Literal["off", "trainer", "all"]


class Attached(NamedTuple):
    """A trainer as workers know it; `started` is the start time of its process in clock ticks.

    `datasets` are the lists by which it may be given stand-ins: those that it has sent batches of.
    """

    number: int
    pid: int
    started: int
    datasets: tuple[int, ...]


def publish_trainers(path: Path, trainers: Iterable[Attached]) -> None:
    """Let workers know who is attached; raises OSError, and then nobody is, where the disk is full."""
    temporary = path.with_suffix(".new")
    try:
        temporary.write_text(json.dumps(list(trainers)))
    except OSError:
        # Rather none than those of before: one that has left must not be given stand-ins any more.
        path.unlink(missing_ok=True)
        raise
    temporary.rename(path)


def published_trainers(path: Path) -> list[Attached]:
    try:
        rows = json.loads(path.read_text())
    except FileNotFoundError:
        return []
    return [Attached(number, pid, started, tuple(datasets)) for number, pid, started, datasets in rows]


def redirect_row(dataset: int, wanted: int, given: int | None) -> tuple[str, bytes, bytes | None]:
    """The row of the table by which readers of `dataset` get `given` for `wanted`; None takes it away."""
    return TABLE, _KEY.pack(wanted, dataset), None if given is None else _INODE.pack(given)


def redirect_rows(records: Records) -> list[tuple[int, int, int]]:
    """All redirects: wanted, dataset, given."""
    return list(each_redirect(records))


def each_redirect(records: Records) -> Iterator[tuple[int, int, int]]:
    """The same for a table of any length: some at a time, each time as the table is then."""
    start = b""
    while rows := records.scan(TABLE, start, _ROWS_AT_A_TIME):
        yield from ((*_KEY.unpack(key), _INODE.unpack(value)[0]) for key, value in rows)
        # The least key behind the last one.
        start = rows[-1][0] + b"\0"


class Placed(NamedTuple):
    """What is known of a thread for a while; no status: nothing."""

    trainer: Attached | None
    status: Status | None
    until: float


class Redirects:
    """A worker's view; `who` is the option `substitute`."""

    def __init__(self, records: Records, reads: PendingReads, clock: Callable[[], float] = time.monotonic) -> None:
        self._records = records
        self._reads = reads
        self._clock = clock
        self._trainers: list[Attached] = []
        self._placed: dict[int, Placed] = {}
        self._can_place = True
        self._leases: dict[tuple[int, int], tuple[int, float]] = {}
        self._who: Who = "trainer"
        self.attended = False
        """Whether there are trainers, whose reads are to be told from others'; asked first, for it costs nothing."""
        self.active = False
        """Whether anybody may be redirected at all."""

    def set_trainers(self, trainers: list[Attached], who: Who) -> None:
        self._trainers = trainers
        self._can_place = is_our_own()
        self._placed.clear()
        # A new manager begins to number its trainers anew.
        self._leases.clear()
        self._who = who
        self.attended = bool(trainers)
        self.active = self.attended and who != "off"

    def trainer_of(self, thread: int) -> Attached | None:
        """The trainer that a thread belongs to; None if it belongs to none or cannot be placed."""
        return self._placed_now(thread).trainer

    def credentials_of(self, thread: int, uid: int, gid: int) -> Credentials | None:
        """The rights of a thread that the kernel says has this user and group; None where they cannot be told."""
        status = self._placed_now(thread).status
        if status is not None and (status.uid, status.gid) != (uid, gid):
            # It has become another user since.
            del self._placed[thread]
            status = self._placed_now(thread).status
        if status is None or (status.uid, status.gid) != (uid, gid):
            return None
        return Credentials(uid, status.groups | {gid}, status.may_read_all)

    def _placed_now(self, thread: int) -> Placed:
        now = self._clock()
        placed = self._placed.get(thread)
        if placed is None or placed.until < now:
            if len(self._placed) > _REMEMBERED:
                self._placed.clear()
            placed = self._placed[thread] = self._place(thread, now + PLACED_S)
        return placed

    def _place(self, thread: int, until: float) -> Placed:
        status = trainer = None
        if self._can_place:
            try:
                status = status_of(thread)
                trainer = self._trainer_above(status)
            except (OSError, ValueError):
                # It, or a process above it, has ended.
                pass
        if trainer is None and self._who == "all" and self._trainers:
            # Nobody's reads: no batch will come for them.
            datasets = {number for trainer in self._trainers for number in trainer.datasets}
            trainer = self._trainers[0]._replace(number=0, datasets=tuple(datasets))
        return Placed(trainer, status, until)

    def _trainer_above(self, status: Status) -> Attached | None:
        pids = {trainer.pid: trainer for trainer in self._trainers}
        below = status.process
        for _ in range(_DEPTH):
            trainer = pids.get(status.process)
            if trainer is not None:
                return trainer if started_at(trainer.pid) == trainer.started and _is_above(status, below) else None
            if not status.parent or (status.parent == 1 and 1 not in pids):
                return None
            below, status = status.process, status_of(status.parent)
        return None

    def concerns(self, wanted: int) -> bool:
        """Whether anybody may be given another file for this one, so that the kernel must ask each time."""
        return bool(self.stand_ins(wanted, 1))

    def stand_ins(self, wanted: int, limit: int = 64) -> list[int]:
        """What readers may be given for a file now, one inode for each dataset that has it."""
        rows = self._records.scan(TABLE, _KEY.pack(wanted, 0), limit)
        return [_INODE.unpack(value)[0] for key, value in rows if _KEY.unpack(key)[0] == wanted]

    def choose(self, wanted: int, trainer: Attached, at_hand: Callable[[int], bool]) -> int:
        """The inode that this trainer is to be given for `wanted`; itself where it is `at_hand` anyway."""
        now = self._clock()
        lease = self._leases.get((trainer.number, wanted))
        if lease is not None and lease[1] >= now:
            return lease[0]
        given = wanted
        for dataset in trainer.datasets:
            row = self._records.get(TABLE, _KEY.pack(wanted, dataset))
            if row is not None:
                given = wanted if at_hand(wanted) else _INODE.unpack(row)[0]
                break
        if len(self._leases) > _REMEMBERED:
            self._leases.clear()
        self._leases[trainer.number, wanted] = (given, now + LEASE_S)
        return given

    def note(self, thread: int, wanted: int, given: int) -> None:
        """Remember, for the open that follows, what the thread had asked for: to be called at each of its look-ups."""
        self._reads.put(thread, wanted, given, self._clock())

    def wanted(self, thread: int, given: int) -> int | None:
        """What a thread that opens `given` had asked for; None if it has not asked: the kernel knew the name."""
        return self._reads.take(thread, given, self._clock() - NOTED_S)


class PendingReads:
    """Between look-up and open: what a thread asked for, in memory that all workers share.

    A thread does one thing at a time, so a slot has one writer; two threads that share a slot can only lose the
    earlier's note, and its open is then taken for what it looks like.

    A look-up need not be followed by an open: stat(2) makes one too. Its note is void once the thread looks another
    name up, has opened something, or lets time pass. What remains: a stat of X, given H, and then as the thread's very
    next open one of H by its own name, which the kernel still knew. It is taken for an open of X.
    """

    _SLOTS = 8192
    _SLOT = struct.Struct("<QQQd")

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, self._SLOTS * self._SLOT.size)

    def put(self, thread: int, wanted: int, given: int, now: float) -> None:
        self._SLOT.pack_into(self._map, self._at(thread), thread, wanted, given, now)

    def take(self, thread: int, given: int, since: float) -> int | None:
        """What was wanted by a look-up that was given `given`, and was noted no earlier than `since`."""
        at = self._at(thread)
        noted, wanted, was_given, when = self._SLOT.unpack_from(self._map, at)
        if noted != thread:
            return None
        self._SLOT.pack_into(self._map, at, 0, 0, 0, 0.0)
        return int(wanted) if was_given == given and when >= since else None

    def _at(self, thread: int) -> int:
        return thread % self._SLOTS * self._SLOT.size


def _is_above(process: Status, below: int) -> bool:
    """Whether the process has made this child of its, or is it, rather than having been given it as an orphan."""
    return below == process.process or not process.is_init or session_of(below) == session_of(process.process)
