"""Which neighbours of a sample in its archive come with it, in one request: a chunk.

A sample that has to be fetched costs a request, and a far source takes as long for one as for a hundred thousand bytes.
Its neighbours in the archive cost hardly more than their bytes. But a neighbour that leaves the cache before its use is
fetched again, and came in vain. So one comes along only if the engine would keep it now, and if its use is near
(`NEAR_CACHES`): what is fetched later and used sooner hardly pushes it out then. With a fifth cached and a uniform
shuffle, requests and bytes of later epochs, as shares of the samples (benchmarks/engine/chunks.py):

    each sample alone                          0.83 / 0.83
    up to four, neighbours that are near       0.51 / 0.88
    up to four, half as near                   0.65 / 0.84
    up to four, all that the engine would keep 0.46 / 1.10
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

# A few members, where more bytes would only delay those that are wanted sooner; more, where the source could send more
# than all requests that may be made at a time ask for.
FEW_MEMBERS, MOST_MEMBERS = 4, 16
# The bytes of a chunk: the reply of a read has room for as many.
MOST_BYTES = 1 << 20
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
    most_members: int = FEW_MEMBERS,
    most_bytes: int = MOST_BYTES,
) -> list[Member]:
    """The members to read together, in the order of the archive; `wanted` is one of them.

    `before` and `after` give the members beside it, the nearest first.
    """
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
