"""The bytes of whole files: chunks of one file beside LMDB, whose rows say which chunks a file has.

LMDB writes a value of 100 kB into pages that it has to find, and copies it on the way: 40 to 103 us. Written over
chunks of a file that are in the page cache, it takes 20 us, and whoever has fetched the bytes may write them. A chunk
is written again and not punched, because a page that is new to the page cache costs as much as the copy.

A second file, the **map**, has a byte for each chunk: 0 if it is free, else the number of the process that has leased
it. A process that is about to commit the loss of a row first makes its chunks its own, and frees them afterwards. It
holds a lock for its number as long as it lives (`linux/range_lock.py`), so chunks of dead processes can be found that
no row names. Those that a row names get a number that no process has, and need not be looked at again. The map is read
and written by system calls, because a mapping would end the process by SIGBUS where the disk is full or fails. It is
made before the file of chunks. Where that exists and the map is gone, no process makes another one, by which it would
lease chunks of files that rows name; `environment.claim` wipes such a store.

Bytes may be read while their chunks are freed and written again: readers verify what they have read by the row's
checksums, and look at the row again if that fails.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from spiderfs.errors import StoreCorrupt, StoreError
from spiderfs.linux.range_lock import lock_exclusive, locked, try_lock, unlock
from spiderfs.shared.layout import EXTENTS_FILE, EXTENTS_MAP_FILE
from spiderfs.store.disks import Disks, spread
from spiderfs.store.environment import NO_ROOM, translated_disk_errors

if TYPE_CHECKING:
    # The manager alone needs it, when another process has died.
    import numpy as np
    from numpy.typing import NDArray

    Chunks = NDArray[np.intp]

CHUNK_BYTES = 16 << 10
"""Waste is half a chunk for each file; with twice as much, 14 % of the disk at 110 kB a file."""
# Where the map begins in its file; before it, the number of chunks.
_MAP_AT = 4096
_COUNT = struct.Struct("<Q")
_RUN = struct.Struct("<II")
_MOST_OWNERS = 250
_SETTLED = 255
# Locks lie behind any map: one for changes of the map, and one for each owner.
_CHANGE_AT = 1 << 61
_OWNERS_AT = _CHANGE_AT + 1
# The file grows by a sixteenth, at most by this.
_MOST_GROWTH = (64 << 20) // CHUNK_BYTES
# What it leaves of the disk to rows: a disk that is full to the last byte could not even say what leaves the cache.
_LEFT_BYTES = 4 << 20
_WINDOW = 16 << 10
_NO_ROOM = (*NO_ROOM, errno.EFBIG)
_translated = partial(translated_disk_errors, _NO_ROOM)


class Lease(NamedTuple):
    """Chunks for one file: pairs of the first chunk of a run and how many there are, in the order of the bytes."""

    runs: tuple[tuple[int, int], ...]
    disk: int = 0

    def packed(self) -> bytes:
        # A byte more than the runs says that the disk is not the first one.
        return b"".join(_RUN.pack(*run) for run in self.runs) + (bytes([self.disk]) if self.disk else b"")

    @classmethod
    def unpacked(cls, packed: bytes) -> Lease:
        beyond = len(packed) % _RUN.size
        if not beyond:
            return cls(tuple(_RUN.iter_unpack(packed)))
        return cls(tuple(_RUN.iter_unpack(packed[:-beyond])), int.from_bytes(packed[-beyond:]))

    def pieces(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """Where bytes [offset, offset + length) of the file lie: places in the file of chunks, and lengths."""
        for first, count in self.runs:
            run_bytes = count * CHUNK_BYTES
            if offset < run_bytes and length > 0:
                taken = min(run_bytes - offset, length)
                yield first * CHUNK_BYTES + offset, taken
                offset, length = 0, length - taken
            else:
                offset -= run_bytes if offset >= run_bytes else 0


class Extents:
    """The chunks of one disk, and their map; in any thread."""

    def __init__(self, path: Path, map_path: Path, readonly: bool = False) -> None:
        self._path, self._map_path = path, map_path
        self._flags = os.O_CLOEXEC | (os.O_RDONLY if readonly else os.O_RDWR)
        self._fd = self._map_fd = -1
        self._owner = self._at = 0
        self._opening, self._changing = threading.Lock(), threading.Lock()

    @property
    def fd(self) -> int:
        if self._fd < 0:
            with self._opening, _translated():
                if self._fd < 0:
                    self._fd = os.open(self._path, self._flags)
        return self._fd

    def write(self, lease: Lease, payload: bytes) -> None:
        """Raises StoreFull, StoreError."""
        view, done = memoryview(payload), 0
        with _translated():
            for place, length in lease.pieces(0, len(payload)):
                while length:
                    written = os.pwrite(self.fd, view[done : done + length], place)
                    done, place, length = done + written, place + written, length - written

    def read(self, lease: Lease, offset: int, length: int) -> bytes:
        """The bytes at this place of the file; fewer at the end of the chunks. Raises OSError, StoreError."""
        if len(lease.runs) == 1:
            ((first, count),) = lease.runs
            return os.pread(self.fd, max(0, min(length, count * CHUNK_BYTES - offset)), first * CHUNK_BYTES + offset)
        return b"".join([os.pread(self.fd, size, place) for place, size in lease.pieces(offset, length)])

    def lease(self, sizes: Sequence[int]) -> list[Lease]:
        """Chunks for files of these sizes, theirs until they are freed; raises StoreFull, StoreError."""
        wanted = [max(1, -(-size // CHUNK_BYTES)) for size in sizes]
        leases = []
        with self._changed() as count:
            runs = self._found(sum(wanted), count)
            for first, length in runs:
                os.pwrite(self._map_fd, bytes([self._owner]) * length, _MAP_AT + first)
        free = iter(runs)
        first = length = 0
        for chunks in wanted:
            mine = []
            while chunks:
                if not length:
                    first, length = next(free)
                taken = min(length, chunks)
                mine.append((first, taken))
                first, length, chunks = first + taken, length - taken, chunks - taken
            leases.append(Lease(tuple(mine)))
        return leases

    def free(self, leases: Iterable[Lease]) -> None:
        """Free chunks that this process owns; never raises: what a failing disk keeps is found after its end."""
        own = list(leases)
        if not own:
            return
        with contextlib.suppress(StoreError), self._changed():
            for first, length in _runs(own):
                if os.pread(self._map_fd, length, _MAP_AT + first) == bytes([self._owner]) * length:
                    os.pwrite(self._map_fd, bytes(length), _MAP_AT + first)

    def take_over(self, leases: Iterable[Lease]) -> None:
        """Make these chunks this process's, which is about to commit that no row names them; raises StoreError.

        If it dies before it has freed them, they are found as those that it has leased.
        """
        others = list(leases)
        if others:
            with self._changed():
                for first, length in _runs(others):
                    os.pwrite(self._map_fd, bytes([self._owner]) * length, _MAP_AT + first)

    def abandoned(self) -> Chunks:
        """The chunks that dead processes had leased, for `settle`; raises StoreError."""
        import numpy as np

        with self._changed() as count:
            return np.flatnonzero(np.isin(*self._owners(count)))

    def settle(self, chunks: Chunks, named: Chunks) -> None:
        """Free those of these chunks of dead processes that no row names; raises StoreError.

        The others belong to no process from then on, so that they are not looked at again.
        """
        import numpy as np

        with self._changed() as count:
            owners, dead = self._owners(count)
            owners = owners.copy()
            # A chunk that was freed meanwhile, and perhaps leased again, is no longer a dead process's.
            still = chunks[chunks < count]
            still = still[np.isin(owners[still], dead)]
            owners[still] = np.where(np.isin(still, named), _SETTLED, 0)
            os.pwrite(self._map_fd, owners.tobytes(), _MAP_AT)

    def _owners(self, count: int) -> tuple[NDArray[np.uint8], list[int]]:
        """The owner of each chunk, and those owners that are dead."""
        import numpy as np

        owners, living = np.frombuffer(os.pread(self._map_fd, count, _MAP_AT), np.uint8), (0, self._owner, _SETTLED)
        candidates = [int(owner) for owner in np.flatnonzero(np.bincount(owners, minlength=1)) if owner not in living]
        return owners, [owner for owner in candidates if not locked(self._map_fd, _OWNERS_AT + owner, 1)]

    def trim(self) -> None:
        """Give free chunks at the end of the file back to the disk; raises StoreError."""
        with self._changed() as count:
            used = len(os.pread(self._map_fd, count, _MAP_AT).rstrip(b"\0"))
            if used < count:
                os.pwrite(self._map_fd, _COUNT.pack(used), 0)
                os.ftruncate(self.fd, used * CHUNK_BYTES)
                os.ftruncate(self._map_fd, _MAP_AT + used)

    def disk_bytes(self) -> int:
        try:
            return os.stat(self._path).st_blocks * 512
        except OSError:
            return 0

    def close(self) -> None:
        for fd in (self._fd, self._map_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._map_fd = -1

    # -- the map

    @contextlib.contextmanager
    def _changed(self) -> Iterator[int]:
        """No one else changes the map meanwhile; gives the number of chunks. Raises StoreFull, StoreError."""
        with self._changing, _translated():
            if self._map_fd < 0:
                self._open()
            lock_exclusive(self._map_fd, _CHANGE_AT, 1)
            try:
                yield self._count()
            finally:
                unlock(self._map_fd, _CHANGE_AT, 1)

    def _count(self) -> int:
        head = os.pread(self._map_fd, _COUNT.size, 0)
        count: int = _COUNT.unpack(head)[0] if len(head) == _COUNT.size else 0
        if count > max(0, os.fstat(self._map_fd).st_size - _MAP_AT):
            raise StoreCorrupt("the cache is damaged (the map of chunks is too short)")
        return count

    def _open(self) -> None:
        with contextlib.ExitStack() as on_failure:
            fd = os.open(self._map_path, self._flags | (0 if self._path.exists() else os.O_CREAT), 0o600)
            on_failure.callback(os.close, fd)
            chunks = os.pread(fd, max(0, os.fstat(fd).st_size - _MAP_AT), _MAP_AT)
            first = int.from_bytes(os.urandom(2)) % _MOST_OWNERS
            numbers = [(first + number) % _MOST_OWNERS + 1 for number in range(_MOST_OWNERS)]
            # Chunks of a dead process would be taken for those of this one, if it had the same number.
            candidates = chain((number for number in numbers if chunks.find(number) < 0), numbers)
            owner = next((number for number in candidates if try_lock(fd, _OWNERS_AT + number, 1)), None)
            if owner is None:
                raise StoreError(f"more than {_MOST_OWNERS} processes write to one cache")
            self._owner, self._map_fd = owner, fd
            on_failure.pop_all()

    def _found(self, wanted: int, count: int) -> list[tuple[int, int]]:
        """Runs of free chunks, behind those that were found last; the file grows if there are not enough."""
        runs: list[tuple[int, int]] = []
        begin = self._at if self._at < count else 0
        for start, end in ((begin, count), (0, begin)):
            for at in range(start, end, _WINDOW):
                window = os.pread(self._map_fd, min(_WINDOW, end - at), _MAP_AT + at)
                place = window.find(0)
                while place >= 0 and wanted:
                    length = 1
                    while length < wanted and place + length < len(window) and not window[place + length]:
                        length += 1
                    runs.append((at + place, length))
                    wanted -= length
                    place = window.find(0, place + length)
                if not wanted:
                    self._at = sum(runs[-1])
                    return runs
        self._grow(count, wanted)
        self._at = count + wanted
        return [*runs, (count, wanted)]

    def _grow(self, count: int, wanted: int) -> None:
        if not count:
            os.close(os.open(self._path, self._flags | os.O_CREAT, 0o600))
        for more in (max(wanted, min(count // 16, _MOST_GROWTH)), wanted):
            try:
                disk = os.fstatvfs(self.fd)
                if disk.f_bavail * disk.f_frsize < more * CHUNK_BYTES + _LEFT_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.posix_fallocate(self._map_fd, _MAP_AT, count + more)
                os.posix_fallocate(self.fd, count * CHUNK_BYTES, more * CHUNK_BYTES)
            except OSError as exc:
                os.ftruncate(self.fd, count * CHUNK_BYTES)
                if exc.errno not in _NO_ROOM or more == wanted:
                    raise
                continue
            os.pwrite(self._map_fd, bytes(more), _MAP_AT + count)
            os.pwrite(self._map_fd, _COUNT.pack(count + more), 0)
            return


class ExtentsOfDisks:
    """The chunks on all disks, of which one that fails is left out; for any thread. See `Extents`."""

    def __init__(self, disks: Disks, readonly: bool = False) -> None:
        self._disks = disks
        self.files = {
            number: Extents(place / EXTENTS_FILE, place / EXTENTS_MAP_FILE, readonly)
            for number, place in disks.places.items()
        }

    def lease(
        self, sizes: Sequence[int], used: Mapping[int, int] | None = None, full: frozenset[int] = frozenset()
    ) -> list[Lease | None]:
        """Chunks for files of these sizes, None for one that lies in its row; raises StoreFull, StoreError.

        `used` is the bytes on each disk. Nothing goes to those that are `full`.
        """
        if not self._disks.several:
            chunked = [size for size in sizes if is_chunked(size)]
            own = iter(self.files[0].lease(chunked) if chunked else ())
            return [next(own) if is_chunked(size) else None for size in sizes]
        chosen = spread(sizes, used or {}, self._disks.shares(full))
        leases: list[Lease | None] = [None] * len(sizes)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.free, leases)
            for number in sorted(set(chosen)):
                places = [at for at, disk in enumerate(chosen) if disk == number and (number or is_chunked(sizes[at]))]
                mine, found = [sizes[at] for at in places], list[Lease | None]()
                try:
                    with self._disks.watched(number):
                        found += [it._replace(disk=number) for it in self.files[number].lease(mine)] if mine else []
                except StoreError:
                    if not set(self._disks.numbers) - full - {number}:
                        raise
                    found += self.lease(mine, used, full | {number})
                for at, lease in zip(places, found, strict=True):
                    leases[at] = lease
            on_failure.pop_all()
        return leases

    def write(self, lease: Lease, payload: bytes) -> None:
        with self._disks.watched(lease.disk):
            self.files[lease.disk].write(lease, payload)

    def read(self, lease: Lease, offset: int, length: int) -> bytes:
        """The bytes at this place of the file; fewer, or none, where the disk gives no more."""
        if lease.disk and not self._disks.has(lease.disk):
            return b""
        try:
            return self.files[lease.disk].read(lease, offset, length)
        except (OSError, StoreError) as exc:
            self._disks.failed(lease.disk, exc)
            return b""

    def free(self, leases: Iterable[Lease | None]) -> None:
        for number, mine in self._by_disk(leases):
            self.files[number].free(mine)

    def take_over(self, leases: Iterable[Lease]) -> None:
        for number, mine in self._by_disk(leases):
            # What another disk loses must keep no row from being dropped.
            with contextlib.suppress(StoreError) if number else contextlib.nullcontext(), self._disks.watched(number):
                self.files[number].take_over(mine)

    def _by_disk(self, leases: Iterable[Lease | None]) -> list[tuple[int, list[Lease]]]:
        given = [it for it in leases if it is not None and (not it.disk or self._disks.has(it.disk))]
        if not self._disks.several:
            return [(0, given)] if given else []
        return [(number, mine) for number in self._disks.numbers if (mine := [it for it in given if it.disk == number])]

    def abandoned(self) -> dict[int, Chunks]:
        """The chunks that dead processes had leased, by disk."""
        found = {}
        for number in self._disks.numbers:
            with self._disks.watched(number):
                found[number] = self.files[number].abandoned()
        return {number: chunks for number, chunks in found.items() if len(chunks)}

    def trim(self) -> None:
        for number in self._disks.numbers:
            self.files[number].trim()

    def disk_bytes(self) -> int:
        return sum(self.files[number].disk_bytes() for number in self._disks.numbers)

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def is_chunked(size: int) -> bool:
    """Whether a payload of this size lies in chunks on the first disk, and not in its row."""
    return size > CHUNK_BYTES


def _runs(leases: Iterable[Lease]) -> Iterator[tuple[int, int]]:
    return (run for lease in leases for run in lease.runs)
