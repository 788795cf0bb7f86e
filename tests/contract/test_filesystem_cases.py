"""What the file system must do: one suite against `Filesystem` alone, over both stores, and against real mounts."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import stat
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

import pytest
import trio
from mounting import Mounted, dead_mount, eventually, mounted, options_of
from reading import error_of
from serving import ServedDaemon, served

from benchmarks.common.sources import make_older
from benchmarks.fakes import FakeKernel, MemoryContent, bare_filesystem
from spiderfs.errors import SpiderfsError
from spiderfs.fuse import wire
from spiderfs.fuse.bindings import Operations
from spiderfs.fuse.kernel import Handles
from spiderfs.sources.local import LocalSource
from spiderfs.store.content import LmdbContent
from spiderfs.store.records import LmdbRecords
from spiderfs.store.spare_records import MemoryRecords
from spiderfs.store.store import Content, Records
from spiderfs.vfs.answer_types import Caller
from spiderfs.vfs.catalogue import ROOT_INODE, TABLES
from spiderfs.vfs.rules import Ownership, Settings

NOT_UTF8 = b"caf\xe9-\xff.bin"
LONGEST_NAME = b"n" * 255
# Short, so that a change shows soon; not 0, so that what is remembered is remembered.
TTL_S = 0.3
CAPACITY_BYTES = 64 << 20
CHANGES = ["open to write", "open to append", "open to truncate", "create", "mkdir", "mknod", "unlink", "rmdir"]
CHANGES += ["rename", "link", "symlink", "chmod", "chown", "utimes", "truncate", "setxattr", "removexattr"]
# What an open of such a change says.
MODES = {"open to write": "r+b", "open to append": "ab", "open to truncate": "wb", "create": "xb"}

# -- subjects


class Shown(NamedTuple):
    """What a stat showed."""

    inode: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int


class Subject(Protocol):
    """The calls of a reader; each raises OSError. Paths are bytes below the root of the source.

    `immutable`: the kernel opens files without asking, and names are trusted for good. `looks_into`: a look-up of a
    small file fetches it.
    """

    immutable: bool
    looks_into: bool
    changes: Collection[str]
    """The changes that it has calls for."""

    def lstat(self, path: bytes) -> Shown: ...
    def scan(self, path: bytes) -> dict[bytes, Shown]: ...
    def names(self, path: bytes) -> list[bytes]: ...
    def open(self, path: bytes, flags: int = os.O_RDONLY) -> int: ...
    def pread(self, handle: int, size: int, offset: int) -> bytes: ...
    def fstat(self, handle: int) -> Shown: ...
    def close(self, handle: int) -> None: ...
    def readlink(self, path: bytes) -> bytes: ...
    def access(self, path: bytes, mask: int) -> None: ...
    def getxattr(self, path: bytes, name: str) -> bytes: ...
    def listxattr(self, path: bytes) -> list[str]: ...
    def statvfs(self) -> Any: ...
    def change(self, what: str, path: bytes) -> None:
        """Try what one of `changes` names."""


class Plain:
    """`Filesystem` without FUSE, on a trio thread of its own; it walks paths and retries a stale open as Linux does."""

    immutable = looks_into = False
    changes = CHANGES

    def __init__(self, root: Path, place: Path, store: str, settings: Settings) -> None:
        self._root, self._place, self._store, self._settings = root, place, store, settings
        self._inodes: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: trio.run(self._live))

    def __enter__(self) -> Plain:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._token.run_sync_soon(self._end.set)
        self._thread.join()

    async def _live(self) -> None:
        self._token, self._end = trio.lowlevel.current_trio_token(), trio.Event()
        content: Content
        records: Records
        if self._store == "lmdb":
            content = LmdbContent(_made(self._place / "content"))
            records = LmdbRecords(_made(self._place / "names"), TABLES)
        else:
            content, records = MemoryContent(), MemoryRecords(TABLES)
        content.set_capacity(CAPACITY_BYTES)
        source = LocalSource(os.fspath(self._root))
        self._content = content
        async with bare_filesystem(source, content, records, self._place, settings=self._settings) as bare:
            self._fs = bare.filesystem
            self._operations = Operations(bare.filesystem, bare.counters, FakeKernel().push, Handles(sole=False))
            self._ready.set()
            await self._end.wait()
        content.close()
        records.close()
        source.close()

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        async def call() -> Any:
            try:
                result = await function(*args)
                return bytes(result) if isinstance(result, memoryview) else result
            finally:
                self._content.end_read()

        try:
            return trio.from_thread.run(call, trio_token=self._token)
        except SpiderfsError as exc:
            raise OSError(exc.errno, str(exc)) from exc

    def _caller(self) -> Caller:
        return Caller(os.getuid(), os.getgid(), os.getpid())

    def _walk(self, path: bytes) -> Any:
        entry = None
        inode = ROOT_INODE
        for name in path.split(b"/") if path else []:
            entry = self._run(self._fs.lookup, inode, name, self._caller())
            inode = entry.attributes.inode
            if inode == 0:
                assert 0 < entry.timeout_s <= TTL_S
                raise FileNotFoundError(errno.ENOENT, "no such name")
        return self._run(self._fs.getattr, inode) if entry is None else entry.attributes

    def lstat(self, path: bytes) -> Shown:
        return Shown(*self._walk(path)[:6])

    def scan(self, path: bytes) -> dict[bytes, Shown]:
        handle = self._run(self._fs.opendir, self._walk(path).inode).handle
        found: dict[bytes, Shown] = {}
        after = 0
        while entries := self._run(self._fs.readdir, handle, after, 7):
            for name, entry, position in entries:
                assert position > after
                assert name not in found
                after = position
                found[name] = Shown(*entry.attributes[:6])
        return found

    def names(self, path: bytes) -> list[bytes]:
        return list(self.scan(path))

    def open(self, path: bytes, flags: int = os.O_RDONLY) -> int:
        try:
            opened = self._open_once(path, flags)
        except OSError as exc:
            if exc.errno != errno.ESTALE:
                raise
            opened = self._open_once(path, flags)
        number = next(self._numbers)
        self._inodes[number] = opened.handle
        return number

    def _open_once(self, path: bytes, flags: int) -> Any:
        return self._run(self._fs.open, self._walk(path).inode, flags, self._caller())

    def pread(self, handle: int, size: int, offset: int) -> bytes:
        return bytes(self._run(self._fs.read, self._inodes[handle], offset, size))

    def fstat(self, handle: int) -> Shown:
        return Shown(*self._run(self._fs.getattr, self._inodes[handle])[:6])

    def close(self, handle: int) -> None:
        self._run(self._fs.release, self._inodes.pop(handle))

    def readlink(self, path: bytes) -> bytes:
        return bytes(self._run(self._fs.readlink, self._walk(path).inode))

    def access(self, path: bytes, mask: int) -> None:
        self._run(self._fs.access, self._walk(path).inode, mask, self._caller())

    def getxattr(self, path: bytes, name: str) -> bytes:
        return bytes(self._run(self._fs.getxattr, self._walk(path).inode, name))

    def listxattr(self, path: bytes) -> list[str]:
        found: list[str] = self._run(self._fs.listxattr, self._walk(path).inode)
        return found

    def statvfs(self) -> Any:
        return self._run(self._fs.statfs)

    def change(self, what: str, path: bytes) -> None:
        """Through the adapter, since `Filesystem` has no words for most of this; nothing is ever changed."""
        inode = self._walk(path).inode
        ops, caller, write = self._operations, self._caller(), os.O_WRONLY
        calls: dict[str, Callable[[], Any]] = {
            "open to write": lambda: ops.open(inode, _words(write), caller, 1),
            "open to append": lambda: ops.open(inode, _words(write | os.O_APPEND), caller, 1),
            "open to truncate": lambda: ops.open(inode, _words(os.O_RDWR | os.O_TRUNC), caller, 1),
            "truncate": lambda: ops.setattr(inode, _words(wire.FATTR_SIZE, *[0] * 5), caller, 1),
        } | dict.fromkeys(("chmod", "chown", "utimes"), lambda: ops.setattr(inode, _words(*[0] * 6), caller, 1))
        # The others are refused whatever they say.
        self._run(calls.get(what, lambda: ops.refuse(inode, _words(), caller, 1)))


class OnMount:
    """A real mount, through the calls of the os module."""

    changes = CHANGES

    def __init__(self, mount: Mounted, immutable: bool, below: bytes = b"") -> None:
        self.mount = mount
        self.immutable, self.looks_into = immutable, bool(below)
        self._root = os.path.join(os.fsencode(mount.point), below)

    def _path(self, path: bytes) -> bytes:
        return os.path.join(self._root, path)

    def lstat(self, path: bytes) -> Shown:
        return _shown(os.lstat(self._path(path)))

    def scan(self, path: bytes) -> dict[bytes, Shown]:
        found = {}
        with os.scandir(self._path(path)) as entries:
            for entry in entries:
                shown = _shown(entry.stat(follow_symlinks=False))
                assert entry.inode() == shown.inode
                assert entry.is_dir(follow_symlinks=False) == stat.S_ISDIR(shown.mode)
                assert entry.is_symlink() == stat.S_ISLNK(shown.mode)
                found[entry.name] = shown
        return found

    def names(self, path: bytes) -> list[bytes]:
        return os.listdir(self._path(path))

    def open(self, path: bytes, flags: int = os.O_RDONLY) -> int:
        return os.open(self._path(path), flags)

    def pread(self, handle: int, size: int, offset: int) -> bytes:
        return os.pread(handle, size, offset)

    def fstat(self, handle: int) -> Shown:
        return _shown(os.fstat(handle))

    def close(self, handle: int) -> None:
        os.close(handle)

    def readlink(self, path: bytes) -> bytes:
        return os.readlink(self._path(path))

    def access(self, path: bytes, mask: int) -> None:
        # os.access() hides the reason; faccessat(2) of the C library tells it.
        if _libc().access(self._path(path), mask):
            raise _last_error()

    def getxattr(self, path: bytes, name: str) -> bytes:
        return os.getxattr(self._path(path), name, follow_symlinks=False)

    def listxattr(self, path: bytes) -> list[str]:
        return os.listxattr(self._path(path), follow_symlinks=False)

    def statvfs(self) -> Any:
        return os.statvfs(self._root)

    def change(self, what: str, path: bytes) -> None:
        here, new = self._path(path), self._path(path) + b".new"
        calls: dict[str, Callable[[], Any]] = {
            "open to write": lambda: _write(here, os.O_WRONLY),
            "open to append": lambda: _write(here, os.O_WRONLY | os.O_APPEND),
            "open to truncate": lambda: os.open(here, os.O_RDWR | os.O_TRUNC),
            "create": lambda: os.open(new, os.O_CREAT | os.O_WRONLY),
            "mkdir": lambda: os.mkdir(new),
            "mknod": lambda: os.mkfifo(new),
            "unlink": lambda: os.unlink(here),
            "rmdir": lambda: os.rmdir(os.path.dirname(here)),
            "rename": lambda: os.rename(here, new),
            "link": lambda: os.link(here, new),
            "symlink": lambda: os.symlink(b"target", new),
            "chmod": lambda: os.chmod(here, 0o600),
            "chown": lambda: os.chown(here, 1, 1),
            "utimes": lambda: os.utime(here, (1, 1)),
            "truncate": lambda: os.truncate(here, 0),
            "setxattr": lambda: os.setxattr(here, "user.new", b"v"),
            "removexattr": lambda: os.removexattr(here, "user.old"),
        }
        calls[what]()


class OnSocket:
    """What `spiderfs serve` serves, through `spiderfs.client`."""

    immutable = looks_into = False
    changes = MODES

    def __init__(self, daemon: ServedDaemon) -> None:
        self.mount = daemon
        self._files = daemon.files
        self._opened: dict[int, Any] = {}

    def lstat(self, path: bytes) -> Shown:
        return _shown(self._files.stat(path, follow_symlinks=False))

    def scan(self, path: bytes) -> dict[bytes, Shown]:
        return {os.fsencode(name): _shown(found) for name, found in self._files.scandir(path)}

    def names(self, path: bytes) -> list[bytes]:
        return [os.fsencode(name) for name in self._files.listdir(path)]

    def open(self, path: bytes, flags: int = os.O_RDONLY) -> int:
        assert flags == os.O_RDONLY
        file = self._files.open(path)
        self._opened[id(file)] = (file, self._files.stat(path))
        return id(file)

    def pread(self, handle: int, size: int, offset: int) -> bytes:
        file, _ = self._opened[handle]
        file.seek(offset)
        content: bytes = file.read(size)
        return content

    def fstat(self, handle: int) -> Shown:
        return _shown(self._opened[handle][1])

    def close(self, handle: int) -> None:
        self._opened.pop(handle)[0].close()

    def readlink(self, path: bytes) -> bytes:
        return os.fsencode(self._files.readlink(path))

    def access(self, path: bytes, mask: int) -> None:
        pytest.skip("spiderfs.client has no such call")

    def getxattr(self, path: bytes, name: str) -> bytes:
        pytest.skip("spiderfs.client has no such call")

    def listxattr(self, path: bytes) -> list[str]:
        pytest.skip("spiderfs.client has no such call")

    def statvfs(self) -> Any:
        pytest.skip("spiderfs.client has no such call")

    def change(self, what: str, path: bytes) -> None:
        self._files.open(path + b".new" if what == "create" else path, MODES[what]).close()


def _write(path: bytes, flags: int) -> None:
    """Either the open or the write fails."""
    fd = os.open(path, flags)
    try:
        os.write(fd, b"spoilt")
    finally:
        os.close(fd)


def _words(*values: int) -> memoryview:
    """The body of a request, of 32-bit words."""
    return memoryview(struct.pack(f"<{len(values)}I", *values))


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _shown(found: os.stat_result) -> Shown:
    return Shown(found.st_ino, found.st_mode, found.st_uid, found.st_gid, found.st_size, found.st_mtime_ns)


def _libc() -> Any:
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def _last_error() -> OSError:
    import ctypes

    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


# A view of which no test has an image, so that it shows all files as they are.
VIEW = b".spiderfs/views/png256"
# Number of workers of those subjects that are mounts, a binding or `immutable`, and the root of what is looked at.
MOUNTS = {
    "1 worker": (1, "kernel", b""),
    "4 workers": (4, "kernel", b""),
    "pyfuse3": (1, "pyfuse3", b""),
    "immutable": (1, "immutable", b""),
    "immutable, 2 workers": (2, "immutable", b""),
    "view, 1 worker": (1, "kernel", VIEW),
    "view, 2 workers": (2, "kernel", VIEW),
    "immutable view": (1, "immutable", VIEW),
}


@contextlib.contextmanager
def subject_of(kind: str, root: Path, place: Path, **own: Any) -> Iterator[Subject]:
    """A subject over `root`; `own` are options that settings have too, octal modes as numbers."""
    if kind in ("memory", "lmdb"):
        ttl_s = own.pop("ttl", TTL_S)
        limits = {name: own.pop(name) for name in ("sample_max_bytes",) if name in own}
        settings = Settings(ttl_s, TTL_S, 0.0, ownership=Ownership(**own), **limits)
        with Plain(root, _made(place), kind, settings) as plain:
            yield plain
        return
    options: dict[str, Any] = {"ttl": TTL_S, "negative_ttl": TTL_S, "dir_ttl": 0, "capacity": CAPACITY_BYTES, **own}
    options |= {name: f"{value:04o}" for name, value in own.items() if name.endswith("_mode")}
    if kind == "served":
        with served(root, place, **options) as daemon:
            yield OnSocket(daemon)
        return
    workers, binding, below = MOUNTS[kind]
    with mounted(root, place, workers=workers, **options_of(binding), **options) as mount:
        if binding == "immutable":
            mount.expect(CHANGED_AFTER_ALL)
        yield OnMount(mount, binding == "immutable", below)


# What another mount covers, in parts: one worker is covered by several, a view by others.
THOROUGH = ("1 worker", "immutable", "view, 1 worker", "immutable view")
KINDS = ("memory", "lmdb", *MOUNTS, "served")


def chosen(kinds: Iterable[str]) -> list[Any]:
    return [pytest.param(kind, marks=pytest.mark.thorough) if kind in THOROUGH else kind for kind in kinds]


CHANGED_AFTER_ALL = "has changed at the source, but the mount is `immutable`"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("source")


@pytest.fixture(scope="module", params=chosen(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def subject(kind: str, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    with subject_of(kind, source, tmp_path_factory.mktemp("subject") / "s") as found:
        yield found


class Tree:
    """A directory of the source that belongs to one test."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name.encode()
        self.root = os.fsencode(root / name)
        os.mkdir(self.root)
        self._mtime_ns = 1_600_000_000_000_000_000

    def real(self, path: bytes) -> bytes:
        """Where it is at the source."""
        return os.path.join(self.root, path)

    def shown(self, path: bytes = b"") -> bytes:
        """How a subject calls it."""
        return self.name + b"/" + path if path else self.name

    def put(self, path: bytes, content: bytes = b"") -> bytes:
        """Write a file, with a new mtime; returns how a subject calls it."""
        os.makedirs(os.path.dirname(self.real(path)), exist_ok=True)
        with open(self.real(path), "wb") as file:
            file.write(content)
        # Two versions within one tick of the clock could not be told apart by anybody.
        self._mtime_ns += 1_000_000_000
        os.utime(self.real(path), ns=(self._mtime_ns, self._mtime_ns))
        return self.shown(path)


