"""Who is given another file, and who never is."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from programs import program

from spiderfs.linux.process_table import started_at, status_of
from spiderfs.shared.published import Attached
from spiderfs.sources.source import SourceStat
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.store.store import ContentKey
from spiderfs.vfs.catalogue import TABLES
from spiderfs.vfs.redirects import (
    IDENTITY_S,
    LEASE_S,
    NOTED_S,
    PendingReads,
    Redirects,
    each_redirect,
    redirect_row,
)
from spiderfs.vfs.rules import Credentials, Ownership, Settings

WANTED, GIVEN, OTHER = 70_001, 70_002, 70_003

# Tells the ids of a process: itself, a thread of it, a child of it, and a thread of the child; then waits for its end.
_FAMILY = r"""
import os, sys, threading
def threaded():
    there, end = threading.Event(), threading.Event()
    ids = []
    def run():
        ids.append(threading.get_native_id()); there.set(); end.wait()
    threading.Thread(target=run, daemon=True).start()
    there.wait()
    return ids[0]
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, f"{os.getpid()} {threaded()}\n".encode())
    sys.stdin.read(); os._exit(0)
thread = threaded()
print(os.getpid(), thread, os.read(read, 99).decode(), flush=True)
sys.stdin.read()
os.wait()
"""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Harness:
    def __init__(self) -> None:
        self.records = MemoryRecords(TABLES)
        self.clock = Clock()
        self.redirects = Redirects(self.records, PendingReads(), self.clock)

    def redirect(self, job_dataset_number: int, wanted: int, given: int | None) -> None:
        self.records.put([redirect_row(job_dataset_number, wanted, given)])


def nowhere(inode: int) -> bool:
    """No file is at hand."""
    return False


@pytest.fixture
def harness() -> Harness:
    return Harness()


@pytest.fixture
def family() -> Iterator[list[int]]:
    """Process, its thread, its child, and the child's thread."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with program(sys.executable, "-I", "-S", "-c", _FAMILY, text=True, **pipes) as process:
        yield [int(number) for number in process.stdout.readline().split()]


def attached(pid: int, number: int = 1, job_dataset_numbers: tuple[int, ...] = (1,), later: int = 0) -> Attached:
    return Attached(number, pid, started_at(pid) + later, job_dataset_numbers, True)


def test_a_trainer_is_its_process_its_threads_and_all_below_it(harness: Harness, family: list[int]) -> None:
    trainer = attached(family[0])
    harness.redirects.set_trainers([trainer], "trainer")
    assert harness.redirects.active
    assert [harness.redirects.trainer_of(thread) for thread in family] == [trainer] * 4


def test_the_nearest_trainer_counts(harness: Harness, family: list[int]) -> None:
    ours, theirs = attached(os.getpid(), 1), attached(family[0], 2)
    harness.redirects.set_trainers([ours, theirs], "trainer")
    assert harness.redirects.trainer_of(family[3]) == theirs
    assert harness.redirects.trainer_of(threading.get_native_id()) == ours


def test_no_one_else_does(harness: Harness, family: list[int]) -> None:
    harness.redirects.set_trainers([attached(family[2])], "trainer")
    strangers = [family[0], family[1], os.getpid(), os.getppid(), 1, 0, 1 << 30]
    assert [harness.redirects.trainer_of(thread) for thread in strangers] == [None] * len(strangers)


def test_a_pid_that_means_another_process_by_now_is_no_trainer(harness: Harness, family: list[int]) -> None:
    harness.redirects.set_trainers([attached(family[0], later=1)], "trainer")
    assert [harness.redirects.trainer_of(thread) for thread in family] == [None] * 4


