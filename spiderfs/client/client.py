"""Reading a mount's files past FUSE, and through it where that is not possible.

A `Client` belongs to one mount and may be used from any thread and after a fork. It finds the mount's cache by an
attribute of the mount's root, holds it while it can be used, and looks for it again when the kernel's mount table has
changed, when the manager has gone, and after a fork. While it has no cache (the mount is another user's, or of another
pid namespace, or is gone), it opens everything through the mount. So a client can do all that `open` can, and every
error is the mount's.
"""

from __future__ import annotations

import builtins
import errno
import io
import logging
import math
import os
import select
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, TypeVar, cast

from spiderfs.core.events import ACCESS_RECORD, HIT
from spiderfs.errors import StoreCorrupt, StoreDamaged, StoreError
from spiderfs.linux import steady_clock
from spiderfs.linux.mounts import FSTYPE, MOUNT_TABLE, canonical, mounts
from spiderfs.shared import published
from spiderfs.shared.layout import DATA_FILE, CacheLayout
from spiderfs.sources.source import SourceStat
from spiderfs.store.content_reader import ContentReader
from spiderfs.store.records import LmdbRecords
from spiderfs.store.store import ContentKey
from spiderfs.vfs import rules
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES, Catalogue, Dentry, Node
from spiderfs.vfs.fetch_lock import FetchLock
from spiderfs.vfs.redirects import PendingReads, Redirects, Who

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
    trusted: rules.Validity


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
    """The stores that this process has open, each of them once.

    LMDB's environments belong to one process and are opened once in it: caches of one mount share them. An environment
    is closed once nothing refers to it, and not before, since another thread may be reading. After a fork, py-lmdb
    takes the parent's environments for open in the child too, which must neither use nor close them. So a process lets
    go of all its environments before a fork, and parent and child open their own when they read again.
    """

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
    """The cache whose terms lie at `path`; raises Gone, OSError, ValueError, StoreError where it cannot be used.

    It is read by this process itself, by the rules that workers follow too (`vfs/rules.py`).

    `serve` gives the bytes of a file wherever a worker would answer from the cache at once, and None for everything
    else: a name that is unknown or whose TTL has passed, a version that has not settled, a symbolic link, a directory,
    a large file, a file that is not cached, a file that this process may not read. The caller then asks the mount,
    which knows all of these better. So this class asks nothing of the source and makes no errors: each error that a
    reader sees is the mount's own.

    Each file that is served is reported to the manager, as if it had been opened (`shared/published.py`). If the
    manager has gone, or the store cannot be used, `Gone` is raised and nothing is served.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        layout = CacheLayout.around(path)
        self._terms, self._pipe_name = published.published_terms(path)
        if self._terms.pid_namespace != published.pid_namespace():
            # The daemon would free our readers' slots, and could not tell our pids from its own.
            raise Gone("the mount lives in another pid namespace")
        self._pid, self._user = os.getpid(), os.geteuid()
        self._groups = frozenset({os.getegid(), *os.getgroups()})
        self._pipe = published.opened_pipe(path.parent / self._pipe_name)
        self._store = STORES.shared(layout)
        self._catalogue = Catalogue(self._store.records)
        self._redirects = Redirects(self._store.records, PendingReads())
        self._fetches = FetchLock(layout.run.fetch_lock)
        self._trainers = layout.run.trainers
        self._directories: dict[bytes, Directory] = {}
        self._lost = 0
        self._follow_at = -math.inf
        self._seen: tuple[published.Edition | None, ...] = ()
        self._take_over(self._terms)

    def __del__(self) -> None:
        if hasattr(self, "_pipe"):
            os.close(self._pipe)

    def usable(self) -> bool:
        """Whether this is still the process, and the user, that it was made for."""
        return os.getpid() == self._pid and os.geteuid() == self._user

    def abandon(self) -> None:
        """Give the store up unclosed, because another process opened it: this one was forked behind Python's back."""
        if os.getpid() != self._pid:
            _ABANDONED.append(self._store)

    def is_at(self, path: Path) -> bool:
        """Whether the terms at `path` are still those of this cache's manager."""
        return path == self._path and published.published_terms(path)[1] == self._pipe_name

    # -- what the manager says

    def _take_over(self, terms: published.Terms) -> None:
        self._terms = terms
        self._settings = rules.Settings(
            ttl_s=terms.ttl_s,
            checked_since_s=terms.checked_since_s,
            sample_max_bytes=terms.sample_max_bytes,
            wait_for_fetches=terms.wait_for_fetches,
            ownership=rules.Ownership(terms.uid, terms.gid, terms.file_mode, terms.dir_mode),
            checks_permissions=terms.checks_permissions,
        )
        # The kernel would let root read everything too.
        checked = terms.checks_permissions and self._user != 0
        self._who = rules.Credentials(self._user, self._groups) if checked else rules.ANYBODY
        self._directories.clear()

    def _follow(self) -> None:
        try:
            seen = (published.edition_of(self._path), published.edition_of(self._trainers))
            if None in seen:
                raise Gone("the manager's files are not there")
            if seen != self._seen:
                terms, _ = published.published_terms(self._path)
                if terms != self._terms:
                    self._take_over(terms)
                self._redirects.set_trainers(published.published_trainers(self._trainers), cast(Who, terms.substitute))
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
        if rules.left_s(dentry.checked_at, now, settings.ttl_s, settings.checked_since_s, dentry.settles_at) <= 0:
            return None
        if rules.is_provisional(dentry.settles_at, now):
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
            # The same record as a worker's for an open that it answered from the store.
            self._report(ACCESS_RECORD.pack(now, given, dentry.inode, len(payload), 0, self._pid, trainer, HIT, 0), now)
        return payload

    def _given(self, dentry: Dentry, directory: bytes, now: float) -> tuple[int, SourceStat, int]:
        """Inode and attributes of what this process is given for a name, and the number of the trainer that it is."""
        reader = self._redirects.trainer_of(self._pid)
        if reader is None:
            return dentry.inode, dentry.stat, 0
        if self._redirects.active and not self._terms.pushes_ahead:
            substitute = self._redirects.substitute(dentry.inode, reader, self, self._settings)
            node = None if substitute is None else self._openable(substitute, directory, now)
            if node is not None:
                return node.inode, node.stat, reader.number
        return dentry.inode, dentry.stat, reader.number

    def _openable(self, substitute: int, directory: bytes, now: float) -> Node | None:
        """The substitute, if this process could open this version by its own path; it has passed `directory`."""
        node = self._catalogue.known(substitute)
        if node is None or not self._catalogue.still_names(node):
            return None
        needed = rules.directories_to_pass(self._who, self._settings.ownership, node.stat, node.path, directory)
        if needed is None or not all(self._directory(above, now) for above in needed):
            return None
        return node

    def _directory(self, path: bytes, now: float) -> Directory | None:
        """A directory whose whole path is known and may be passed; None for any other."""
        known = self._directories.get(path)
        if known is None or not known.trusted.at(now):
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
            return Directory(ROOT_INODE, rules.trusted(now, ttl_s))
        above, _, name = path.rpartition(b"/")
        parent = self._directory(above, now)
        dentry = self._catalogue.find(parent.inode, name) if parent else None
        if parent is None or dentry is None:
            return None
        if not stat.S_ISDIR(dentry.stat.mode) or not ownership.may_pass(self._who, dentry.stat):
            return None
        known = Directory(dentry.inode, rules.trusted(dentry.checked_at, ttl_s, since_s).and_also(parent.trusted))
        return known if known.trusted.at(now) else None

    def _report(self, record: bytes, now: float) -> None:
        try:
            if self._lost:
                # One for all files served whose records found the FIFO full. No file has the inode 0.
                record = ACCESS_RECORD.pack(now, 0, 0, self._lost, 0, 0, 0, HIT, 0) + record
            os.write(self._pipe, record)
            self._lost = 0
        except BlockingIOError:
            # The manager is behind, and events are hints; but the number of opens is to be right.
            self._lost += 1
        except BrokenPipeError as exc:
            raise Gone("the manager has gone") from exc