@pytest.fixture
def tree(source: Path, request: pytest.FixtureRequest) -> Tree:
    unique = f"{request.node.originalname}-{next(_SERIAL)}"
    return Tree(source, unique)


_SERIAL = itertools.count()


@pytest.fixture
def noticed(kind: str) -> None:
    """Changes at the source are noticed when a name's TTL has passed, or at an open."""
    if kind.startswith("immutable"):
        pytest.skip("in an immutable mount, names are trusted for good")


def shown_mode(subject: Subject, mode: int) -> int:
    """The mode of an entry of the source, as it is shown."""
    return mode & ~0o222 if subject.immutable and not stat.S_ISLNK(mode) else mode


def read(subject: Subject, path: bytes) -> bytes:
    handle = subject.open(path)
    try:
        pieces = []
        offset = 0
        while piece := subject.pread(handle, 1 << 17, offset):
            pieces.append(piece)
            offset += len(piece)
        return b"".join(pieces)
    finally:
        subject.close(handle)


def bytes_of(size: int, seed: int = 0) -> bytes:
    return Random(seed).randbytes(size)


# -- names and attributes


def test_attributes_are_those_of_the_source(subject: Subject, tree: Tree) -> None:
    path = tree.put(b"file", b"12345")
    os.chmod(tree.real(b"file"), 0o640)
    found, real = subject.lstat(path), os.lstat(tree.real(b"file"))
    assert found[1:] == (shown_mode(subject, real.st_mode), real.st_uid, real.st_gid, 5, real.st_mtime_ns)
    assert found.mode == shown_mode(subject, stat.S_IFREG | 0o640)
    directory = subject.lstat(tree.shown())
    assert stat.S_ISDIR(directory.mode)
    assert stat.S_ISDIR(subject.lstat(b"").mode)


