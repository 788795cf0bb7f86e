"""The store's contract for records, kept in memory: for records that the disk does not take, and for tests."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence

from spiderfs.store.store import Left, Row


class MemoryRecords:
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
