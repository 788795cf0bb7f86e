"""Which of several nodes is the home of a sample: the one that keeps it for all of them.

Each node draws a number for each sample, and the highest one wins (rendezvous hashing, Thaler and Ravishankar, 1998;
weighted as by Schindelhauer and Schomaker, 2005). So all nodes with one list of members agree without a message, each
member is the home of a share in proportion to its weight, and when a member comes or goes only its own share moves.

The numbers are drawn for 2^16 groups of samples and not for each one: a home is looked up for every member of a cache.
The samples of a group have the same last bits in their keys, which must be hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import copy

import numpy as np
import numpy.typing as npt

GROUPS = 1 << 16
_MIXED = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Homes:
    def __init__(self, weights: Mapping[str, float], own: str) -> None:
        """The weight of each member, above 0, by its name, which is the same on all nodes; `own` is this node's."""
        self.members = sorted(weights)
        """The names; `home` gives places in this list."""
        self.own = self.members.index(own)
        groups = np.arange(GROUPS, dtype=np.uint64)
        home, soonest = np.zeros(GROUPS, np.int64), np.full(GROUPS, np.inf)
        for place, name in enumerate(self.members):
            # The time of the first event of a process with this rate: of all members, each is first in proportion to
            # it. All times of 1,000 members at once would take half a gigabyte.
            times = -np.log(_drawn(name, groups)) / weights[name]
            home[times < soonest] = place
            np.minimum(times, soonest, out=soonest)
        self._places = home
        # A list answers faster than an array, if it is asked of one sample.
        self._home: list[int] = home.tolist()

    @property
    def edition(self) -> int:
        """Another number whenever samples have other homes."""
        return 0

    def seen_from(self, own: int) -> Homes:
        """The same homes, as the member at this place sees them."""
        seen = copy(self)
        seen.own = own
        return seen

    def home(self, key: int) -> int:
        """The place of a sample's home in `members`."""
        return self._home[key % GROUPS]

    def of_all(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
        """The home of each of these samples."""
        found: npt.NDArray[np.intp] = self._places[keys % np.uint64(GROUPS)]
        return found

    def is_remote(self, key: object) -> bool:
        """Whether the home of a sample is another node."""
        assert isinstance(key, int)
        return self._home[key % GROUPS] != self.own

    def passes(self, number: int, block: int) -> bool:
        """Whether a block, counted from 1, of the large file with this number is another node's to keep."""
        return False

    def rank(self, key: object) -> float:
        """A number that stands for a sample alone: a home keeps those with the highest ones."""
        assert isinstance(key, int)
        return key // GROUPS


def _drawn(name: str, groups: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """The numbers, above 0 and below 1, that a member draws for these groups."""
    seed = np.frombuffer(hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest(), np.uint64)
    # The steps of SplitMix64 (Steele, Lea and Flood, 2014).
    mixed = seed + groups * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in zip((30, 27), _MIXED, strict=True):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * factor
    mixed ^= mixed >> np.uint64(31)
    found: npt.NDArray[np.float64] = ((mixed >> np.uint64(12)).astype(np.float64) + 0.5) / 2**52
    return found