def test_a_missing_name_is_missing(subject: Subject, tree: Tree) -> None:
    path = tree.put(b"file")
    assert error_of(subject.scan, path) == errno.ENOTDIR
    assert error_of(subject.lstat, tree.shown(b"n" * 256)) in (errno.ENOENT, errno.ENAMETOOLONG)
    assert error_of(subject.lstat, tree.shown(b"absent")) == errno.ENOENT
    assert error_of(subject.lstat, tree.shown(b"absent/below")) == errno.ENOENT
    assert error_of(subject.open, tree.shown(b"absent")) == errno.ENOENT
    assert error_of(subject.scan, tree.shown(b"absent")) == errno.ENOENT


def test_a_directory_cannot_be_read_as_a_file(subject: Subject, tree: Tree) -> None:
    tree.put(b"dir/file")
    if isinstance(subject, Plain | OnSocket):
        assert error_of(subject.open, tree.shown(b"dir")) == errno.EISDIR
    else:
        handle = subject.open(tree.shown(b"dir"))
        assert error_of(subject.pread, handle, 1, 0) == errno.EISDIR
        subject.close(handle)


def test_a_listing_has_every_name_once_with_its_attributes(subject: Subject, tree: Tree) -> None:
    for number in range(150):
        tree.put(b"dir/%03d" % number, b"x" * number)
    os.mkdir(tree.real(b"dir/below"))
    os.symlink("000", tree.real(b"dir/link"))
    # A view gives a young version another number, and on a busy machine this one would settle between the two looks.
    make_older(tree.real(b"dir/link"))
    found = subject.scan(tree.shown(b"dir"))
    assert sorted(found) == sorted(os.listdir(tree.real(b"dir")))
    for name, shown in found.items():
        real = os.lstat(tree.real(b"dir/" + name))
        assert (shown.mode, shown.mtime_ns) == (shown_mode(subject, real.st_mode), real.st_mtime_ns)
        assert shown == subject.lstat(tree.shown(b"dir/" + name))
    assert found[b"149"].size == 149
    assert len({shown.inode for shown in found.values()}) == len(found)


