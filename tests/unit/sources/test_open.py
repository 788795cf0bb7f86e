"""Opening a source by its name: what the users of a mount are shown of it, and what its own parts see."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.fakes.faulty_source import Faults, FaultySource
from spiderfs.errors import ConfigError, SourceNotFound
from spiderfs.sources.open import open_source
from spiderfs.views.tree import Forms, TreeSource

HIDDEN, OTHER = b".packages", b".other"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "below").mkdir(parents=True)
    (root / "below" / HIDDEN.decode()).touch()
    (root / OTHER.decode()).touch()
    (root / HIDDEN.decode()).mkdir()
    (root / HIDDEN.decode() / "one").write_bytes(b"bytes")
    return root


@pytest.fixture
def source(root: Path, tmp_path: Path) -> Iterator[FaultySource]:
    source = FaultySource(open_source(str(root)), Faults.made())
    yield source
    source.close()


@pytest.fixture
def shown(source: FaultySource) -> TreeSource:
    return TreeSource(source, Forms(), (HIDDEN, OTHER))


def test_some_entries_of_the_root_are_not_shown(shown: TreeSource) -> None:
    assert [name for name, _ in shown.scan(b"")] == [b".", b"below"]
    assert [name for name, _ in shown.scan(b"below")] == [b".", HIDDEN], "a user's file of that name"
    for name in (HIDDEN, OTHER):
        with pytest.raises(SourceNotFound):
            shown.stat(name)
    assert stat.S_ISDIR(shown.stat(b"").mode)


@pytest.mark.parametrize("named", ["ftp://bucket/train", "gopher://example.org/train"])
def test_a_source_of_an_unknown_kind_is_refused(named: str) -> None:
    with pytest.raises(ConfigError, match="name a directory"):
        open_source(named)
