"""What a daemon has to know at any time: the messages that wait, and in which order they are sent."""

from __future__ import annotations

import numpy as np
import pytest

from spiderfs.protocol import Plan, Progress, Samples
from trainer_hook import Declaration
from trainer_hook.connection.client import ListsAndPlans

pytestmark = pytest.mark.clock


def lists() -> ListsAndPlans:
    lists = ListsAndPlans()
    lists.declare(Declaration("train", "train", [b"1", b"2"], np.zeros(2, np.int32)))
    lists.begin()
    assert isinstance(lists.next(), Samples)
    return lists


def sent_plan(lists: ListsAndPlans) -> Plan:
    plan = lists.next()
    assert isinstance(plan, Plan)
    return plan


def plan(epoch: int) -> Plan:
    return Plan("train", epoch, 0, True, np.arange(100, dtype=np.uint32) % 2)


def test_a_plan_that_came_after_its_list_was_asked_for_is_sent_before_its_progress() -> None:
    told = lists()
    told.plan(plan(0))
    assert sent_plan(told).epoch == 0
    told.set_progress("train", 100, 100)
    # The sending thread has asked `next`, and is about to ask for progress.
    told.plan(plan(1))
    told.set_progress("train", 8, 8)
    assert told.progress(1.0, hurry=True) is None
    finished, following, come = told.next(), sent_plan(told), told.progress(1.0, hurry=True)
    assert isinstance(finished, Progress)
    assert isinstance(come, Progress)
    assert [(finished.epoch, finished.taken), following.epoch, (come.epoch, come.taken)] == [(0, 100), 1, (1, 8)]
    assert told.next() is None
    assert told.progress(1.0, hurry=True) is None


def test_the_first_progress_is_sent_at_once_on_a_machine_that_has_just_booted() -> None:
    told = lists()
    told.plan(plan(0))
    told.set_progress("train", 64, 56)
    assert sent_plan(told).epoch == 0
    assert isinstance(told.progress(0.0, hurry=False), Progress)
    told.set_progress("train", 72, 64)
    assert told.progress(0.0, hurry=False) is None, "some was sent a moment ago"