def test_empty_files_and_empty_directories(subject: Subject, tree: Tree) -> None:
    path = tree.put(b"empty")
    os.mkdir(tree.real(b"nothing"))
    assert read(subject, path) == b""
    assert subject.lstat(path).size == 0
    assert subject.scan(tree.shown(b"nothing")) == {}


def test_a_deep_tree(subject: Subject, tree: Tree) -> None:
    path = b"/".join(b"level%02d" % level for level in range(60)) + b"/leaf"
    shown = tree.put(path, b"deep")
    assert read(subject, shown) == b"deep"
    assert list(subject.scan(os.path.dirname(shown))) == [b"leaf"]


def test_any_name_that_the_source_can_have(subject: Subject, tree: Tree) -> None:
    names = [NOT_UTF8, LONGEST_NAME, b" ", b"new\nline", b"back\\slash", b"-o", "日本".encode()]
    for name in names:
        path, inner = tree.put(b"files/" + name, b"content of " + name), tree.put(b"dirs/" + name + b"/x", name)
        assert (read(subject, path), read(subject, inner)) == (b"content of " + name, name)
    assert set(subject.scan(tree.shown(b"files"))) == set(subject.scan(tree.shown(b"dirs"))) == set(names)


def test_hard_links_are_two_names_for_the_same_bytes(subject: Subject, tree: Tree) -> None:
    first = tree.put(b"first", b"shared bytes")
    os.link(tree.real(b"first"), tree.real(b"second"))
    assert read(subject, first) == read(subject, tree.shown(b"second")) == b"shared bytes"
    assert set(subject.scan(tree.shown())) == {b"first", b"second"}


