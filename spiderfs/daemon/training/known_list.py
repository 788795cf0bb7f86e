"""One list of samples that trainers declared: its files, its labels, and the scorings that learn about them."""

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
from spiderfs.daemon.training.trainer import SampleList
from spiderfs.errors import SourceError, Stale
from spiderfs.scorer import SCORINGS
from spiderfs.scorer.scoring import ScorerOptions, Scoring
from spiderfs.vfs.catalogue import Catalogue
from spiderfs.vfs.lister import Lister

log = logging.getLogger(__name__)

# Lists whose scores are kept on disk, unless more are in use. That of a million samples takes some 400 MB, which do not
# count towards the capacity; so many lists may one trainer have.
KEPT_LISTS = 8

# Samples looked up between two chances for other tasks: 5 ms.
_AT_A_TIME = 500


@dataclass(frozen=True)
class ListStatus:
    """`left_out_share` is of the rows of its batches; `scoring_s` is the mean time that it took to score a batch."""

    number: int
    name: str
    samples: int
    left_out_share: float
    scoring_s: float


class KnownList:
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
        places = (self.place_of.get(inode, place) for place, inode in enumerate(self.keys))
        self.one_of_file = np.fromiter(places, np.uint32, len(self.keys))
        """Of the samples of one file, the one that `place_of` knows."""
        self.directory = directory
        self.scorings: dict[str, Scoring] = {}
        """By name; one that is not in use keeps what it has learned."""
        # Calls of the scoring, the rows that it was given and those that there was no time for.
        self.scorings_made = 0
        self.scoring_s = 0.0
        self.rows_scored = 0
        self.rows_left_out = 0
        self._scored_at = np.zeros(len(samples), np.uint32)

    def status(self) -> ListStatus:
        left_out_share = self.rows_left_out / max(1, self.rows_left_out + self.rows_scored)
        scoring_s = self.scoring_s / max(1, self.scorings_made)
        return ListStatus(self.number, self.name, len(self.labels), left_out_share, scoring_s)

    @property
    def label_of(self) -> dict[Key, int]:
        """The label of each known file, in the order of the places by which `place_of` knows them."""
        labels: list[int] = self.labels.tolist()
        return {inode: labels[place] for place, inode in enumerate(self.keys) if self.place_of.get(inode) == place}

    def scoring_for(self, name: str, dimension: int, options: ScorerOptions) -> Scoring:
        """A scoring of the table for embeddings of this dimension, made when the first batch comes. Blocks."""
        scoring = self.scorings.get(name)
        if scoring is None or not scoring.fits(dimension):
            scoring = SCORINGS[name](self.labels, dimension, options)
            if scoring.restore(self.directory):
                log.info("%s goes on with the scores of an earlier training", self.name)
            self.scorings[name] = scoring
        return scoring

    def to_score(self, places: npt.NDArray[np.int64], limit: int) -> npt.NDArray[np.int64]:
        """Which of these rows to score if there is time for `limit`: those whose samples were scored the longest ago.

        They come in their order.
        """
        rows = np.arange(len(places))
        if len(places) > limit:
            rows = np.sort(np.argsort(self._scored_at[places], kind="stable")[:limit])
        self.rows_scored += len(rows)
        self.rows_left_out += len(places) - len(rows)
        self._scored_at[places[rows]] = self.scorings_made + 1
        return rows

    def remember(self, name: str, options: ScorerOptions) -> None:
        """Bring a scoring back from an earlier mount, if one was saved. Blocks."""
        if name not in self.scorings:
            saved = SCORINGS[name].saved(self.labels, options, self.directory)
            if saved is not None:
                self.scorings[name] = saved

    def save(self) -> None:
        """Blocks on the disk."""
        for scoring in list(self.scorings.values()):
            self.directory.mkdir(parents=True, exist_ok=True)
            scoring.save(self.directory)


async def inodes_of(samples: SampleList, catalogue: Catalogue, lister: Lister) -> npt.NDArray[np.uint64]:
    """The file of each sample of a list, 0 where there is none; directories that are not known yet are listed."""
    inodes = np.zeros(len(samples), np.uint64)
    listed: dict[bytes, int] = {}
    for place, path in enumerate(samples.paths):
        directory, _, name = path.rpartition(b"/")
        if directory not in listed:
            listed[directory] = await _listed(directory, lister)
        dentry = catalogue.find(listed[directory], name) if listed[directory] else None
        if dentry is not None:
            inodes[place] = dentry.inode
        if place % _AT_A_TIME == 0:
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
    """Of the lists saved below `directory`, by digest, keep those `in_use` and the latest. Blocks on the disk."""
    try:
        found = [(entry.stat().st_mtime, entry.name) for entry in directory.iterdir()]
    except FileNotFoundError:
        return
    # Each save puts its files into the list's directory anew, so that one's time is that of the last save.
    for _, digest in sorted(found, reverse=True)[kept:]:
        if digest not in in_use:
            shutil.rmtree(directory / digest, ignore_errors=True)
            log.info("deleted the scores of a list that was not used lately")


def leave_out_contradictions(inodes: npt.NDArray[np.uint64], labels: npt.NDArray[np.int32]) -> None:
    """Make files unknown that a list names with different labels: nobody could say for whom they may stand in."""
    label_of: dict[int, int] = {}
    contradicted = set()
    for inode, label in zip(inodes.tolist(), labels.tolist(), strict=True):
        if label_of.setdefault(inode, label) != label:
            contradicted.add(inode)
    if contradicted:
        inodes[np.isin(inodes, np.array(sorted(contradicted), np.uint64))] = 0
