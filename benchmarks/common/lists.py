"""What caches make of the draws of a sampler: replays with the product's engine and policies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from spiderfs.core.engine import Engine
from spiderfs.core.plans.planned_epoch import PlannedEpoch
from spiderfs.policies import POLICIES
from spiderfs.simulation import Replay, policy_for, replay
from spiderfs.trace import Accesses

LIST_POLICIES = {"LRU": "lru", "MinIO": "minio", "MIN": "belady"}
_READER = "reader"
MIN_BY_EPOCH = "MIN by epoch"
LIST_CACHES = (*LIST_POLICIES, MIN_BY_EPOCH)


def list_origin(lists: list[list[int]], sizes: list[int], capacity: int) -> dict[str, list[float]]:
    """The origin bytes per sample that each of LIST_CACHES fetches in each of these epochs."""
    found = {name: list(served(policy, lists, sizes, capacity)) for name, policy in LIST_POLICIES.items()}
    found[MIN_BY_EPOCH] = list(min_by_epoch(lists, sizes, capacity))
    return {name: [epoch.origin_bytes_per_sample for epoch in epochs] for name, epochs in found.items()}


def served(
    policy: str, lists: list[list[int]], sizes: list[int], capacity: int, planned: bool = False
) -> Iterator[Replay]:
    """The results of a policy, epoch by epoch; if `planned`, the engine gets each epoch's plan when it begins."""
    whole = accesses_of([sample for drawn in lists for sample in drawn], sizes)
    engine = Engine(policy_for(POLICIES[policy], whole), capacity)
    for drawn in lists:
        accesses = accesses_of(drawn, sizes)
        if planned:
            yield replay(engine, accesses, len(drawn), before=Following(engine, accesses, len(drawn), 1).read_next)
        else:
            yield replay(engine, accesses, len(drawn))


class Following:
    """One reader that follows its plans: at the begin of an epoch the engine gets `epochs` of them, from it on."""

    def __init__(self, engine: Engine, accesses: Accesses, epoch_length: int, epochs: int) -> None:
        self._engine = engine
        self._accesses = accesses
        self._ids = accesses.ids.astype(np.uint32)
        self._epoch_length = epoch_length
        self._epochs = epochs
        self._keys = list(dict.fromkeys(accesses.keys))
        self._id_of = {key: number for number, key in enumerate(self._keys)}

    def read_next(self, number: int) -> None:
        """The reader is about to read: `before` of `replay`."""
        epoch, position = divmod(number, self._epoch_length)
        if position == 0:
            for ahead in range(self._epochs):
                start = number + ahead * self._epoch_length
                order = self._ids[start : start + self._epoch_length]
                if len(order):
                    planned = PlannedEpoch(epoch + ahead, self._keys, self._id_of, order)
                    self._engine.plan(_READER, "", planned, float(number), begun=ahead == 0)
        self._engine.progressed(_READER, "", epoch, position + 1, position, float(number))
        self._engine.wanted(_READER, self._accesses.keys[number], float(number))


def min_by_epoch(lists: list[list[int]], sizes: list[int], capacity: int) -> Iterator[Replay]:
    """The results of a MIN that learns an epoch's draws when the epoch begins; its cache lasts over all epochs."""
    engine: Engine | None = None
    for drawn in lists:
        accesses = accesses_of(drawn, sizes)
        policy = policy_for(POLICIES["belady"], accesses)
        if engine is None:
            engine = Engine(policy, capacity)
        else:
            engine.change_policy(policy)
        yield replay(engine, accesses, len(drawn))


def accesses_of(samples: list[int], sizes: list[int]) -> Accesses:
    return Accesses.of(samples, [sizes[sample] for sample in samples])
