"""Chooses for one thread between the file that it asks for and a substitute; workers and clients both choose so.

The policy decides which sample stands in for which, and the manager writes a row of the table of redirects: the
substitute for an inode, for the readers of one job dataset. The table lies in the store, so no worker has to ask the
manager. A process that finds a row still finds out whether the thread belongs to a trainer, and whether the file itself
is at hand. `substitutes.py` asks this module at the look-ups and opens of a worker.

A thread of an attached trainer, or of a process below one, may be given a sample with the same label, of a list that
this trainer has declared. Every other thread, and one that cannot be identified, gets the file that it asks for, or
with `substitute=all` perhaps a substitute of any attached trainer. A thread is identified by walking up /proc to a
trainer's process; the result holds for a second, as its number may be used again (proc_pid_status(5)). A trainer may be
the first process of its pid namespace, which adopts the namespace's orphans; these, known by their other session, do
not belong to it. A choice holds for a short lease, so a reader who asks for attributes and then opens gets one file.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Container, Iterator
from typing import Literal, NamedTuple

from spiderfs.linux.process_table import Status, is_our_own, session_of, started_at, status_of
from spiderfs.shared.published import Attached
from spiderfs.shared.shared_memory import SharedSlots
from spiderfs.store.store import ContentKey, Records, Row
from spiderfs.vfs.rules import Cached, Credentials, Settings, is_at_hand

TABLE = "redirect"
# A row's key: the inode that a reader asks for, and the number of the job dataset. In this order all rows of an inode
# lie side by side.
_KEY = struct.Struct(">QI")
_INODE = struct.Struct(">Q")
_ROWS_AT_A_TIME = 1000


LEASE_S = 2.0
IDENTITY_S = 1.0
# The open of a system call follows its look-up at once, however long a busy machine takes for that.
NOTED_S = 5.0
# Threads, and leases, that are remembered; when there are more, all of them are forgotten at once.
_REMEMBERED = 65536
# Processes on the way up from a loader's worker to the trainer; a container's init is further than any trainer.
_DEPTH = 32


def redirect_row(job_dataset_number: int, wanted: int, substitute: int | None) -> Row:
    """The row that gives the readers of a job dataset `substitute` for `wanted`; None deletes the row."""
    return TABLE, _KEY.pack(wanted, job_dataset_number), None if substitute is None else _INODE.pack(substitute)


def each_redirect(records: Records) -> Iterator[tuple[int, int, int]]:
    """All redirects, read in pieces: the wanted inode, the job dataset's number, the substitute."""
    start = b""
    while rows := records.scan(TABLE, start, _ROWS_AT_A_TIME):
        yield from ((*_KEY.unpack(key), _INODE.unpack(value)[0]) for key, value in rows)
        # The least key behind the last one.
        start = rows[-1][0] + b"\0"


Who = Literal["off", "trainer", "all"]


class Identity(NamedTuple):
    """The trainer of a thread and the thread's status, trusted until `until`; None stands for what is not known."""

    trainer: Attached | None
    status: Status | None
    until: float


class PendingReads(SharedSlots):
    """The result of each thread's latest look-up, kept for the open that follows it: memory that all workers share.

    The open may come to another worker, and only says which inode it opens. So the look-up leaves a note by the
    thread's number: which file it had asked for, and which one it got. Where two threads share a slot, the earlier note
    is lost, and its open is taken at face value. A note is void once the thread looks another name up, opens something,
    or lets time pass. One mistake remains possible: a thread calls stat on X, is given H, and as its very next open
    opens H by H's own name, which the kernel still knew. That open is taken for an open of X.
    """

    def __init__(self) -> None:
        super().__init__(8192, "QQd")  # by thread: wanted inode, given inode, time


