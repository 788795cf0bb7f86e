"""One list of samples that trainers declared: its files, its labels, and the scorer that learns about them."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spiderfs.daemon.trainer import SampleList
from spiderfs.scorer.scorer import Scorer, ScorerOptions

log = logging.getLogger(__name__)


class Dataset:
    """One list of samples: sample i of the list is the file `inodes[i]` (0: unknown)."""

    def __init__(
        self, number: int, digest: str, samples: SampleList, inodes: npt.NDArray[np.uint64], directory: Path
    ) -> None:
        self.number = number
        self.digest = digest
        self.name = f"{samples.name} ({samples.split})"
        # -1 says that a sample has no label, so no two of them have the same: each gets one of its own.
        # Below all labels that can be declared, which have 32 bits.
        own = -(1 << 32) - np.arange(len(samples), dtype=np.int64)
        self.labels = np.where(samples.labels == -1, own, samples.labels)
        self.inodes = inodes
        self.keys: list[int] = inodes.tolist()
        self.place_of = {inode: place for place, inode in enumerate(self.keys) if inode}
        self.directory = directory
        self.scorer: Scorer | None = None
        self.batches = 0
        self.scoring_s = 0.0

    def scorer_for(self, dimension: int, options: ScorerOptions) -> Scorer:
        """The scorer, made (and brought back from an earlier mount) when the first batch says its dimension. Blocks."""
        if self.scorer is None or self.scorer.dimension != dimension:
            self.scorer = Scorer(self.labels, dimension, options)
            if self.scorer.restore(self.directory):
                log.info("%s goes on with the scores of an earlier training", self.name)
        return self.scorer

    def save(self) -> None:
        """Blocks on the disk."""
        if self.scorer is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.scorer.save(self.directory)


def leave_out_contradictions(inodes: npt.NDArray[np.uint64], labels: npt.NDArray[np.int32]) -> None:
    """Make files unknown that a list names with different labels: nobody could say for whom they may stand in."""
    label_of: dict[int, int] = {}
    contradicted = set()
    for inode, label in zip(inodes.tolist(), labels.tolist(), strict=True):
        if label_of.setdefault(inode, label) != label:
            contradicted.add(inode)
    if contradicted:
        inodes[np.isin(inodes, np.array(sorted(contradicted), np.uint64))] = 0
