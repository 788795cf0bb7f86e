"""Packages as bytes: what was packed comes out again, or nothing does."""

from __future__ import annotations

import hashlib
import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spiderfs.errors import StoreDamaged
from spiderfs.packages import HEADER_BYTES, index_bytes, pack, read_index
from spiderfs.sources.source import Version

FILES = st.lists(st.tuples(st.binary(min_size=1, max_size=20), st.binary(max_size=50)), max_size=8)
KEY = bytes(range(32))


def packed(*files: tuple[bytes, bytes], key: bytes = KEY) -> bytes:
    _, package = pack([(path, Version(len(payload), 7), payload) for path, payload in files], key)
    return package


@given(FILES)
def test_what_is_packed_comes_out(files: list[tuple[bytes, bytes]]) -> None:
    package = packed(*files)
    index = read_index(package, len(package), KEY)
    assert [(file.path, index.payload(file, package)) for file in index.files] == files
    # The index can be read without the rest.
    head = package[: HEADER_BYTES + index_bytes(package)]
    assert read_index(head, len(package), KEY) == index


@given(st.data())
def test_a_changed_byte_is_noticed(data: st.DataObject) -> None:
    files = [(b"a", b"one"), (b"b/c", b"four")]
    package = bytearray(packed(*files))
    place = data.draw(st.integers(0, len(package) - 1))
    package[place] ^= data.draw(st.integers(1, 255))
    try:
        index = read_index(bytes(package), len(package), KEY)
    except StoreDamaged:
        return
    found = [(file.path, index.payload(file, bytes(package))) for file in index.files]
    assert place >= HEADER_BYTES + index_bytes(bytes(package)), "header and index are sealed"
    assert None in [payload for _, payload in found]


@given(FILES)
def test_one_of_another_key_is_not_trusted(files: list[tuple[bytes, bytes]]) -> None:
    package = packed(*files, key=bytes(32))
    with pytest.raises(StoreDamaged):
        read_index(package, len(package), KEY)


def test_bytes_of_another_package_of_ours_are_not_taken_for_a_files() -> None:
    one, other = packed((b"a", b"one")), packed((b"a", b"two"))
    index = read_index(one, len(one), KEY)
    assert index.payload(index.files[0], one[:-3] + other[-3:]) is None


@pytest.mark.parametrize("length", [0, 5, HEADER_BYTES, HEADER_BYTES + 3, -1])
def test_one_that_is_cut_short_is_damaged(length: int) -> None:
    package = packed((b"a", b"one"))[:length]
    with pytest.raises(StoreDamaged):
        read_index(package, len(package), KEY)


def test_a_claimed_length_is_not_trusted() -> None:
    header = bytearray(packed((b"a", b"one"))[:HEADER_BYTES])
    header[16:20] = b"\xff\xff\xff\xff"
    with pytest.raises(StoreDamaged, match="unknown header"):
        index_bytes(bytes(header))


@pytest.mark.parametrize("index", [b"\xc1", msgpack.packb(7), msgpack.packb([7]), msgpack.packb([[b"a", "x", 1, 1]])])
def test_an_index_that_makes_no_sense_is_damaged(index: bytes) -> None:
    header = struct.pack("<8sIIII16s", b"SPIDERPK", 2, 1, len(index), 0, b"")
    seal = hashlib.blake2b(header + index, key=KEY, person=b"spiderfs head", digest_size=16).digest()
    package = header[:-16] + seal + index
    with pytest.raises(StoreDamaged, match="no sense"):
        read_index(package, len(package), KEY)
