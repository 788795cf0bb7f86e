"""Reading a cache around FUSE, rule by rule, against a cache directory that is made by hand."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forking import exit_status, forked
from programs import program

from spiderfs.client.client import Cache, Gone
from spiderfs.core.events import HIT, Access
from spiderfs.daemon.pipes import ClientPipe
from spiderfs.errors import StoreDamaged
from spiderfs.linux import steady_clock
from spiderfs.linux.process_table import started_at
from spiderfs.metrics import SharedCounters
from spiderfs.shared import published
from spiderfs.shared.layout import DATA_FILE, CacheLayout
from spiderfs.shared.published import Attached, Terms, pid_namespace, publish_trainers, published_terms
from spiderfs.sources.source import SourceStat
from spiderfs.store.content import LmdbContent
from spiderfs.store.records import LmdbRecords
from spiderfs.store.store import ContentKey
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES, Catalogue, Dentry
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.redirects import redirect_row
from spiderfs.vfs.rules import FOREVER_S

pytestmark = pytest.mark.clock

TERMS = Terms(
    ttl_s=3600.0,
    checked_since_s=0.0,
    clock_began_s=steady_clock.BEGAN_S,
    sample_max_bytes=1000,
    wait_for_fetches=True,
    substitute="trainer",
    uid=None,
    gid=None,
    file_mode=None,
    dir_mode=None,
    checks_permissions=False,
    pushes_ahead=False,
    pid_namespace=pid_namespace(),
)
DATASET = 7
NOBODY = 65534


class Daemon:
    """What the processes of a mount write, in a process of its own: one environment is open once in each."""

    def __init__(self, place: Path) -> None:
        self.layout = CacheLayout(place)
        for directory in (self.layout.run.directory, *self.layout.environments):
            directory.mkdir(parents=True)
        self.counters = SharedCounters(1)
        self.terms = self.layout.run.client_terms
        self.inodes: dict[bytes, int] = {}
        self.pipe: ClientPipe
        FetchLock(self.layout.run.fetch_lock).close()
        self.write(lambda catalogue, records, content: content.set_capacity(1 << 20))
        self.record(b"", b"train", mode=stat.S_IFDIR | 0o755)
        self.trainers([])

    def write(self, what: Any) -> None:
        """Let `what(catalogue, records, content)` change the store."""

        def work() -> None:
            records = LmdbRecords(self.layout.names, TABLES)
            what(Catalogue(records), records, LmdbContent(self.layout.content))

        assert exit_status(forked(work)) == 0

    def record(
        self,
        directory: bytes,
        name: bytes,
        content: bytes | None = None,
        *,
        mode: int = stat.S_IFREG | 0o644,
        size: int | None = None,
        age_s: float = 0.0,
        uid: int = 0,
        gid: int = 0,
    ) -> None:
        """Make a name known, and its content too unless it is None."""
        found = SourceStat(mode, uid, gid, size if size is not None else len(content or b""), 1)
        reader, writer = os.pipe()

        def put(catalogue: Catalogue, records: LmdbRecords, store: LmdbContent) -> None:
            if not directory:
                catalogue.record_root(SourceStat(stat.S_IFDIR | 0o755, 0, 0, 0, 0))
            parent = catalogue.directory_inode(directory) if directory else ROOT_INODE
            dentry: Dentry = catalogue.record(parent, name, found, time.time() - age_s)
            if content:
                assert store.land(ContentKey(dentry.inode), content)
            os.write(writer, b"%d" % dentry.inode)

        self.write(put)
        self.inodes[name] = int(os.read(reader, 64))
        os.close(reader)
        os.close(writer)

    def redirect(self, wanted: bytes, given: bytes) -> None:
        row = redirect_row(DATASET, self.inodes[wanted], self.inodes[given])
        self.write(lambda catalogue, records, content: records.put([row]))

    def trainers(self, trainers: list[Attached]) -> None:
        publish_trainers(self.layout.run.trainers, trainers)

    def begin(self, **terms: object) -> None:
        self.pipe = ClientPipe(self.layout.run, TERMS._replace(**terms), self.counters.row(0))

    def events(self) -> list[Access]:
        return self.pipe.read()

    def counted(self, name: str) -> int:
        return self.counters.totals()[name]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    # Not tmp_path or TMPDIR, into which other users may not be let.
    place = Path(tempfile.mkdtemp(prefix="sf-client.", dir="/tmp"))
    place.chmod(0o755)
    found = Daemon(place)
    found.record(b"train", b"cat", b"a cat")
    found.record(b"train", b"dog", b"a dog")
    found.begin()
    yield found
    os.close(found.pipe.fd)
    shutil.rmtree(place)


def test_what_is_cached_is_served_and_reported(daemon: Daemon) -> None:
    cache = Cache(daemon.terms)
    before = time.time()
    assert cache.serve(b"train/cat") == b"a cat"
    (event,) = daemon.events()
    assert before <= event.time_s <= time.time()
    inode = daemon.inodes[b"cat"]
    assert event[1:8] == (inode, inode, 5, 0, os.getpid(), 0, HIT)
    assert [daemon.counted(name) for name in ("opens", "opens_hit", "client_opens", "redirects")] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    "path",
    [
        b"train",
        b"",
        b"train/",
        b"train//cat",
        b"train/./cat",
        b"train/../train/cat",
        b"cat",
        b"train/none",
        b"none/cat",
    ],
)
def test_other_paths_are_the_mounts(daemon: Daemon, path: bytes) -> None:
    assert Cache(daemon.terms).serve(path) is None
    assert daemon.events() == []


def test_what_is_not_plain_is_the_mounts(daemon: Daemon) -> None:
    daemon.record(b"train", b"uncached", None, size=5)
    daemon.record(b"train", b"large", b"x" * 1001)
    daemon.record(b"train", b"link", b"cat", mode=stat.S_IFLNK | 0o777)
    daemon.record(b"", b"train link", b"train", mode=stat.S_IFLNK | 0o777)
    cache = Cache(daemon.terms)
    for path in (b"train/uncached", b"train/large", b"train/link", b"train link/cat", b"train/cat/cat"):
        assert cache.serve(path) is None
    assert daemon.events() == []


@pytest.mark.parametrize(("age_s", "served"), [(0.0, True), (50.0, True), (70.0, False), (-70.0, False)])
def test_a_name_is_trusted_for_its_ttl_and_not_from_the_future(daemon: Daemon, age_s: float, served: bool) -> None:
    os.close(daemon.pipe.fd)
    daemon.begin(ttl_s=60.0)
    _serves_names_of_age(daemon, age_s, served)


def _serves_names_of_age(daemon: Daemon, age_s: float, served: bool) -> None:
    daemon.record(b"train", b"cow", b"a cow", age_s=age_s)
    daemon.record(b"", b"old", mode=stat.S_IFDIR | 0o755, age_s=age_s)
    daemon.record(b"old", b"pig", b"a pig")
    cache = Cache(daemon.terms)
    assert (cache.serve(b"train/cow") is not None) == served
    assert (cache.serve(b"old/pig") is not None) == served


@pytest.mark.parametrize(("age_s", "served"), [(0.0, True), (50.0, True), (70.0, False)])
def test_a_name_checked_before_an_immutable_mount_is_not_trusted(daemon: Daemon, age_s: float, served: bool) -> None:
    os.close(daemon.pipe.fd)
    daemon.begin(ttl_s=FOREVER_S, checked_since_s=time.time() - 60)
    _serves_names_of_age(daemon, age_s, served)


def test_a_name_that_expires_while_it_is_used(daemon: Daemon) -> None:
    os.close(daemon.pipe.fd)
    daemon.begin(ttl_s=0.2)
    daemon.record(b"train", b"cow", b"a cow")
    daemon.record(b"", b"train", mode=stat.S_IFDIR | 0o755)
    cache = Cache(daemon.terms)
    deadline = time.monotonic() + 30
    while cache.serve(b"train/cow") is not None:
        assert time.monotonic() < deadline
    assert time.monotonic() > deadline - 30


def test_changed_options_are_taken_over(daemon: Daemon) -> None:
    cache = Cache(daemon.terms)
    assert cache.serve(b"train/cat") == b"a cat"
    daemon.pipe.change(TERMS._replace(sample_max_bytes=3))
    deadline = time.monotonic() + 30
    while cache.serve(b"train/cat") is not None:
        assert time.monotonic() < deadline


def test_a_damaged_record_is_never_served(daemon: Daemon) -> None:
    data = daemon.layout.content / DATA_FILE
    data.write_bytes(data.read_bytes().replace(b"a cat", b"a rat"))
    with pytest.raises(StoreDamaged):
        Cache(daemon.terms).serve(b"train/cat")
    assert daemon.events() == []


# -- the manager at the other end


def test_without_a_manager_nothing_is_served(daemon: Daemon) -> None:
    cache = Cache(daemon.terms)
    assert cache.is_at(daemon.terms)
    os.close(daemon.pipe.fd)
    with pytest.raises(Gone):
        cache.serve(b"train/cat")
    with pytest.raises(OSError, match="No such device"):
        Cache(daemon.terms)
    daemon.begin()
    assert not cache.is_at(daemon.terms)
    assert Cache(daemon.terms).serve(b"train/cat") == b"a cat"


def test_events_that_find_the_pipe_full_are_counted(daemon: Daemon) -> None:
    cache = Cache(daemon.terms)
    served = 0
    while not cache._lost:
        assert cache.serve(b"train/cat") == b"a cat"
        served += 1
    assert cache.serve(b"train/cat") == b"a cat"
    reported = len(daemon.events())
    assert cache.serve(b"train/dog") == b"a dog"
    while some := len(daemon.events()):
        reported += some
    assert reported == served
    assert daemon.counted("events_dropped") == 2
    assert daemon.counted("client_opens") == daemon.counted("opens") == daemon.counted("opens_hit") == served + 2


def test_another_pid_namespace_and_another_version_keep_away(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.pipe.change(TERMS._replace(pid_namespace=1))
    with pytest.raises(Gone, match="pid namespace"):
        Cache(daemon.terms)
    monkeypatch.setattr(published, "VERSION", 4)
    daemon.pipe.change(TERMS)
    monkeypatch.setattr(published, "VERSION", 3)
    with pytest.raises(ValueError, match="another version"):
        published_terms(daemon.terms)


def test_a_store_that_was_wiped_is_opened_again(daemon: Daemon) -> None:
    old = Cache(daemon.terms)
    assert old.serve(b"train/cat") == b"a cat"
    shutil.rmtree(daemon.layout.store)
    for environment in daemon.layout.environments:
        environment.mkdir(parents=True)
    daemon.write(lambda catalogue, records, content: content.set_capacity(1 << 20))
    daemon.record(b"", b"train", mode=stat.S_IFDIR | 0o755)
    daemon.record(b"train", b"cat", b"a new cat")
    assert Cache(daemon.terms).serve(b"train/cat") == b"a new cat"


# -- trainers


def test_trainers_that_change_within_one_tick_of_the_clock_are_followed(daemon: Daemon) -> None:
    trainers = daemon.layout.run.trainers
    os.utime(trainers, ns=(5, 5))
    cache = Cache(daemon.terms)
    assert cache.serve(b"train/cat") == b"a cat"
    daemon.trainers([Attached(3, os.getpid(), started_at(os.getpid()), (DATASET,), True)])
    os.utime(trainers, ns=(5, 5))
    cache._follow_at = -math.inf
    assert cache.serve(b"train/cat") == b"a cat"
    assert [event.trainer for event in daemon.events()] == [0, 3]


_FETCHING = """
import sys
from pathlib import Path
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.store.store import ContentKey
lock = FetchLock(Path(sys.argv[1]))
assert lock.try_hold(ContentKey(int(sys.argv[2])))
"""
_REDIRECTING = """
import sys
from pathlib import Path
from spiderfs.vfs.catalogue import TABLES
from spiderfs.vfs.redirects import redirect_row
from spiderfs.store.records import LmdbRecords
LmdbRecords(Path(sys.argv[1]), TABLES).put([redirect_row(*map(int, sys.argv[2:]))])
"""


@contextlib.contextmanager
def remote(does: str, *arguments: object) -> Iterator[int]:
    """The pid of another process that has done something, and waits until the context ends."""
    waiting = f"{does}\nprint('done', flush=True)\nsys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with program(sys.executable, "-c", waiting, *map(str, arguments), text=True, **pipes) as process:
        assert process.stdout.readline() == "done\n"
        yield process.pid
        process.stdin.close()


def attach(daemon: Daemon, pid: int | None = None) -> None:
    pid = os.getpid() if pid is None else pid
    daemon.trainers([Attached(3, pid, started_at(pid), (DATASET,), True)])


def test_a_trainer_gets_the_substitute_of_what_is_not_cached(daemon: Daemon) -> None:
    daemon.record(b"train", b"cow", None, size=5)
    daemon.redirect(b"cow", b"cat")
    attach(daemon)
    assert Cache(daemon.terms).serve(b"train/cow") == b"a cat"
    (event,) = daemon.events()
    assert (event.trainer, event.size) == (3, 5)
    assert (event.wanted, event.inode) == (daemon.inodes[b"cow"], daemon.inodes[b"cat"])
    assert daemon.counted("redirects") == 1


def test_a_substitute_stays_the_same_for_the_lease(daemon: Daemon) -> None:
    daemon.record(b"train", b"cow", None, size=5)
    daemon.redirect(b"cow", b"cat")
    attach(daemon)
    cache = Cache(daemon.terms)
    assert cache.serve(b"train/cow") == b"a cat"
    with remote(_REDIRECTING, daemon.layout.names, DATASET, daemon.inodes[b"cow"], daemon.inodes[b"dog"]):
        assert cache.serve(b"train/cow") == b"a cat"
        assert Cache(daemon.terms).serve(b"train/cow") == b"a dog"


def test_what_is_cached_or_being_fetched_has_no_substitute(daemon: Daemon) -> None:
    daemon.record(b"train", b"cow", None, size=5)
    daemon.redirect(b"cow", b"cat")
    daemon.redirect(b"dog", b"cat")
    attach(daemon)
    cache = Cache(daemon.terms)
    assert cache.serve(b"train/dog") == b"a dog"
    del cache
    with remote(_FETCHING, daemon.layout.run.fetch_lock, daemon.inodes[b"cow"]):
        assert Cache(daemon.terms).serve(b"train/cow") is None
    assert Cache(daemon.terms).serve(b"train/cow") == b"a cat"


def test_where_samples_are_pushed_ahead_the_mount_says_which_substitute_is_due(daemon: Daemon) -> None:
    """The kernel may have what the store has not."""
    daemon.record(b"train", b"cow", None, size=5)
    daemon.redirect(b"cow", b"cat")
    daemon.redirect(b"dog", b"cat")
    attach(daemon)
    daemon.begin(pushes_ahead=True)
    cache = Cache(daemon.terms)
    assert [cache.serve(b"train/cow"), cache.serve(b"train/dog")] == [None, b"a dog"]
    assert [event.trainer for event in daemon.events()] == [3]


def test_no_one_else_gets_a_substitute(daemon: Daemon) -> None:
    daemon.record(b"train", b"cow", None, size=5)
    daemon.redirect(b"cow", b"cat")
    assert Cache(daemon.terms).serve(b"train/cow") is None
    with remote("import sys, os") as other:
        attach(daemon, pid=other)
        assert Cache(daemon.terms).serve(b"train/cow") is None
    attach(daemon)
    daemon.pipe.change(TERMS._replace(substitute="off"))
    assert Cache(daemon.terms).serve(b"train/cow") is None
    assert Cache(daemon.terms).serve(b"train/cat") == b"a cat"
    assert daemon.events()[-1].trainer == 3


def test_a_substitute_that_has_left_the_store_is_the_mounts_affair(daemon: Daemon) -> None:
    daemon.record(b"train", b"cow", None, size=5)
    daemon.record(b"train", b"pig", None, size=5)
    daemon.redirect(b"cow", b"pig")
    attach(daemon)
    assert Cache(daemon.terms).serve(b"train/cow") is None


# -- permissions


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's part")
@pytest.mark.parametrize(
    ("mode", "uid", "gid", "granted"),
    [
        (0o400, NOBODY, 0, True),
        (0o044, NOBODY, 0, False),
        (0o040, 0, NOBODY, True),
        (0o404, 0, NOBODY, False),
        (0o004, 0, 0, True),
        (0o440, 0, 0, False),
    ],
)
def test_modes_count_where_the_kernel_checks_them(daemon: Daemon, mode: int, uid: int, gid: int, granted: bool) -> None:
    daemon.record(b"train", b"cow", b"a cow", mode=stat.S_IFREG | mode, uid=uid, gid=gid)
    closed, child_mode = stat.S_IFDIR | mode & 0o111 | mode >> 2 & 0o111, 0o777
    daemon.record(b"", b"yard", mode=closed, uid=uid, gid=gid)
    daemon.record(b"yard", b"pig", b"a pig", mode=stat.S_IFREG | child_mode)
    daemon.pipe.change(TERMS._replace(checks_permissions=True))
    assert Cache(daemon.terms).serve(b"train/cow") == b"a cow", "root may read everything"

    def seen() -> tuple[bool, bool]:
        cache = Cache(daemon.terms)
        return cache.serve(b"train/cow") is not None, cache.serve(b"yard/pig") is not None

    assert as_nobody(daemon, seen) == (granted, granted)
    daemon.pipe.change(TERMS._replace(checks_permissions=True, uid=0, gid=0, file_mode=0o444, dir_mode=0o555))
    assert as_nobody(daemon, seen) == (True, True)
    daemon.pipe.change(TERMS._replace(checks_permissions=False))
    assert as_nobody(daemon, seen) == (True, True)


def as_nobody(daemon: Daemon, what: Any, owner: bool = True) -> tuple[bool, bool]:
    """What another user gets, to whom the cache directory belongs."""
    for path in (daemon.layout.cache, *daemon.layout.cache.rglob("*")) if owner else ():
        os.chown(path, NOBODY, NOBODY)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(writer, bytes(what()))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    try:
        cow, pig = os.read(reader, 2)
    finally:
        os.close(reader)
    return bool(cow), bool(pig)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's part")
@pytest.mark.parametrize(
    ("directory_mode", "file_mode", "given"), [(0o755, 0o644, b"a pig"), (0o700, 0o644, None), (0o755, 0o600, None)]
)
def test_a_substitute_could_be_opened(daemon: Daemon, directory_mode: int, file_mode: int, given: bytes | None) -> None:
    daemon.record(b"train", b"gone", None, size=5)
    daemon.record(b"", b"yard", mode=stat.S_IFDIR | directory_mode)
    daemon.record(b"yard", b"pig", b"a pig", mode=stat.S_IFREG | file_mode)
    daemon.redirect(b"gone", b"pig")
    daemon.pipe.change(TERMS._replace(checks_permissions=True, substitute="all"))
    daemon.trainers([Attached(3, os.getpid(), started_at(os.getpid()), (DATASET,), True)])
    assert Cache(daemon.terms).serve(b"train/gone") == b"a pig", "root may read everything"

    def seen() -> tuple[bool, bool]:
        found = Cache(daemon.terms).serve(b"train/gone")
        return found == given, found is None

    assert as_nobody(daemon, seen) == (True, given is None)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's part")
def test_a_cache_of_another_user_is_not_read(daemon: Daemon) -> None:
    def seen() -> tuple[bool, bool]:
        try:
            Cache(daemon.terms)
        except ValueError as exc:
            return "another user's" in str(exc), True
        return False, False

    for path in daemon.layout.cache.rglob("*"):
        path.chmod(0o777)
    assert as_nobody(daemon, lambda: (Cache(daemon.terms).serve(b"train/cat") is not None, True)) == (True, True)
    os.chown(daemon.terms, 0, 0)
    assert as_nobody(daemon, seen, owner=False) == (True, True)


@pytest.mark.parametrize("name", ["../victim", "victim", "link", "/etc/hostname"])
def test_records_are_written_into_a_fifo_alone(daemon: Daemon, name: str) -> None:
    """The terms are those of whoever made the mount; root reads many."""
    for place in (daemon.layout.run.directory, daemon.layout.cache):
        (place / "victim").write_bytes(b"as it was")
    (daemon.layout.run.directory / "link").symlink_to("victim")
    terms = json.loads(daemon.terms.read_bytes())
    daemon.terms.write_text(json.dumps(terms | {"pipe": name}))
    with pytest.raises(ValueError, match="no FIFO"):
        Cache(daemon.terms)
    for place in (daemon.layout.run.directory, daemon.layout.cache):
        assert (place / "victim").read_bytes() == b"as it was"


@pytest.mark.parametrize(
    "text", ["[]", "7", "{}", '{"version": 1}', '{"version": 1, "pipe": "x", "odd": 1}', "[" * 9999]
)
def test_terms_that_make_no_sense_are_none(daemon: Daemon, text: str) -> None:
    terms = json.loads(daemon.terms.read_bytes())
    for each in (text, json.dumps(terms | {"ttl_s": "x"}), json.dumps(terms | {"uid": []})):
        daemon.terms.write_text(each)
        with pytest.raises(ValueError):  # noqa: PT011
            Cache(daemon.terms)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's part")
def test_a_process_that_becomes_another_user_must_look_again(daemon: Daemon) -> None:
    cache = Cache(daemon.terms)
    assert cache.usable()
    os.seteuid(NOBODY)
    try:
        assert not cache.usable()
    finally:
        os.seteuid(0)
