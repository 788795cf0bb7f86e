"""A list of samples that the manager knows: its files, its labels, and the scorings that learn about them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import trio

from spiderfs.core.policy import Key
from spiderfs.core.thinning import ScoreAges, Thinning
from spiderfs.daemon.training.trainer import SampleList
from spiderfs.errors import SourceError, Stale
from spiderfs.scorer import SCORINGS
from spiderfs.scorer.scoring import ScorerOptions, Scoring
from spiderfs.vfs.catalogue import Catalogue
from spiderfs.vfs.lister import Lister

log = logging.getLogger(__name__)

# The scores of so many lists stay on disk, or of more if more are in use: one trainer may have so many. The scores of a
# million samples take some 150 MB, which do not count towards the capacity.
KEPT_LISTS = 8

# So many samples are looked up between two chances for other tasks, in 5 ms.
_AT_A_TIME = 500


@dataclass(frozen=True)
class ListStatus:
    """The status of one list, as control files show it.

    `left_out_share` is the share of rows that were not scored, and `scored_per_s` is the number of rows in a second of
    scoring.
    """

    number: int
    name: str
    samples: int
    left_out_share: float
    ages: ScoreAges
    scored_per_s: float


class KnownList:
    """One list of samples that trainers have declared.

    Sample i of the list is the file `inodes[i]`; inode 0 stands for an unknown file.
    """

    def __init__(
        self, number: int, digest: str, samples: SampleList, inodes: npt.NDArray[np.uint64], directory: Path
    ) -> None:
        self.number = number
        self.digest = digest
        self.name = f"{samples.name} ({samples.split})"
        # -1 stands for no label. Each of these samples gets a label of its own, below all labels that can be declared,
        # which have 32 bits: so no two of them have the same label.
        own = -(1 << 32) - np.arange(len(samples), dtype=np.int64)
        self.labels = np.where(samples.labels == -1, own, samples.labels)
        self.inodes = inodes
        self.keys: list[int] = inodes.tolist()
        self.index_of = {inode: index for index, inode in enumerate(self.keys) if inode}
        indices = (self.index_of.get(inode, index) for index, inode in enumerate(self.keys))
        self.one_of_file = np.fromiter(indices, np.uint32, len(self.keys))
        """For each sample, the sample of the same file that `index_of` knows."""
        self.directory = directory
        self.scorings: dict[str, Scoring] = {}
        """By name; a scoring that is not in use keeps what it has learned."""
        self.thinning = Thinning(len(samples))
        # Calls of the scoring, and the time that they took.
        self.scorings_made = 0
        self.scoring_s = 0.0

    @property
    def course_id(self) -> str:
        """What is learned about this list is one course: so far, all trainings on a list share it."""
        return self.digest

    @property
    def job_id(self) -> str:
        """So far all trainings on a list count as one job."""
        return self.digest

    def status(self) -> ListStatus:
        scored_per_s = self.thinning.rows_scored / self.scoring_s if self.scoring_s else 0.0
        left_out_share, ages = self.thinning.left_out_share, self.thinning.ages()
        return ListStatus(self.number, self.name, len(self.labels), left_out_share, ages, scored_per_s)

    @property
    def label_of(self) -> dict[Key, int]:
        """The label of each known file, in the order of the list."""
        labels: list[int] = self.labels.tolist()
        return {inode: labels[index] for index, inode in enumerate(self.keys) if self.index_of.get(inode) == index}

    def scoring_for(self, name: str, dimension: int, options: ScorerOptions) -> Scoring:
        """The scoring with this name for embeddings of this dimension, made when the first batch comes. Blocks."""
        scoring = self.scorings.get(name)
        if scoring is None or not scoring.fits(dimension):
            scoring = SCORINGS[name](self.labels, dimension, options)
            if scoring.restore(self.directory):
                log.info("%s goes on with the scores of an earlier training", self.name)
            self.scorings[name] = scoring
        return scoring

    def remember(self, name: str, options: ScorerOptions) -> None:
        """Restore a scoring that an earlier mount has saved, if there is one. Blocks."""
        if name not in self.scorings:
            saved = SCORINGS[name].saved(self.labels, options, self.directory)
            if saved is not None:
                self.scorings[name] = saved

    def save(self) -> None:
        """Save all scorings. Blocks on the disk."""
        for scoring in list(self.scorings.values()):
            self.directory.mkdir(parents=True, exist_ok=True)
            scoring.save(self.directory)


async def inodes_of(samples: SampleList, catalogue: Catalogue, lister: Lister) -> npt.NDArray[np.uint64]:
    """The file of each sample of a list, 0 for a sample without one; lists directories that are not known yet."""
    inodes = np.zeros(len(samples), np.uint64)
    listed: dict[bytes, int] = {}
    for index, path in enumerate(samples.paths):
        directory, _, name = path.rpartition(b"/")
        if directory not in listed:
            listed[directory] = await _listed(directory, lister)
        dentry = catalogue.find(listed[directory], name) if listed[directory] else None
        if dentry is not None:
            inodes[index] = dentry.inode
        if index % _AT_A_TIME == 0:
            await trio.lowlevel.checkpoint()
    return inodes


async def _listed(path: bytes, lister: Lister) -> int:
    try:
        node = await lister.directory(path)
        await lister.complete(node, ttl_s=60.0)
    except (SourceError, Stale):
        return 0
    return node.inode


def delete_older_scores(directory: Path, in_use: Container[str], kept: int = KEPT_LISTS) -> None:
    """Delete saved lists below `directory`, except those `in_use` and the `kept` latest ones. Blocks on the disk."""
    try:
        found = [(entry.stat().st_mtime, entry.name) for entry in directory.iterdir()]
    except FileNotFoundError:
        return
    # Each save writes its files into the list's directory anew, so the directory's mtime is that of the last save.
    for _, digest in sorted(found, reverse=True)[kept:]:
        if digest not in in_use:
            shutil.rmtree(directory / digest, ignore_errors=True)
            log.info("deleted the scores of a list that was not used lately")


def leave_out_contradictions(inodes: npt.NDArray[np.uint64], labels: npt.NDArray[np.int32]) -> None:
    """Make a file unknown that the list names with different labels: for which samples may it stand in?"""
    label_of: dict[int, int] = {}
    contradicted = set()
    for inode, label in zip(inodes.tolist(), labels.tolist(), strict=True):
        if label_of.setdefault(inode, label) != label:
            contradicted.add(inode)
    if contradicted:
        inodes[np.isin(inodes, np.array(sorted(contradicted), np.uint64))] = 0
