"""The layout of a cache directory, and what the documentation says of it."""

from __future__ import annotations

import re
from pathlib import Path

from spiderfs.shared import layout
from spiderfs.shared.layout import CacheLayout, RunLayout

DOCS = Path(__file__).parents[3] / "docs"
HEADING = "## The cache directory\n"


def documented() -> set[str]:
    """All names in the one table of the documentation that says what lies in a cache directory."""
    (text,) = [text for path in DOCS.rglob("*.md") if HEADING in (text := path.read_text())]
    rows = [line for line in text.partition(HEADING)[2].partition("\n## ")[0].splitlines() if line.startswith("| `")]
    names = re.findall(r"`([^`]+)`", "\n".join(rows))
    return {part for name in names for part in name.split("/") if part}


def test_the_documentation_names_every_file() -> None:
    everything = CacheLayout(Path("/cache"))
    paths = [path for part in (everything, everything.run) for path in vars(part).values() if isinstance(path, Path)]
    names = {path.name for path in paths} - {"cache"}
    names |= {layout.IN_USE_FILE, layout.FORMAT_FILE, layout.BLOCKS_DIRECTORY, layout.RESERVE_FILE}
    assert names - documented() == set()


def test_all_that_lies_at_the_top_is_listed() -> None:
    everything = CacheLayout(Path("/cache"))
    paths = [path for path in vars(everything).values() if isinstance(path, Path)]
    at_the_top = {path.name for path in paths if path.parent == everything.cache}
    assert at_the_top | {"run"} == {*CacheLayout.FILES, *CacheLayout.DIRECTORIES}


def test_a_reader_of_the_terms_finds_the_cache_directory_around_them() -> None:
    everything = CacheLayout(Path("/cache"))
    assert CacheLayout.around(everything.run.client_terms).content == everything.content


def test_notes_of_backing_files_are_found_again(tmp_path: Path) -> None:
    run = RunLayout(tmp_path)
    for path in (run.backing_file(70001, 3), run.backing_file(2, 11), run.client_pipe("ab"), run.snapshot(5, 0)):
        path.touch()
    assert sorted(run.backing_files()) == [(2, 11), (70001, 3)]
    assert list(run.client_pipes()) == [run.client_pipe("ab")]
