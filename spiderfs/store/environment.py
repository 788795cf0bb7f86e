"""Opening LMDB so that neither a crash nor a damaged file can hurt a mount.

spiderfs never syncs: a killed process loses nothing, since the pages are the kernel's, and after a power loss the cache
is rebuilt, since it is only a cache. These rules make that safe:

- `claim` leaves a marker with the machine's boot id while the store is in use and `release` removes it. A marker of
  another boot means that pages may be missing: the store is wiped.
- `is_sound` walks through the store in a forked child before anybody uses it, because damage shows as SIGBUS or abort()
  as often as it shows as an error. Before a mount the walk ends after a moment, so that a large cache does not delay
  it.
- If a store turns out to be damaged later, the process that notices ends with EXIT_STORE_CORRUPT (`StoreCorrupt`).

Only this package imports lmdb. The daemon opens environments after fork, never before (py-lmdb, "Environment class").
A reader's own process may fork at any time: the child gives up the environments that were open, without closing them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import shutil
import signal
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import lmdb

from spiderfs.errors import StoreCorrupt, StoreError, StoreFull
from spiderfs.shared.layout import (
    BLOCKS_DIRECTORY,
    DATA_FILE,
    EXTENTS_FILE,
    EXTENTS_MAP_FILE,
    FORMAT_FILE,
    IN_USE_FILE,
)

# Address space, not disk: the file grows only as records are written. One figure for every process, because LMDB wants
# them to agree. 4 TiB stays well inside the 128 TiB of a process.
MAP_BYTES = 4 << 40
# One slot per reading transaction of every process; 126, LMDB's own default, is too few for 64 workers with threads.
MAX_READERS = 1024
# sysexits.h leaves 79 and up free.
EXIT_STORE_CORRUPT = 79
SOUNDNESS_TIMEOUT_S = 60.0
# The walk reads a page for each record: 100,000 records take 0.2 s from memory and 7 s from a cold SSD. Records that
# the walk does not reach are verified when they are used, and after a crash of a process the whole store is walked.
CLAIM_WALK_S = 2.0

# Errors of a disk that is full; py-lmdb passes on their texts alone. LMDB turns a write that was cut short into EIO,
# and the last write before a disk is full is cut short (mdb_page_flush: "TODO: Use which error code?").
_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))
# The format of rows; it gets a new number with each change. A store that says nothing has format 1.
FORMAT = "5"


def open_environment(path: Path, tables: int, readonly: bool = False) -> lmdb.Environment:
    """Open the environment in directory `path`, or create it; raises StoreFull, StoreCorrupt, StoreError.

    One environment can be open once in a process. `readonly` creates nothing, and survives a fork of the process.
    """
    with translated_errors():
        env = lmdb.open(
            os.fsencode(path),
            map_size=MAP_BYTES,
            max_dbs=tables,
            readonly=readonly,
            create=not readonly,
            # This is the mode of the directory; its files get the same without the right to execute.
            mode=0o700,
            max_readers=MAX_READERS,
            # Ended read transactions are kept and renewed: one allocation and one lock less per request.
            max_spare_txns=4,
            sync=False,
            metasync=False,
            # Reads are random: read-ahead of the mapping would fetch pages that no one wants.
            readahead=False,
            # Else what this process had in memory before, which may be a secret, would fill unused parts of pages.
            meminit=True,
        )
    if readonly:
        _readers.add(env)
    return env


_readers: weakref.WeakSet[lmdb.Environment] = weakref.WeakSet()


def _abandon_readers() -> None:
    """In a child after fork: never let the parent's environments be closed here.

    Closing one gives back reader slots that are the parent's, and with its lock file's descriptor all locks that this
    process holds on that file go (fcntl(2)), those of its own environment too. One reference too many keeps each.
    """
    for env in list(_readers):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(env))
    _readers.clear()


os.register_at_fork(after_in_child=_abandon_readers)

_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.PanicError,
    lmdb.BadTxnError,
    # The map has one fixed size, far beyond any disk: only a damaged page can claim that there is more than fits.
    lmdb.MapResizedError,
    lmdb.PageFullError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.BadDbiError,
)


def translate(exc: lmdb.Error) -> StoreError | StoreCorrupt:
    """The project's error for one of lmdb's."""
    if isinstance(exc, _DAMAGE):
        return StoreCorrupt(f"the cache is damaged ({exc})")
    if isinstance(exc, (lmdb.MapFullError, lmdb.DiskError)) or any(words in str(exc) for words in _FULL):
        return StoreFull(f"no space left for the cache ({exc})")
    return StoreError(f"the cache cannot be used ({exc})")


@contextlib.contextmanager
def translated_errors() -> Iterator[None]:
    """Turn lmdb's errors into the project's; the read path catches for itself, a generator costs it 1 us."""
    try:
        yield
    except lmdb.Error as exc:
        raise translate(exc) from exc


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def translated_disk_errors(no_room: tuple[int, ...] = NO_ROOM) -> Iterator[None]:
    """Turn OSErrors of a file beside LMDB into the project's errors; those of `no_room` mean that the disk is full."""
    try:
        yield
    except OSError as exc:
        if exc.errno in no_room:
            raise StoreFull(f"no space left for the cache ({exc.strerror})") from exc
        raise StoreError(f"the cache cannot be used ({exc.strerror})") from exc


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def claim(directory: Path) -> str | None:
    """Mark the directory, which the caller has locked, as in use; returns why the old store was wiped, if it was."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    marker = directory / IN_USE_FILE
    reason = None
    written_format, last_boot = _word(directory / FORMAT_FILE, "1"), _word(marker, boot_id())
    if not (written_format and last_boot):
        reason = f"{IN_USE_FILE if written_format else FORMAT_FILE} is damaged"
    elif _environments(directory) and written_format != FORMAT:
        reason = "it was written by another version of spiderfs"
    elif last_boot != boot_id():
        reason = "the machine went down while the cache was in use"
    else:
        for environment in _environments(directory):
            if lost := lost_chunks(environment):
                reason = f"{lost} is lost"
            elif not is_sound(environment, CLAIM_WALK_S):
                reason = f"{environment.name} is damaged"
            if reason:
                break
    if reason:
        wipe(directory)
    (directory / FORMAT_FILE).write_text(FORMAT + "\n")
    marker.write_text(boot_id() + "\n")
    return reason


def _word(path: Path, absent: str) -> str:
    """The one word in a small file; `absent` if there is no file, and empty if what is there cannot be a word."""
    try:
        word = path.read_text("ascii", errors="replace").strip()
    except FileNotFoundError:
        return absent
    return word if word.isascii() and word.isprintable() else ""


def release(directory: Path, others: Iterable[Path] = ()) -> None:
    """Flush the store and `others`, on other disks, and remove the marker: what is there survives a power loss."""
    for environment in (*_environments(directory), *others):
        patterns = (DATA_FILE, f"{EXTENTS_FILE}*", f"{BLOCKS_DIRECTORY}/*")
        for path in (path for pattern in patterns for path in environment.glob(pattern)):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    (directory / IN_USE_FILE).unlink(missing_ok=True)


def wipe(directory: Path) -> None:
    for environment in _environments(directory):
        shutil.rmtree(environment)


def lost_chunks(environment: Path) -> Path | None:
    """The file of chunks, or the map of them, if it is gone while the other one is there and needs it."""
    chunks, map_of_them = environment / EXTENTS_FILE, environment / EXTENTS_MAP_FILE
    if chunks.exists():
        return None if map_of_them.exists() else map_of_them
    # A process that has leased nothing leaves an empty map.
    return chunks if map_of_them.exists() and map_of_them.stat().st_size else None


def _environments(directory: Path) -> list[Path]:
    return sorted(path.parent for path in directory.glob(f"*/{DATA_FILE}"))


def is_sound(path: Path, walk_s: float = math.inf) -> bool:
    """Walk every table's keys, for about `walk_s`, in a child process; a signal or a late answer counts as damage."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            # A crash is an expected answer here, so it leaves no core file and no message of the Python runtime.
            for number in (signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT):
                signal.signal(number, signal.SIG_DFL)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            _walk(path, time.monotonic() + walk_s)
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + SOUNDNESS_TIMEOUT_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        time.sleep(0.002)
    # The child is not waited for here, because it may hang in the kernel; the supervisor reaps it later.
    os.kill(child, signal.SIGKILL)
    return False


