"""The examples of docs/SEMANTICS.md with their SOURCE on NFS, changed by the client that the mount reads through.

What a document says of names and versions holds for local sources; this client sees its own changes at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nfs_server import Way
from test_semantics import EXAMPLES, Example, check, places_of


@pytest.fixture
def environment(source: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    yield from places_of(tmp_path, source)


@pytest.mark.parametrize("example", [pytest.param(example, id=example.name) for example in EXAMPLES])
def test_semantics(way: Way, example: Example, environment: dict[str, str]) -> None:
    if not (way.hard and way.short):
        pytest.skip("what the examples show does not depend on this way to mount")
    check(example, environment, "kernel")
