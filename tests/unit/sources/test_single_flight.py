"""Sharing identical questions: who waits for whom, and what becomes of errors, timeouts and cancelled askers."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from spiderfs.errors import SourceChanged, SourceTimeout
from spiderfs.sources import single_flight as recent_timeouts
from spiderfs.sources.single_flight import RecentTimeouts, SingleFlight


class Question:
    """A question that a test answers when it likes."""

    def __init__(self, outcome: bytes | Exception = b"bytes") -> None:
        self.outcome = outcome
        self.asked = 0
        self.go = trio.Event()

    async def __call__(self) -> bytes:
        self.asked += 1
        await self.go.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def flights() -> SingleFlight:
    return SingleFlight(RecentTimeouts())


async def test_identical_questions_are_asked_once(flights: SingleFlight) -> None:
    question, got = Question(), []

    async def ask() -> None:
        got.append(await flights.run(("inode", 0), question))

    assert not flights.busy
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert flights.busy
        assert flights.has(("inode", 0))
        assert not flights.has(("inode", 1))
        question.go.set()
    assert got == [b"bytes"] * 10
    assert question.asked == 1
    assert not flights.busy
    await flights.run(("inode", 0), question)
    assert question.asked == 2, "an answer is not remembered"


async def test_an_error_goes_to_all_who_wait(flights: SingleFlight) -> None:
    question, errors = Question(SourceChanged("changed")), []

    async def ask() -> None:
        with pytest.raises(SourceChanged) as caught:
            await flights.run("key", question)
        errors.append(str(caught.value))

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        question.go.set()
    assert errors == ["changed"] * 10
    assert question.asked == 1


@pytest.mark.parametrize("cancelled", [0, 1])
async def test_cancelling_one_does_not_fail_the_others(flights: SingleFlight, cancelled: int) -> None:
    question, got = Question(), []
    scopes = [trio.CancelScope() for _ in range(4)]

    async def ask(number: int) -> None:
        with scopes[number]:
            got.append((number, await flights.run("key", question)))

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(ask, number)
            await trio.testing.wait_all_tasks_blocked()
        scopes[cancelled].cancel()
        await trio.testing.wait_all_tasks_blocked()
        question.go.set()
    assert sorted(got) == [(number, b"bytes") for number in range(4) if number != cancelled]
    assert question.asked == (2 if cancelled == 0 else 1)


async def test_who_asks_just_after_a_timeout_gets_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in another process of the mount: the kernel asks for one reader after the other."""
    timeouts = RecentTimeouts()
    one, other = SingleFlight(timeouts), SingleFlight(timeouts)
    unanswered = Question(SourceTimeout("not answered"))
    unanswered.go.set()
    with pytest.raises(SourceTimeout, match="not answered"):
        await one.run((1, b"file"), unanswered)
    for flights in (one, other):
        with pytest.raises(SourceTimeout, match="just left this unanswered"):
            await flights.run((1, b"file"), unanswered)
    assert unanswered.asked == 1
    with pytest.raises(SourceTimeout, match="not answered"):
        await other.run((1, b"another"), unanswered)
    assert unanswered.asked == 2
    monkeypatch.setattr(recent_timeouts, "SHARED_S", 0.0)
    answered = Question()
    answered.go.set()
    assert await one.run((1, b"file"), answered) == b"bytes"
