"""The backlog of a trainer: order, bounds, and what waits for room."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from spiderfs.daemon.training.connection.hook_server import Backlog
from spiderfs.protocol import Batch, EpochEnd


def batch(step: int, rows: int = 10, name: str = "train") -> Batch:
    return Batch(name, 0, step, np.arange(rows, dtype=np.uint32), np.zeros((rows, 4), np.float16), None)


def latest(indices: npt.NDArray[np.uint32], count: int) -> npt.NDArray[np.int64]:
    return np.arange(len(indices) - count, len(indices))


LATEST = dict.fromkeys(("train", "other"), latest)


@pytest.fixture(autouse=True)
def clock() -> trio.abc.Clock:
    return MockClock(autojump_threshold=0)


async def test_batches_that_are_alike_wait_as_one_and_order_is_kept() -> None:
    backlog = Backlog(10, 1 << 20, LATEST, ())
    told = [batch(0), batch(1), EpochEnd(0, None), batch(2), batch(3, name="other"), batch(4, name="other")]
    for message in told:
        await backlog.put(message)
    backlog.close()
    taken = [await backlog.take() for _ in range(5)]
    assert taken == [told[:2], told[2], told[3:4], told[4:], None]


async def test_runs_beyond_the_limit_are_thinned_and_no_batch_waits() -> None:
    backlog = Backlog(2, 20_000, LATEST, ())
    with trio.fail_after(1):
        for step in range(1000):
            await backlog.put(batch(step))
            assert backlog._held_bytes <= 20_000
    taken = await backlog.take()
    assert isinstance(taken, list)
    assert taken[-1].step == 999
    assert backlog._held_bytes == 0


async def test_a_run_that_cannot_be_thinned_waits_until_it_is_taken() -> None:
    backlog = Backlog(2, 3_000, {}, ())
    done: list[int] = []

    async def put() -> None:
        for step in range(4):
            await backlog.put(batch(step))
            done.append(step)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(put)
        await wait_all_tasks_blocked()
        assert done == [0, 1]
        taken = await backlog.take()
        await wait_all_tasks_blocked()
        assert isinstance(taken, list)
        assert (len(taken), done) == (3, [0, 1, 2, 3])


async def test_other_messages_wait_for_room() -> None:
    backlog = Backlog(2, 1 << 20, LATEST, ())
    ends = [EpochEnd(epoch, None) for epoch in range(5)]
    async with trio.open_nursery() as nursery:

        async def put() -> None:
            for end in ends:
                await backlog.put(end)
            backlog.close()

        nursery.start_soon(put)
        await wait_all_tasks_blocked()
        assert len(backlog._items) == 2
        found = [await backlog.take() for _ in range(6)]
    assert found == [*ends, None]
