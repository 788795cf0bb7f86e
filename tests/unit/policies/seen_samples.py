"""An engine that has seen samples, for the tests of policies that follow scores."""

from __future__ import annotations

from spiderfs.core.engine import Engine
from spiderfs.core.policy import Policy


def engine_with(policy: Policy, capacity: int, scores: dict[int, float]) -> Engine:
    """An engine that has seen these samples, of 10 bytes each."""
    engine = Engine(policy, capacity)
    for key, score in scores.items():
        policy.scored(key, score)
        engine.opened(key, 10)
    return engine
