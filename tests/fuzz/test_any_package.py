"""Packages of any bytes, and with any index that is rightly sealed: what comes out of one is what was put in."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest
from fuzzing import damaged, examples, integers
from hypothesis import example, given
from hypothesis import strategies as st

from spiderfs import packages
from spiderfs.errors import StoreDamaged
from spiderfs.packages import HEADER_BYTES, index_bytes, pack, read_index
from spiderfs.sources.source import Version

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
FILES = [(b"a", Version(3, 7), b"one"), (b"b/c", Version(4, 8), b"four"), (b"empty", Version(0, 9), b"")]
SCALARS = st.none() | st.booleans() | integers(64) | st.integers(-(1 << 63), -1) | st.floats() | st.binary(max_size=20)
ROWS = st.lists(SCALARS | st.text(max_size=5), max_size=5) | st.tuples(
    st.binary(max_size=5) | SCALARS, integers(40) | SCALARS, integers(63) | SCALARS, st.binary(max_size=16) | SCALARS
).map(list)
INDICES = st.lists(ROWS, max_size=4) | SCALARS | st.dictionaries(st.binary(max_size=3), SCALARS, max_size=3)


def sealed(index: bytes, count: int, key: bytes) -> bytes:
    """A package without bytes of files."""
    header = struct.pack("<8sIIII16s", packages._MAGIC, packages._VERSION, count, len(index), 0, b"")
    return header[:-16] + packages._seal(key, packages._HEAD, header, index) + index


@examples(100)
@given(data=st.data())
def test_no_wrong_byte_comes_out_of_a_damaged_package(data: st.DataObject) -> None:
    package = data.draw(damaged(pack(FILES, KEY)[1]))
    try:
        index = read_index(package, len(package), KEY)
    except StoreDamaged:
        return
    assert [(file.path, file.version) for file in index.files] == [(path, version) for path, version, _ in FILES]
    for file, (_, _, payload) in zip(index.files, FILES, strict=True):
        assert index.payload(file, package) in (None, payload)


@examples(100)
@example([[b"a", float("inf"), 1, b""]], 1, 1)
@example([[1 << 40, 0, 1, b""]], 1, 1)
@example([[b"a", -5, 1, b""]], 1, 1)
@given(index=INDICES, count=integers(32) | st.integers(0, 4), length=integers(40))
def test_any_index_that_is_sealed_makes_sense_or_is_damaged(index: Any, count: int, length: int) -> None:
    package = sealed(msgpack.packb(index), count, KEY)
    assert index_bytes(package) == len(package) - HEADER_BYTES
    for package_bytes in (len(package), length):
        try:
            found = read_index(package, package_bytes, KEY)
        except StoreDamaged:
            continue
        assert all(file.version.size >= 0 and file.offset >= len(package) for file in found.files)
    with pytest.raises(StoreDamaged):
        read_index(package, len(package), OTHER_KEY)
