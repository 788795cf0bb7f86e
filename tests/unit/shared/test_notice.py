"""Every worker takes over what is published, and no one wakes without it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from spiderfs.shared.shared_memory import Notice


def publish(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    os.utime(path.with_suffix(".new"), ns=(5, 5))
    path.with_suffix(".new").rename(path)


def test_every_worker_takes_over_what_was_replaced_within_one_tick(tmp_path: Path) -> None:
    notice, path, other = Notice(2), tmp_path / "trainers.json", tmp_path / "options.json"
    read: list[list[str]] = [[], []]
    publish(other, "{}")
    told = notice.after(lambda text: publish(path, text))

    async def follow(worker: int) -> None:
        takers = {path: lambda: read[worker].append(path.read_text()), other: lambda: read[worker].append("other")}
        await notice.follow(worker, takers)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            told("[0]")
            nursery.start_soon(follow, 0)
            nursery.start_soon(follow, 1)
            assert not notice.taken_over()
            # The clock of the test jumps to when someone wants to wake: here it is the test alone.
            await trio.sleep(1e6)
            for text in ("[1]", "[2]", "[3]"):
                assert notice.taken_over()
                told(text)
                assert not notice.taken_over()
                await trio.sleep(1e6)
            assert notice.taken_over()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0.001))
    assert read == [["[0]", "other", "[1]", "[2]", "[3]"]] * 2


def test_workers_hear_of_what_could_be_published_only_in_part(tmp_path: Path) -> None:
    notice, path, read = Notice(1), tmp_path / "options.json", []

    def fail(text: str) -> None:
        publish(path, text)
        raise OSError(text)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(notice.follow, 0, {path: lambda: read.append(path.exists())})
            await trio.sleep(1)
            with pytest.raises(OSError, match="half"):
                notice.after(fail)("half")
            await trio.sleep(1)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0.001))
    assert read == [True]