def test_what_was_found_of_a_thread_is_looked_up_again(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = attached(os.getpid())
    harness.redirects.set_trainers([trainer], "trainer")
    assert harness.redirects.trainer_of(os.getpid()) == trainer
    monkeypatch.setattr("spiderfs.vfs.redirects.status_of", lambda thread: status_of(1))
    assert harness.redirects.trainer_of(os.getpid()) == trainer
    harness.clock.now += IDENTITY_S + 0.01
    assert harness.redirects.trainer_of(os.getpid()) is None


def test_off_is_off(harness: Harness) -> None:
    trainer = attached(os.getpid())
    harness.redirects.set_trainers([trainer], "off")
    assert not harness.redirects.active
    # Whose opens they are is told all the same, for plans.
    assert harness.redirects.attended
    assert harness.redirects.trainer_of(os.getpid()) == trainer
    harness.redirects.set_trainers([], "off")
    assert not harness.redirects.attended


def test_all_means_every_process(harness: Harness) -> None:
    harness.redirects.set_trainers([attached(os.getpid(), 1, (1,)), attached(os.getpid(), 2, (2,))], "all")
    reader = harness.redirects.trainer_of(1)
    assert set(reader.job_dataset_numbers) == {1, 2}
    harness.redirect(2, WANTED, GIVEN)
    assert harness.redirects.choose(WANTED, reader, nowhere) == GIVEN


def test_only_declared_lists_count(harness: Harness) -> None:
    harness.redirect(2, WANTED, GIVEN)
    harness.redirect(3, WANTED, OTHER)
    assert harness.redirects.choose(WANTED, Attached(1, 1, 1, (1,), True), nowhere) == WANTED
    assert harness.redirects.choose(WANTED, Attached(2, 1, 1, (1, 2), True), nowhere) == GIVEN
    assert harness.redirects.choose(WANTED, Attached(3, 1, 1, (3,), True), nowhere) == OTHER
    assert harness.redirects.choose(GIVEN, Attached(2, 1, 1, (1, 2), True), nowhere) == GIVEN
    assert harness.redirects.concerns(WANTED)
    assert not harness.redirects.concerns(WANTED - 1)
    assert not harness.redirects.concerns(GIVEN)


def test_a_choice_holds_for_its_lease(harness: Harness) -> None:
    one, two = Attached(1, 1, 1, (1,), True), Attached(2, 1, 1, (1,), True)
    harness.redirect(1, WANTED, GIVEN)
    assert harness.redirects.choose(WANTED, one, nowhere) == GIVEN
    harness.redirect(1, WANTED, OTHER)
    harness.clock.now += LEASE_S
    assert harness.redirects.choose(WANTED, one, nowhere) == GIVEN
    assert harness.redirects.choose(WANTED, two, nowhere) == OTHER
    harness.clock.now += 0.01
    assert harness.redirects.choose(WANTED, one, nowhere) == OTHER


def test_what_is_at_hand_needs_no_substitute(harness: Harness) -> None:
    asked: list[int] = []
    here: set[int] = set()

    def at_hand(inode: int) -> bool:
        asked.append(inode)
        return inode in here

    one, two = Attached(1, 1, 1, (1,), True), Attached(2, 1, 1, (1,), True)
    harness.redirect(1, WANTED, GIVEN)
    assert harness.redirects.choose(OTHER, one, at_hand) == OTHER
    asked.clear()
    assert harness.redirects.choose(WANTED, one, at_hand) == GIVEN
    # It arrives, or its fetch begins: who has a lease goes on with what it was given.
    here.add(WANTED)
    assert harness.redirects.choose(WANTED, one, at_hand) == GIVEN
    assert harness.redirects.choose(WANTED, two, at_hand) == WANTED
    # And the other way round.
    here.clear()
    assert harness.redirects.choose(WANTED, two, at_hand) == WANTED
    harness.clock.now += LEASE_S + 0.01
    assert harness.redirects.choose(WANTED, two, at_hand) == GIVEN
    assert asked == [WANTED] * 3


class Nothing:
    """A cache in which there is nothing but the substitute."""

    def stored(self, key: ContentKey) -> bool:
        return key.inode == GIVEN

    def under_way(self, key: ContentKey) -> bool:
        return False


def test_what_the_kernel_has_needs_no_substitute() -> None:
    harness, pushed = Harness(), set[int]()
    redirects = Redirects(harness.records, PendingReads(), harness.clock, pushed)
    harness.redirect(1, WANTED, GIVEN)
    one, two = Attached(1, 1, 1, (1,), True), Attached(2, 1, 1, (1,), True)
    assert redirects.substitute(WANTED, one, Nothing(), Settings()) == GIVEN
    pushed.add(WANTED)
    assert redirects.substitute(WANTED, one, Nothing(), Settings()) == GIVEN, "the lease holds"
    assert redirects.substitute(WANTED, two, Nothing(), Settings()) is None


def test_a_look_up_without_an_open_is_not_taken_for_a_later_one(harness: Harness) -> None:
    redirects = harness.redirects
    # A stat of WANTED, an open of another file, and one of the substitute by its own name, which the kernel knows.
    redirects.remember_lookup(5, WANTED, GIVEN)
    assert redirects.wanted(5, OTHER) is None
    assert redirects.wanted(5, GIVEN) is None
    # A stat of WANTED, and an open of the substitute by its own name, which the kernel asks for.
    redirects.remember_lookup(5, WANTED, GIVEN)
    redirects.remember_lookup(5, GIVEN, GIVEN)
    assert redirects.wanted(5, GIVEN) == GIVEN
    # A stat of WANTED, and much later an open of the substitute by its own name.
    redirects.remember_lookup(5, WANTED, GIVEN)
    harness.clock.now += NOTED_S + 0.01
    assert redirects.wanted(5, GIVEN) is None
    # What cannot be told from an open of WANTED: the same at once.
    redirects.remember_lookup(5, WANTED, GIVEN)
    assert redirects.wanted(5, GIVEN) == WANTED


def test_threads_that_share_a_slot_lose_a_note_and_never_mix_them_up(harness: Harness) -> None:
    redirects = harness.redirects
    redirects.remember_lookup(5, WANTED, GIVEN)
    redirects.remember_lookup(5 + 8192, OTHER, GIVEN)
    assert redirects.wanted(5, GIVEN) is None
    assert redirects.wanted(5 + 8192, GIVEN) == OTHER


# As the first process of a pid namespace: a trainer, with a worker of its loader and an orphan of someone else's.
_FIRST = r"""
import os, signal, sys, time
from spiderfs.linux.process_table import is_our_own, started_at
from spiderfs.shared.published import Attached
from spiderfs.vfs.redirects import PendingReads
from spiderfs.vfs.redirects import Redirects
from spiderfs.store.spare_records import MemoryRecords
assert os.getpid() == 1
def child(orphaned=False):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        if orphaned:
            os.setsid()
            if os.fork():
                os._exit(0)
        os.write(write, b"%d" % os.getpid())
        signal.pause()
    if orphaned:
        os.waitpid(pid, 0)
    return int(os.read(read, 9))
trainer = Attached(1, 1, started_at(1), (1,), True)
redirects = Redirects(MemoryRecords(("redirect",)), PendingReads())
redirects.set_trainers([trainer], "trainer")
worker, orphan = child(), child(orphaned=True)
print(*(redirects.trainer_of(pid) == trainer for pid in (1, worker, orphan)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a pid namespace")
@pytest.mark.parametrize(
    ("flags", "seen"),
    [
        (["--mount-proc"], "True True False"),
        # Its /proc is that of the machine, whose numbers mean other processes.
        ([], "False False False"),
    ],
)
def test_a_trainer_may_be_the_first_process_of_its_namespace(flags: list[str], seen: str) -> None:
    command = ["unshare", "--pid", "--fork", "--kill-child", *flags, sys.executable, "-c", _FIRST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == seen, done.stderr


_AS_SOMEBODY = """
import os, sys
os.setgroups([7, 8]); os.setgid(5); os.setuid(6)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_the_rights_of_a_reader_are_those_of_its_thread(harness: Harness) -> None:
    assert harness.redirects.credentials_of(os.getpid(), 0, 0).may_read_all
    command = [sys.executable, "-I", "-S", "-c", _AS_SOMEBODY]
    with program(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        assert harness.redirects.credentials_of(process.pid, 6, 5) == Credentials(6, frozenset({5, 7, 8}))
        # What the kernel says of a request is not what is found: it has changed, or the number means another one.
        assert harness.redirects.credentials_of(process.pid, 0, 0) is None
        process.stdin.close()
    harness.clock.now += IDENTITY_S + 0.01
    assert harness.redirects.credentials_of(process.pid, 6, 5) is None, "it has gone"


def test_a_thread_of_another_user_is_looked_at_again(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    status = status_of(os.getpid())
    monkeypatch.setattr("spiderfs.vfs.redirects.status_of", lambda thread: status._replace(uid=6, gid=5))
    assert harness.redirects.credentials_of(os.getpid(), 6, 5) is not None
    monkeypatch.setattr("spiderfs.vfs.redirects.status_of", lambda thread: status._replace(uid=9, gid=5))
    assert harness.redirects.credentials_of(os.getpid(), 9, 5) is not None


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "granted"),
    [
        (0o400, 6, 0, True),
        (0o077, 6, 7, False),
        (0o040, 0, 5, True),
        (0o040, 0, 7, True),
        (0o707, 0, 7, False),
        (0o004, 0, 0, True),
        (0o770, 0, 0, False),
    ],
)
def test_owners_and_modes_count_as_for_the_kernel(mode: int, uid: int, gid: int, granted: bool) -> None:
    who, shown = Credentials(6, frozenset({5, 7})), Ownership()
    file = SourceStat(stat.S_IFREG | mode, uid, gid, 1, 1)
    directory = SourceStat(stat.S_IFDIR | mode >> 2 & 0o111, uid, gid, 1, 1)
    assert (shown.may_read(who, file), shown.may_pass(who, directory)) == (granted, granted)
    root = Credentials(0, frozenset({0}), True)
    assert shown.may_read(root, file)
    assert shown.may_pass(root, directory)
    closed, opened = Ownership(0, 0, 0o600, 0o700), Ownership(0, 0, 0o644, 0o755)
    assert not closed.may_read(who, file)
    assert not closed.may_pass(who, directory)
    assert opened.may_read(who, file)
    assert opened.may_pass(who, directory)


# -- the rows that the manager writes


def test_rows_are_taken_away_again() -> None:
    records = MemoryRecords(TABLES)
    records.put([redirect_row(1, WANTED, GIVEN), redirect_row(2, WANTED, OTHER)])
    assert sorted(each_redirect(records)) == [(WANTED, 1, GIVEN), (WANTED, 2, OTHER)]
    records.put([redirect_row(1, WANTED, None)])
    assert list(each_redirect(records)) == [(WANTED, 2, OTHER)]


def test_a_table_of_redirects_is_read_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spiderfs.vfs.redirects._ROWS_AT_A_TIME", 3)
    records = MemoryRecords(TABLES)
    rows = [(wanted, number, 7) for wanted in range(5) for number in (1, 2)]
    records.put([redirect_row(number, wanted, given) for wanted, number, given in rows])
    assert list(each_redirect(records)) == rows


def test_the_substitutes_of_one_inode_are_not_those_of_the_next() -> None:
    records = MemoryRecords(TABLES)
    records.put([redirect_row(number, WANTED, GIVEN + number) for number in range(3)])
    records.put([redirect_row(0, WANTED + 1, OTHER)])
    redirects = Redirects(records, PendingReads())
    assert redirects.substitutes(WANTED) == [GIVEN, GIVEN + 1, GIVEN + 2]
    assert redirects.substitutes(WANTED, 2) == [GIVEN, GIVEN + 1]
    assert redirects.substitutes(WANTED - 1) == []
