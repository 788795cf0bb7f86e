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

from spiderfs.protocol import Message, Plan, Samples
from trainer_hook.sample_list import Declaration


class Standing:
    def __init__(self) -> None:
        self._declarations: dict[str, Declaration] = {}
        # The current plan of each list, and the plans of later epochs: by list and number of the epoch.
        self._plans: dict[tuple[str, int], Plan] = {}
        # The current plan of each list, and how far the training has come in it.
        self._begun: dict[str, Plan] = {}
        self._positions: dict[str, int] = {}
        # The names of the lists and plans that have not been sent through this connection.
        self._undeclared: deque[str] = deque()
        self._unplanned: deque[tuple[str, int]] = deque()
        # The lists that were declared through this connection. No plan is sent for a list that was withdrawn before it
        # was declared.
        self._declared: set[str] = set()
        self._chunks: Iterator[Samples] = iter(())

    # -- the training's threads

    def of_lists(self, names: Collection[str]) -> Standing:
        """These lists and their plans, for another job; what comes to the one does not come to the other."""
        following = Standing()
        following._declarations = {name: found for name, found in self._declarations.items() if name in names}
        following._plans = {key: plan for key, plan in self._plans.items() if key[0] in names}
        following._begun = {name: plan for name, plan in self._begun.items() if name in names}
        following._positions = {name: position for name, position in self._positions.items() if name in names}
        return following

    def declare(self, declaration: Declaration) -> None:
        """Declare a list to this daemon and to every later one."""
        self._declarations[declaration.name] = declaration
        self._undeclared.append(declaration.name)

    def withdraw(self, name: str) -> Plan | None:
        """No longer declare a list; returns its current plan, if it has one."""
        self._declarations.pop(name, None)
        return self._begun.get(name)

    def plan(self, plan: Plan) -> None:
        """Keep a plan, as `Client.plan` says."""
        key = plan.list, plan.epoch
        if plan.begun:
            drawn_ahead, last = self._plans.get(key), self._begun.get(plan.list)
            as_expected = (last is None or last.epoch <= plan.epoch) and (
                drawn_ahead is None or drawn_ahead.begun or np.array_equal(drawn_ahead.order, plan.order)
            )
            for name, epoch in list(self._plans):
                if name == plan.list and not (as_expected and epoch > plan.epoch):
                    del self._plans[name, epoch]
            self._begun[plan.list] = plan
            self._positions[plan.list] = plan.position
        self._plans[key] = plan
        # If the plan replaces one that waits to be sent, it must not be sent before plans that came earlier.
        with contextlib.suppress(ValueError):
            self._unplanned.remove(key)
        self._unplanned.append(key)

    def reached(self, name: str, position: int) -> None:
        """The training has taken so many samples of the list's current plan."""
        self._positions[name] = position

    # -- the sending thread

    def begin(self) -> None:
        """A connection begins, whose daemon knows nothing."""
        # `declare` and `plan` write their table before the queue, so a name may come twice here but is never missing.
        self._declared = set()
        self._undeclared = deque(self._declarations)
        self._unplanned = deque(sorted(key for key in list(self._plans) if key[0] in self._declarations))
        self._chunks = iter(())

    def next(self) -> Message | None:
        """The next message of a list, or else of a plan, that has not been sent; None if there is none."""
        chunk = next(self._chunks, None)
        while chunk is None and self._undeclared:
            declaration = self._declarations.get(self._undeclared.popleft())
            if declaration is not None:
                self._declared.add(declaration.name)
                self._chunks = declaration.chunks()
                chunk = next(self._chunks, None)
        while chunk is None and self._unplanned:
            plan = self._plans.get(self._unplanned.popleft())
            if plan is not None and plan.list in self._declared:
                position = self._positions[plan.list] if plan.begun else plan.position
                return replace(plan, position=min(position, len(plan.order)))
        return chunk