class Redirects:
    """One process's view of all redirects."""

    def __init__(
        self,
        records: Records,
        reads: PendingReads,
        clock: Callable[[], float] = time.monotonic,
        pushed: Container[int] = (),
    ) -> None:
        """`pushed`: the inodes that the kernel has for their readers, whether the store has them or not."""
        self._records, self._reads, self._clock = records, reads, clock
        self._pushed = pushed
        self._trainers: list[Attached] = []
        self._identities: dict[int, Identity] = {}
        self._proc_is_ours = True
        self._leases: dict[tuple[int, int], tuple[int, float]] = {}
        self._who: Who = "trainer"
        self.attended = False
        """Whether there are trainers, whose reads differ from others'. Ask this first, since it costs nothing."""
        self.active = False
        """Whether anybody may be redirected at all."""
        self.gives = False
        """Whether some trainer may be given a substitute, now or when it has come further."""

    def set_trainers(self, trainers: list[Attached], who: Who) -> None:
        """Take over the attached trainers; `who` is the option `substitute`, which says who is given substitutes."""
        self._trainers = trainers
        self._proc_is_ours = is_our_own()
        self._identities.clear()
        # A new manager begins to number its trainers again.
        self._leases.clear()
        self._who = who
        self.attended = bool(trainers)
        self.active = self.attended and who != "off"
        self.gives = self.active and any(trainer.sends_batches for trainer in trainers)

    def trainer_of(self, thread: int) -> Attached | None:
        """The trainer that a thread belongs to; None if it belongs to none, or cannot be identified."""
        return self._identity(thread).trainer

    def process_of(self, thread: int) -> int:
        """The process of a thread; the thread's own number where that cannot be found out."""
        status = self._identity(thread).status
        return thread if status is None else status.process

    def credentials_of(self, thread: int, uid: int, gid: int) -> Credentials | None:
        """The rights of a thread that the kernel says has this user and group; None where they cannot be found out."""
        if (status := self._identity(thread).status) is not None and (status.uid, status.gid) != (uid, gid):
            # The thread has become another user since.
            del self._identities[thread]
            status = self._identity(thread).status
        if status is None or (status.uid, status.gid) != (uid, gid):
            return None
        return Credentials(uid, status.groups | {gid}, status.may_read_all)

    def _identity(self, thread: int) -> Identity:
        now = self._clock()
        if (identity := self._identities.get(thread)) is None or identity.until < now:
            if len(self._identities) > _REMEMBERED:
                self._identities.clear()
            identity = self._identities[thread] = self._identify(thread, now + IDENTITY_S)
        return identity

    def _identify(self, thread: int, until: float) -> Identity:
        status = trainer = None
        if self._proc_is_ours:
            try:
                status = status_of(thread)
                trainer = self._trainer_above(status)
            except (OSError, ValueError):
                # The thread, or a process above it, has ended.
                pass
        if trainer is None and self._who == "all" and self._trainers:
            # The reads count as no one's (trainer 0), because no batch will come for them.
            job_dataset_numbers = {number for trainer in self._trainers for number in trainer.job_dataset_numbers}
            trainer = self._trainers[0]._replace(number=0, job_dataset_numbers=tuple(job_dataset_numbers))
        return Identity(trainer, status, until)

    def _trainer_above(self, status: Status) -> Attached | None:
        pids = {trainer.pid: trainer for trainer in self._trainers}
        below = status.process
        for _ in range(_DEPTH):
            if (trainer := pids.get(status.process)) is not None:
                # A child of a container's first process, and not an orphan that has come to it.
                is_above = below == status.process or not status.is_init or session_of(below) == session_of(trainer.pid)
                return trainer if started_at(trainer.pid) == trainer.started and is_above else None
            if not status.parent or (status.parent == 1 and 1 not in pids):
                return None
            below, status = status.process, status_of(status.parent)
        return None

    def reader_of(self, thread: int, inode: int) -> tuple[int, int, Attached | None]:
        """An open's trainer number (0: none) and wanted inode; and the trainer, if the kernel did not look up."""
        if self.attended and (trainer := self.trainer_of(thread)) is not None:
            asked = self.wanted(thread, inode)
            return trainer.number, asked or inode, trainer if asked is None else None
        return 0, inode, None

    def concerns(self, wanted: int) -> bool:
        """Whether anybody may be given a substitute for this file, so that the kernel must ask each time."""
        return bool(self.substitutes(wanted, 1))

    def substitutes(self, wanted: int, limit: int = 64) -> list[int]:
        """The substitutes that readers may be given for a file now, one inode for each job dataset that has one."""
        rows = self._records.scan(TABLE, _KEY.pack(wanted, 0), limit)
        return [_INODE.unpack(value)[0] for key, value in rows if _KEY.unpack(key)[0] == wanted]

    def choose(self, wanted: int, trainer: Attached, at_hand: Callable[[int], bool]) -> int:
        """The inode that this trainer is to be given for `wanted`; `wanted` itself if that is `at_hand` anyway."""
        now = self._clock()
        if (lease := self._leases.get((trainer.number, wanted))) is not None and lease[1] >= now:
            return lease[0]
        given = wanted
        # This first: most files that are asked for are at hand, and to find that out takes half as long as a row.
        if not at_hand(wanted):
            for job_dataset_number in trainer.job_dataset_numbers:
                if (row := self._records.get(TABLE, _KEY.pack(wanted, job_dataset_number))) is not None:
                    (given,) = _INODE.unpack(row)
                    break
        if len(self._leases) > _REMEMBERED:
            self._leases.clear()
        self._leases[trainer.number, wanted] = (given, now + LEASE_S)
        return given

    def substitute(self, wanted: int, trainer: Attached, cached: Cached, settings: Settings) -> int | None:
        """The substitute that this trainer is to be given for `wanted`; None if it is to be given the file itself."""
        given = self.choose(wanted, trainer, lambda inode: inode in self._pushed or is_at_hand(inode, cached, settings))
        return given if given != wanted and cached.stored(ContentKey(given)) else None

    def remember_lookup(self, thread: int, wanted: int, given: int) -> None:
        """Remember what the thread has asked for, for its open that follows; call this at each of its look-ups."""
        self._reads.put(thread, wanted, given, self._clock())

    def last_lookup(self, thread: int) -> tuple[int, int] | None:
        """What the thread asked for at its last look-up, and what it was given, as inodes; the note stays."""
        note = self._reads.get(thread)
        return None if note is None or note[2] < self._clock() - NOTED_S else (note[0], note[1])

    def wanted(self, thread: int, given: int) -> int | None:
        """What the thread, which opens `given`, had asked for; None if the kernel knew the name. The note is gone."""
        last = self.last_lookup(thread)
        self._reads.discard(thread)
        return last[0] if last is not None and last[1] == given else None
