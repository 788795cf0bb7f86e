"""The kernel's side of FUSE in bytes: the structures and numbers of linux/fuse.h that spiderfs uses.

Pure: packs and unpacks, and does no input or output. Sizes are those of protocol 7.36 and later, little-endian, as on
every machine that spiderfs runs on; the kernel keeps answering older minors for good.
"""

from __future__ import annotations

import os
import stat
import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple

from spiderfs.errors import InvalidArgument
from spiderfs.sources.source import split_time
from spiderfs.vfs.answer_types import Attributes, Entry

MAJOR, MINOR = 7, 40
# struct fuse_in_header: length, opcode, unique, nodeid, uid, gid, pid, extension length.
IN_HEADER = struct.Struct("<IIQQIIIHxx")
# struct fuse_out_header: length, error, unique.
OUT_HEADER = struct.Struct("<IiQ")
# struct fuse_open_out: handle, flags, number of a backing file (0: none).
OPEN_OUT = struct.Struct("<QIi")
# struct fuse_read_in: handle, offset, size; the lock owner and the flags of the open do not matter here.
READ_IN = struct.Struct("<QQI")
WRITE_OUT = struct.Struct("<Ixxxx")
# struct fuse_setattr_in: flags of the attributes to set, handle, size.
SETATTR_IN = struct.Struct("<IxxxxQQ")
FATTR_SIZE = 1 << 3
# Of fuse_getattr_in, whose first field are flags: the request is about an open file, for a read or a seek.
GETATTR_FH = 1 << 0
GETXATTR_OUT = struct.Struct("<Ixxxx")
# The first field of fuse_open_in and fuse_getattr_in (flags), of fuse_access_in (mask), of fuse_getxattr_in (size) and
# of fuse_batch_forget_in (count).
FIRST_WORD = struct.Struct("<I")
# The first field of fuse_release_in: the handle.
HANDLE = struct.Struct("<Q")
# The length of the structure that comes before a name or data.
WRITE_IN_BYTES = 40
GETXATTR_IN_BYTES = 8
_BATCH_FORGET_IN_BYTES = 8
_FORGET_ONE = struct.Struct("<QQ")  # inode, how many of its look-ups are forgotten
_STATFS_OUT = struct.Struct("<5Q3I28x")
# struct fuse_init_in: major, minor, read-ahead, the lower 32 bits of the flags, the upper bits.
_INIT_IN = struct.Struct("<IIIII")
_INIT_IN_UNUSED_BYTES = 44
# struct fuse_init_out: major, minor, read-ahead, lower flags, background requests, how many of them mean congestion,
# largest write, time granularity, pages of a request, alignment of mappings, upper flags, depth of stacked file
# systems.
_INIT_OUT = struct.Struct("<IIIIHHIIHHII24x")
_ATTR = struct.Struct("<QQQqqqIIIIIIIIII")
_ENTRY = struct.Struct("<QQQQII" + _ATTR.format[1:])
_ATTR_OUT = struct.Struct("<QIxxxx" + _ATTR.format[1:])
_DIRENT = struct.Struct("<QQII")
_STORE = struct.Struct("<QQII")  # fuse_notify_store_out: inode, offset, size, padding
_INVAL_INODE = struct.Struct("<Qqq")  # fuse_notify_inval_inode_out: inode, offset (below 0: no pages), length
_FORGET_NAME = struct.Struct("<QII")  # fuse_notify_inval_entry_out: inode of the directory, length of the name, flags
_DIRENT_PLUS_BYTES = _ENTRY.size + _DIRENT.size

# The largest write, and the size of a buffer for requests: no request is longer than a write.
MAX_WRITE_BYTES = 1 << 20
REQUEST_BYTES = MAX_WRITE_BYTES + IN_HEADER.size + WRITE_IN_BYTES
# The largest READ: 1 MiB, which the kernel allows ordinary users too.
_MAX_PAGES = 256
# The kernel sets this bit in the number of a request that it hands out again (FUSE_UNIQUE_RESEND).
RESENT = 1 << 63
# The last position of a listing that a reader's off_t can hold.
MOST_POSITION = (1 << 63) - 1
# The kernel's limit on requests in the background (RELEASE, read-ahead). With its default of 12 eight readers wait.
# With 64, all left unanswered by a hanging source, a reader of a cached file waited 5.7 s: so it is as large as can be.
_MAX_BACKGROUND, _CONGESTED = 65535, 49152
# The read-ahead that a kernel offers by default.
_READ_AHEAD_BYTES = 128 << 10
# struct stat counts blocks of this size, whatever the file system's own (stat(2)).
_STAT_BLOCK_BYTES = 512
# Programs read in pieces of st_blksize. Pillow, which reads through Python's buffer, gets a file of 112 kB by three
# READs if that is 4 KiB, and by one if it is the whole file.
_LEAST_PIECE_BYTES, _MOST_PIECE_BYTES = 4 << 10, 256 << 10
# Programs read small parts of larger files here and there, so a buffer should bring no more than it has to.
_READ_WHOLE_BYTES = 8 << 20


