"""One mount's cache, read by this process itself, by the rules that workers follow too (`vfs/rules.py`).

`serve` gives the bytes of a file wherever a worker would answer from the cache at once, and None for everything else: a
name that is unknown or whose TTL has passed, a version that has not settled, a symbolic link, a directory, a large
file, a file that is not cached, a file that this process may not read. The caller then asks the mount, which knows all
of these better. So this module asks nothing of the source and makes no errors: each error that a reader sees is the
mount's own.

The manager is told of each file that is served, as if it had been opened (`shared/bypass_terms.py`). If the manager has
gone, or the store cannot be used, `Gone` is raised and nothing is served.

LMDB's environments belong to one process and are opened once in it: caches of one mount share them. An environment is
closed once nothing refers to it, and not before, since another thread may be reading. After a fork, py-lmdb takes the
parent's environments for open in the child too, which must neither use nor close them. So a process lets go of all its
environments before a fork, and parent and child open their own when they read again.
"""

from __future__ import annotations

import os
import stat
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from spiderfs.errors import StoreCorrupt, StoreDamaged, StoreError
from spiderfs.linux import steady_clock
from spiderfs.shared.attached_trainers import Edition, edition_of, published_trainers
from spiderfs.shared.bypass_terms import Terms, hit_record, lost_record, opened_pipe, pid_namespace, published_terms
from spiderfs.shared.layout import DATA_FILE, CacheLayout
from spiderfs.sources.source import SourceStat
from spiderfs.store.content_reader import ContentReader
from spiderfs.store.records import LmdbRecords
from spiderfs.store.store import ContentKey
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES, Catalogue, Dentry, Node
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.redirects import PendingReads, Redirects, Who
from spiderfs.vfs.rules import (
    ANYBODY,
    Believed,
    Credentials,
    Ownership,
    Settings,
    believed,
    directories_to_pass,
    is_provisional,
    left_s,
)

# How often changed options and trainers are looked for: as often as workers do.
FOLLOW_S = 0.02
_What = TypeVar("_What")
# Directories that are remembered; when there are more, all of them are forgotten at once.
_DIRECTORIES = 65536


class Gone(Exception):
    """This cache cannot be read any more, or not by this process; another one may be found at the same mount."""


class Directory(NamedTuple):
    """A directory of the mount, all directories above it included."""

    inode: int
    believed: Believed


class Store:
    """Both environments of a cache directory, opened to read; see `Stores`."""

    def __init__(self, layout: CacheLayout) -> None:
        self.pid = os.getpid()
        self.closing = False
        self.content = ContentReader(layout.content)
        self.records = LmdbRecords(layout.names, TABLES, readonly=True)

    def __del__(self) -> None:
        # Closing takes LMDB some time, in which other threads go on. The store is closed here because it leaves the
        # list of open stores only when this method returns.
        self.closing = True
        if os.getpid() == self.pid:
            for part in ("content", "records"):
                if hasattr(self, part):
                    getattr(self, part).close()


class Stores:
    """The stores that this process has open, each of them once."""

    # When one thread forks, the reads of the others end within microseconds, unless a disk hangs.
    PATIENCE_S = 1.0

    def __init__(self) -> None:
        self._open: weakref.WeakValueDictionary[tuple[tuple[int, int], ...], Store] = weakref.WeakValueDictionary()
        self._opening = threading.Lock()
        self._forking = False

    def shared(self, layout: CacheLayout) -> Store:
        """The store of a cache directory; raises Gone just before a fork, OSError, StoreError."""
        # A store that was wiped is another one at the same place; a mount of another view wipes the names alone.
        files = [os.stat(environment / DATA_FILE) for environment in layout.environments]
        key = tuple((found.st_dev, found.st_ino) for found in files)
        with self._opening:
            if self._forking:
                raise Gone("this process is about to fork")
            store = self._open.get(key)
            if store is not None and (store.closing or store.pid != os.getpid()):
                raise Gone("the store is being closed, or another process has opened it")
            if store is None:
                if any(not set(key).isdisjoint(other) for other in list(self._open)):
                    raise Gone("another client of this process has yet to let go of the names of an earlier view")
                store = self._open[key] = Store(layout)
            return store

    def before_fork(self, let_go: Callable[[], None]) -> None:
        """Wait until no store is open, and give out none until after the fork; `let_go` makes the holders forget."""
        with self._opening:
            self._forking = True
        deadline = time.monotonic() + self.PATIENCE_S
        let_go()
        while len(self._open) and time.monotonic() < deadline:
            time.sleep(0.0001)
            # A thread that had just been given a store may have kept it since.
            let_go()

    def after_fork(self) -> None:
        self._forking = False

    def in_child(self) -> None:
        """Make a new lock and forget all stores: the threads that held them do not exist in a forked child."""
        self._opening = threading.Lock()
        self._open.clear()
        self._forking = False


