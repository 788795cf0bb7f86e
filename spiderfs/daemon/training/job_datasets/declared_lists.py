"""How job datasets come into memory when trainers declare their lists, and leave it when no trainer uses them any more.

All ranks of a job share a job dataset, for a list is known by its content; two jobs that declare one list have one
each. A job dataset stays in memory for a while after its last trainer has left, so that a job that comes back finds it
as it was. When it leaves, its scores are saved, the policy forgets its labels and the scores of its samples, and its
redirects are withdrawn. All state belongs to the manager's event loop.
"""

from __future__ import annotations

import logging
import math
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import trio

from spiderfs.core.feed import PolicyFeed
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.job_datasets.job_datasets import JobDataset, JobDatasets, directory_of, job_dataset_id_of
from spiderfs.daemon.training.job_datasets.scoring import BatchScoring
from spiderfs.daemon.training.job_datasets.trainers import Trainers
from spiderfs.daemon.training.trainer import Declared, KnownList, SampleList, Trainer, inodes_of
from spiderfs.errors import ProtocolError
from spiderfs.linux import steady_clock
from spiderfs.linux.mounts import NO_READ_AHEAD_KIB, READ_AHEAD_KIB, set_read_ahead
from spiderfs.protocol import Hello
from spiderfs.protocol.extents import DIRECTORY, Extent, extent_of
from spiderfs.store.store import Records
from spiderfs.vfs.catalogue import Node
from spiderfs.vfs.on_demand import Supply
from spiderfs.vfs.redirects import each_redirect, redirect_row

log = logging.getLogger(__name__)

# How many extents are looked at between two chances for other tasks.
_EXTENTS_AT_A_TIME = 2000


async def inodes_of_extents(
    paths: Sequence[bytes], supply: Supply, sample_max_bytes: int, release_blocks: Callable[[int], None]
) -> npt.NDArray[np.uint64]:
    """The inode of each extent, 0 for one without a file; workers find those extents in READs from now on.

    A file of up to `sample_max_bytes` is read as a whole, so it stands for each of its extents. Of a larger one, blocks
    are released: no one reads them any more, and what learns ranges has read many.
    """
    inodes = np.zeros(len(paths), np.uint64)
    of_files: defaultdict[bytes, list[tuple[int, Extent]]] = defaultdict(list)
    for number, path in enumerate(paths):
        if (extent := extent_of(path)) is not None:
            of_files[extent.file].append((number, extent))
        if number % _EXTENTS_AT_A_TIME == 0:
            await trio.lowlevel.checkpoint()
    directories = {file.rpartition(b"/")[0] for file in of_files}
    listed = await supply.lister.directories(directories, ttl_s=60.0)
    for file, members in of_files.items():
        directory, _, name = file.rpartition(b"/")
        parent = listed.get(directory)
        dentry = None if parent is None else supply.catalogue.find(parent.inode, name)
        if parent is None or dentry is None or not stat.S_ISREG(dentry.stat.mode):
            continue
        numbers = [number for number, _ in members]
        if dentry.stat.size <= sample_max_bytes:
            inodes[numbers] = dentry.inode
            continue
        release_blocks(dentry.inode)
        extents = [extent for _, extent in members]
        inodes[numbers] = await trio.to_thread.run_sync(_record, supply, dentry.below(parent), extents)
    return inodes


def _record(supply: Supply, file: Node, extents: list[Extent]) -> list[int]:
    inodes = supply.catalogue.record_extents(file, extents)
    places = sorted({(extent.begin, extent.end) for extent in extents})
    try:
        supply.grids.publish(file.path, np.array(places, np.int64))
    except OSError as exc:
        log.warning("no range of %s is fetched ahead (%s): free the cache's disk", os.fsdecode(file.path), exc.strerror)
        return [0] * len(inodes)
    return inodes


