"""Replay on several nodes: the accesses are dealt to them in turn, and their caches act as one (`core/homes.py`).

That is how a training with a rank on each node reads an epoch. Each node has an engine of its own and hears all hints.
What a node has not cached it asks the home for, which fetches what it has not, and keeps it. So an access is a hit if
the node or the home has the bytes, and else one read from the source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spiderfs.core.accesses import Accesses
from spiderfs.core.engine import Engine
from spiderfs.core.hints import Hint
from spiderfs.core.homes import Homes
from spiderfs.core.policy import Key
from spiderfs.simulation.replay import Replay, Teacher, counted, served


def replay_on_nodes(
    nodes: int,
    engine: Callable[[int, Homes], Engine],
    capacity_bytes: int,
    accesses: Accesses,
    epoch_length: int,
    hints: Sequence[tuple[int, Hint]] = (),
    ratio: float | None = None,
) -> Replay:
    """As `replay`, on so many nodes of this capacity each, whose engines `engine` makes."""
    names = [f"{number:06}" for number in range(nodes)]
    homes = Homes(dict.fromkeys(names, 1.0), names[0])
    engines = [engine(capacity_bytes, homes.seen_from(place)) for place in range(nodes)]
    sizes = dict(zip(accesses.keys, accesses.sizes, strict=True))
    teachers = [Teacher(made, sizes, hints, ratio) for made in engines]
    outcomes = []
    for number, access in enumerate(zip(accesses.keys, accesses.sizes, accesses.course_ids, strict=True)):
        # All have the same hints.
        if number == teachers[0].due:
            for teacher in teachers:
                teacher.give(number)
        own, home = engines[number % nodes], engines[homes.home(_hash_of(access[0]))]
        outcomes.append(served(own, teachers[number % nodes], *access, None if home is own else home))
    for teacher in teachers:
        teacher.give(len(accesses))
    return counted(accesses, epoch_length, outcomes)


def _hash_of(key: Key) -> int:
    """The number by which a sample has its home; the blocks of a file have one home."""
    number = key[0] if isinstance(key, tuple) else key
    assert isinstance(number, int)
    return number
