"""What ImPACT's cache knows of one course: its losses, its H-list, and what its readers got in this epoch.

The half of the course's samples with the higher losses are its **H-samples**, and all other samples are its
**L-samples**: an L-sample of one course may be an H-sample of another. A member can stand in for a course if it is one
of its L-samples, and if no reader of this course got it in this epoch, under whatever name.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np

from spiderfs.core.policy import Key, saved_keys
from spiderfs.policies.parts.single_use_stand_ins import SingleUseStandIns

# The share of the scored samples that are H-samples; the paper leaves it open.
H_SHARE = 0.5
# Reads of H-samples and of L-samples counted at the start: the paper's 9 to 1. Counts are halved at each epoch, so
# these soon weigh little.
FIRST_HIGH_READS, FIRST_LOW_READS = 900.0, 100.0
# The H-list is made anew after as many reads as this share of the scored samples, which is four times in an epoch of
# half of them. Made once in an epoch, it is an epoch old when the sampler draws by newer losses: of 3,000 images with a
# fifth cached, 29 % of the reads were hits, and 31 % with the newer lists (benchmarks/training/missing_hits.py).
LISTED_AFTER_SHARE = 1 / 8
# The fewest reads between two lists.
LISTED_AFTER_READS = 256


class ImpactCourse:
    """`is_away(key)` says whether a sample is neither cached nor pinned."""

    def __init__(self, is_away: Callable[[Key], bool]) -> None:
        self._is_away = is_away
        self.labels: Mapping[Key, int] = {}
        self.losses: dict[Key, float] = {}
        self.high: frozenset[Key] = frozenset()
        """The H-list."""
        self.asked_for: set[Key] = set()
        """All samples that readers asked for in this epoch."""
        self.used: set[Key] = set()
        """The L-members that readers got in this epoch, under whatever name."""
        self.stand_ins = SingleUseStandIns(self.needs_stand_in)
        self.warms_up = False
        self.is_back = True
        """False after a remount, until something is heard of the course."""
        self.high_reads, self.low_reads = FIRST_HIGH_READS, FIRST_LOW_READS
        self._reads_since_list = 0
        # Whether an epoch has ended, and whether the last one had no reads.
        self._has_begun = self._is_idle = False

    def wants(self, key: Key) -> bool:
        """Whether a member is one of the samples that this course reads in its epochs."""
        return not self._is_idle and (key in self.losses or key in self.labels)

    def needs_stand_in(self, key: Key) -> bool:
        """Whether readers of this sample need a stand-in; what no batch has named may be a validation's."""
        return key in self.losses and key not in self.high and key not in self.asked_for and self._is_away(key)

    def read(self, key: Key, counts: bool) -> None:
        """A reader got these bytes under the sample's own name; the read moves the ratio if it `counts`."""
        self.asked_for.add(key)
        self._is_idle = False
        self._reads_since_list += 1
        # Before there is a list nobody knows which samples are L-samples.
        if counts and self.high:
            if key in self.high:
                self.high_reads += 1
            else:
                self.low_reads += 1

    def use(self, key: Key) -> None:
        """A member was read: it stands in for this course no more, if it is one of its L-samples."""
        if key not in self.high:
            self.used.add(key)
            self.stand_ins.discard(key)

    def offer(self, key: Key) -> None:
        """A member may stand in, if it is one of the course's L-samples and was not read in this epoch."""
        if key in self.high:
            return
        if key in self.asked_for:
            self.used.add(key)
        elif self.high and key not in self.used:
            self.stand_ins.add(key)

    def new_epoch(self) -> None:
        """Begin an epoch: every L-member may stand in again."""
        self.high_reads, self.low_reads = self.high_reads / 2, self.low_reads / 2
        self._is_idle = self._has_begun and not self.asked_for
        self._has_begun = True
        self.forget_reads()

    def forget_reads(self) -> None:
        self.asked_for.clear()
        self.used.clear()
        self.stand_ins.clear()

    @property
    def list_is_old(self) -> bool:
        """Whether there is a list, and so many reads have come since it was made that it is to be made anew."""
        enough = max(LISTED_AFTER_READS, len(self.losses) * LISTED_AFTER_SHARE)
        return bool(self.high) and self._reads_since_list >= enough

    def list_anew(self) -> None:
        """Choose the H-samples by the losses of now; there are none while the course warms up."""
        self._reads_since_list = 0
        # Members are offered anew by the new list.
        self.stand_ins.clear()
        keys, count = list(self.losses), int(len(self.losses) * H_SHARE)
        if count == 0 or self.warms_up:
            self.high = frozenset()
            return
        losses = np.fromiter(self.losses.values(), np.float64, len(keys))
        chosen = np.argpartition(losses, len(keys) - count)[-count:]
        self.high = frozenset(keys[index] for index in chosen.tolist())

    def state(self) -> dict[str, Any]:
        return {"high": list(self.high), "used": list(self.used), "reads": [self.high_reads, self.low_reads]}

    def restore(self, state: Mapping[str, Any], members: Container[Key]) -> None:
        """Go on from what `state` returned; of the samples that readers asked for it has the used members."""
        self.high = frozenset(saved_keys(state["high"]))
        self.high_reads, self.low_reads = state["reads"]
        self.used.update(key for key in saved_keys(state["used"]) if key in members)
        self.asked_for.update(self.used)