class RedirectPublisher:
    """Publishes the policy's redirects: writes them to the table that workers read at each look-up.

    The policy names the redirects that have changed since it was asked last, so each change is drawn from it once. Two
    callers that draw one after the other must write in the same order: all that is written goes through one lock. A row
    names its job dataset by the job dataset's number, and only job datasets that are in memory have rows.

    The kernel is not notified: it trusts a name for the rest of its time. A reader that opens a file which has a
    substitute by now is sent back to look the name up again (`Substitutes.send_back` of `vfs/substitutes.py`).
    """

    def __init__(self, feed: PolicyFeed, records: Records, job_datasets: JobDatasets) -> None:
        self._feed, self._records, self._job_datasets = feed, records, job_datasets
        self._publishing = trio.Lock()

    def begin(self) -> None:
        """Empty the table: the substitutes that an earlier manager has published may no longer be cached."""
        published = list(each_redirect(self._records))
        self._records.put(redirect_row(number, wanted, None) for wanted, number, _ in published)

    async def publish(self) -> None:
        """Write the redirects that have changed since the last time."""
        async with self._publishing:
            if not (changes := self._feed.redirects_changed()):
                return
            rows = []
            for job_dataset_id, wanted, substitute in changes:
                assert isinstance(wanted, int)
                assert substitute is None or isinstance(substitute, int)
                if (job_dataset := self._job_datasets.get(job_dataset_id)) is not None:
                    rows.append(redirect_row(job_dataset.number, wanted, substitute))
            await trio.to_thread.run_sync(self._records.put, rows)

    async def publish_all(self) -> None:
        """Write every redirect again: a hub of an earlier mount may belong to a job dataset that has only now begun."""
        async with self._publishing:
            self.begin()
            self._feed.forget_published()
        await self.publish()

    async def withdraw(self, job_dataset: JobDataset) -> None:
        """Remove all redirects of a job dataset that leaves memory."""
        async with self._publishing:
            wanted = [row[0] for row in each_redirect(self._records) if row[1] == job_dataset.number]
            self._records.put(redirect_row(job_dataset.number, inode, None) for inode in wanted)

    def has_substitute(self, inode: int) -> bool:
        """Whether readers of some job dataset get another file for this one while it is not cached."""
        return any(
            self._feed.substitute(job_dataset.job_dataset_id, inode) is not None for job_dataset in self._job_datasets
        )


# How long a job dataset stays in memory without a trainer. A list takes 15 MB for 100,000 samples, and what a job
# dataset learns about it some 150 bytes a sample.
GRACE_S = 60.0
# Files that were not there are looked for again after so long, unless more of the list's files have changed.
FOLLOW_AGAIN_S = 30.0
# The most samples of the lists of all job datasets together; each takes the manager 150 bytes before it is scored.
MAX_SAMPLES = 32_000_000
# All ranks of a job share its job datasets, so the trainers of 256 connections, with 8 lists each, seldom have half as
# many; the others are about to leave.
MAX_JOB_DATASETS = 1024
# Stands for a list whose ranges are not known yet. No job dataset has such an id.
_LEARNING = "learning"
# How many samples are forgotten, or looked at, between two chances for other tasks, in some milliseconds.
_AT_A_TIME = 10_000


