"""The examples of docs/reference/semantics.md with their SOURCE on NFS, changed by the mount's own client.

What a document says of names and versions holds for local sources; this client sees its own changes at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from nfs_server import Way
from test_semantics import EXAMPLES, Example, check, places_of


@pytest.fixture
def environment(source: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    yield from places_of(tmp_path, source)


TIMEOUT_S = 300.0
# It reads thousands of files, which takes minutes where the processor is emulated.
TOO_SLOW = ("the-budget-2",)
# A worker is killed in it. Before Linux 6.9 that ends the mount, since the kernel cannot hand out requests again.
OF_NEWER_KERNELS = ("unmounting-and-crashes-2",)
KERNEL = tuple(int(part) for part in os.uname().release.split(".")[:2])


@pytest.mark.parametrize("example", [pytest.param(example, id=example.name) for example in EXAMPLES])
def test_semantics(way: Way, example: Example, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_semantics.TIMEOUT_S", TIMEOUT_S)
    if str(way) != "v4.2,hard,actimeo=1":
        pytest.skip("what the examples show does not depend on this way to mount")
    if example.name in TOO_SLOW:
        pytest.skip("takes minutes where the processor is emulated")
    if example.name in OF_NEWER_KERNELS and KERNEL < (6, 9):
        pytest.skip("needs Linux 6.9")
    check(example, environment, "kernel")
