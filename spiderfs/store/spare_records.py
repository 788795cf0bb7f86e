"""Records of names for a disk that may fail: rows that the disk refuses are kept in memory.

A disk that turns read-only, fails or vanishes must not become a reader's error, and no inode can be opened without its
record. So a row that the disk refuses is kept in memory, where it hides the disk's row of the same key; if a read of
the disk fails, the rows in memory are the answer. As soon as the disk accepts a write again, all rows in memory are
written to it too.

Each process has rows of its own in memory, so a name that one worker has looked up while the disk is broken is looked
up again by the next. But the open that follows a look-up may come to another worker. So the rows that say what inodes
mean are also kept in memory that all processes share, with a flag that there are such rows: a directory that was listed
for one worker may have to be listed again for another.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from spiderfs.errors import StoreError, StoreFull
from spiderfs.shared.shared_memory import RecentRecords
from spiderfs.store.records import LmdbRecords
from spiderfs.store.store import Left, Row


class MemoryRecords:
    """The store's contract for records, kept in memory: for records that the disk does not take, and for tests."""

    def __init__(self, tables: Iterable[str]) -> None:
        self._rows: dict[str, dict[bytes, bytes]] = {name: {} for name in tables}
        self._order: dict[str, list[bytes]] = {name: [] for name in self._rows}

    def get(self, table: str, key: bytes) -> bytes | None:
        return self._rows[table].get(key)

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self._rows[table].get(key) for key in keys]

    def put(self, rows: Iterable[Row], leave: Left | None = None, unless: Callable[[], bool] | None = None) -> None:
        if unless is not None and unless():
            return
        for table, key, value in rows:
            known, order = self._rows[table], self._order[table]
            if leave is not None and table == leave[0] and key in known and leave[1](known[key]):
                continue
            if value is None:
                if known.pop(key, None) is not None:
                    del order[bisect_left(order, key)]
            else:
                if key not in known:
                    insort(order, key)
                known[key] = value

    def scan(self, table: str, start: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        first = bisect_left(self._order[table], start)
        rows = self._rows[table]
        # Another thread may just be putting or deleting a row.
        found = ((key, rows.get(key)) for key in self._order[table][first : first + limit])
        return [(key, value) for key, value in found if value is not None]

    def count(self, table: str) -> int:
        return len(self._rows[table])

    def close(self) -> None:
        pass


log = logging.getLogger(__name__)

T = TypeVar("T")

# This many rows take some 300 MB. One more is refused: to forget another row instead would leave a name out of a
# listing, which is worse.
MOST_ROWS = 1_000_000
INODES = "inode"
# Memory for as many rows of inodes as those with paths of 860 bytes; it is used as far as there are rows.
SHARED_BYTES = 512 << 20
# Rows that go to the disk first when it may take rows again; each time that it does, twice as many follow.
_FIRST_ROWS = 16


class SharedRows:
    """Rows that processes share, and the flag that there are any; make it before forking them."""

    def __init__(self) -> None:
        self._rows = RecentRecords(SHARED_BYTES)
        self._flag = mmap.mmap(-1, 1)

    @property
    def in_use(self) -> bool:
        """Whether some process has names in memory that others do not have."""
        return self._flag[0] != 0

    @in_use.setter
    def in_use(self, value: bool) -> None:
        self._flag[0] = value

    def put(self, key: bytes, value: bytes) -> None:
        """Keep a row; only more bytes of newer rows than SHARED_BYTES push it out."""
        # A name that is looked up again and again must not push others out.
        if self.get(key) != value:
            self._rows.put(key, value)

    def get(self, key: bytes) -> bytes | None:
        return self._rows.get(key)


class SpareRecords:
    """`Records` on top of those on the disk (None if the disk has none); `shared` holds rows of the table INODES."""

    def __init__(self, disk: LmdbRecords | None, tables: Iterable[str], shared: SharedRows) -> None:
        self._disk = disk
        self._shared = shared
        self._tables = tuple(tables)
        self._spare: MemoryRecords | None = None if disk else MemoryRecords(self._tables)
        # Keys of rows that were deleted, and that the disk still has.
        self._deleted: set[tuple[str, bytes]] = set()
        self._writing = threading.Lock()

    def get(self, table: str, key: bytes) -> bytes | None:
        if (spare := self._spare) is not None:
            row = spare.get(table, key)
            if row is not None or (table, key) in self._deleted:
                return row
        row = self._ask(lambda disk: disk.get(table, key), None)
        return self._shared.get(key) if row is None and table == INODES else row

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[bytes | None]:
        if self._spare is not None:
            return [self.get(table, key) for key in keys]
        return self._ask(lambda disk: disk.get_many(table, keys), [None] * len(keys))

    def put(self, rows: Iterable[Row], leave: Left | None = None, unless: Callable[[], bool] | None = None) -> None:
        rows = list(rows)
        # One thread at a time moves rows between memory and disk.
        with self._writing:
            if self._disk is not None:
                try:
                    if self._spare is not None:
                        self._give_back(self._disk, self._spare, {(table, key) for table, key, _ in rows})
                    self._disk.put(rows, leave, unless)
                    return
                except StoreError as exc:
                    if self._spare is None:
                        log.warning("%s: names are kept in memory until the disk takes them", exc)
                        self._spare = MemoryRecords(self._tables)
            if unless is None or not unless():
                self._keep(rows, leave)

    def scan(self, table: str, start: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        if self._spare is None:
            return self._ask(lambda disk: disk.scan(table, start, limit), [])
        hidden = len(self._deleted)
        below: list[tuple[bytes, bytes]] = self._ask(lambda disk: disk.scan(table, start, limit + hidden), [])
        rows = {key: value for key, value in below if (table, key) not in self._deleted}
        end = below[-1][0] if len(below) == limit + hidden else None
        rows |= {key: value for key, value in self._spare.scan(table, start, limit) if end is None or key <= end}
        return sorted(rows.items())[:limit]

    def count(self, table: str) -> int:
        spare = 0 if self._spare is None else self._spare.count(table)
        return self._ask(lambda disk: disk.count(table), 0) + spare

    def reserve(self) -> None:
        """See `LmdbRecords.reserve`."""
        if self._disk is not None:
            self._disk.reserve()

    def clear_dead_readers(self) -> int:
        return self._ask(lambda disk: disk.clear_dead_readers(), 0)

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()

    def _ask(self, question: Callable[[LmdbRecords], T], unknown: T) -> T:
        if self._disk is None:
            return unknown
        try:
            return question(self._disk)
        except StoreError as exc:
            log.debug("%s: names are asked for at the source", exc)
            return unknown

    def _give_back(self, disk: LmdbRecords, spare: MemoryRecords, first: set[tuple[str, bytes]]) -> None:
        """Write the rows in memory to the disk, `first` these, in batches that begin small; raises StoreError.

        So what a disk without room has to refuse at each look-up does not grow with the rows that wait.
        """
        limit = _FIRST_ROWS
        wanted = {(table, key) for table, key in first if spare.get(table, key) is not None} | (first & self._deleted)
        while True:
            for table in self._tables:
                wanted.update((table, key) for key, _ in spare.scan(table, b"", max(limit - len(wanted), 0)))
            wanted.update(itertools.islice(self._deleted, max(limit - len(wanted), 0)))
            if not wanted:
                break
            disk.put([(table, key, spare.get(table, key)) for table, key in wanted])
            spare.put([(table, key, None) for table, key in wanted])
            self._deleted -= wanted
            wanted, limit = set(), 2 * limit
        log.warning("the disk of the cache takes names again")
        self._spare = None
        self._shared.in_use = False

    def _keep(self, rows: list[Row], leave: Left | None) -> None:
        assert self._spare is not None
        if sum(map(self._spare.count, self._tables)) + len(rows) > MOST_ROWS:
            raise StoreFull("the disk of the cache takes no names, and memory holds no more of them")
        self._shared.in_use = True
        for table, key, value in rows:
            there = self.get(table, key) if leave is not None and table == leave[0] else None
            if leave is not None and there is not None and leave[1](there):
                continue
            (self._deleted.add if value is None else self._deleted.discard)((table, key))
            self._spare.put([(table, key, value)])
            if value is not None and table == INODES:
                self._shared.put(key, value)
