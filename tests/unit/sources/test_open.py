"""Opening a source by its name, and what the users of a mount are not shown of it."""

from __future__ import annotations

import stat

import pytest

from benchmarks.fakes import MemorySource
from spiderfs.errors import ConfigError, SourceNotFound
from spiderfs.sources.open import open_source
from spiderfs.views.tree import Forms, TreeSource

HIDDEN, OTHER = b".packages", b".other"


def test_some_entries_of_the_root_are_not_shown() -> None:
    source = MemorySource()
    for path in (HIDDEN + b"/one", OTHER, b"below/" + HIDDEN):
        source.add(path)
    shown = TreeSource(source, Forms(), (HIDDEN, OTHER))
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
