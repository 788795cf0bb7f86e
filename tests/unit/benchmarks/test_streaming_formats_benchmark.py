"""Where benchmarks/serving/streaming_formats.py could silently be wrong: ratios, refusals, and what loaders read."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.common.images import make_images
from benchmarks.serving import streaming_formats
from benchmarks.serving.format_loaders import Task
from benchmarks.serving.streaming_formats import Reading, measured

pytestmark = pytest.mark.thorough

PYTHON = Path(sys.executable)
PHOTOS = 12


@pytest.fixture
def data(tmp_path: Path) -> streaming_formats.Data:
    make_images(tmp_path / "photos", None, PHOTOS, in_a_directory=4)
    return streaming_formats.Data(tmp_path / "photos", 1_000_000, PHOTOS, tmp_path / "shards")


def test_a_ratio_is_of_one_round_and_a_system_that_refused_has_none() -> None:
    def readings(*first: float) -> list[dict[str, Any]]:
        return [asdict(Reading(first=figure, second=1.0)) for figure in first]

    refused = [asdict(Reading(refused="no"))]
    far = {"planned": readings(80, 91, 100), "mosaicml": readings(100, 100, 200), "litdata": refused}
    (planned, mosaicml) = tables.streaming_formats({"readings": {"remote": far}}).splitlines()[2:]
    assert planned == "| **with a plan** | 91 | 0.80 (0.9: **missed**) | | 1 | 0.0 | |"
    assert mosaicml.startswith("| MosaicML Streaming | 100 | 1.00 | |")


@pytest.mark.parametrize("case", ["remote", "local"])
def test_plain_files_are_read_twice(data: streaming_formats.Data, tmp_path: Path, case: str) -> None:
    found = measured(streaming_formats.SYSTEMS["direct"], streaming_formats.CASES[case], data, tmp_path / "run", PYTHON)
    # Four requests list three folders and the root.
    assert (found.start_s >= 0.08) == (case == "remote")
    assert found.first > 0 < found.second
    assert found.whole_s > found.imports_s > 0


def test_a_format_that_refuses_is_quoted_and_others_raise(data: streaming_formats.Data) -> None:
    task = Task("litdata", str(data.photos), str(data.shards))
    found = streaming_formats.read(task, PHOTOS, PYTHON)
    assert "No module named 'litdata'" in found.refused
    with pytest.raises(RuntimeError, match="No such file"):
        streaming_formats.read(Task("files", "/does/not/exist", str(data.shards)), PHOTOS, PYTHON)


def test_a_loader_that_loses_images_is_not_measured(data: streaming_formats.Data) -> None:
    with pytest.raises(RuntimeError, match="gave \\[12, 12\\] images, and not 13 each time"):
        streaming_formats.read(Task("files", str(data.photos), str(data.shards)), PHOTOS + 1, PYTHON)
