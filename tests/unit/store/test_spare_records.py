"""Records over a disk that fails at times: what was written last is what is there, whatever took it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import hypothesis.strategies as st
import pytest
from hypothesis import given

from spiderfs.errors import StoreCorrupt, StoreError
from spiderfs.store.records import LmdbRecords
from spiderfs.store.spare_records import INODES, MemoryRecords, SharedRows, SpareRecords
from spiderfs.store.store import Left, Row

TABLES = (INODES, "dentry")
KEYS = st.integers(0, 9).map(b"%08d".__mod__)


class Disk(MemoryRecords):
    """One that can be made to refuse writes, or everything."""

    writes: Exception | None = None
    reads: Exception | None = None

    def __init__(self, tables: Iterable[str]) -> None:
        super().__init__(tables)
        self.asked_for: list[int] = []

    def get(self, table: str, key: bytes) -> bytes | None:
        self._ask()
        return super().get(table, key)

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[bytes | None]:
        self._ask()
        return super().get_many(table, keys)

    def scan(self, table: str, start: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        self._ask()
        return super().scan(table, start, limit)

    def put(self, rows: Iterable[Row], leave: Left | None = None, unless: Callable[[], bool] | None = None) -> None:
        rows = list(rows)
        self.asked_for.append(len(rows))
        if self.writes:
            raise self.writes
        super().put(rows, leave, unless)

    def _ask(self) -> None:
        if self.reads:
            raise self.reads


def over(disk: Disk | None, shared: SharedRows | None = None) -> SpareRecords:
    return SpareRecords(cast(LmdbRecords, disk) if disk is not None else None, TABLES, shared or SharedRows())


@given(
    st.lists(
        st.one_of(st.tuples(st.sampled_from(TABLES), KEYS, st.one_of(st.none(), st.binary(max_size=3))), st.booleans()),
        max_size=40,
    )
)
def test_what_is_there_is_what_was_written_last(steps: list[Row | bool]) -> None:
    disk, model = Disk(TABLES), MemoryRecords(TABLES)
    # Each example maps some memory; one for all of them would remember what another example wrote.
    records = over(disk)
    for step in steps:
        if isinstance(step, bool):
            disk.writes = StoreError("read-only") if step else None
            continue
        records.put([step])
        model.put([step])
        for table in TABLES:
            for limit in (1, 3, 100):
                assert records.scan(table, b"%08d" % 2, limit) == model.scan(table, b"%08d" % 2, limit)
            for number in range(10):
                key = b"%08d" % number
                if table != INODES:
                    assert records.get(table, key) == model.get(table, key)
            keys = [b"%08d" % number for number in range(10)]
            if table != INODES:
                assert records.get_many(table, keys) == model.get_many(table, keys)
    disk.writes = None
    records.put([("dentry", b"last", b"row")])
    model.put([("dentry", b"last", b"row")])
    assert all(disk.scan(table, b"", 100) == model.scan(table, b"", 100) for table in TABLES), "the disk has it all"


def test_what_an_inode_means_is_known_to_the_other_processes() -> None:
    shared, disk = SharedRows(), Disk(TABLES)
    disk.writes = StoreError("read-only")
    one, other = over(disk, shared), over(disk, shared)
    assert not shared.in_use
    one.put([(INODES, b"inode", b"row"), ("dentry", b"name", b"row"), (INODES, b"long", bytes(600))])
    assert shared.in_use
    assert other.get(INODES, b"inode") == b"row"
    assert other.get(INODES, b"long") == bytes(600)
    assert other.get(INODES, b"never") is other.get("dentry", b"name") is None


def test_no_row_of_an_inode_is_lost_to_the_other_processes() -> None:
    shared = SharedRows()
    one, other = over(None, shared), over(None, shared)
    rows = {b"%08d" % number: b"%d " % number * 250 for number in range(5000)}
    for key, value in rows.items():
        one.put([(INODES, key, value)])
    assert all(other.get(INODES, key) == value for key, value in rows.items())


def test_a_write_that_the_disk_refuses_costs_no_more_when_many_rows_wait() -> None:
    disk = Disk(TABLES)
    disk.writes = StoreError("no space left on the device")
    records = over(disk)
    for number in range(1000):
        records.put([("dentry", b"%08d" % number, b"row")])
    assert max(disk.asked_for) < 50
    disk.writes = None
    records.put([("dentry", b"last", b"row")])
    assert disk.count("dentry") == 1001, "the disk has them all"


def test_rows_wait_on_in_memory_when_a_write_is_not_wanted_any_more() -> None:
    disk = Disk(TABLES)
    disk.writes = StoreError("no space left on the device")
    records = over(disk)
    records.put([("dentry", b"a", b"1")])
    disk.writes = None
    records.put([("dentry", b"b", b"2")], unless=lambda: True)
    assert records.scan("dentry", b"", 10) == [(b"a", b"1")]


def test_a_disk_that_cannot_be_read_is_one_that_knows_nothing() -> None:
    disk = Disk(TABLES)
    records = over(disk)
    records.put([("dentry", b"a", b"1")])
    disk.reads = StoreError("input/output error")
    assert records.get("dentry", b"a") is None
    assert records.scan("dentry", b"", 10) == []
    disk.reads = None
    assert records.get("dentry", b"a") == b"1"


def test_without_any_disk_all_is_in_memory() -> None:
    shared = SharedRows()
    records = over(None, shared)
    records.put([("dentry", b"a", b"1"), ("dentry", b"b", b"2")])
    records.put([("dentry", b"a", None)], ("dentry", lambda row: row == b"1"))
    assert records.scan("dentry", b"", 10) == [(b"a", b"1"), (b"b", b"2")]
    assert shared.in_use


def test_a_damaged_store_is_reported() -> None:
    disk = Disk(TABLES)
    disk.writes = disk.reads = StoreCorrupt("damaged")
    with pytest.raises(StoreCorrupt):
        over(disk).put([("dentry", b"a", b"1")])
    with pytest.raises(StoreCorrupt):
        over(disk).get("dentry", b"a")
