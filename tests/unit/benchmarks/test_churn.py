"""The source of churn.py, and the growth that it reports."""

from __future__ import annotations

import pytest

from benchmarks import tables
from benchmarks.fakes.made_source import MadeSource, content_of, name_of
from benchmarks.serving.churn import Counted, growth
from spiderfs.errors import SourceChanged, SourceNotFound

FILES, SIZE = 2500, 300


def test_each_file_that_is_listed_can_be_read() -> None:
    source = MadeSource(f"made://{FILES}/{SIZE}")
    directories = [name for name, _ in source.scan(b"") if name != b"."]
    names = [b"%s/%s" % (above, name) for above in directories for name, _ in source.scan(above) if name != b"."]
    assert names == [name_of(number).encode() for number in range(FILES)]
    assert len({content_of(number, SIZE) for number in range(FILES)}) == FILES
    for number in (0, 999, 1000, FILES - 1):
        path = name_of(number).encode()
        found = source.stat(path)
        assert source.read(path, 10, 20, found.version) == content_of(number, SIZE)[10:30]
        assert source.read_present(path, SIZE) == (found, content_of(number, SIZE))
        with pytest.raises(SourceChanged):
            source.read(path, 0, SIZE, found._replace(size=SIZE + 1).version)


@pytest.mark.parametrize("path", ["000003", "000002/000002500", "000001/000000000", "000000/x", "x"])
def test_no_other_name_is_there(path: str) -> None:
    with pytest.raises(SourceNotFound):
        MadeSource(f"made://{FILES}/{SIZE}").stat(path.encode())


def test_growth_is_that_of_the_second_half() -> None:
    """The disk fills in the first parts; from then on memory alone grows, by 5 MB for 100,000 files."""
    files = range(100_000, 1_100_000, 100_000)
    rows = [
        Counted(count, 0, 0, 0, 300, 400, min(count / 2000, 100), 90 + count * 5e-5, 50, 10, count) for count in files
    ]
    grown = growth(rows)
    assert {name: round(slope, 6) for name, slope in grown.items()} == {
        "fetch_us": 0,
        "disk_mb": 0,
        "memory_mb": 50,
        "own_mb": 0,
    }
    result = {"extent": {"kilobytes": 10}, "parts": [row._asdict() for row in rows], "per_million_files": grown}
    lines = tables.churn(result).splitlines()
    assert len(lines) == 2 + 5 + 2
    assert lines[-3].startswith("| 1,000,000 | ")
    assert "| +50.0 |" in lines[-2]
