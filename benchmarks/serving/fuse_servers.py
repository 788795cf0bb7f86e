"""Serves a bare `Filesystem` through spiderfs' own FUSE session or through pyfuse3: the daemons of fuse_library.py.

    .peers/pyfuse3/bin/python -m benchmarks.serving.fuse_servers SYSTEM SOURCE MOUNTPOINT PLACE LATENCY_MS

SYSTEM is own, pyfuse3 or pyfuse3-polled.

One process, one event loop, in the foreground until it is unmounted; PLACE is a directory for its store. What is
compared is described in fuse_library.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyfuse3
import trio

from benchmarks.serving.bare import bare_on_disk
from spiderfs.daemon.worker import keep_freed_memory
from spiderfs.errors import SpiderfsError
from spiderfs.fuse import session, wire
from spiderfs.fuse.handles import Handles
from spiderfs.fuse.kernel import Serving
from spiderfs.fuse.kernel_binding import KernelBinding
from spiderfs.linux.mounts import FSTYPE, mounted_at, widen_read_ahead
from spiderfs.sources.faults import FaultState
from spiderfs.sources.local import LocalSource
from spiderfs.sources.slow import SlowSource
from spiderfs.sources.source import Source
from spiderfs.testing import Bare
from spiderfs.vfs.filesystem import Attributes, Caller, Entry

T = TypeVar("T")
# readdir is not told how much room there is: as many names as fit into what getdents64(2) of glibc asks for.
_NAMES = wire.most_names(32768)
# Of fusectl; root only.
_CONNECTIONS = Path("/sys/fs/fuse/connections")


class Adapter(pyfuse3.Operations):  # type: ignore[misc]
    """As spiderfs.fuse.operations.Operations, for pyfuse3: the same questions to `Filesystem` and the same answers."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(self, bare: Bare) -> None:
        super().__init__()
        self._fs = bare.filesystem
        # pyfuse3 has sent an answer before it calls the next handler, so a view of the store ends there.
        self._begin = bare.content.end_read

    async def lookup(self, parent_inode: int, name: bytes, ctx: Any) -> Any:
        self._begin()
        return _entry(await _answer(self._fs.lookup(parent_inode, name, _caller(ctx))))

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        return

    async def getattr(self, inode: int, ctx: Any) -> Any:
        self._begin()
        entry = pyfuse3.EntryAttributes()
        _fill(entry, await _answer(self._fs.getattr(inode)))
        return entry

    # The two that a warm file costs are written out, without a coroutine more than they need.
    async def open(self, inode: int, flags: int, ctx: Any) -> Any:
        self._begin()
        try:
            handle, direct_io, *_ = await self._fs.open(inode, flags, Caller(ctx.uid, ctx.gid, ctx.pid))
        except SpiderfsError as exc:
            raise pyfuse3.FUSEError(exc.errno) from exc
        return pyfuse3.FileInfo(fh=handle, direct_io=direct_io, keep_cache=not direct_io)

    async def read(self, fh: int, off: int, size: int) -> memoryview | bytes:
        self._begin()
        try:
            return await self._fs.read(fh, off, size)
        except SpiderfsError as exc:
            raise pyfuse3.FUSEError(exc.errno) from exc

    async def flush(self, fh: int) -> None:
        # Once and for all: the kernel does not ask again after ENOSYS.
        raise pyfuse3.FUSEError(errno.ENOSYS)

    async def release(self, fh: int) -> None:
        await self._fs.release(fh)

    async def opendir(self, inode: int, ctx: Any) -> int:
        self._begin()
        # Whether the kernel may keep the listing, or use what it has, cannot be said.
        return (await _answer(self._fs.opendir(inode))).handle

    async def readdir(self, fh: int, start_id: int, token: Any) -> None:
        self._begin()
        while True:
            names = await _answer(self._fs.readdir(fh, start_id, _NAMES))
            for name, entry, position in names:
                if not pyfuse3.readdir_reply(token, name, _entry(entry), position):
                    return
                start_id = position
            if len(names) < _NAMES:
                return

    async def releasedir(self, fh: int) -> None:
        return

    async def access(self, inode: int, mode: int, ctx: Any) -> bool:
        self._begin()
        await _answer(self._fs.access(inode, mode, _caller(ctx)))
        return True

    async def readlink(self, inode: int, ctx: Any) -> bytes:
        self._begin()
        return await _answer(self._fs.readlink(inode))

    async def statfs(self, ctx: Any) -> Any:
        found = await _answer(self._fs.statfs())
        answer = pyfuse3.StatvfsData()
        for name in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_files", "f_ffree", "f_namemax"):
            setattr(answer, name, getattr(found, name))
        answer.f_bavail = answer.f_favail = 0
        return answer


