"""The notes that a worker leaves behind when it dies."""

from __future__ import annotations

import errno
import os

import pytest
import trio
import trio.testing

from spiderfs.errors import DeadlyRequest, NotFound, StoreCorrupt
from spiderfs.fuse import resent_requests
from spiderfs.fuse.resent_requests import PUBLISHED, HeldRequests, ResentRequests
from spiderfs.metrics import SharedCounters

HELD, REFUSED_AFTER = 4, 3


class Notes:
    def __init__(self, workers: int = 1) -> None:
        self.counters = SharedCounters(workers)
        self.shared = ResentRequests(workers, HELD, REFUSED_AFTER)

    def of(self, worker: int = 0) -> HeldRequests:
        return self.shared.of_worker(worker, self.counters.row(worker))


@pytest.fixture(autouse=True)
def clock() -> trio.testing.MockClock:
    return trio.testing.MockClock(autojump_threshold=0)


def test_what_a_dead_process_held_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resent_requests, "FIRST_BEHIND_S", 3600.0)
    monkeypatch.setattr(resent_requests, "LONGEST_BEHIND_S", 3600.0)
    notes = Notes(workers=2)
    notes.shared.publish({8: 1})
    pid = os.fork()
    if pid == 0:
        try:

            async def die() -> None:
                os._exit(0)

            async def wait() -> None:
                await trio.sleep_forever()

            async def main() -> None:
                held = notes.of(1)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(held.answer, 7 | 1 << 63, "", wait)
                    nursery.start_soon(held.answer, 8, "", wait)
                    await trio.testing.wait_all_tasks_blocked()
                    await held.answer(9, "", die)

            trio.run(main)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert notes.shared.held_by(1) == ({7 | 1 << 63, 9}, {8})
    assert notes.shared.held_by(0) == (set(), set())
    notes.shared.forget(1)
    assert notes.shared.held_by(1) == (set(), set())


async def test_a_note_goes_with_its_answer_and_stays_if_the_worker_ends_of_it() -> None:
    notes = Notes()

    async def fail(how: BaseException) -> None:
        raise how

    held = notes.of()
    with pytest.raises(NotFound):
        await held.answer(1, "", lambda: fail(NotFound("no")))
    assert notes.shared.held_by(0) == (set(), set())
    with pytest.raises(StoreCorrupt):
        await held.answer(2, "", lambda: fail(StoreCorrupt("damaged")))
    with trio.CancelScope() as scope:
        # As when another task ends the worker, such as the one that watches the reading process.
        scope.cancel()
        await held.answer(3, "", lambda: trio.sleep(1))
    assert notes.shared.held_by(0) == ({2, 3}, set())


async def test_suspects_are_begun_one_at_a_time_and_behind_the_others() -> None:
    notes = Notes()
    notes.shared.publish({1: 1, 2: 2})
    order: list[str] = []

    async def handle(name: str) -> str:
        order.append(f"{name} begun")
        await trio.sleep(1)
        order.append(f"{name} done")
        return name

    held = notes.of()
    async with trio.open_nursery() as nursery:
        for number, name in ((1, "suspect"), (2, "suspect"), (3, "other")):
            nursery.start_soon(held.answer, number, name, lambda name=name: handle(name))
        await trio.sleep(resent_requests.FIRST_BEHIND_S / 2)
        assert order == ["other begun"]
        assert notes.shared.held_by(0) == ({3}, {1, 2})
    assert order[1:] == ["suspect begun", "other done", "suspect done", "suspect begun", "suspect done"]
    assert notes.shared.held_by(0) == (set(), set())


async def test_a_request_is_suspected_or_refused_once_by_a_worker() -> None:
    """Where a number follows from what is asked, the next one who asks it is treated like anybody."""
    notes = Notes()
    notes.shared.publish({1: REFUSED_AFTER - 1, 2: REFUSED_AFTER})

    async def handle() -> str:
        return "done"

    held = notes.of()
    for waited_s in (2 * resent_requests.FIRST_BEHIND_S, 0.0):
        began_s = trio.current_time()
        assert await held.answer(1, "READ of inode 5", handle) == "done"
        assert trio.current_time() - began_s == pytest.approx(waited_s)
    with pytest.raises(DeadlyRequest, match="READ of inode 6: 3 workers have died at this request") as caught:
        await held.answer(2, "READ of inode 6", handle)
    assert caught.value.errno == errno.EIO
    assert await held.answer(2, "READ of inode 6", handle) == "done"
    with pytest.raises(DeadlyRequest):
        await notes.of().answer(2, "READ of inode 6", handle)
    assert notes.counters.totals()["deadly_requests"] == 2


async def test_more_requests_than_notes_are_answered_too() -> None:
    notes = Notes()
    held = notes.of()
    async with trio.open_nursery() as nursery:
        for number in range(1, 2 * HELD):
            nursery.start_soon(held.answer, number, "", lambda: trio.sleep(1))
        await trio.testing.wait_all_tasks_blocked()
        assert len(notes.shared.held_by(0)[0]) == HELD
    assert notes.shared.held_by(0) == (set(), set())


async def test_of_too_many_counts_the_latest_are_published() -> None:
    notes = Notes()
    notes.shared.publish(dict.fromkeys(range(1, 2 * PUBLISHED), REFUSED_AFTER) | {(1 << 64) - 1: REFUSED_AFTER})
    held = notes.of()
    await held.answer(1, "", lambda: trio.sleep(0))
    for number in (2 * PUBLISHED - 1, (1 << 64) - 1):
        with pytest.raises(DeadlyRequest):
            await held.answer(number, "", lambda: trio.sleep(0))