log = logging.getLogger(__name__)

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

# How soon after a failure a cache is looked for again: a manager that died is back after half a second.
RETRY_S = 0.25
_CONTROL = b".spiderfs"
_READ_MODES = {"r", "rt", "tr", "rb", "br"}


class MountTable:
    """The mount points of this process, as of the last call of `state`.

    Reading `/proc/self/mountinfo` takes a tenth of a millisecond. An epoll on it, which says whether the table has
    changed since the last epoll, takes a third of a microsecond (proc_pid_mounts(5)). Each open file of the table
    reports a change once, to the first thread that asks. So a process has one `MountTable`, and a child of fork opens
    the file again.
    """

    def __init__(self) -> None:
        self._state = 0
        self._watch: select.epoll | None = None
        self._file = -1
        self._points: list[tuple[bytes, bool]] = []
        self._beginning = threading.Lock()

    def state(self) -> int:
        """A number that changes whenever the table changes, and in a child of fork."""
        watch = self._watch
        if watch is None:
            self._begin()
        elif watch.poll(0):
            self._read()
        return self._state

    def spiderfs_points(self) -> list[bytes]:
        """The mount points on which a spiderfs mount is the topmost one; the longest paths come first."""
        on_top = dict(self._points)
        return sorted((point for point, ours in on_top.items() if ours), key=len, reverse=True)

    def below(self, point: bytes) -> tuple[bytes, ...]:
        """Prefixes of the paths below `point` that belong to other mounts."""
        inner = (other for other, _ in self._points if other.startswith(point + b"/"))
        return tuple(prefix for other in inner for prefix in (other, other + b"/"))

    def _begin(self) -> None:
        with self._beginning:
            if self._watch is None:
                self._file = os.open(MOUNT_TABLE, os.O_RDONLY | os.O_CLOEXEC)
                watch = select.epoll()
                watch.register(self._file, select.EPOLLPRI)
                self._read()
                self._watch = watch

    def _read(self) -> None:
        self._points = [(os.fsencode(mount.mountpoint), mount.fstype == FSTYPE) for mount in mounts()]
        self._state += 1

    def _after_fork(self) -> None:
        self._beginning = threading.Lock()
        # The child shares the parent's open file: the kernel would notify the child of a change, and not the parent.
        if self._watch is not None:
            self._watch.close()
            os.close(self._file)
            self._watch = None
            self._state += 1


