"""Job datasets: the learned state of each job for each of its lists, and where it is saved.

The scores of a job dataset lie in a directory of its own, `JOB/LIST` below the mount's scores: the digests of the job's
id, which may be any text, and of the list. A job that comes back finds them there, and `scores_from` copies them.

A job dataset has a number, for rows of tables and for traces. It keeps the number when it leaves memory and comes back.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import shutil
from collections.abc import Container, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spiderfs.core.batches import Thinning
from spiderfs.daemon.training.trainer import KnownList
from spiderfs.scorer import SCORINGS
from spiderfs.scorer.scoring import ScorerOptions, Scoring

log = logging.getLogger(__name__)

# Job datasets whose scores stay on disk, or more if more are in use: one trainer may have this many lists. The scores
# of a million samples take some 150 MB, which do not count towards the capacity.
KEPT_JOB_DATASETS = 8
# Hexadecimal digits of the digest of a job's id.
_JOB_DIGITS = 32
# The number of a job dataset has 16 bits in traces.
_MAX_NUMBER = 0xFFFF


class JobDataset:
    def __init__(self, number: int, job_id: str, known_list: KnownList, scores_directory: Path) -> None:
        self.number, self.job_id = number, job_id
        self.job_dataset_id = job_dataset_id_of(job_id, known_list.digest)
        self.list = known_list
        """Another one with the same digest takes its place when its files have changed (`DeclaredLists`)."""
        self.directory = directory_of(scores_directory, job_id, known_list.digest)
        self.scorings: dict[str, Scoring] = {}
        """By name; a scoring that is not in use keeps what it has learned."""
        self.thinning = Thinning(len(known_list.keys))
        self.scoring_s = 0.0
        """The time that scoring has taken."""

    def scoring_for(self, name: str, dimension: int, options: ScorerOptions) -> Scoring:
        """The scoring with this name for embeddings of this dimension, made when the first batch comes. Blocks."""
        if (scoring := self.scorings.get(name)) is None or not scoring.fits(dimension):
            scoring = SCORINGS[name](self.list.labels, dimension, options)
            if scoring.restore(self.directory):
                log.info("job %s continues with its scores of %s", self.job_id, self.list.name)
            self.scorings[name] = scoring
        return scoring

    def remember(self, name: str, options: ScorerOptions) -> None:
        """Restore a scoring that this job has saved, if there is one. Blocks."""
        if name not in self.scorings:
            saved = SCORINGS[name].saved(self.list.labels, options, self.directory)
            if saved is not None:
                self.scorings[name] = saved

    def save(self) -> None:
        """Save all scorings. Blocks on the disk."""
        for scoring in list(self.scorings.values()):
            self.directory.mkdir(parents=True, exist_ok=True)
            scoring.save(self.directory)

    def take_over(self, directory: Path) -> None:
        """Begin with the scores that another job has saved in `directory`, if there are any; raises OSError. Blocks."""
        if not directory.is_dir():
            return
        try:
            shutil.copytree(directory, self.directory)
        except (OSError, shutil.Error) as exc:
            shutil.rmtree(self.directory, ignore_errors=True)
            # `copytree` goes on after a file that it could not copy, and names all of them at the end, as texts.
            raise OSError(errno.EIO, str(exc.args[0][0][2])) if isinstance(exc, shutil.Error) else exc from exc


def job_dataset_id_of(job_id: str, digest: str) -> str:
    """The id of a job dataset; a digest has no slash, so no two job datasets have one."""
    return f"{job_id}/{digest}"


def directory_of(scores_directory: Path, job_id: str, digest: str) -> Path:
    """Where the scores of a job dataset are saved."""
    return scores_directory / hashlib.sha256(job_id.encode()).hexdigest()[:_JOB_DIGITS] / digest


def delete_older_scores(scores_directory: Path, in_use: Container[Path]) -> None:
    """Delete saved job datasets, but for those `in_use` and the KEPT_JOB_DATASETS latest. Blocks on the disk."""
    try:
        jobs = list(scores_directory.iterdir())
    except FileNotFoundError:
        return
    found = [(job_dataset.stat().st_mtime, job_dataset) for job in jobs for job_dataset in _saved_job_datasets(job)]
    # Each save writes its files into the job dataset's directory again, so the directory's mtime is that of the last
    # save.
    for _, job_dataset in sorted(found, reverse=True)[KEPT_JOB_DATASETS:]:
        if job_dataset not in in_use:
            shutil.rmtree(job_dataset, ignore_errors=True)
            log.info("deleted the scores of a job that has not come back lately")
    for job in jobs:
        if not any(_saved_job_datasets(job)):
            shutil.rmtree(job, ignore_errors=True)


def _saved_job_datasets(job: Path) -> Iterator[Path]:
    """The directories of a job's job datasets; what an older version of spiderfs has saved there has none."""
    if len(job.name) == _JOB_DIGITS and job.is_dir():
        yield from (entry for entry in job.iterdir() if entry.is_dir())


class JobDatasets:
    def __init__(self) -> None:
        self._job_datasets: dict[str, JobDataset] = {}
        self._numbers: dict[str, int] = {}

    def __iter__(self) -> Iterator[JobDataset]:
        """The job datasets there are now: others may come, or leave memory, while a caller looks at these."""
        return iter(list(self._job_datasets.values()))

    def __len__(self) -> int:
        return len(self._job_datasets)

    def __contains__(self, job_dataset_id: object) -> bool:
        return job_dataset_id in self._job_datasets

    def get(self, job_dataset_id: str) -> JobDataset | None:
        return self._job_datasets.get(job_dataset_id)

    def of_job(self, job_id: str) -> list[JobDataset]:
        return [job_dataset for job_dataset in self._job_datasets.values() if job_dataset.job_id == job_id]

    def number_of(self, job_dataset_id: str) -> int:
        """The number of a job dataset, which gets one now if it has none; the numbers in use are 1, 2, and so on."""
        if (number := self._numbers.get(job_dataset_id)) is None:
            number = len(self._numbers) + 1
            if number > _MAX_NUMBER:
                # That of the job dataset which got one first, of those not in memory: there are far fewer in memory.
                number = self._numbers.pop(next(known for known in self._numbers if known not in self._job_datasets))
            self._numbers[job_dataset_id] = number
        return number

    def put(self, job_dataset: JobDataset) -> None:
        """Have this job dataset in memory; there is none with its id."""
        self._job_datasets[job_dataset.job_dataset_id] = job_dataset

    def remove(self, job_dataset: JobDataset) -> None:
        del self._job_datasets[job_dataset.job_dataset_id]

    def known_list(self, digest: str, inodes: npt.NDArray[np.uint64]) -> KnownList | None:
        """The list with this digest and these files, if some job dataset has it: all of them share it."""
        for job_dataset in self._job_datasets.values():
            if job_dataset.list.digest == digest and np.array_equal(job_dataset.list.inodes, inodes):
                return job_dataset.list
        return None

    def samples_beside(self, job_dataset_id: str) -> int:
        """How many samples all other job datasets have together."""
        return sum(
            len(job_dataset.list.keys)
            for job_dataset in self._job_datasets.values()
            if job_dataset.job_dataset_id != job_dataset_id
        )
