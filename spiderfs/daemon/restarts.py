"""What follows when a process of a mount dies: when it starts again, when the mount ends, which request is to blame.

**Progress** is a request that a worker has answered (an event that the manager has acted on), or a minute of life.
Deaths between which there was progress never end a mount, however many they are: each costs a pause. Deaths of workers
without progress between them end it, since no one would be answered any more.

The kernel hands a request at which a worker died to the next worker. So deaths are also counted for each such request
(`Suspects`). Nothing here has a clock or looks at a process: `supervisor.py` brings the facts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

# The mount ends after this many deaths of workers in a row without progress between them. With the pauses below, they
# take a minute if there is one worker.
DEATHS = 20
# The first pause comes before the second start in a row; each further pause is twice as long as the one before, up to a
# longest. A process that died before it had done anything is likely to die so again, and no one misses it.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
# Readers wait for one that had done something. A start costs 0.1 s of a core, so this keeps it to a fifth of one.
LONGEST_BUSY_PAUSE_S = 0.5
# A process that has lived for this time did not die of how it began, and 20 such deaths take 20 minutes. It is much
# longer than the longest pause, or pauses themselves would let other processes live long enough.
LIVED_S = 60.0
# More doublings than any longest pause needs. (A float has no room for 1,024 of them.)
_MOST_DOUBLINGS = 16

# A request at which two workers have died is begun alone, so that the next death shows whether it is to blame. One at
# which ten have died is answered with an error: half of DEATHS, so that it alone never ends a mount. Want of memory
# kills workers too, whatever they have begun: two of them with the same request (16 readers, files of 7 MB, 150 MB).
ALONE_AFTER, REFUSED_AFTER = 2, 10
# The requests whose deaths are remembered. A worker begins 512 at most, so one that kills outlives seven deaths of
# other workers here.
_REMEMBERED = 4096


class Restarts:
    """Decides on restarts of processes that share one task, such as all workers."""

    def __init__(self, processes: int, limit: int | None = None) -> None:
        """`limit`: the deaths in a row, without progress between them, at which `died` gives up."""
        self._limit = limit
        # What each had done at its own death before, and all together at the death before, whosever it was.
        self._done = [0] * processes
        self._done_by_all = -1
        # The deaths of each, in a row, after less than a minute of life.
        self._early = [0] * processes
        self.in_vain = 0

    def died(self, who: int, done: Sequence[int], lived_s: Sequence[float]) -> float | None:
        """How many seconds to wait before process `who` starts again; None: give up.

        `done`: what each process, and those before it in its place, have done since the mount. `lived_s`: for how long
        each process lives or, like this one, has lived; 0 for one that is not there.
        """
        progress = sum(done) > self._done_by_all or max(lived_s) >= LIVED_S
        busy = done[who] > self._done[who]
        self._done_by_all, self._done[who] = sum(done), done[who]
        self.in_vain = 1 if progress else self.in_vain + 1
        self._early[who] = 1 if lived_s[who] >= LIVED_S else self._early[who] + 1
        if self.in_vain == self._limit:
            return None
        in_a_row = max(self._early[who], self.in_vain)
        if in_a_row == 1:
            return 0.0
        pause_s = FIRST_PAUSE_S * 2.0 ** min(in_a_row - 2, _MOST_DOUBLINGS)
        return min(pause_s, LONGEST_BUSY_PAUSE_S if busy else LONGEST_PAUSE_S)


class Suspects:
    """Counts how many workers have died at each request that the kernel has handed out again."""

    def __init__(self, sole: bool) -> None:
        """`sole`: there is one worker, so a request that it did not hold when it died has been answered."""
        self._sole = sole
        # The request at which a worker died last comes last.
        self._deaths: dict[int, int] = {}

    def died(self, begun: Collection[int], waiting: Collection[int]) -> None:
        """Count the death of a worker that had begun some of these requests, and held others that it had not begun."""
        if self._sole and (begun or waiting):
            held = {*begun, *waiting}
            self._deaths = {number: deaths for number, deaths in self._deaths.items() if number in held}
        # The one with the most deaths last: where there is no room for all, it is the first to be remembered.
        for number in sorted(begun, key=lambda number: self._deaths.get(number, 0)):
            self._deaths[number] = self._deaths.pop(number, 0) + 1
        for number in list(self._deaths)[:-_REMEMBERED]:
            del self._deaths[number]

    def alone(self) -> Mapping[int, int]:
        """The requests to begin alone, with the number of deaths at each; those to refuse have REFUSED_AFTER."""
        return {number: deaths for number, deaths in self._deaths.items() if deaths >= ALONE_AFTER}
