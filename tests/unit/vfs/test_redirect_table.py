"""The rows that the manager writes, and how they are read."""

from __future__ import annotations

import pytest

from spiderfs.store.spare_records import MemoryRecords
from spiderfs.vfs.redirects import redirect_row, redirect_rows, substitute_of, substitutes_of

TABLES = ("redirect",)
WANTED, GIVEN, OTHER = 70_001, 70_002, 70_003


def test_rows_are_taken_away_again() -> None:
    records = MemoryRecords(TABLES)
    records.put([redirect_row(1, WANTED, GIVEN), redirect_row(2, WANTED, OTHER)])
    assert sorted(redirect_rows(records)) == [(WANTED, 1, GIVEN), (WANTED, 2, OTHER)]
    records.put([redirect_row(1, WANTED, None)])
    assert redirect_rows(records) == [(WANTED, 2, OTHER)]
    assert substitute_of(records, WANTED, 1) is None
    assert substitute_of(records, WANTED, 2) == OTHER


def test_a_table_of_redirects_is_read_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spiderfs.vfs.redirects._ROWS_AT_A_TIME", 3)
    records = MemoryRecords(TABLES)
    rows = [(wanted, number, 7) for wanted in range(5) for number in (1, 2)]
    records.put([redirect_row(number, wanted, given) for wanted, number, given in rows])
    assert redirect_rows(records) == rows


def test_the_substitutes_of_one_inode_are_not_those_of_the_next() -> None:
    records = MemoryRecords(TABLES)
    records.put([redirect_row(number, WANTED, GIVEN + number) for number in range(3)])
    records.put([redirect_row(0, WANTED + 1, OTHER)])
    assert substitutes_of(records, WANTED, 64) == [GIVEN, GIVEN + 1, GIVEN + 2]
    assert substitutes_of(records, WANTED, 2) == [GIVEN, GIVEN + 1]
    assert substitutes_of(records, WANTED - 1, 64) == []
