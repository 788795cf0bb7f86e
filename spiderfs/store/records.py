"""Ordered records in LMDB: the tables in which the catalogue keeps names and attributes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import lmdb

from spiderfs.shared.layout import DATA_FILE
from spiderfs.store.environment import open_environment, translate, translated_errors
from spiderfs.store.rows import sealed, unsealed
from spiderfs.store.store import Left, Row

# Names must go on working when the disk is full, since without them no file can be served, cached or not. The file is
# therefore allocated ahead of its use: 32 MiB hold about 100,000 further names.
RESERVE_BYTES = 32 << 20


class LmdbRecords:
    """One environment with the given tables; all calls may come from any thread."""

    def __init__(self, path: Path, tables: Iterable[str], readonly: bool = False) -> None:
        names = tuple(tables)
        self._data_file = path / DATA_FILE
        self._env = open_environment(path, len(names), readonly)
        with translated_errors():
            self._tables = {name: self._env.open_db(name.encode(), create=not readonly) for name in names}

    def get(self, table: str, key: bytes) -> bytes | None:
        try:
            with self._env.begin(self._tables[table]) as txn:
                stored = txn.get(key)
        except lmdb.Error as exc:
            raise translate(exc) from exc
        return None if stored is None else unsealed(key, stored)

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[bytes | None]:
        with translated_errors(), self._env.begin(self._tables[table]) as txn, txn.cursor() as cursor:
            found = {key: unsealed(key, stored) for key, stored in cursor.getmulti(keys)}
        return [found.get(key) for key in keys]

    def put(self, rows: Iterable[Row], leave: Left | None = None, unless: Callable[[], bool] | None = None) -> None:
        with translated_errors(), self._env.begin(write=True) as txn:
            # `unless` reads outside this transaction, and so sees all that was committed before it.
            if unless is not None and unless():
                return
            for table, key, value in rows:
                if leave is not None and table == leave[0]:
                    there = txn.get(key, db=self._tables[table])
                    if there is not None and leave[1](unsealed(key, bytes(there))):
                        continue
                if value is None:
                    txn.delete(key, db=self._tables[table])
                else:
                    txn.put(key, sealed(key, value), db=self._tables[table])

    def scan(self, table: str, start: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        rows: list[tuple[bytes, bytes]] = []
        with translated_errors(), self._env.begin(self._tables[table]) as txn, txn.cursor() as cursor:
            if not cursor.set_range(start):
                return rows
            for key, stored in cursor:
                rows.append((key, unsealed(key, stored)))
                if len(rows) == limit:
                    break
        return rows

    def count(self, table: str) -> int:
        with translated_errors(), self._env.begin() as txn:
            return int(txn.stat(self._tables[table])["entries"])

    def reserve(self) -> None:
        """Allocate the file ahead of its use; raises OSError if the disk has no room for it."""
        used = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        fd = os.open(self._data_file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_blocks * 512 < used + RESERVE_BYTES // 2:
                os.posix_fallocate(fd, 0, used + RESERVE_BYTES)
        finally:
            os.close(fd)

    def clear_dead_readers(self) -> int:
        """Free the slots of readers that were killed; returns the number of slots."""
        with translated_errors():
            return int(self._env.reader_check())

    def close(self) -> None:
        self._env.close()