STORES = Stores()
_ABANDONED: list[Store] = []


class Cache:
    """The cache whose terms lie at `path`; raises Gone, OSError, ValueError, StoreError where it cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        layout = CacheLayout.around(path)
        self._terms, self._pipe_name = published_terms(path)
        if self._terms.pid_namespace != pid_namespace():
            # The daemon would free our readers' slots, and could not tell our pids from its own.
            raise Gone("the mount lives in another pid namespace")
        self._pid, self._user = os.getpid(), os.geteuid()
        self._groups = frozenset({os.getegid(), *os.getgroups()})
        self._pipe = opened_pipe(path.parent / self._pipe_name)
        self._store = STORES.shared(layout)
        self._catalogue = Catalogue(self._store.records)
        self._redirects = Redirects(self._store.records, PendingReads())
        self._fetches = FetchLock(layout.run.fetch_lock)
        self._trainers = layout.run.trainers
        self._directories: dict[bytes, Directory] = {}
        self._lost = 0
        self._follow_at = 0.0
        self._seen: tuple[Edition | None, ...] = ()
        self._take_over(self._terms)

    def __del__(self) -> None:
        if hasattr(self, "_pipe"):
            os.close(self._pipe)
        if hasattr(self, "_fetches"):
            self._fetches.close()

    def usable(self) -> bool:
        """Whether this is still the process, and the user, that it was made for."""
        return os.getpid() == self._pid and os.geteuid() == self._user

    def abandon(self) -> None:
        """Give the store up unclosed, because another process opened it: this one was forked behind Python's back."""
        if os.getpid() != self._pid:
            _ABANDONED.append(self._store)

    def is_at(self, path: Path) -> bool:
        """Whether the terms at `path` are still those of this cache's manager."""
        return path == self._path and published_terms(path)[1] == self._pipe_name

    # -- what the manager says

    def _take_over(self, terms: Terms) -> None:
        self._terms = terms
        self._settings = Settings(
            ttl_s=terms.ttl_s,
            checked_since_s=terms.checked_since_s,
            sample_max_bytes=terms.sample_max_bytes,
            wait_for_fetches=terms.wait_for_fetches,
            ownership=Ownership(terms.uid, terms.gid, terms.file_mode, terms.dir_mode),
            checks_permissions=terms.checks_permissions,
        )
        # The kernel would let root read everything too.
        checked = terms.checks_permissions and self._user != 0
        self._who = Credentials(self._user, self._groups) if checked else ANYBODY
        self._directories.clear()

    def _follow(self) -> None:
        try:
            seen = (edition_of(self._path), edition_of(self._trainers))
            if None in seen:
                raise Gone("the manager's files are not there")
            if seen != self._seen:
                terms, _ = published_terms(self._path)
                if terms != self._terms:
                    self._take_over(terms)
                self._redirects.set_trainers(published_trainers(self._trainers), cast(Who, terms.substitute))
                self._seen = seen
        except (OSError, ValueError) as exc:
            raise Gone("the manager's files are not there") from exc

    # -- what is cached, for `Redirects` (`rules.Cached`)

    def stored(self, key: ContentKey) -> bool:
        return self._store.content.has(key.inode)

    def under_way(self, key: ContentKey) -> bool:
        return self._fetches.held(key)

    # -- the way of a read

    def serve(self, path: bytes) -> bytes | None:
        """The whole file that the caller is given for `path`, a path below the mount; None: ask the mount.

        Raises StoreDamaged for a record that fails its checksum, and Gone.
        """
        return self._looked_up(self._serve, path)

    def kept(self, inode: int) -> bytes | None:
        """The bytes that lie under an inode, if there are any; raises as `serve`."""
        return self._looked_up(self._store.content.copy, inode)

    def _looked_up(self, look_up: Callable[[_What], bytes | None], what: _What) -> bytes | None:
        """What is found with the mount's terms as they are now."""
        try:
            moment = time.monotonic()
            if moment >= self._follow_at:
                self._follow()
                self._follow_at = moment + FOLLOW_S
            return look_up(what)
        except StoreDamaged:
            raise
        except (StoreError, StoreCorrupt, OSError) as exc:
            raise Gone(str(exc)) from exc

    def _serve(self, path: bytes) -> bytes | None:
        settings, now = self._settings, steady_clock.now(self._terms.clock_began_s)
        directory, _, name = path.rpartition(b"/")
        parent = self._directory(directory, now)
        dentry = self._catalogue.find(parent.inode, name) if parent else None
        if dentry is None:
            return None
        if left_s(dentry.checked_at, now, settings.ttl_s, settings.checked_since_s, dentry.settles_at) <= 0:
            return None
        if is_provisional(dentry.settles_at, now):
            return None
        found = dentry.stat
        if not stat.S_ISREG(found.mode) or not settings.ownership.may_read(self._who, found):
            return None
        given, trainer = dentry.inode, 0
        if self._redirects.attended:
            given, found, trainer = self._given(dentry, directory, now)
        if found.size > settings.sample_max_bytes:
            return None
        payload = self._store.content.copy(given) if found.size else b""
        if payload is not None:
            self._tell(hit_record(now, given, dentry.inode, len(payload), self._pid, trainer), now)
        return payload

    def _given(self, dentry: Dentry, directory: bytes, now: float) -> tuple[int, SourceStat, int]:
        """Inode and attributes of what this process is given for a name, and the number of the trainer that it is."""
        reader = self._redirects.trainer_of(self._pid)
        if reader is None:
            return dentry.inode, dentry.stat, 0
        if self._redirects.active and not self._terms.pushes_ahead:
            stand_in = self._redirects.stand_in(dentry.inode, reader, self, self._settings)
            node = None if stand_in is None else self._openable(stand_in, directory, now)
            if node is not None:
                return node.inode, node.stat, reader.number
        return dentry.inode, dentry.stat, reader.number

    def _openable(self, stand_in: int, directory: bytes, now: float) -> Node | None:
        """The stand-in, if this process could open this version by its own path; it has passed `directory`."""
        node = self._catalogue.known(stand_in)
        if node is None or not self._catalogue.still_names(node):
            return None
        needed = directories_to_pass(self._who, self._settings.ownership, node.stat, node.path, directory)
        if needed is None or not all(self._directory(above, now) for above in needed):
            return None
        return node

    def _directory(self, path: bytes, now: float) -> Directory | None:
        """A directory whose whole path is known and may be passed; None for any other."""
        known = self._directories.get(path)
        if known is None or not known.believed.at(now):
            known = self._found_directory(path, now)
            if known is not None:
                if len(self._directories) > _DIRECTORIES:
                    self._directories.clear()
                self._directories[path] = known
        return known

    def _found_directory(self, path: bytes, now: float) -> Directory | None:
        ownership, ttl_s, since_s = self._settings.ownership, self._settings.ttl_s, self._settings.checked_since_s
        if not path:
            root = self._catalogue.known(ROOT_INODE)
            if root is None or not ownership.may_pass(self._who, root.stat):
                return None
            return Directory(ROOT_INODE, believed(now, ttl_s))
        above, _, name = path.rpartition(b"/")
        parent = self._directory(above, now)
        dentry = self._catalogue.find(parent.inode, name) if parent else None
        if parent is None or dentry is None:
            return None
        if not stat.S_ISDIR(dentry.stat.mode) or not ownership.may_pass(self._who, dentry.stat):
            return None
        known = Directory(dentry.inode, believed(dentry.checked_at, ttl_s, since_s).and_also(parent.believed))
        return known if known.believed.at(now) else None

    def _tell(self, record: bytes, now: float) -> None:
        try:
            os.write(self._pipe, lost_record(now, self._lost) + record if self._lost else record)
            self._lost = 0
        except BlockingIOError:
            # The manager is behind, and events are hints; but the number of opens is to be right.
            self._lost += 1
        except BrokenPipeError as exc:
            raise Gone("the manager has gone") from exc