class Opcode(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    INIT = 26
    OPENDIR = 27
    RELEASEDIR = 29
    ACCESS = 34
    CREATE = 35
    DESTROY = 38
    BATCH_FORGET = 42
    READDIRPLUS = 44
    RENAME2 = 45
    TMPFILE = 51


class Notice(IntEnum):
    """A message to the kernel that answers no request: its out header has this number where an error would be."""

    INVAL_INODE = 2
    INVAL_ENTRY = 3
    STORE = 4
    RESEND = 7
    INC_EPOCH = 8


class OpenFlag(IntFlag):
    DIRECT_IO = 1
    KEEP_CACHE = 2
    CACHE_DIR = 8
    PASSTHROUGH = 128


class InitFlag(IntFlag):
    ASYNC_READ = 1 << 0
    ATOMIC_O_TRUNC = 1 << 3
    BIG_WRITES = 1 << 5
    DO_READDIRPLUS = 1 << 13
    NO_OPEN_SUPPORT = 1 << 17
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22
    CACHE_SYMLINKS = 1 << 23
    INIT_EXT = 1 << 30
    PASSTHROUGH = 1 << 37
    HAS_RESEND = 1 << 39


# ATOMIC_O_TRUNC: an open that truncates says so itself, and is refused before anything else is tried.
# PARALLEL_DIROPS: readers of one directory look up side by side.
# CACHE_SYMLINKS: a link is a version like any file.
# INIT_EXT: there are more than 32 flags. PASSTHROUGH: a file may be given to the kernel to read (`passthrough.py`).
# Not AUTO_INVAL_DATA: no bytes change under an inode, and opendir says whether a kept listing holds.
_WANTED = (
    InitFlag.ASYNC_READ
    | InitFlag.ATOMIC_O_TRUNC
    | InitFlag.BIG_WRITES
    | InitFlag.DO_READDIRPLUS
    | InitFlag.PARALLEL_DIROPS
    | InitFlag.MAX_PAGES
    | InitFlag.CACHE_SYMLINKS
    | InitFlag.INIT_EXT
    | InitFlag.PASSTHROUGH
)
# Files that are read by the kernel must not lie on a stacked file system (overlayfs) themselves. With 2 they might, but
# then no overlayfs could be put on top of the mount (FILESYSTEM_MAX_STACK_DEPTH of linux/fs.h).
_STACK_DEPTH = 1


def unpacked(form: struct.Struct, body: memoryview) -> tuple[int, ...]:
    """Unpack the structure at the beginning of a request's body; raises InvalidArgument if the body is too short."""
    try:
        return form.unpack_from(body)
    except struct.error:
        raise InvalidArgument(f"a request with {len(body)} bytes, not {form.size}") from None


def init_again() -> bytes:
    """The INIT of a kernel that offers just what spiderfs has accepted, for libfuse, which wants to answer an INIT."""
    body = _INIT_IN.pack(MAJOR, MINOR, _READ_AHEAD_BYTES, _WANTED & 0xFFFFFFFF, 0) + bytes(_INIT_IN_UNUSED_BYTES)
    return IN_HEADER.pack(IN_HEADER.size + len(body), Opcode.INIT, 2, 0, 0, 0, 0, 0) + body


class Offer(NamedTuple):
    """What a kernel says of itself in its INIT."""

    minor: int
    read_ahead_bytes: int
    flags: int

    @classmethod
    def of(cls, body: memoryview) -> Offer:
        _, minor, read_ahead_bytes, flags, further = _INIT_IN.unpack_from(body)
        return cls(minor, read_ahead_bytes, flags | further << 32 if flags & InitFlag.INIT_EXT else flags)


def init_out(body: memoryview, immutable: bool = False) -> bytes:
    """The answer to INIT: the part of the kernel's offer that spiderfs accepts.

    Where no open is asked for, one that truncates has to be another request (SETATTR), which can be refused.
    """
    offer = Offer.of(body)
    taken = _WANTED & offer.flags
    if immutable:
        taken &= ~InitFlag.ATOMIC_O_TRUNC
    return _INIT_OUT.pack(
        MAJOR,
        MINOR,
        offer.read_ahead_bytes,
        taken & 0xFFFFFFFF,
        _MAX_BACKGROUND,
        _CONGESTED,
        MAX_WRITE_BYTES,
        1,
        _MAX_PAGES,
        0,
        taken >> 32,
        _STACK_DEPTH if taken & InitFlag.PASSTHROUGH else 0,
    )


def entry_out(entry: Entry) -> bytes:
    """The answer to LOOKUP; inode 0 makes the kernel remember that there is no such name."""
    found = entry.attributes
    (seconds, nanoseconds), (of_attributes, rest) = _timeout(entry.timeout_s), _timeout(found.timeout_s)
    return _ENTRY.pack(found.inode, 0, seconds, of_attributes, nanoseconds, rest, *_attr(found))


def attr_out(found: Attributes) -> bytes:
    return _ATTR_OUT.pack(*_timeout(found.timeout_s), *_attr(found))


def _timeout(timeout_s: float) -> tuple[int, int]:
    seconds = int(timeout_s)
    return seconds, int((timeout_s - seconds) * 1e9)


def _attr(found: Attributes) -> tuple[int, ...]:
    inode, mode, uid, gid, size, mtime_ns, _, shown = found
    seconds, nanoseconds = split_time(mtime_ns)
    return (
        shown or inode,
        size,
        stat_blocks(size),
        # One time for all three: the source's access and change times are not part of a version.
        seconds,
        seconds,
        seconds,
        nanoseconds,
        nanoseconds,
        nanoseconds,
        mode,
        links(mode),
        uid,
        gid,
        0,
        piece_bytes(size),
        0,
    )


def piece_bytes(size: int) -> int:
    """The size of the pieces in which a file of `size` bytes is best read (st_blksize): a power of two."""
    if size > _READ_WHOLE_BYTES:
        return _LEAST_PIECE_BYTES
    return max(_LEAST_PIECE_BYTES, 1 << (min(size, _MOST_PIECE_BYTES) - 1).bit_length())


def stat_blocks(size: int) -> int:
    return -(-size // _STAT_BLOCK_BYTES)


def links(mode: int) -> int:
    """The link count that is shown: every name is a file of its own."""
    return 2 if stat.S_ISDIR(mode) else 1


def most_names(size: int) -> int:
    """How many names fit into a listing of `size` bytes at most."""
    return size // (_DIRENT_PLUS_BYTES + 8)


def direntry_out(name: bytes, entry: Entry, position: int) -> bytes:
    """One name of a READDIRPLUS answer; `position` is where the listing goes on behind it."""
    inode, mode = entry.attributes.shown or entry.attributes.inode, entry.attributes.mode
    text = entry_out(entry) + _DIRENT.pack(inode, position, len(name), stat.S_IFMT(mode) >> 12) + name
    return text + bytes(-len(text) % 8)


def forgotten(body: memoryview) -> list[int]:
    """The inodes of a BATCH_FORGET."""
    (count,) = unpacked(FIRST_WORD, body)
    rows = body[_BATCH_FORGET_IN_BYTES : _BATCH_FORGET_IN_BYTES + count * _FORGET_ONE.size]
    return [inode for inode, _ in _FORGET_ONE.iter_unpack(rows[: len(rows) // _FORGET_ONE.size * _FORGET_ONE.size])]


def statfs_out(found: os.statvfs_result) -> bytes:
    # Nothing can be written here, so nothing is available.
    return _STATFS_OUT.pack(
        found.f_blocks, found.f_bfree, 0, found.f_files, found.f_ffree, found.f_bsize, found.f_namemax, found.f_frsize
    )


def answered(unique: int, body: bytes) -> bytes:
    """A whole answer to a request that succeeded."""
    return answer_head(unique, len(body)) + body


def answer_head(unique: int, size: int) -> bytes:
    """What comes before the `size` bytes of such an answer."""
    return OUT_HEADER.pack(OUT_HEADER.size + size, 0, unique)


def resend() -> bytes:
    return OUT_HEADER.pack(OUT_HEADER.size, Notice.RESEND, 0)


def store(inode: int, size: int, offset: int = 0) -> bytes:
    """The head of a message that gives the kernel `size` bytes of a file, as if the kernel had read them."""
    return OUT_HEADER.pack(OUT_HEADER.size + _STORE.size + size, Notice.STORE, 0) + _STORE.pack(inode, offset, size, 0)


def forget_name(parent: int, name: bytes) -> bytes:
    """A message that makes the kernel forget a name, so that its next use is looked up."""
    body = _FORGET_NAME.pack(parent, len(name), 0) + name + b"\0"
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), Notice.INVAL_ENTRY, 0) + body


def forget_names() -> bytes:
    """A message that makes the kernel look up every name again when it is used next (Linux 6.16)."""
    return OUT_HEADER.pack(OUT_HEADER.size, Notice.INC_EPOCH, 0)


def doubt(inode: int) -> bytes:
    """A message that makes the kernel ask for the attributes of an inode before it uses them again."""
    return drop_pages(inode, -1, 0)


def drop_pages(inode: int, offset: int, size: int) -> bytes:
    """A message that makes the kernel drop the pages in which these bytes of an inode lie."""
    body = _INVAL_INODE.pack(inode, offset, size)
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), Notice.INVAL_INODE, 0) + body