class DeclaredLists:
    def __init__(
        self,
        supply: Supply,
        cache: CacheControl,
        feed: PolicyFeed,
        job_datasets: JobDatasets,
        trainers: Trainers,
        scoring: BatchScoring,
        redirects: RedirectPublisher,
        scores_directory: Path,
        sample_max_bytes: int,
        mountpoint: Path,
    ) -> None:
        self._supply = supply
        self._sample_max_bytes, self._mountpoint = sample_max_bytes, mountpoint
        # Lists of ranges that are in memory; "": perhaps some that an earlier manager of this mount had; `_LEARNING`.
        self._of_ranges = {""}
        self._began_s, self._cache, self._feed = math.inf, cache, feed
        self._job_datasets, self._trainers, self._scoring = job_datasets, trainers, scoring
        self._redirects, self._scores_directory = redirects, scores_directory
        # The time at which each job dataset was first found without a trainer. One that is being declared counts as
        # used.
        self._unused_since: dict[str, float] = {}
        self._declared_now: list[str] = []
        # One list at a time begins: a rank waits until another rank of its job has begun their job dataset with its
        # scores, and no two lists take the same room.
        self._beginning = trio.Lock()

    async def declare(self, trainer: Trainer, samples: SampleList) -> Declared:
        """Begin, or go on with, the job dataset of a declared list; raises ProtocolError for more than MAX_SAMPLES."""
        digest = samples.digest
        job_dataset_id = job_dataset_id_of(trainer.job_id, digest)
        warnings: list[str] = []
        # This job dataset does not leave memory meanwhile.
        self._declared_now.append(job_dataset_id)
        try:
            paths, has_ranges = samples.paths, DIRECTORY in samples.text
            if has_ranges:
                release = self._cache.release_blocks
                inodes = await inodes_of_extents(paths, self._supply, self._sample_max_bytes, release)
            else:
                inodes = await inodes_of(paths, self._supply.catalogue, self._supply.lister)
            # What has no path lies outside of the mount, which has been said.
            unknown = [paths[index] for index in np.flatnonzero(inodes == 0).tolist() if paths[index]]
            del paths
            samples.leave_out_contradictions(inodes)
            async with self._beginning:
                await self._make_room(job_dataset_id, len(samples))
                known_list = self._job_datasets.known_list(digest, inodes) or KnownList(digest, samples, inodes)
                if (job_dataset := self._job_datasets.get(job_dataset_id)) is None:
                    number = self._job_datasets.number_of(job_dataset_id)
                    job_dataset = JobDataset(number, trainer.job_id, known_list, self._scores_directory)
                    self._job_datasets.put(job_dataset)
                    if has_ranges:
                        self._of_ranges.add(job_dataset_id)
                        await trio.to_thread.run_sync(set_read_ahead, self._mountpoint, NO_READ_AHEAD_KIB)
                    warnings += await self._begin(job_dataset, trainer.hello)
                elif job_dataset.list is not known_list or not (
                    self._scoring.of(job_dataset) is not None or self._trainers.any_uses(job_dataset_id)
                ):
                    # Its scores are by index, so they hold for other files too.
                    job_dataset.list = known_list
                    warnings += await self._begin(job_dataset, trainer.hello)
            self._trainers.declare(trainer, samples.name, job_dataset, samples.sends_batches)
        finally:
            self._declared_now.remove(job_dataset_id)
        return Declared(len(unknown), tuple(warnings), unknown[0] if unknown else b"")

    async def _begin(self, job_dataset: JobDataset, hello: Hello) -> list[str]:
        """Begin a job dataset with the scores that its job, or the job that it names, has; returns what is missing."""
        warnings = []
        if hello.scores_from is not None and not job_dataset.directory.exists():
            digest = job_dataset.list.digest
            try:
                if (other := self._job_datasets.get(job_dataset_id_of(hello.scores_from, digest))) is not None:
                    await self._scoring.in_turn(other.save)
                theirs = directory_of(self._scores_directory, hello.scores_from, digest)
                await self._scoring.in_turn(job_dataset.take_over, theirs)
            except OSError as exc:
                warnings.append(f"the scores of job {hello.scores_from} cannot be copied ({exc.strerror})")
        await self._scoring.introduce(job_dataset)
        if self._scoring.of(job_dataset) is None and not warnings:
            if hello.scores_from is not None:
                warnings.append(f"the mount has no scores of job {hello.scores_from} to start from")
            if hello.resume:
                warnings.append(f"the mount has no scores of job {hello.job}, so it starts afresh")
        return warnings

    async def _make_room(self, job_dataset_id: str, samples: int) -> None:
        if self._is_full(job_dataset_id, samples):
            await self.let_go(0.0)
        if self._is_full(job_dataset_id, samples):
            raise ProtocolError(
                f"a list of {samples} samples: all jobs of this mount together have {MAX_SAMPLES} in "
                f"{MAX_JOB_DATASETS} lists at most; close the hooks of trainings that are over",
                "too-large",
            )

    def _is_full(self, job_dataset_id: str, samples: int) -> bool:
        if self._job_datasets.samples_beside(job_dataset_id) + samples > MAX_SAMPLES:
            return True
        return job_dataset_id not in self._job_datasets and len(self._job_datasets) >= MAX_JOB_DATASETS

    def superseded(self, inode: int, path: bytes) -> None:
        """Note that the file at a path has another version than this one."""
        for job_dataset in self._job_datasets:
            if inode in job_dataset.list.index_of:
                job_dataset.list.superseded[inode] = path
                job_dataset.list.followed_s = -math.inf

    async def follow(self, job_dataset: JobDataset) -> bool:
        """Have the samples of a list be the present versions of their files; returns whether that changes any.

        As when the list is declared again, its scores hold for the files that there are now. All files are looked at
        of each directory, such as an archive, in which one was superseded.
        """
        known = job_dataset.list
        if not known.superseded or trio.current_time() < known.followed_s + FOLLOW_AGAIN_S:
            return False
        # What is not there now may come back.
        known.followed_s = trio.current_time()
        noted = dict(known.superseded)
        directories = {path.rpartition(b"/")[0] for path in noted.values()}
        places, paths = [], []
        for first in range(0, len(known.keys), _AT_A_TIME):
            inodes = known.keys[first : first + _AT_A_TIME]
            for place, path in enumerate(self._supply.catalogue.paths(inodes), first):
                path = noted.get(known.keys[place], path)
                if known.keys[place] and path.rpartition(b"/")[0] in directories:
                    places.append(place)
                    paths.append(path)
            await trio.lowlevel.checkpoint()
        found = await inodes_of(paths, self._supply.catalogue, self._supply.lister)
        now = known.inodes.copy()
        now[places] = np.where(found, found, now[places])
        # The source may have taken long, and no one attaches while this is held.
        async with self._beginning:
            if job_dataset.list is not known or np.array_equal(now, known.inodes):
                return job_dataset.list is not known
            followed = self._job_datasets.known_list(known.digest, now) or known.with_files(now)
            for other in self._job_datasets:
                if other.list is known:
                    other.list = followed
                    await self._scoring.introduce(other)
        return True

    async def let_go(self, grace_s: float = GRACE_S) -> None:
        """Let job datasets leave memory that no trainer has used for `grace_s`; their scores are saved first."""
        now = trio.current_time()
        self._began_s = min(self._began_s, now)
        if now - self._began_s >= grace_s:
            await self._forget_ranges("")
        if self._supply.read_log.is_kept(steady_clock.now()):
            # Samples' ranges are being learned, and a worker has made the read-ahead small.
            self._of_ranges.add(_LEARNING)
        else:
            await self._forget_ranges(_LEARNING)
        self._unused_since = {
            job_dataset.job_dataset_id: self._unused_since.get(job_dataset.job_dataset_id, now)
            for job_dataset in self._job_datasets
            if not self._is_used(job_dataset.job_dataset_id)
        }
        for job_dataset_id, since in list(self._unused_since.items()):
            if (job_dataset := self._job_datasets.get(job_dataset_id)) is None or now - since < grace_s:
                continue
            try:
                await self._scoring.in_turn(job_dataset.save)
            except OSError as exc:
                log.warning(
                    "cannot save the scores of an unused list (%s): it stays in memory until the cache's disk has room",
                    exc.strerror,
                )
                continue
            # A trainer may have declared the list while its scores were saved.
            if self._job_datasets.get(job_dataset_id) is job_dataset and not self._is_used(job_dataset_id):
                await self._forget(job_dataset)

    def _is_used(self, job_dataset_id: str) -> bool:
        return job_dataset_id in self._declared_now or self._trainers.any_uses(job_dataset_id)

    async def _forget_ranges(self, job_dataset_id: str) -> None:
        if job_dataset_id in self._of_ranges:
            self._of_ranges.discard(job_dataset_id)
            if not self._of_ranges:
                await trio.to_thread.run_sync(set_read_ahead, self._mountpoint, READ_AHEAD_KIB, NO_READ_AHEAD_KIB)

    async def _forget(self, job_dataset: JobDataset) -> None:
        self._job_datasets.remove(job_dataset)
        await self._forget_ranges(job_dataset.job_dataset_id)
        log.info("job %s is over: its scores of %s leave memory", job_dataset.job_id, job_dataset.list.name)
        inodes = list(job_dataset.list.index_of)
        for first in range(0, max(1, len(inodes)), _AT_A_TIME):
            # Another job may have declared a list with these files since the last slice.
            others = [other.list.index_of for other in self._job_datasets]
            some = inodes[first : first + _AT_A_TIME]
            lonely = [inode for inode in some if not any(inode in other for other in others)]
            self._cache.apply(self._feed.end(job_dataset.job_dataset_id, lonely))
            await trio.lowlevel.checkpoint()
            if job_dataset.job_dataset_id in self._job_datasets:
                # The list was declared again, and with it its scores and redirects.
                return
        await self._redirects.withdraw(job_dataset)
