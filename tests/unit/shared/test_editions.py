"""Files that one process replaces and others follow."""

from __future__ import annotations

import os
from pathlib import Path

from spiderfs.shared.published import edition_of


def publish(path: Path, text: str, mtime_ns: int) -> None:
    path.with_suffix(".new").write_text(text)
    os.utime(path.with_suffix(".new"), ns=(mtime_ns, mtime_ns))
    path.with_suffix(".new").rename(path)


def test_a_file_that_was_replaced_within_one_tick_of_the_clock_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "trainers.json"
    assert edition_of(path) is None
    publish(path, "[1]", 5)
    first = edition_of(path)
    assert first == edition_of(path)
    publish(path, "[2]", 5)
    second = edition_of(path)
    assert first != second
    # In place, as on a full disk.
    path.write_text("[22]")
    os.utime(path, ns=(5, 5))
    assert edition_of(path) not in (first, second)
