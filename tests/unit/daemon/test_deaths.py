"""What the supervisor makes of a death: the facts come from the memory that the dead process has left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from spiderfs.daemon.context import FIRST_WORKER_ROW, MANAGER_ROW
from spiderfs.daemon.restarts import DEATHS, FIRST_PAUSE_S, LIVED_S, LONGEST_PAUSE_S, REFUSED_AFTER
from spiderfs.daemon.supervisor import MANAGER, MANAGER_PAUSE_S, Deaths
from spiderfs.errors import DeadlyRequest
from spiderfs.fuse.resent_requests import ResentRequests
from spiderfs.metrics import SharedCounters


class Mount:
    """The deaths of a mount without processes, and its clock."""

    def __init__(self, workers: int = 1) -> None:
        self.now = 1000.0
        self.counters = SharedCounters(FIRST_WORKER_ROW + workers)
        self.resent = ResentRequests(workers, 4, REFUSED_AFTER)
        self.deaths = Deaths(self.counters, self.resent, workers, lambda: self.now)
        for index in (MANAGER, *range(workers)):
            self.deaths.started(index, again=False)

    def die(self, index: int, lived_s: float = 0.1, answered: int = 0) -> float | None:
        """Let a process live, and start it again after its death."""
        self.now += lived_s
        if index != MANAGER:
            self.counters.row(FIRST_WORKER_ROW + index).add("answers", answered)
        pause_s = self.deaths.pause_s(index)
        if pause_s is not None:
            self.now += pause_s
            self.deaths.started(index, again=True)
        return pause_s

    def handed(self, number: int, handle: Callable[[], None], index: int = 0) -> None:
        """Hand a worker a request that was handed out before."""

        async def handling() -> None:
            handle()

        held = self.resent.of_worker(index, self.counters.row(FIRST_WORKER_ROW + index))
        trio.run(held.answer, number, "", handling)


class Killed(BaseException):
    """Nothing is done any more by a process that is killed."""


def kill() -> None:
    raise Killed


def test_deaths_at_once_end_the_mount() -> None:
    mount = Mount(workers=2)
    pauses = [mount.die(death % 2) for death in range(DEATHS)]
    assert None not in pauses[:-1]
    assert pauses[-1] is None
    assert mount.counters.totals()["worker_restarts"] == DEATHS - 1


def test_the_manager_ends_nothing_and_pauses_longer_while_it_does_nothing() -> None:
    mount = Mount()
    assert [mount.die(MANAGER) for _ in range(5)] == [MANAGER_PAUSE_S] * 5
    assert mount.die(MANAGER) == 0.8
    assert [mount.die(MANAGER) for _ in range(DEATHS)][-1] == LONGEST_PAUSE_S
    mount.counters.row(MANAGER_ROW).add("events_folded")
    assert mount.die(MANAGER) == MANAGER_PAUSE_S
    assert mount.die(MANAGER, LIVED_S) == MANAGER_PAUSE_S
    assert mount.counters.totals()["manager_restarts"] == 8 + DEATHS


def test_a_request_that_kills_is_refused_while_others_are_answered() -> None:
    mount = Mount(workers=2)
    for death in range(REFUSED_AFTER):
        with pytest.raises(Killed):
            mount.handed(77, kill, death % 2)
        assert mount.die(death % 2, answered=100) is not None
    with pytest.raises(DeadlyRequest):
        mount.handed(77, kill)
    mount.handed(78, lambda: None)


def test_a_mount_that_only_refuses_ends() -> None:
    mount = Mount()
    pauses = [mount.die(0)]
    while pauses[-1] is not None:
        row = mount.counters.row(FIRST_WORKER_ROW)
        row.add("deadly_requests")
        pauses.append(mount.die(0, answered=1))
        assert len(pauses) <= DEATHS
    assert len(pauses) == DEATHS


def test_what_was_killed_with_others_is_not_blamed_for_it() -> None:
    """When the cache begins again, the supervisor ends all children, whatever they hold."""
    mount = Mount()
    with pytest.raises(Killed):
        mount.handed(77, kill)
    mount.deaths.started(0, again=True)
    mount.die(0)
    assert mount.resent.held_by(0) == (set(), set())
    assert mount.deaths._suspects.alone() == {}


def test_a_life_begins_with_its_start() -> None:
    mount = Mount()
    mount.now += 5.0
    assert mount.deaths.lived_s(0) == 5.0
    assert mount.deaths.pause_s(0) == 0.0
    mount.now += 5.0
    assert mount.deaths.lived_s(0) == 0.0
    mount.deaths.started(0, again=True)
    assert mount.deaths.lived_s(0) == 0.0
    assert mount.deaths.pause_s(0) == FIRST_PAUSE_S