TABLE = MountTable()
os.register_at_fork(after_in_child=TABLE._after_fork)


class CachedFile(io.BytesIO):
    """The bytes of one version of a file, read-only; `io.BytesIO` does not copy what it is given to begin with."""

    mode = "rb"

    def __init__(self, content: bytes, name: Any) -> None:
        super().__init__(content)
        self.name = name
        self._content = content
        self._file: io.FileIO | None = None

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move the position; a place before the beginning is an error, but io.BytesIO would go to the beginning."""
        start = {os.SEEK_CUR: self.tell(), os.SEEK_END: len(self._content)}.get(whence, 0)
        if start + offset < 0 and not self.closed:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().seek(offset, whence)

    def peek(self, size: int = 0, /) -> bytes:
        """The bytes from the present position on, without moving it."""
        return self._content[self.tell() :]

    def fileno(self) -> int:
        """A descriptor of the same bytes, opened through the mount; its position is its own.

        Raises io.UnsupportedOperation where the name means other bytes by now.
        """
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if self._file is None:
            file = io.FileIO(self.name)
            if os.fstat(file.fileno()).st_size != len(self._content) or file.readall() != self._content:
                file.close()
                raise io.UnsupportedOperation("fileno")
            self._file = file
        os.lseek(self._file.fileno(), self.tell(), os.SEEK_SET)
        return self._file.fileno()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()

    def writable(self) -> bool:
        return False

    def write(self, _: Any, /) -> NoReturn:
        raise io.UnsupportedOperation("write")

    def writelines(self, _: Iterable[Any], /) -> NoReturn:
        raise io.UnsupportedOperation("write")

    def truncate(self, _: int | None = None, /) -> NoReturn:
        raise io.UnsupportedOperation("truncate")

    def getbuffer(self) -> memoryview:
        return super().getbuffer().toreadonly()


def is_plain(mode: str, buffering: int, encoding: str | None, errors: str | None, newline: str | None) -> bool:
    """Whether the built-in open would give a buffered file to read from, whose place bytes in memory can take."""
    return mode in _READ_MODES and buffering != 0 and ("b" not in mode or not (encoding or errors or newline))


def in_mode(
    file: Any, mode: str, buffering: int, encoding: str | None, errors: str | None, newline: str | None
) -> IO[Any]:
    """A buffered file of bytes, or the text in it, as the mode of open says."""
    if "b" in mode:
        return cast(IO[Any], file)
    wrapped = io.TextIOWrapper(file, io.text_encoding(encoding), errors, newline, line_buffering=buffering == 1)
    wrapped.mode = mode  # type: ignore[misc]
    return wrapped


_HOLDERS: weakref.WeakSet[CacheHolder] = weakref.WeakSet()


class CacheHolder:
    """Holds a cache while it can be used, and looks for it again when it cannot."""

    def __init__(self) -> None:
        self._cache: Cache | None = None
        self._state = -1
        self._retry_at = -math.inf
        self._attaching = threading.Lock()
        _HOLDERS.add(self)

    def _terms(self) -> Path | None:
        """Where the terms for clients lie now; None where nothing has some. Raises OSError."""
        raise NotImplementedError

    def _current(self, state: int) -> Cache | None:
        cache = self._cache
        if state != self._state or cache is None or not cache.usable():
            cache = self._attach(state)
        return cache

    def _lose(self, exc: Gone) -> None:
        log.debug("%s: the daemon is asked instead", exc)
        self._cache = None
        self._retry_at = time.monotonic() + RETRY_S

    def _attach(self, state: int) -> Cache | None:
        """The cache as of now, if it can be used."""
        if state == self._state and time.monotonic() < self._retry_at:
            return None
        with self._attaching:
            if state == self._state and (self._cache is not None and self._cache.usable()):
                return self._cache  # another thread was faster
            try:
                held, self._cache = self._cache, None
                if held is not None and not held.usable():
                    held.abandon()
                    held = None
                path = self._terms()
                if path is not None:
                    # Someone else's mounts come and go.
                    if held is not None and not held.is_at(path):
                        held = None  # which closes its store, before another mount's is opened
                    self._cache = Cache(path) if held is None else held
            except (OSError, ValueError, KeyError, StoreError, StoreCorrupt, Gone, MemoryError) as exc:
                log.debug("%s cannot be read without its daemon: %s", self, exc)
                self._retry_at = time.monotonic() + RETRY_S
            self._state = state
            return self._cache


class Client(CacheHolder):
    """The files below one mount point; paths are absolute, or relative to it."""

    def __init__(self, mountpoint: AnyPath) -> None:
        super().__init__()
        given = os.fsencode(os.path.abspath(os.fsdecode(mountpoint)))
        self._point = os.fsencode(canonical(os.fsdecode(mountpoint)))
        self._prefixes = tuple({given + b"/": None, self._point + b"/": None})
        self._below: tuple[bytes, ...] = ()

    @property
    def mountpoint(self) -> str:
        return os.fsdecode(self._point)

    # -- reading

    def read_bytes(self, path: AnyPath) -> bytes:
        """The whole file; the fastest way."""
        whole = self._absolute(path)
        content = self.cached(whole)
        if content is None:
            with builtins.open(os.fsdecode(whole), "rb") as file:
                content = file.read()
        return content

    def open(
        self,
        path: AnyPath,
        mode: str = "rb",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        """A file object, as of the built-in open; a cached file is in memory as a whole."""
        whole = self._absolute(path)
        return self.opened(whole, os.fsdecode(whole), mode, buffering, encoding, errors, newline)

    def opened(
        self,
        path: bytes,
        name: str | bytes,
        mode: str,
        buffering: int,
        encoding: str | None,
        errors: str | None,
        newline: str | None,
        state: int | None = None,
    ) -> IO[Any]:
        """`open` for an absolute path that the caller writes as `name`."""
        plain = is_plain(mode, buffering, encoding, errors, newline)
        content = self.cached(path, state) if plain else None
        if content is None:
            return builtins.open(name, mode, buffering, encoding, errors, newline)
        return in_mode(CachedFile(content, name), mode, buffering, encoding, errors, newline)

    # -- names and attributes, which the kernel keeps: through the mount

    def stat(self, path: AnyPath) -> os.stat_result:
        """As os.stat, through the mount."""
        return os.stat(self._absolute(path))

    def listdir(self, path: AnyPath = "") -> list[str]:
        """As os.listdir, through the mount."""
        return os.listdir(os.fsdecode(self._absolute(path)))

    def exists(self, path: AnyPath) -> bool:
        """As os.path.exists, through the mount."""
        return os.path.exists(self._absolute(path))

    # -- finding the cache

    def _absolute(self, path: AnyPath) -> bytes:
        given = os.fsencode(path)
        return given if given.startswith(b"/") else self._point + b"/" + given if given else self._point

    def cached(self, path: bytes, state: int | None = None) -> bytes | None:
        """The cached bytes of the file at an absolute path, counted as an open; None if the mount has to be asked.

        `state` is the mount table's, if the caller has just asked for it.
        """
        cache = self._current(TABLE.state() if state is None else state)
        if cache is None:
            return None
        for prefix in self._prefixes:
            if path.startswith(prefix):
                below = path[len(prefix) :]
                break
        else:
            return None
        if below.startswith(_CONTROL) or (self._below and (self._point + b"/" + below).startswith(self._below)):
            return None
        try:
            return cache.serve(below)
        except StoreDamaged:
            self._have_it_mended(path)
        except Gone as exc:
            self._lose(exc)
        return None

    def kept(self, inode: int) -> bytes | None:
        """The bytes that lie in the cache under an inode, whatever they are; None if it has none or cannot be read."""
        cache = self._current(TABLE.state())
        try:
            return None if cache is None else cache.kept(inode)
        except StoreDamaged:
            return None
        except Gone as exc:
            self._lose(exc)
            return None

    def _terms(self) -> Path | None:
        self._below = TABLE.below(self._point)
        if self._point not in TABLE.spiderfs_points():
            return None
        return Path(os.fsdecode(os.getxattr(self._point, published.CLIENT_XATTR)))

    @staticmethod
    def _have_it_mended(path: bytes) -> None:
        """Make the next read of a damaged record reach the daemon, which fetches it again, and not the page cache."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            log.debug("a damaged record stays as it is (%s)", exc)
            return
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _let_go() -> None:
    for holder in list(_HOLDERS):
        holder._cache = None


def _in_parent() -> None:
    STORES.after_fork()
    for holder in list(_HOLDERS):
        holder._retry_at = -math.inf


def _in_child() -> None:
    STORES.in_child()
    for holder in list(_HOLDERS):
        # A thread that was attaching does not exist here.
        holder._attaching = threading.Lock()
        holder._retry_at = -math.inf
    _let_go()


os.register_at_fork(before=lambda: STORES.before_fork(_let_go), after_in_parent=_in_parent, after_in_child=_in_child)