def _walk(path: Path, until_s: float) -> None:
    # The walk has no read-ahead, and below it leaves out the values, since py-lmdb touches every page of a value: 2,000
    # records of 100 kB from a cold disk take 0.14 s without their bytes, and 3.6 s with them.
    env = lmdb.open(
        os.fsencode(path), map_size=MAP_BYTES, max_dbs=16, readonly=True, lock=False, create=False, readahead=False
    )
    file_bytes = os.stat(path / DATA_FILE).st_size
    page_bytes = int(env.stat()["psize"])
    last_page = int(env.info()["last_pgno"])
    if file_bytes < 2 * page_bytes or last_page < 1:
        raise StoreCorrupt("the file is too short")
    # If the file is shorter than LMDB says, either the last pages are empty and were never written, or the file was
    # truncated. The walk finds that out: it ends by SIGBUS where a page of the tree or of a value is missing.
    whole = file_bytes >= (last_page + 1) * page_bytes
    with env.begin(buffers=True) as txn:
        names = [bytes(name) for name, _ in txn.cursor()]
        for name in names:
            table = env.open_db(name, txn=txn, create=False)
            with txn.cursor(table) as cursor:
                rows: Iterator[object] = (
                    cursor.iternext(keys=True, values=False) if whole else (bytes(value[-1:]) for _, value in cursor)
                )
                for _ in rows:
                    if time.monotonic() > until_s:
                        return
    env.close()
