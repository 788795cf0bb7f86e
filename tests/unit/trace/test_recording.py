"""The trace of a mount: where the disk takes no more of it, it ends, and nothing else does."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spiderfs.trace import ROWS, Recording, read_trace, recording_to


@contextmanager
def no_longer_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("noticed", ["as it goes", "at a flush", "at the end"])
def test_a_trace_that_cannot_be_written_ends_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, noticed: str
) -> None:
    path = tmp_path / "epoch.trace"
    recording = Recording(path)
    recording.append(1.0, 5, 100)
    recording.flush()
    size = path.stat().st_size
    with caplog.at_level(logging.WARNING), no_longer_than(size):
        for _ in range(3 * ROWS if noticed == "as it goes" else 3):
            recording.append(2.0, 6, 100)
        if noticed == "at a flush":
            recording.flush()
            recording.flush()
        recording.close()
    (record,) = caplog.records
    assert record.getMessage() == f"cannot go on recording to {path}: File too large: the trace ends here"
    assert path.stat().st_size == size
    assert read_trace(path).accesses().keys == [5]


def test_a_trace_that_has_ended_takes_no_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recording = Recording(tmp_path / "epoch.trace")
    with caplog.at_level(logging.CRITICAL), no_longer_than((tmp_path / "epoch.trace").stat().st_size):
        for _ in range(2 * ROWS):
            recording.append(1.0, 5, 100)
    assert len(recording._rows) == len(recording._buffer) == 0
    recording.close()


def test_without_a_file_there_is_no_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert recording_to(None) is None
    with caplog.at_level(logging.WARNING):
        assert recording_to(tmp_path) is None
    (record,) = caplog.records
    assert record.getMessage().endswith(": no more accesses are recorded")
    recording = recording_to(tmp_path / "new.trace")
    assert recording is not None
    recording.close()
