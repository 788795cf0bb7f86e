"""What a daemon has to know at any time: the lists of a training, and its latest plans.

A connection may end, and a daemon that comes back knows nothing. So lists and plans are kept here, and each connection
gets them anew, the current plan from the position that the training has reached by then. The training's threads change
them, and the sending thread alone takes messages from them. No method waits.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from spiderfs.protocol import Message, Plan, Progress, Samples
from trainer_hook.connection.sample_list import Declaration

# The progress in a list's plan is sent at most once in this time. The sending thread looks 20 times a second, and each
# time it looks it is to find that it is time.
PROGRESS_EVERY_S = 0.04


class ListsAndPlans:
    def __init__(self) -> None:
        self._declarations: dict[str, Declaration] = {}
        # The current plan of each list, and the plans of later epochs: by list and number of the epoch.
        self._plans: dict[tuple[str, int], Plan] = {}
        # The current plan of each list, and how far the training has come in it.
        self._begun: dict[str, Plan] = {}
        self._progress_of: dict[str, Progress] = {}
        # The progress of lists that has not been sent, when it was sent last, and the last one in epochs that are over.
        # Who takes what is unsaid takes it out in one step: both the training's threads and the sending thread do.
        self._unsaid: dict[str, Progress] = {}
        self._said_at: dict[str, float] = {}
        self._finished: deque[Progress] = deque()
        # The names of the lists and plans that have not been sent through this connection.
        self._undeclared: deque[str] = deque()
        self._unplanned: deque[tuple[str, int]] = deque()
        # The plans among these that began before this connection; its daemon has not seen what was read by then.
        self._begun_before: set[tuple[str, int]] = set()
        # The lists that were declared through this connection. No plan is sent for a list that was withdrawn before it
        # was declared.
        self._declared: set[str] = set()
        self._chunks: Iterator[Samples] = iter(())

    # -- the training's threads

    def of_lists(self, names: Collection[str]) -> ListsAndPlans:
        """A copy with these lists and their plans, for another job."""
        following = ListsAndPlans()
        following._declarations = {name: found for name, found in self._declarations.items() if name in names}
        following._plans = {key: plan for key, plan in self._plans.items() if key[0] in names}
        following._begun = {name: plan for name, plan in self._begun.items() if name in names}
        following._progress_of = {name: come for name, come in self._progress_of.items() if name in names}
        return following

    def declare(self, declaration: Declaration) -> None:
        self._declarations[declaration.name] = declaration
        self._undeclared.append(declaration.name)

    def withdraw(self, name: str) -> Plan | None:
        """No longer declare a list; returns its current plan, if it has one."""
        self._declarations.pop(name, None)
        return self._begun.get(name)

    def plan(self, plan: Plan) -> None:
        key = plan.list, plan.epoch
        if plan.begun:
            drawn_ahead, last = self._plans.get(key), self._begun.get(plan.list)
            as_expected = (last is None or last.epoch <= plan.epoch) and (
                drawn_ahead is None or drawn_ahead.begun or np.array_equal(drawn_ahead.order, plan.order)
            )
            for name, epoch in list(self._plans):
                if name == plan.list and not (as_expected and epoch > plan.epoch):
                    del self._plans[name, epoch]
            if (unsaid := self._unsaid.pop(plan.list, None)) is not None:
                self._finished.append(unsaid)
            self._begun_before.discard(key)
            self._begun[plan.list] = plan
            self._progress_of[plan.list] = Progress(plan.list, plan.epoch, plan.position, plan.position)
        self._plans[key] = plan
        # If the plan replaces one that waits to be sent, it must not be sent before plans that came earlier.
        with contextlib.suppress(ValueError):
            self._unplanned.remove(key)
        self._unplanned.append(key)

    def set_progress(self, name: str, dispatched: int, taken: int) -> None:
        """Keep how far the training is in the list's current plan, if the list has one."""
        plan = self._begun.get(name)
        if plan is not None:
            self._progress_of[name] = self._unsaid[name] = Progress(name, plan.epoch, dispatched, taken)

    # -- the sending thread

    def begin(self) -> None:
        """A connection begins, whose daemon knows nothing."""
        # `declare` and `plan` write their table before the queue, so a name may come twice here but is never missing.
        self._declared = set()
        self._undeclared = deque(self._declarations)
        self._unplanned = deque(sorted(key for key in list(self._plans) if key[0] in self._declarations))
        self._begun_before = set(self._unplanned)
        self._finished.clear()
        for name, come in list(self._progress_of.items()):
            self._unsaid.setdefault(name, come)
        self._said_at = {}
        self._chunks = iter(())

    def next(self) -> Message | None:
        """The next message of a list, or else of a plan, that has not been sent; None if there is none.

        What is left to say of the progress in an epoch comes before the plan of the next one.
        """
        chunk = next(self._chunks, None)
        while chunk is None and self._undeclared:
            declaration = self._declarations.get(self._undeclared.popleft())
            if declaration is not None:
                self._declared.add(declaration.name)
                self._chunks = declaration.chunks()
                chunk = next(self._chunks, None)
        while chunk is None and self._finished:
            finished = self._finished.popleft()
            if finished.list in self._declared:
                return finished
        while chunk is None and self._unplanned:
            key = self._unplanned.popleft()
            plan = self._plans.get(key)
            if plan is not None and plan.list in self._declared:
                if not plan.begun:
                    return plan
                # How far the training has come meanwhile is said next.
                self._said_at.pop(plan.list, None)
                position = self._progress_of[plan.list].taken if key in self._begun_before else plan.position
                return replace(plan, position=min(position, len(plan.order)))
        return chunk

    def progress(self, now_s: float, hurry: bool) -> Progress | None:
        """Some progress that has not been sent; None if there is none. The caller asks `next` first.

        Without `hurry` the progress of a list waits if some of it was sent a moment ago.
        """
        for name in list(self._unsaid):
            due = hurry or now_s >= self._said_at.get(name, 0.0) + PROGRESS_EVERY_S
            if not due or name not in self._declared or (said := self._unsaid.pop(name, None)) is None:
                continue
            if (name, said.epoch) not in self._unplanned:
                self._said_at[name] = now_s
                return said
            # Its plan came after `next` was asked, and is sent first.
            self._unsaid.setdefault(name, said)
        return None
