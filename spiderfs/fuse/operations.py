"""The adapter between pyfuse3 and `Filesystem`: translates attributes and errors, and decides nothing."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import pyfuse3

from spiderfs.errors import ReadOnly, SpiderfsError, StoreCorrupt
from spiderfs.filesystem import Attributes, Caller, Entry, Filesystem
from spiderfs.metrics import Counters
from spiderfs.store.environment import end_as_corrupt

log = logging.getLogger(__name__)
T = TypeVar("T")

# readdirplus fills one page of the kernel's at a time, with about this many names.
_READDIR_NAMES = 32
# struct stat counts blocks of this size, whatever the file system's own (stat(2)).
_STAT_BLOCK_BYTES = 512


class Operations(pyfuse3.Operations):
    """Created before the fork, so that INIT can be answered; `serve` gives it the worker's file system."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self) -> None:
        super().__init__()
        self._fs: Filesystem
        self._counters: Counters

    def serve(self, filesystem: Filesystem, counters: Counters) -> None:
        self._fs = filesystem
        self._counters = counters

    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        try:
            return _entry(await self._fs.lookup(parent_inode, name, Caller(ctx.uid, ctx.gid, ctx.pid)))
        except Exception as exc:
            raise self._fuse_error(exc) from exc

    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        try:
            return _attributes(await self._fs.getattr(inode))
        except Exception as exc:
            raise self._fuse_error(exc) from exc

    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        try:
            handle, direct_io = await self._fs.open(inode, flags, Caller(ctx.uid, ctx.gid, ctx.pid))
            # The pages of an inode are those of one version, so they may stay from one open to the next.
            return pyfuse3.FileInfo(fh=handle, direct_io=direct_io, keep_cache=not direct_io)
        except Exception as exc:
            raise self._fuse_error(exc) from exc

    # Any buffer will do for pyfuse3, whatever its stub says.
    async def read(self, fh: int, off: int, size: int) -> memoryview | bytes:  # type: ignore[override]
        try:
            return await self._fs.read(fh, off, size)
        except Exception as exc:
            raise self._fuse_error(exc) from exc

    async def release(self, fh: int) -> None:
        await self._answer(self._fs.release(fh))

    async def flush(self, fh: int) -> None:
        # Once and for all: the kernel does not ask again after ENOSYS, which saves a round trip at every close.
        raise pyfuse3.FUSEError(errno.ENOSYS)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        # Nothing is remembered per inode that could be forgotten.
        return

    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        return await self._answer(self._fs.readlink(inode))

    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        return await self._answer(self._fs.opendir(inode))

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        while True:
            names = await self._answer(self._fs.readdir(fh, start_id, _READDIR_NAMES))
            for name, entry, position in names:
                if not pyfuse3.readdir_reply(token, name, _entry(entry), position):
                    return
                start_id = position
            if len(names) < _READDIR_NAMES:
                return

    async def releasedir(self, fh: int) -> None:
        return

    async def access(self, inode: int, mode: int, ctx: pyfuse3.RequestContext) -> bool:
        await self._answer(self._fs.access(inode, mode, Caller(ctx.uid, ctx.gid, ctx.pid)))
        return True

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        found = await self._answer(self._fs.statfs())
        answer = pyfuse3.StatvfsData()
        for name in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_files", "f_ffree", "f_namemax"):
            setattr(answer, name, getattr(found, name))
        # Nothing can be written here, so nothing is available.
        answer.f_bavail = answer.f_favail = 0
        return answer

    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> list[bytes]:
        return [os.fsencode(name) for name in await self._answer(self._fs.listxattr(inode))]

    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        return await self._answer(self._fs.getxattr(inode, os.fsdecode(name)))

    # -- what would change something: only control files can be written

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return await self._answer(self._fs.write(fh, buf))

    async def setattr(
        self, inode: int, attr: Any, fields: pyfuse3.SetattrFields, fh: int | None, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        if not fields.update_size:
            raise self._fuse_error(ReadOnly("spiderfs is read-only"))
        return _attributes(await self._answer(self._fs.truncate(inode)))

    async def create(self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: Any) -> Any:
        raise pyfuse3.FUSEError(errno.EROFS)

    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: Any) -> Any:
        raise pyfuse3.FUSEError(errno.EROFS)

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: Any) -> Any:
        raise pyfuse3.FUSEError(errno.EROFS)

    async def unlink(self, parent_inode: int, name: bytes, ctx: Any) -> None:
        raise pyfuse3.FUSEError(errno.EROFS)

    async def rmdir(self, parent_inode: int, name: bytes, ctx: Any) -> None:
        raise pyfuse3.FUSEError(errno.EROFS)

    async def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: Any) -> Any:
        raise pyfuse3.FUSEError(errno.EROFS)

    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: Any) -> Any:
        raise pyfuse3.FUSEError(errno.EROFS)

    async def rename(
        self, parent_old: int, name_old: bytes, parent_new: int, name_new: bytes, flags: int, ctx: Any
    ) -> None:
        raise pyfuse3.FUSEError(errno.EROFS)

    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: Any) -> None:
        raise pyfuse3.FUSEError(errno.EROFS)

    async def removexattr(self, inode: int, name: bytes, ctx: Any) -> None:
        raise pyfuse3.FUSEError(errno.EROFS)

    # -- errors

    async def _answer(self, question: Awaitable[T]) -> T:
        try:
            return await question
        except Exception as exc:
            raise self._fuse_error(exc) from exc

    def _fuse_error(self, exc: Exception) -> pyfuse3.FUSEError:
        if isinstance(exc, StoreCorrupt):
            # The supervisor rebuilds the store and starts the workers again; the kernel then asks anew, so that no
            # reader sees an error. Nothing of this process is worth saving.
            end_as_corrupt(exc)
        if isinstance(exc, SpiderfsError):
            if exc.errno == errno.EIO:
                log.warning("%s", exc)
            return pyfuse3.FUSEError(exc.errno)
        self._counters.add("internal_errors")
        log.exception("unexpected error in a request handler")
        return pyfuse3.FUSEError(errno.EIO)


def _attributes(found: Attributes) -> pyfuse3.EntryAttributes:
    entry = pyfuse3.EntryAttributes()
    _fill(entry, found)
    return entry


def _entry(found: Entry) -> pyfuse3.EntryAttributes:
    entry = pyfuse3.EntryAttributes()
    entry.entry_timeout = found.timeout_s
    if found.attributes.inode == 0:
        # A negative entry: the kernel remembers that there is no such name.
        entry.st_ino = 0
        return entry
    _fill(entry, found.attributes)
    return entry


def _fill(entry: pyfuse3.EntryAttributes, found: Attributes) -> None:
    inode, mode, uid, gid, size, mtime_ns, timeout_s = found
    entry.st_ino = inode
    entry.st_mode = mode
    entry.st_uid = uid
    entry.st_gid = gid
    entry.st_size = size
    entry.st_nlink = 2 if stat.S_ISDIR(mode) else 1
    entry.st_blocks = -(-size // _STAT_BLOCK_BYTES)
    # One time for all three: the source's access and change times are not part of a version.
    entry.st_mtime_ns = entry.st_atime_ns = entry.st_ctime_ns = mtime_ns
    entry.attr_timeout = timeout_s