def test_symbolic_links_are_shown_as_they_are(subject: Subject, tree: Tree) -> None:
    tree.put(b"file", b"behind the link")
    for target in (b"file", b"../remote", b"/etc/passwd", b"not/there", b"t" * 4000, NOT_UTF8):
        link = b"link to " + target[:20].replace(b"/", b"-")
        os.symlink(target, tree.real(link))
        make_older(tree.real(link))
        shown = subject.lstat(tree.shown(link))
        assert stat.S_ISLNK(shown.mode)
        assert shown.size == len(target)
        assert subject.readlink(tree.shown(link)) == target
        assert subject.scan(tree.shown())[link] == shown


def test_only_a_symbolic_link_can_be_read_as_a_link(subject: Subject, tree: Tree) -> None:
    assert error_of(subject.readlink, tree.put(b"file", b"x")) == errno.EINVAL


def test_sockets_and_pipes_are_not_shown(subject: Subject, tree: Tree) -> None:
    tree.put(b"file")
    os.mkfifo(tree.real(b"pipe"))
    assert list(subject.scan(tree.shown())) == [b"file"]
    assert error_of(subject.lstat, tree.shown(b"pipe")) == errno.ENOENT


def test_a_name_whose_attributes_fail_hides_no_other(subject: Subject, tree: Tree) -> None:
    path = tree.put(b"dir/file", b"beside")
    below = tree.put(b"dir/below/file", b"below")
    os.mkdir(tree.real(b"dir/dead"))
    if isinstance(subject, OnMount | OnSocket):
        subject.mount.expect("Transport endpoint is not connected")
    with dead_mount(os.fsdecode(tree.real(b"dir/dead"))):
        assert sorted(subject.names(tree.shown(b"dir"))) == [b"below", b"dead", b"file"]
        assert read(subject, path) == b"beside"
        assert set(subject.scan(os.path.dirname(below))) == {b"file"}
        assert error_of(subject.lstat, tree.shown(b"dir/dead")) == errno.EIO
        assert error_of(subject.lstat, tree.shown(b"dir/dead/file")) == errno.EIO
        tree.put(b"dir/new")
        assert sorted(subject.names(tree.shown(b"dir"))) == [b"below", b"dead", b"file", b"new"]
        assert read(subject, below) == b"below"
    tree.put(b"dir/dead/file", b"alive")
    assert read(subject, tree.shown(b"dir/dead/file")) == b"alive"


