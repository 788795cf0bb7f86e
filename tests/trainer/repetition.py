"""Repeats what a recorded mount did: readers get what they got then, and the engine decides anew.

A replay (`simulation/replay.py`) asks what another cache would have served. A repetition asks whether the same cache
decides the same again. It does if the mount began with an empty cache, followed no plan, fetched nothing ahead of
readers (`warm`, packages), and kept its policy: a trace has nothing of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spiderfs.core.engine import Engine
from spiderfs.core.hints import Budget, Hint, Lost, Published
from spiderfs.core.policy import Key, Policy
from spiderfs.simulation.replay import Teacher, read
from spiderfs.trace.format import Trace


class _Repeating(Teacher):
    """Tells the engine too what it heard beside accesses, and keeps the table of redirects as workers have it."""

    def __init__(self, engine: Engine, hints: Sequence[tuple[int, Hint]]) -> None:
        super().__init__(engine, {}, hints, None)
        self.redirects: dict[tuple[str, Key], Key] = {}

    def _give(self, hint: Hint) -> None:
        match hint:
            case Budget(capacity_bytes, landing_bytes):
                self._engine.resize(capacity_bytes, landing_bytes)
            case Lost(key):
                self._engine.forget(key)
            case Published():
                for course_id, wanted, stand_in in self._teaching.redirects_changed():
                    if stand_in is None:
                        self.redirects.pop((course_id, wanted), None)
                    else:
                        self.redirects[course_id, wanted] = stand_in
            case _:
                super()._give(hint)


class Repeated(NamedTuple):
    engine: Engine
    redirects: Mapping[tuple[str, Key], Key]
    """The published stand-ins, by course and sample."""


def repeated(trace: Trace, policy: Policy) -> Repeated:
    """What the mount had at the end of the trace; `policy` is a new one, as the mount made it."""
    engine, accesses = Engine(policy, 0), trace.accesses()
    teacher = _Repeating(engine, trace.hints())
    columns = zip(accesses.keys, accesses.course_ids, trace.given(), strict=True)
    for number, (key, course_id, given) in enumerate(columns):
        teacher.give(number)
        if not given.offered:
            continue
        if course_id:
            teacher.served(course_id, key, given.key)
        if given.unseen:
            engine.read_unseen(given.key, given.size)
        else:
            read(engine, given.key, given.size)
    teacher.give(len(accesses))
    return Repeated(engine, teacher.redirects)