def _caller(context: Any) -> Caller:
    return Caller(context.uid, context.gid, context.pid)


async def _answer(question: Awaitable[T]) -> T:
    try:
        return await question
    except SpiderfsError as exc:
        raise pyfuse3.FUSEError(exc.errno) from exc


def _entry(found: Entry) -> Any:
    entry = pyfuse3.EntryAttributes()
    entry.entry_timeout = found.timeout_s
    if found.attributes.inode == 0:
        entry.st_ino = 0
    else:
        _fill(entry, found.attributes)
    return entry


def _fill(entry: Any, found: Attributes) -> None:
    inode, mode, uid, gid, size, mtime_ns, timeout_s = found
    entry.st_ino = inode
    entry.st_mode = mode
    entry.st_uid = uid
    entry.st_gid = gid
    entry.st_size = size
    entry.st_nlink = 2 if stat.S_ISDIR(mode) else 1
    entry.st_blocks = -(-size // 512)
    entry.st_mtime_ns = entry.st_atime_ns = entry.st_ctime_ns = mtime_ns
    entry.attr_timeout = timeout_s


# -- servers


async def serve_own(bare: Bare, source: str, mountpoint: Path) -> None:
    descriptor = session.mount(mountpoint, source, allow_other=False, programs_run=True)
    serving = Serving(bare.filesystem, bare.counters, bare.content.end_read, Handles(sole=False))
    await KernelBinding(descriptor).serve(serving)


async def serve_pyfuse3(bare: Bare, source: str, mountpoint: Path, polled: bool = False) -> None:
    kind, _, subtype = FSTYPE.partition(".")
    assert kind == "fuse"
    before = _descriptors()
    pyfuse3.init(Adapter(bare), os.fspath(mountpoint), {f"fsname={source}", f"subtype={subtype}"})
    (descriptor,) = _descriptors() - before
    widen_read_ahead(mountpoint)
    _widen_background(mountpoint)
    if polled:
        _look_before_waiting(descriptor)
    await pyfuse3.main()
    pyfuse3.close(unmount=False)


def _descriptors() -> set[int]:
    """Those of /dev/fuse; pyfuse3 has one and does not say which."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{name}") == "/dev/fuse":
                found.add(int(name))
    return found


def _widen_background(mountpoint: Path) -> None:
    """What wire.py asks for in INIT, and pyfuse3 does not: from outside, where fusectl is mounted and we are root."""
    mount = mounted_at(mountpoint)
    assert mount is not None
    connection = _CONNECTIONS / mount.device.partition(":")[2]
    with contextlib.suppress(OSError):
        (connection / "max_background").write_text("64")
        (connection / "congestion_threshold").write_text("48")


def _look_before_waiting(descriptor: int) -> None:
    """Replace pyfuse3's wait for a request, a private function that it looks up in its module at each use.

    Up to a burst of requests are taken without a pass of trio's loop, as session.py does. Looking again after a wait
    keeps the read that follows, which holds the interpreter's lock, from blocking when another task was quicker.
    """
    waiting: Any = pyfuse3
    wait: Callable[[], Awaitable[bool]] = waiting._wait_fuse_readable
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    burst = 0

    async def look_then_wait() -> bool:
        nonlocal burst
        while True:
            if burst < session.BURST and poll.poll(0):
                burst += 1
                return True
            burst = 0
            if not await wait():
                return False

    waiting._wait_fuse_readable = look_then_wait


SERVERS: dict[str, Callable[[Bare, str, Path], Awaitable[None]]] = {
    "own": serve_own,
    "pyfuse3": serve_pyfuse3,
    "pyfuse3-polled": partial(serve_pyfuse3, polled=True),
}


async def run(server: str, root: str, mountpoint: Path, place: Path, latency_ms: float) -> None:
    place.mkdir()
    source: Source = LocalSource(root)
    if latency_ms:
        source = SlowSource(source, FaultState.create(place / "faults", latency_ms=latency_ms))
    async with bare_on_disk(source, place) as bare:
        await SERVERS[server](bare, root, mountpoint)


if __name__ == "__main__":
    keep_freed_memory()
    trio.run(run, sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), float(sys.argv[5]))
