"""The job datasets in memory: their numbers, and the lists that they share."""

from __future__ import annotations

from pathlib import Path

import pytest
from short_lists import job_dataset

from spiderfs.daemon.training.job_datasets import job_datasets as module
from spiderfs.daemon.training.job_datasets.job_datasets import JobDatasets, directory_of, job_dataset_id_of


def test_a_job_dataset_keeps_its_number() -> None:
    job_datasets = JobDatasets()
    numbers = [job_datasets.number_of(name) for name in ("a/1", "b/1", "a/2", "b/1", "a/1")]
    assert numbers == [1, 2, 3, 2, 1]


def test_when_numbers_run_out_those_of_job_datasets_that_are_over_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_NUMBER", 4)
    job_datasets = JobDatasets()
    living = job_dataset(job_datasets.number_of("job/digest 1"), [10])
    job_datasets.put(living)
    found = [job_datasets.number_of(f"job {number}") for number in range(10)]
    assert set(found) == {2, 3, 4}
    assert living.number not in found
    assert job_datasets.number_of("job/digest 1") == 1


def test_no_two_job_datasets_have_one_id_or_one_directory() -> None:
    jobs = ["a", "a/1", "A", "..", "../../evil", "/etc/evil", "\u00e4" * 60, "x" * 128]
    pairs = [("a", "2"), *((job, "1") for job in jobs)]
    assert len({job_dataset_id_of(*pair) for pair in pairs}) == len(pairs)
    found = {directory_of(Path("/s"), *pair) for pair in pairs}
    assert len(found) == len(pairs)
    assert all(path.resolve().parent.parent == Path("/s") for path in found)
