"""Repeats what a recorded mount did: readers get what they got then, and the engine decides again.

A replay (`spiderfs/simulation.py`) asks what another cache would have served. A repetition asks whether the same cache
decides the same again. It does if the mount began with an empty cache, followed no plan, fetched nothing ahead of
readers (`warm`, packages), and kept its policy: a trace has nothing of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spiderfs.core.engine import Engine
from spiderfs.core.events import Budget, Hint, Lost, Published
from spiderfs.core.policy import Key, Policy
from spiderfs.simulation import ReplayedFeed, read
from spiderfs.trace import Trace


class _Repeating(ReplayedFeed):
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
                for job_dataset_id, wanted, substitute in self._feed.redirects_changed():
                    if substitute is None:
                        self.redirects.pop((job_dataset_id, wanted), None)
                    else:
                        self.redirects[job_dataset_id, wanted] = substitute
            case _:
                super()._give(hint)


class Repeated(NamedTuple):
    engine: Engine
    redirects: Mapping[tuple[str, Key], Key]
    """The published substitutes, by job dataset and sample."""


def repeated(trace: Trace, policy: Policy) -> Repeated:
    """What the mount had at the end of the trace; `policy` is a new one, as the mount made it."""
    engine, accesses = Engine(policy, 0), trace.accesses()
    feed = _Repeating(engine, trace.hints())
    columns = (trace.columns[name].tolist() for name in ("given", "given_size", "block", "unoffered", "unseen"))
    rows = zip(accesses.keys, accesses.job_dataset_ids, *columns, strict=True)
    for number, (key, job_dataset_id, inode, size, block, unoffered, unseen) in enumerate(rows):
        feed.give(number)
        if unoffered:
            continue
        given = (inode, block) if block else inode
        if job_dataset_id:
            feed.served(job_dataset_id, key, given)
        if unseen:
            engine.read_unseen(given, size)
        else:
            read(engine, given, size)
    feed.give(len(accesses))
    return Repeated(engine, feed.redirects)
