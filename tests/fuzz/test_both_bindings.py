"""The same random operations on a mount over each binding: answers, attributes and errors are the same.

What both answer alike is hardly a slip in how spiderfs packs a structure, for libfuse packs those of the other one. The
differences that docs/reference/bindings.md names are left out.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import select
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fuzzing import examples
from hypothesis import given
from hypothesis import strategies as st
from mounting import Mounted, mounted

from spiderfs.sources.source import FIRST_INODE
from spiderfs.vfs.catalogue import PROVISIONAL, ROOT_INODE

LIMIT = 64 << 10  # sample_max_bytes
SIZES = {b"empty": 0, b"small": 1000, b"page": 4096, b"at": LIMIT, b"large": LIMIT + 1, b"blocks": (2 << 20) + 17}
DIRECTORIES = (b"", b"dir", b"dir/below", b"none")
NAMES = (*SIZES, b"link", b"broken", b"loop", b"caf\xe9-\xff", b"n" * 255, b"n" * 256, b"new\nline")
NAMES += (b".", b"..", b"absent")
CONTROL = tuple(b"/.spiderfs/" + name for name in (b"epochs", b"graph", b"redirects", b"ratio", b"none", b""))
ONE_BINDING_ALONE = b"views"  # in `.spiderfs`
ATTRIBUTES = ("user.label", "user.none", "user.spiderfs.inode", "user.spiderfs.version", "user.spiderfs.none")
ATTRIBUTES += ("trusted.x", "security.capability", "system.posix_acl_access", "odd", "user." + "n" * 250)
FLAGS = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_TRUNC, os.O_APPEND, os.O_DIRECTORY, os.O_NOFOLLOW, os.O_DIRECT)
FLAGS += (os.O_CREAT | os.O_EXCL, os.O_PATH, os.O_NOATIME, os.O_NONBLOCK)
WHENCES = (os.SEEK_SET, os.SEEK_CUR, os.SEEK_END, os.SEEK_DATA, os.SEEK_HOLE)
OFFSETS = (0, 1, 999, 1000, 4095, 4096, LIMIT, LIMIT + 1, 1 << 20, 2 << 20, (1 << 63) - 1)

paths = st.one_of(
    st.builds(
        lambda directory, name: b"/".join(part for part in (directory, name) if part),
        *map(st.sampled_from, (DIRECTORIES, NAMES)),
    ),
    st.sampled_from(DIRECTORIES),
    st.sampled_from(CONTROL),
)
numbers = st.integers(0, 3)
offsets = st.sampled_from(OFFSETS)
sizes_of_files = st.sampled_from(sorted(SIZES.values()))
sizes = st.sampled_from((0, 1, 100, 4096, 1 << 17, 3 << 20))
flags = st.lists(st.sampled_from(FLAGS), max_size=2).map(
    lambda chosen: chosen[0] | sum(chosen[1:]) if len(set(chosen)) == len(chosen) and chosen else 0
)


class Reader:
    """One mount, as a program of its own would use it."""

    def __init__(self, mount: Mounted) -> None:
        self._mount = os.fsencode(mount.point)
        self.root = b""
        self._open: list[int] = []

    def begin(self, name: bytes) -> None:
        self.root = os.path.join(self._mount, name)

    def end(self) -> None:
        while self._open:
            os.close(self._open.pop())

    def _path(self, path: bytes) -> bytes:
        return self._mount + path if path.startswith(b"/") else os.path.join(self.root, path)

    def _handle(self, number: int) -> int:
        if not self._open:
            raise OSError(errno.EBADF, "nothing is open")
        return self._open[number % len(self._open)]

    # -- names

    def stat(self, path: bytes) -> Any:
        return _shown(os.stat(self._path(path)))

    def lstat(self, path: bytes) -> Any:
        return _shown(os.lstat(self._path(path)))

    def scan(self, path: bytes) -> Any:
        with os.scandir(self._path(path)) as entries:
            return [
                (entry.name, entry.inode() & ~PROVISIONAL, _shown(entry.stat(follow_symlinks=False)))
                for entry in entries
                if entry.name != ONE_BINDING_ALONE
            ]

    def readlink(self, path: bytes) -> Any:
        return os.readlink(self._path(path))

    def access(self, path: bytes, mask: int) -> Any:
        return os.access(self._path(path), mask)

    def getxattr(self, path: bytes, name: str) -> Any:
        return os.getxattr(self._path(path), name)

    def getxattr_of_size(self, path: bytes, name: str, size: int) -> Any:
        libc = ctypes.CDLL(None, use_errno=True)
        buffer = ctypes.create_string_buffer(size)
        length = libc.getxattr(self._path(path), name.encode(), buffer if size else None, size)
        if length < 0:
            raise OSError(ctypes.get_errno(), "getxattr")
        return length, buffer.raw[:length]

    def listxattr(self, path: bytes) -> Any:
        return os.listxattr(self._path(path))

    def statvfs(self, path: bytes) -> Any:
        found = os.statvfs(self._path(path))
        # Not how much is free, which others change meanwhile.
        sizes = (found.f_bsize, found.f_frsize, found.f_blocks, found.f_bavail, found.f_files)
        return *sizes, found.f_flag, found.f_namemax

    # -- handles

    def open(self, path: bytes, flags: int) -> Any:
        handle = os.open(self._path(path), flags, 0o600)
        self._open.append(handle)
        return fcntl.fcntl(handle, fcntl.F_GETFL)

    def close(self, number: int) -> Any:
        handle = self._handle(number)
        self._open.remove(handle)
        os.close(handle)

    def fstat(self, number: int) -> Any:
        return _shown(os.fstat(self._handle(number)))

    def pread(self, number: int, size: int, offset: int) -> Any:
        # The buffer of who reads past all pages must begin with a page.
        with mmap.mmap(-1, max(size, 1)) as buffer:
            length = os.preadv(self._handle(number), [memoryview(buffer)[:size]], offset)
            return buffer[:length]

    def read(self, number: int, size: int) -> Any:
        return os.read(self._handle(number), size)

    def seek(self, number: int, offset: int, whence: int) -> Any:
        return os.lseek(self._handle(number), offset, whence)

    def map(self, number: int, size: int) -> Any:
        handle = self._handle(number)
        with mmap.mmap(handle, min(size, os.fstat(handle).st_size), prot=mmap.PROT_READ) as mapped:
            return mapped[:]

    def send(self, number: int, size: int, offset: int) -> Any:
        ours = os.memfd_create("sent")
        try:
            sent = os.sendfile(ours, self._handle(number), offset, size)
            return sent, os.pread(ours, sent, 0)
        finally:
            os.close(ours)

    def advise(self, number: int, advice: int) -> Any:
        return os.posix_fadvise(self._handle(number), 0, 0, advice)

    def sync(self, number: int) -> Any:
        return os.fsync(self._handle(number)), os.fdatasync(self._handle(number))

    def lock(self, number: int, kind: int) -> Any:
        fcntl.flock(self._handle(number), kind | fcntl.LOCK_NB)
        return fcntl.lockf(self._handle(number), (kind & fcntl.LOCK_EX or fcntl.LOCK_SH) | fcntl.LOCK_NB, 10)

    def poll(self, number: int) -> Any:
        poll = select.poll()
        poll.register(self._handle(number), select.POLLIN | select.POLLOUT)
        return [event for _, event in poll.poll(0)]

    def ioctl(self, number: int, command: int) -> Any:
        return fcntl.ioctl(self._handle(number), command, bytes(8))

    def write(self, number: int, text: bytes) -> Any:
        return os.write(self._handle(number), text)

    def ftruncate(self, number: int, size: int) -> Any:
        return os.ftruncate(self._handle(number), size)

    def allocate(self, number: int) -> Any:
        return os.posix_fallocate(self._handle(number), 0, 10)

    # -- what would change something

    def change(self, what: str, path: bytes, other: bytes) -> Any:
        here, there = self._path(path), self._path(other)
        calls: dict[str, Callable[[], Any]] = {
            "mkdir": lambda: os.mkdir(here),
            "mkfifo": lambda: os.mkfifo(here),
            "unlink": lambda: os.unlink(here),
            "rmdir": lambda: os.rmdir(here),
            "rename": lambda: os.rename(here, there),
            "link": lambda: os.link(here, there, follow_symlinks=False),
            "symlink": lambda: os.symlink(b"target", here),
            "chmod": lambda: os.chmod(here, 0o600),
            "chown": lambda: os.chown(here, 1, 1, follow_symlinks=False),
            "utime": lambda: os.utime(here, (1, 1), follow_symlinks=False),
            "truncate": lambda: os.truncate(here, 3),
            "setxattr": lambda: os.setxattr(here, "user.new", b"v"),
            "removexattr": lambda: os.removexattr(here, "user.label"),
        }
        return calls[what]()


CHANGES = ["mkdir", "mkfifo", "unlink", "rmdir", "rename", "link", "symlink", "chmod", "chown", "utime", "truncate"]
CHANGES += ["setxattr", "removexattr"]


def _shown(found: os.stat_result) -> tuple[int, ...]:
    """All but the device, and the times of a control file, which are those of its mount.

    Each mount learns by itself how far the source's clock is behind, and so whether a version has settled.
    """
    own = (found.st_ino & ~PROVISIONAL, found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_size)
    times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    is_control = ROOT_INODE < found.st_ino < FIRST_INODE
    return *own, found.st_blocks, found.st_blksize, *(() if is_control else times)


def operation(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(st.just(name), *arguments)


class Source:
    """What the mounts show; its files are an hour old and older, so that they have settled."""

    def __init__(self, root: Path) -> None:
        self._root = os.fsencode(root)
        self._ages = itertools.count(3600)

    def begin(self) -> None:
        for directory in (b"dir", b"dir/below"):
            os.makedirs(os.path.join(self._root, directory))
        for directory in (b"", b"dir"):
            for name, size in SIZES.items():
                self.put(os.path.join(directory, name), size, 0)
            os.setxattr(os.path.join(self._root, directory, b"small"), "user.label", b"cat")
        links = {b"link": b"small", b"broken": b"nowhere", b"loop": b"loop", b"dir/link": b"../small"}
        for name, target in links.items():
            os.symlink(target, os.path.join(self._root, name))
        for name in (b"caf\xe9-\xff", b"n" * 255, b"new\nline"):
            self.put(b"dir/" + name, 10, 1)

    def put(self, path: bytes, size: int, seed: int) -> None:
        """Write a file of another version, unless there is no place for one."""
        path = os.path.join(self._root, path)
        try:
            with open(path, "wb") as file:
                file.write(Random(seed).randbytes(size))
            at = os.stat(path).st_mtime - next(self._ages)
            os.utime(path, (at, at))
        except OSError:
            pass

    def remove(self, path: bytes) -> None:
        path = os.path.join(self._root, path)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)


BY_READERS = [
    *(operation(name, paths) for name in ("stat", "lstat", "scan", "readlink", "listxattr", "statvfs")),
    operation("access", paths, st.integers(0, 7)),
    operation("getxattr", paths, st.sampled_from(ATTRIBUTES)),
    operation("getxattr_of_size", paths, st.sampled_from(ATTRIBUTES), st.sampled_from((0, 1, 2, 3, 100))),
    operation("open", paths, flags),
    operation("open", paths, st.just(os.O_RDONLY)),
    *(operation(name, numbers) for name in ("close", "fstat", "sync", "poll", "allocate")),
    operation("pread", numbers, sizes, offsets),
    operation("read", numbers, sizes),
    operation("seek", numbers, offsets | st.just(-1), st.sampled_from(WHENCES)),
    operation("map", numbers, sizes),
    operation("send", numbers, sizes, offsets),
    operation("advise", numbers, st.sampled_from((os.POSIX_FADV_WILLNEED, os.POSIX_FADV_DONTNEED))),
    operation("lock", numbers, st.sampled_from((fcntl.LOCK_SH, fcntl.LOCK_EX))),
    operation("ioctl", numbers, st.sampled_from((0x5401, 0x80086601, 0x12345678))),
    operation("write", numbers, st.sampled_from((b"", b"x", b"ttl=nonsense\n", b"small\n"))),
    operation("ftruncate", numbers, st.sampled_from((0, 1))),
    operation("change", st.sampled_from(CHANGES), paths, paths),
]
BY_SOURCE = [
    operation("put", st.sampled_from((*SIZES, b"dir/small", b"dir/new")), sizes_of_files, st.integers(1, 250)),
    operation("remove", st.sampled_from((b"small", b"dir/small", b"dir/below", b"link"))),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("source")


@pytest.fixture(scope="module")
def readers(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Reader]]:
    # The size of an access log is that of what all examples have read so far.
    options = {"sample_max_bytes": LIMIT, "read_ahead": 1, "capacity": "8MiB", "access_log": "off"}
    options |= dict.fromkeys(("ttl", "negative_ttl", "dir_ttl"), 0)
    place = tmp_path_factory.mktemp("mounts")
    with (
        mounted(source, place / "kernel", binding="kernel", **options) as one,
        mounted(source, place / "pyfuse3", binding="pyfuse3", **options) as other,
    ):
        yield [Reader(one), Reader(other)]


_examples = itertools.count()


@examples(60)
@given(operations=st.lists(st.one_of(*BY_READERS, *BY_READERS, *BY_SOURCE), min_size=20, max_size=80))
def test_both_bindings_answer_alike(operations: list[tuple[Any, ...]], source: Path, readers: list[Reader]) -> None:
    name = f"{next(_examples):05d}"
    tree = Source(source / name)
    tree.begin()
    for reader in readers:
        reader.begin(name.encode())
    try:
        for what, *arguments in operations:
            if hasattr(tree, what):
                getattr(tree, what)(*arguments)
                continue
            one, other = (outcome(getattr(reader, what), *arguments) for reader in readers)
            assert one == other, (what, arguments)
    finally:
        for reader in readers:
            reader.end()
        shutil.rmtree(source / name)


def outcome(call: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    try:
        return "answer", call(*arguments)
    except OSError as exc:
        return "error", errno.errorcode.get(exc.errno or 0, exc.errno)
    except (ValueError, OverflowError) as exc:
        return "refused by Python", type(exc)
