"""A short list, as a trainer declares it and as the manager has it, and what a job learns about it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spiderfs.daemon.training.job_datasets.job_datasets import JobDataset
from spiderfs.daemon.training.trainer import KnownList, SampleList


def sample_list(count: int, name: str = "train") -> SampleList:
    text = b"".join(b"%03d\0" % number for number in range(count))
    return SampleList(name, name, text, np.arange(count, dtype=np.int32) % 2)


def known_list(inodes: list[int], digest: str = "digest") -> KnownList:
    return KnownList(digest, sample_list(len(inodes)), np.array(inodes, np.uint64))


def job_dataset(number: int, inodes: list[int], directory: Path = Path("/nonexistent"), job: str = "job") -> JobDataset:
    """A job dataset of a list whose digest says the job dataset's number."""
    return JobDataset(number, job, known_list(inodes, f"digest {number}"), directory)