def test_a_new_name_is_listed_though_the_directory_keeps_its_mtime(subject: Subject, tree: Tree) -> None:
    tree.put(b"dir/old", b"x")
    make_older(tree.real(b"dir"))
    assert set(subject.names(tree.shown(b"dir"))) == {b"old"}
    kept = os.stat(tree.real(b"dir")).st_mtime_ns
    tree.put(b"dir/new", b"x")
    os.utime(tree.real(b"dir"), ns=(kept, kept))
    assert set(subject.names(tree.shown(b"dir"))) == {b"old", b"new"}, "dir_ttl is 0"
    os.unlink(tree.real(b"dir/old"))
    os.utime(tree.real(b"dir"), ns=(kept, kept))
    assert set(subject.names(tree.shown(b"dir"))) == {b"new"}


def test_access(subject: Subject, tree: Tree) -> None:
    plain, script = tree.put(b"plain", b"x"), tree.put(b"script", b"x")
    os.chmod(tree.real(b"plain"), 0o644)
    os.chmod(tree.real(b"script"), 0o755)
    for path in (plain, script, tree.shown()):
        subject.access(path, os.F_OK)
        subject.access(path, os.R_OK)
        # In an immutable mount the kernel answers by the modes, and root may do whatever they say.
        if not subject.immutable:
            assert error_of(subject.access, path, os.W_OK) == errno.EROFS
            assert error_of(subject.access, path, os.R_OK | os.W_OK) == errno.EROFS
    subject.access(script, os.X_OK)
    subject.access(tree.shown(), os.X_OK | os.R_OK)
    assert error_of(subject.access, plain, os.X_OK) == errno.EACCES


# -- bytes


def test_bytes_are_those_of_the_source(subject: Subject, tree: Tree) -> None:
    for size in (1, 4095, 4096, 4097, 131072, 1 << 20, (1 << 20) + 1):
        content = bytes_of(size)
        path = tree.put(b"%d" % size, content)
        assert read(subject, path) == content
        handle = subject.open(path)
        assert subject.pread(handle, 10, size - 1) == content[-1:]
        assert subject.pread(handle, 10, size) == b""
        assert subject.pread(handle, 10, size + 10**6) == b""
        subject.close(handle)


def test_statvfs_is_the_source_s_and_nothing_can_be_written(subject: Subject, tree: Tree) -> None:
    found, real = subject.statvfs(), os.statvfs(tree.root)
    assert (found.f_blocks, found.f_frsize, found.f_namemax) == (real.f_blocks, real.f_frsize, real.f_namemax)
    if isinstance(subject, OnMount):
        assert found.f_bavail == 0


def test_extended_attributes(subject: Subject, tree: Tree) -> None:
    path = tree.put(b"file", b"12345")
    os.setxattr(tree.real(b"file"), "user.label", b"cat\0\xff")
    os.mkdir(tree.real(b"dir"))
    os.setxattr(tree.real(b"dir"), "user.split", b"train")
    assert subject.getxattr(path, "user.label") == b"cat\0\xff"
    if not subject.looks_into:
        assert subject.getxattr(path, "user.spiderfs.state") == b"uncached"
        assert subject.getxattr(path, "user.spiderfs.section") == b"none"
    assert read(subject, path) == b"12345"
    if subject.immutable:
        # Another worker than the one whose reading process has answered may hear of it later.
        eventually(lambda: subject.getxattr(path, "user.spiderfs.state") == b"cached")
    else:
        assert subject.getxattr(path, "user.spiderfs.state") == b"cached"
    if isinstance(subject, OnMount):
        eventually(lambda: subject.getxattr(path, "user.spiderfs.section") == b"importance")
        assert subject.getxattr(path, "user.spiderfs.score") == b"0", "no trainer has scored it"
    else:
        assert subject.getxattr(path, "user.spiderfs.section") == b"landing"
        assert subject.getxattr(path, "user.spiderfs.score") == b"none"
    shown = subject.lstat(path)
    assert subject.getxattr(path, "user.spiderfs.inode") == b"%d" % shown.inode
    assert subject.getxattr(path, "user.spiderfs.version") == b"5 %d" % shown.mtime_ns
    assert subject.getxattr(path, "user.spiderfs.served_by") == b"itself"
    os.setxattr(tree.real(b"file"), "user.spiderfs.state", b"copied from another mount")
    assert subject.listxattr(path) == ["user.label"], "what is said of the cache is not copied with the file"
    assert subject.getxattr(path, "user.spiderfs.state") == b"cached"
    assert subject.listxattr(tree.shown(b"dir")) == ["user.split"]
    assert subject.getxattr(tree.shown(b"dir"), "user.split") == b"train"
    for absent in ("user.none", "user.spiderfs.none", "trusted.x", "security.capability"):
        assert error_of(subject.getxattr, path, absent) == errno.ENODATA


