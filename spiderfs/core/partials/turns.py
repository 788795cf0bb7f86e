"""Which generation of a partial sample a job gets next, where several jobs share them: Seneca's augmented form.

Each job uses a generation once (Seneca, "Preparation Meets Opportunity", section 5.2: an augmented sample leaves when
as many jobs as there are have used it). So a job that wants a sample gets the generation that is there if the job has
not had it, and otherwise makes a new one, which takes its place. Then the others have not had that.

With the paper's reference count alone, a job that comes twice before a slower one would have to make a sample for
itself, and nobody else would use it. Here a new generation is there for all others at once, and a slower job does not
miss the old one: both are equally random. So the count is the set of jobs that have had it. Of what they draw, five
equally fast jobs that began at different times make 0.25 by this rule and 0.32 by the paper's; in step both make 0.2
(tests/unit/core/test_turns.py).

A generation's number comes from the job that makes it, so numbers are never used again, also when all this is lost.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.uint32]
Numbers = npt.NDArray[np.uint64]
# A job is a bit of a 64-bit number.
MOST_JOBS = 64
NONE = 0


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
