"""Opening a source by its name: what the users of a mount are shown of it, and what its own parts see."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from spiderfs.errors import ConfigError, SourceNotFound, SourceUnavailable
from spiderfs.sources.faults import FaultState
from spiderfs.sources.open import OpenedSource, open_source

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
def source(root: Path, tmp_path: Path) -> Iterator[OpenedSource]:
    source = open_source(str(root), FaultState.create(tmp_path / "faults"), HIDDEN, OTHER)
    yield source
    source.close()
    source.faults.close()


def test_some_entries_of_the_root_are_not_shown(source: OpenedSource) -> None:
    assert [name for name, _ in source.shown.scan(b"")] == [b"below"]
    assert [name for name, _ in source.shown.scan(b"below")] == [HIDDEN], "a user's file of that name"
    for name in (HIDDEN, OTHER):
        with pytest.raises(SourceNotFound):
            source.shown.stat(name)
    assert stat.S_ISDIR(source.shown.stat(b"").mode)


def test_the_mount_itself_sees_everything(source: OpenedSource) -> None:
    assert {name for name, _ in source.everything.scan(b"")} == {b"below", HIDDEN, OTHER}
    path = HIDDEN + b"/one"
    assert source.everything.read(path, 0, 5, source.everything.stat(path).version) == b"bytes"


def test_faults_concern_all_of_it(source: OpenedSource) -> None:
    source.faults.set("gone", 1)
    for view in (source.everything, source.shown):
        with pytest.raises(SourceUnavailable):
            view.stat(b"below")


@pytest.mark.parametrize("named", ["s3://bucket/train", "https://example.org/train"])
def test_a_source_of_an_unknown_kind_is_refused(named: str, tmp_path: Path) -> None:
    faults = FaultState.create(tmp_path / "faults")
    with pytest.raises(ConfigError, match="name a directory"):
        open_source(named, faults, HIDDEN)
    faults.close()
