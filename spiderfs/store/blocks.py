"""The bytes of large files' blocks: one sparse file for each inode, beside LMDB, which has their checksums.

Block n lies at the same place as in the file of the source. So once all blocks are cached, the kernel can read this
plain file without asking anybody. Of several disks, the file stays on the one where its inode had it made until its
last block is dropped; disks may come and go, so a process that needs the file looks on each. Bytes without a record of
LMDB mean nothing. Locks on the range of a block keep records and bytes together (`linux/range_lock.py`):

- A process that lands a block holds a shared lock on it from before it writes the bytes until the record is committed.
- A process that frees a block takes an exclusive lock, or leaves a locked block for later, and checks that there still
  is no record before it punches the hole.
- A process that hands a file out to the kernel holds a shared lock on the whole file. The lock belongs to the open
  file, which the kernel keeps open as long as the file is registered.

A reader may map the plain file, and the mapping may outlive its handle and the registration. So no hole is ever made in
a file that was handed out, which its mode says: it is unlinked as a whole once no record of it is left. A file without
blocks is unlinked under an exclusive lock on the whole file; a process that has locked an unlinked file opens it by its
name again. `stray` finds bytes that a killed process had written without a record.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from spiderfs.errors import StoreError
from spiderfs.linux.range_lock import lock_shared, try_lock
from spiderfs.shared.layout import BLOCKS_DIRECTORY
from spiderfs.store.disks import Disks, home
from spiderfs.store.environment import translated_disk_errors
from spiderfs.store.store import BLOCK_BYTES, ContentKey

log = logging.getLogger(__name__)

# fallocate(2)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
# Errors of a write behind the end of the longest file that a file system can have: 16 TiB on ext4, 4 GiB on vfat.
_TOO_FAR = (errno.EFBIG, errno.EOVERFLOW, errno.EINVAL)
# Descriptors that are kept to read from; opening a file takes 5 us.
_OPEN_FILES = 64
# struct stat counts blocks of this size (stat(2)).
_STAT_BLOCK_BYTES = 512
# A length of 0 means all of a file, however long it becomes (fcntl(2)).
_WHOLE = (0, 0)
_OWN = 0o600
# The mark is the sticky bit: the kernel gives it no meaning for files, and it stays there for the next mount.
_HANDED_OUT = _OWN | stat.S_ISVTX


class BlockFiles:
    """Call `read` and `forget` in one thread only; all other methods may be called in any thread."""

    def __init__(self, disks: Disks) -> None:
        self._disks = disks
        self._open: OrderedDict[int, int] = OrderedDict()

    def can_free(self) -> bool:
        """Whether holes can be punched into files on all disks; raises StoreFull, StoreError."""
        for number in self._disks.numbers:
            directory = self._directory(number)
            with translated_disk_errors(), self._disks.watched(number):
                directory.mkdir(mode=0o700, exist_ok=True)
                with open(directory / "probe", "wb") as probe:
                    try:
                        _punch(probe.fileno(), 1)
                    except OSError as exc:
                        if exc.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                            raise
                        return False
                    finally:
                        (directory / "probe").unlink(missing_ok=True)
        return True

    # -- reading

    def read(self, inode: int, offset: int, length: int) -> bytes:
        """The bytes at this place; fewer bytes, or none, if the file or a part of it is missing."""
        try:
            return os.pread(self._opened(inode), length, offset)
        except OSError as exc:
            self._disks.failed(self.disk_of(inode), exc)
            return b""

    def forget(self, inode: int) -> None:
        """Close the file that is kept open for this inode: another one may have its name by now."""
        fd = self._open.pop(inode, None)
        if fd is not None:
            os.close(fd)

    def _opened(self, inode: int) -> int:
        fd = self._open.get(inode)
        if fd is not None:
            self._open.move_to_end(inode)
            return fd
        if len(self._open) >= _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        fd = self._open[inode] = os.open(self._path(inode), os.O_RDONLY | os.O_CLOEXEC)
        return fd

    def hand_out(self, inode: int) -> int | None:
        """A descriptor of the file, for the caller to close, or None if the file cannot be handed out now.

        No hole is made in the file from now on. The caller must ask afterwards which blocks it has.
        """
        try:
            fd = os.open(self._path(inode), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if try_lock(fd, *_WHOLE, shared=True) and os.fstat(fd).st_nlink:
                os.fchmod(fd, _HANDED_OUT)
                return fd
        except OSError as exc:
            log.debug("inode %d is not handed out: %s", inode, exc)
        os.close(fd)
        return None

    def was_handed_out(self, inode: int) -> bool:
        """Whether the file was handed out at any time, by any process."""
        try:
            return _has_mark(os.stat(self._path(inode)))
        except OSError:
            return False

    # -- writing

    @contextlib.contextmanager
    def writing(self, blocks: Iterable[tuple[ContentKey, bytes]]) -> Iterator[set[ContentKey]]:
        """Write the bytes of these blocks, and keep all of them from being freed until the `with` block ends.

        The caller commits their records inside the `with` block. It is given the blocks that could not be written
        because this file system has no files that long. Raises StoreFull, StoreError; then the caller must free what
        was written.
        """
        held: dict[int, int] = {}
        too_far = set()
        try:
            for key, payload in blocks:
                with translated_disk_errors(), self._disks.watched(self.disk_of(key.inode)):
                    if not self._write(held, key, payload):
                        too_far.add(key)
            yield too_far
        finally:
            for fd in held.values():
                os.close(fd)

    def _write(self, held: dict[int, int], key: ContentKey, payload: bytes) -> bool:
        """Write one block; returns False if this file system has no files that long."""
        fd = held[key.inode] = self._locked_file(key.inode, key.block, 1, held.get(key.inode))
        try:
            _write(fd, payload, _start(key.block))
        except OSError as exc:
            if exc.errno not in _TOO_FAR:
                raise
            return False
        return True

    def _locked_file(self, inode: int, first: int, count: int, fd: int | None = None, waits: bool = True) -> int:
        """A descriptor of the file, `fd` if that is still it, with a lock that keeps these blocks from being freed."""
        while True:
            if fd is None:
                fd = os.open(self._path(inode), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _OWN)
            place = _start(first), count * BLOCK_BYTES
            if waits:
                lock_shared(fd, *place)
            elif not try_lock(fd, *place, shared=True):
                os.close(fd)
                raise StoreError("the blocks are being freed")
            # No one unlinks a file while anybody holds a lock on a block of it.
            if os.fstat(fd).st_nlink:
                return fd
            os.close(fd)
            fd = None

    def hold(self, inode: int, first: int, count: int) -> int:
        """A descriptor that keeps these blocks from being freed; raises StoreError if they are being freed."""
        with translated_disk_errors(), self._disks.watched(self.disk_of(inode)):
            return self._locked_file(inode, first, count, waits=False)

    def fill(self, inode: int, offset: int, pieces: Iterable[bytes]) -> Iterator[memoryview]:
        """Write pieces, from this offset on, to blocks that someone holds; gives each block once it is written.

        The last block may be shorter; each is valid until the next. Raises StoreFull, StoreError.
        """
        number = self.disk_of(inode)
        with translated_disk_errors(), self._disks.watched(number):
            fd = os.open(self._path(inode), os.O_WRONLY | os.O_CLOEXEC)
        block, size = memoryview(bytearray(BLOCK_BYTES)), 0
        try:
            for piece in pieces:
                # As they come: whole blocks out of one buffer took three times as much of the kernel's time on ext4.
                with translated_disk_errors(), self._disks.watched(number):
                    _write(fd, piece, offset)
                offset += len(piece)
                rest = memoryview(piece)
                while rest:
                    taken, rest = rest[: BLOCK_BYTES - size], rest[BLOCK_BYTES - size :]
                    block[size : size + len(taken)] = taken
                    size += len(taken)
                    if size == BLOCK_BYTES:
                        yield block
                        size = 0
            if size:
                yield block[:size]
        finally:
            os.close(fd)

    # -- freeing

    @contextlib.contextmanager
    def locked(self, inode: int, blocks: Iterable[int]) -> Iterator[Freeing]:
        """Lock those of these blocks exclusively that no one has locked, until the `with` block ends."""
        try:
            fd = os.open(self._path(inode), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            yield Freeing(self._path(inode), None, list(blocks))
            return
        try:
            mine = []
            for block in blocks:
                if try_lock(fd, _start(block), BLOCK_BYTES):
                    mine.append(block)
                elif _has_mark(os.fstat(fd)):
                    # It is registered with the kernel: all of its blocks are locked.
                    break
            # An unlinked file is no one's concern any more: there may be a new file with its name.
            yield Freeing(self._path(inode), fd, mine if os.fstat(fd).st_nlink else [])
        finally:
            os.close(fd)

    def inodes(self) -> list[int]:
        """The inodes of all files, in no order."""
        return [int(path.name) for path in self._all_files() if path.name.isdecimal()]

    def stray(self, inode: int, recorded: set[int]) -> list[int]:
        """The blocks that have bytes and no record; for an empty file without records, block 1."""
        try:
            fd = os.open(self._path(inode), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        with open(fd, "rb", buffering=0):
            found: set[int] = set()
            end = os.fstat(fd).st_size
            offset = 0
            while offset < end:
                try:
                    first = os.lseek(fd, offset, os.SEEK_DATA)
                except OSError as exc:
                    if exc.errno != errno.ENXIO:
                        raise
                    break  # a hole to the end
                offset = os.lseek(fd, first, os.SEEK_HOLE)
                found.update(range(first // BLOCK_BYTES + 1, (offset - 1) // BLOCK_BYTES + 2))
        return sorted(found - recorded) if recorded or found else [1]

    # -- bookkeeping

    def disk_bytes(self) -> int:
        total = 0
        for path in self._all_files():
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_blocks * _STAT_BLOCK_BYTES
        return total

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def disk_of(self, inode: int) -> int:
        """The disk on which the file lies, or would be made."""
        if not self._disks.several:
            return 0
        on = (number for number in self._disks.numbers if os.path.exists(self._directory(number) / str(inode)))
        found = next(on, None)
        return home(inode, self._disks.shares()) if found is None else found

    def _path(self, inode: int) -> Path:
        return self._directory(self.disk_of(inode)) / str(inode)

    def _directory(self, number: int) -> Path:
        return self._disks.places[number] / BLOCKS_DIRECTORY

    def _all_files(self) -> Iterator[Path]:
        for number in self._disks.numbers:
            with contextlib.suppress(OSError):
                yield from self._directory(number).iterdir()


class Freeing:
    """Blocks of one file that this process has locked (`blocks`), so that no one else writes or commits them."""

    def __init__(self, path: Path, fd: int | None, blocks: list[int]) -> None:
        self._path = path
        self._fd = fd  # None: there is no file
        self.blocks = blocks
        self.handed_out = fd is not None and _has_mark(os.fstat(fd))
        """Whether someone may have mapped the file: then it is freed as a whole, or not at all."""

    @property
    def is_current(self) -> bool:
        """Whether no other file has taken this file's name."""
        return self._fd is not None or not self._path.exists()

    def punch(self, block: int) -> None:
        """Give the room of a block back to the disk; the caller has checked that the block has no record."""
        if self._fd is not None:
            _punch(self._fd, block)

    def unlink(self, is_empty: Callable[[], bool]) -> None:
        """Unlink the file, unless anybody has a lock on it, or `is_empty` says that it has blocks after all."""
        # While this process holds the lock, and the file has its name, no one gives the name to another file.
        if self._fd is not None and try_lock(self._fd, *_WHOLE) and os.fstat(self._fd).st_nlink and is_empty():
            self._path.unlink(missing_ok=True)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def _punch(fd: int, block: int) -> None:
    if _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, _start(block), BLOCK_BYTES) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _has_mark(found: os.stat_result) -> bool:
    return found.st_mode & stat.S_ISVTX != 0


def _write(fd: int, payload: bytes | memoryview, offset: int) -> None:
    rest = memoryview(payload)
    while rest:
        written = os.pwrite(fd, rest, offset)
        rest, offset = rest[written:], offset + written


def _start(block: int) -> int:
    return (block - 1) * BLOCK_BYTES
