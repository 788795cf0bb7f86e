"""Which neighbours of a sample in its archive come with it, in one request: a chunk.

A sample that has to be fetched costs a request, and a far source takes as long for one as for a hundred thousand bytes.
Its neighbours in the archive cost hardly more than their bytes. But a neighbour that leaves the cache before its use is
fetched again, and came in vain. So one comes along only if the engine would keep it now, and if its use is near
(`NEAR_CACHES`): what is fetched later and used sooner hardly pushes it out then. With a fifth cached and a uniform
shuffle, requests and bytes of later epochs, as shares of the samples, in a replay:

    each sample alone                          0.83 / 0.83
    up to four, neighbours that are near       0.52 / 0.87
    up to four, half as near                   0.65 / 0.84
    up to four, all that the engine would keep 0.46 / 1.08
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from spiderfs.core.engine import Engine
from spiderfs.core.plans.schedule import AWAITED, PlannedReader
from spiderfs.core.policy import Key

MOST_MEMBERS = 16
# The bytes of a chunk: a few, where more would only delay those that are wanted sooner (four photos of ImageNet), and
# more, where the source could send more than all requests that may be made at a time ask for.
FEW_BYTES, MOST_BYTES = 512 << 10, 1 << 20
# A neighbour's use is near if the samples that are read before it would fill the cache no more than so many times.
NEAR_CACHES = 2.0
# What lies between two members is read in vain, such as labels: so much of it at most, as a share of what is wanted.
GAP_SHARE = 1 / 8


class Member(NamedTuple):
    """A member of an archive: its number there, and the bytes of the archive that have to be read for it."""

    number: int
    begin: int
    end: int


def chunk_of(
    wanted: Member,
    before: Iterator[Member],
    after: Iterator[Member],
    admits: Callable[[Member], bool],
    most_bytes: int,
    most_members: int = MOST_MEMBERS,
) -> list[Member]:
    """Members to read together, in archive order; `before` and `after` give those beside `wanted`, nearest first."""
    chunk = deque([wanted])
    gap_bytes = GAP_SHARE * (wanted.end - wanted.begin)
    sides = deque([after, before])
    while sides and len(chunk) < most_members:
        side = sides.popleft()
        passed = 0
        while passed <= gap_bytes and (member := next(side, None)) is not None:
            if max(member.end, chunk[-1].end) - min(member.begin, chunk[0].begin) > most_bytes:
                break
            if admits(member):
                chunk.append(member) if side is after else chunk.appendleft(member)
                sides.append(side)
                break
            passed += member.end - member.begin
    return list(chunk)


def is_worth_it(engine: Engine, reader: PlannedReader, key: Key, size: int, since: int) -> bool:
    """Whether a neighbour is to come along: it is used soon, and the engine would keep it now.

    Soon: the reader's plan of this epoch reads it before the samples from position `since` on have filled the cache so
    many times. What is read before `since` waits for its reader somewhere else.
    """
    position, use_s = reader.next_position(key), engine.schedule.next_use_s(key)
    if position is None or position >= reader.fetched_to or use_s is None or use_s >= AWAITED:
        return False
    mean_bytes = engine.used_bytes / len(engine.members) if engine.members else size
    # What is in hand takes room too, unless the kernel has it: a small cache may have none beside it.
    in_hand = reader.in_hand if engine.schedule.opens_are_reported else 0
    room_bytes = engine.budget_bytes - in_hand * mean_bytes
    return (position - since) * mean_bytes < NEAR_CACHES * room_bytes and engine.would_keep(key, size)
