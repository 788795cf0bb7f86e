"""Files that one process replaces and others follow."""

from __future__ import annotations

import os
from pathlib import Path

import trio

from spiderfs.daemon.worker import _follow
from spiderfs.shared.editions import edition_of


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


def test_a_worker_takes_over_what_was_replaced_within_one_tick(tmp_path: Path) -> None:
    path, read = tmp_path / "trainers.json", []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_follow, path, 0.001, lambda: read.append(path.read_text()))
            with trio.fail_after(10):
                for text in ("[1]", "[2]", "[3]"):
                    publish(path, text, 5)
                    while read[-1:] != [text]:
                        await trio.sleep(0.001)
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert read == ["[1]", "[2]", "[3]"]