def test_nothing_can_be_changed(subject: Subject, tree: Tree) -> None:
    path = tree.put(b"dir/file", b"as it was")
    os.setxattr(tree.real(b"dir/file"), "user.old", b"v")
    before = subject.lstat(path)
    # In an immutable mount the kernel itself refuses who may not write by the modes, or is not the owner.
    by_modes = subject.immutable and os.geteuid() != 0
    refusals = (errno.EROFS, errno.EACCES, errno.EPERM) if by_modes else (errno.EROFS,)
    for what in subject.changes:
        assert error_of(subject.change, what, path) in refusals, what
        assert subject.lstat(path) == before, what
        assert read(subject, path) == b"as it was", what
        assert os.listdir(tree.real(b"dir")) == [b"file"], what


# -- what changes at the source


def test_a_name_that_did_not_exist_is_asked_again_after_a_moment(subject: Subject, tree: Tree) -> None:
    os.mkdir(tree.real(b"dir"))
    path = tree.shown(b"dir/late")
    assert error_of(subject.lstat, path) == errno.ENOENT
    tree.put(b"dir/late", b"here now")
    assert eventually(lambda: _read_or_none(subject, path)) == b"here now"


@pytest.mark.usefixtures("noticed")
def test_a_removed_file_goes_from_names_and_listing(subject: Subject, tree: Tree) -> None:
    path = tree.put(b"dir/going", b"x")
    tree.put(b"dir/staying", b"x")
    assert read(subject, path) == b"x"
    assert len(subject.scan(tree.shown(b"dir"))) == 2
    os.unlink(tree.real(b"dir/going"))
    eventually(lambda: set(subject.scan(tree.shown(b"dir"))) == {b"staying"})
    eventually(lambda: _read_or_none(subject, path) is None)
    assert error_of(subject.lstat, path) == errno.ENOENT


@pytest.mark.usefixtures("noticed")
def test_a_removed_directory_goes_with_all_below(subject: Subject, tree: Tree) -> None:
    path = tree.put(b"dir/below/file", b"x")
    assert read(subject, path) == b"x"
    os.rename(tree.real(b"dir"), tree.real(b"gone"))
    eventually(lambda: _read_or_none(subject, path) is None)
    assert read(subject, tree.shown(b"gone/below/file")) == b"x"
    eventually(lambda: set(subject.scan(tree.shown())) == {b"gone"})


@pytest.mark.usefixtures("noticed")
def test_a_changed_file_is_a_new_inode_with_new_bytes(subject: Subject, tree: Tree) -> None:
    path = tree.put(b"file", b"old bytes")
    before = subject.lstat(path)
    assert read(subject, path) == b"old bytes"
    for new in (b"new bytes, and more of them", b"as many, but other, bytes.."):
        tree.put(b"file", new)
        eventually(lambda before=before: subject.lstat(path).inode != before.inode)  # type: ignore[misc]
        after = subject.lstat(path)
        assert (after.size, after.mtime_ns > before.mtime_ns) == (27, True)
        assert read(subject, path) == new
        assert subject.scan(tree.shown())[b"file"] == after
        before = after


@pytest.mark.usefixtures("noticed")
def test_an_open_handle_keeps_its_version(subject: Subject, tree: Tree) -> None:
    path = tree.put(b"file", b"old bytes")
    handle = subject.open(path)
    tree.put(b"file", b"new bytes!")
    assert eventually(lambda: read(subject, path) == b"new bytes!")
    assert subject.pread(handle, 100, 0) == b"old bytes"
    assert subject.fstat(handle).size == 9
    subject.close(handle)


def test_an_old_handle_whose_bytes_are_gone_is_stale(subject: Subject, tree: Tree) -> None:
    """A file of more than sample_max_bytes is read by blocks; the last lies beyond the read-ahead of the first."""
    content = bytes_of(12 << 20)
    path = tree.put(b"large", content)
    handle = subject.open(path)
    try:
        assert subject.pread(handle, 4096, 0) == content[:4096]
        tree.put(b"large", content[::-1])
        assert error_of(subject.pread, handle, 4096, 11 << 20) == errno.ESTALE
        assert subject.pread(handle, 4096, 0) == content[:4096]
    finally:
        subject.close(handle)
    assert read(subject, path) == content[::-1]


@pytest.mark.usefixtures("noticed")
def test_an_open_is_never_stale(subject: Subject, tree: Tree) -> None:
    """The old version is still trusted in and its bytes were never fetched: the open asks for the name once more."""
    if subject.looks_into:
        pytest.skip("a look-up has fetched the bytes")
    for number in range(5):
        path = tree.put(b"%d" % number, b"old")
        before = subject.lstat(path)
        tree.put(b"%d" % number, b"newer")
        assert read(subject, path) == b"newer"
        assert subject.lstat(path).inode != before.inode


def test_a_change_that_is_not_noticed_costs_one_reader_an_error(subject: Subject, tree: Tree) -> None:
    """The old version is trusted in, and its bytes were never fetched. No reader gets anything else for them."""
    if not subject.immutable or subject.looks_into:
        pytest.skip("an open notices the change, or a look-up has fetched the bytes")
    for number in range(5):
        path = tree.put(b"%d" % number, b"old")
        before = subject.lstat(path)
        tree.put(b"%d" % number, b"newer")
        kept = subject.open(path)
        assert error_of(subject.pread, kept, 100, 0) == errno.ESTALE
        assert read(subject, path) == b"newer"
        assert subject.lstat(path).inode != before.inode
        assert error_of(subject.pread, kept, 100, 0) == errno.ESTALE
        subject.close(kept)
        assert read(subject, path) == b"newer"


