"""Partly augmented samples in the cache: their section, and whose turn it is to use one.

A **partial sample** is what a loader keeps half way in a mount's cache: an immutable version like any other record,
whose inode follows from the sample's version, the transforms, the seed and its generation. It is no candidate of the
policy. A loader says which generation a new one replaces; whatever else leaves, leaves in the order in which it came. A
loader asks for room when it begins, is granted what the rooms of others leave, and keeps a fixed part of its samples
that fits (`trainer_hook/refurbishing/generations.py`); so no section evicts what a loader will use.

Jobs may share what they keep, each using a generation once, as in Seneca's augmented form ("Preparation Meets
Opportunity", section 5.2). A job gets the generation that is there if it has not had it, and otherwise makes a new one,
which takes its place and is there for all others at once. With the paper's reference count alone, a job that comes
twice before a slower one would make a sample for itself alone. Of what they draw, five equally fast jobs that began at
different times make 0.25 by this rule and 0.32 by the paper's; in step both make 0.2 (tests/unit/core/test_turns.py). A
generation's number comes from the job that makes it, so none is used again, also when all this is lost.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.uint32]
Numbers = npt.NDArray[np.uint64]

PARTIALS = "partials"
# The section's room is taken from the policy in this many steps, so that few samples change the policy's room.
_STEPS = 64
# A job is a bit of a 64-bit number.
MOST_JOBS = 64
NONE = 0


class Partials:
    """The section's members, up to a `share` of the capacity; bytes == sum of their sizes <= limit_bytes always."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._sizes: dict[int, int] = {}
        self._rooms: dict[str, int] = {}
        self.bytes = 0
        self.limit_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, inode: int) -> bool:
        return inode in self._sizes

    @property
    def set_aside_bytes(self) -> int:
        """Bytes of the capacity that nothing else may take: what the section holds, rounded up to a step."""
        step = max(1, self.limit_bytes // _STEPS)
        return min(self.limit_bytes, -(-self.bytes // step) * step)

    # -- rooms

    def begin(self, store: str, wanted_bytes: int) -> int:
        """A loader begins; the bytes that it may fill. Processes that give the same `store` share one room."""
        taken = sum(room for other, room in self._rooms.items() if other != store)
        room = self._rooms[store] = max(0, min(wanted_bytes, self.limit_bytes - taken))
        return room

    def end(self, store: str) -> None:
        """The last process of this name has gone; what it kept stays until others need the room."""
        self._rooms.pop(store, None)

    # -- members

    def restore(self, members: Iterable[tuple[int, int]]) -> None:
        """Replace all members by these (inode, bytes), the oldest first; `resize` then drops what is too much."""
        self._sizes = dict(members)
        self.bytes = sum(self._sizes.values())

    def resize(self, capacity_bytes: int) -> list[int]:
        """Follow a new capacity; returns the members that have to leave for it."""
        self.limit_bytes = int(capacity_bytes * self._share)
        return self._leave(self.bytes - self.limit_bytes)

    def made(self, inode: int, size: int, replaces: int | None) -> list[int] | None:
        """A sample is to become a member; returns the members that leave for it, or None if it does not fit."""
        if inode in self._sizes:
            return []
        if size > self.limit_bytes:
            return None
        gone = [] if replaces is None or replaces not in self._sizes else [replaces]
        self.forget(gone)
        gone += self._leave(self.bytes + size - self.limit_bytes)
        self._sizes[inode] = size
        self.bytes += size
        return gone

    def forget(self, inodes: Iterable[int]) -> None:
        """These have left, or the store has lost them; others are ignored."""
        for inode in inodes:
            self.bytes -= self._sizes.pop(inode, 0)

    def _leave(self, over_bytes: int) -> list[int]:
        """Take out the oldest members that together free `over_bytes`, and return them."""
        going = []
        for inode, size in self._sizes.items():
            if over_bytes <= 0:
                break
            going.append(inode)
            over_bytes -= size
        self.forget(going)
        return going


class Turns:
    """What jobs have had of `samples` samples."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._present: Numbers = np.zeros(samples, np.uint64)
        self._had_by: Numbers = np.zeros(samples, np.uint64)
        self._bits: dict[str, int] = {}
        self._here: set[str] = set()

    @property
    def jobs(self) -> int:
        """How many jobs share the samples now."""
        return len(self._here)

    def join(self, job: str) -> bool:
        """A job comes, or is there already, or comes again; returns whether there is a place for it."""
        if job not in self._bits:
            free = next((bit for bit in range(MOST_JOBS) if bit not in self._bits.values()), None)
            if free is None:
                gone = next((other for other in self._bits if other not in self._here), None)
                if gone is None:
                    return False
                free = self._bits.pop(gone)
                self._had_by &= ~np.uint64(1 << free)
            self._bits[job] = free
        self._here.add(job)
        return True

    def leave(self, job: str) -> None:
        """A job has gone; what it has had is known until another job needs its place."""
        self._here.discard(job)

    def ready(self, job: str) -> npt.NDArray[np.bool_]:
        """For each sample, whether a generation is there that this job has not had; none if the job is unknown."""
        if job not in self._bits:
            return np.zeros(self.samples, np.bool_)
        bit = np.uint64(1 << self._bits[job])
        unused: npt.NDArray[np.bool_] = (self._present != NONE) & (self._had_by & bit == 0)
        return unused

    def take(self, job: str, indices: Indices, new: int) -> tuple[Numbers, Numbers]:
        """The generation of each of these samples that a job is to use now, and the one whose place a new one takes.

        `new` is the number, above 0, of those that it has to make. The second is 0 where nothing is to be made, or
        where nothing was there.
        """
        bit = np.uint64(1 << self._bits[job])
        present, had_by = self._present[indices], self._had_by[indices]
        makes = (present == NONE) | (had_by & bit != 0)
        taken = np.where(makes, np.uint64(new), present)
        self._present[indices] = taken
        self._had_by[indices] = np.where(makes, bit, had_by | bit)
        return taken, np.where(makes, present, np.uint64(NONE))