def test_bytes_that_are_cached_are_read_on_whatever_has_become_of_the_file(subject: Subject, tree: Tree) -> None:
    if not subject.immutable:
        pytest.skip("an open notices the change")
    path = tree.put(b"file", b"old bytes")
    assert read(subject, path) == b"old bytes"
    os.unlink(tree.real(b"file"))
    assert read(subject, path) == b"old bytes"
    assert subject.lstat(path).size == 9


@pytest.mark.usefixtures("noticed")
def test_a_file_that_becomes_a_directory_and_back(subject: Subject, tree: Tree) -> None:
    path = tree.put(b"name", b"a file")
    assert read(subject, path) == b"a file"
    os.unlink(tree.real(b"name"))
    tree.put(b"name/inside", b"in it")
    eventually(lambda: stat.S_ISDIR(subject.lstat(path).mode))
    assert read(subject, path + b"/inside") == b"in it"
    os.unlink(tree.real(b"name/inside"))
    os.rmdir(tree.real(b"name"))
    tree.put(b"name", b"again")
    eventually(lambda: _read_or_none(subject, path) == b"again")
    assert stat.S_ISREG(subject.lstat(path).mode)


def _read_or_none(subject: Subject, path: bytes) -> bytes | None:
    """The bytes, or None where there is no such file (any more); any other failure is the test's."""
    try:
        return read(subject, path)
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ESTALE):
            return None
        raise


# -- options that a subject is made with


# Each test makes subjects of its own here, and several workers take the same options.
ALONE = [kind for kind in KINDS if kind not in MOUNTS or MOUNTS[kind][0] == 1]


@pytest.mark.parametrize("kind", chosen(ALONE), indirect=True)
def test_owner_and_modes_can_be_replaced(kind: str, tmp_path: Path) -> None:
    if kind.startswith("immutable") and os.geteuid() != 0:
        pytest.skip("in an immutable mount, owner and modes say who may read, and so keep this user out")
    tree = Tree(tmp_path, "source")
    tree.put(b"dir/file", b"x")
    os.symlink("file", tree.real(b"dir/link"))
    overrides = {"uid": os.getuid() + 1, "gid": os.getgid() + 1, "file_mode": 0o440, "dir_mode": 0o550}
    with subject_of(kind, Path(os.fsdecode(tree.root)), tmp_path / "subject", **overrides) as subject:
        file, directory = subject.lstat(b"dir/file"), subject.lstat(b"dir")
        assert (file.mode, directory.mode) == (stat.S_IFREG | 0o440, stat.S_IFDIR | 0o550)
        assert {(found.uid, found.gid) for found in (file, directory, subject.lstat(b""))} == {
            (overrides["uid"], overrides["gid"])
        }
        assert subject.lstat(b"dir/link").mode == os.lstat(tree.real(b"dir/link")).st_mode
        assert subject.scan(b"dir")[b"file"] == file


def test_a_name_that_is_trusted_for_ever_is_asked_again_when_its_version_is_gone(kind: str, tmp_path: Path) -> None:
    tree = Tree(tmp_path, "source")
    tree.put(b"small", b"old")
    tree.put(b"large", bytes_of(2 << 20))
    options = {"ttl": math.inf, "sample_max_bytes": 1 << 20}
    with subject_of(kind, tmp_path / "source", tmp_path / "subject", **options) as subject:
        small, large = b"small", b"large"
        subject.lstat(small)
        handle = subject.open(large)
        tree.put(small, b"newer")
        tree.put(large, bytes_of(2 << 20, seed=1))
        if subject.immutable and not subject.looks_into:
            assert error_of(read, subject, small) == errno.ESTALE
        assert read(subject, small) == (b"old" if subject.looks_into else b"newer")
        try:
            assert error_of(subject.pread, handle, 4096, 1 << 20) == errno.ESTALE
        finally:
            subject.close(handle)
        assert read(subject, large) == bytes_of(2 << 20, seed=1)


@pytest.mark.parametrize("kind", chosen(ALONE), indirect=True)
def test_the_limit_between_small_and_large_files(kind: str, tmp_path: Path) -> None:
    limit = 3 << 20
    tree = Tree(tmp_path, "source")
    contents = {b"below": bytes_of(limit - 1), b"at": bytes_of(limit), b"above": bytes_of(limit + 1)}
    for name, content in contents.items():
        tree.put(name, content)
    with subject_of(kind, Path(os.fsdecode(tree.root)), tmp_path / "subject", sample_max_bytes=limit) as subject:
        for name, content in contents.items():
            handle = subject.open(name)
            is_here = name != b"above" and (subject.looks_into or not subject.immutable)
            state = b"cached" if is_here else b"uncached"
            assert subject.getxattr(name, "user.spiderfs.state") == state
            subject.close(handle)
            assert read(subject, name) == content
            eventually(lambda name=name: subject.getxattr(name, "user.spiderfs.state") == b"cached")
