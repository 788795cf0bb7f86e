"""The READs that workers remember, and the attribute that says them."""

from __future__ import annotations

import os
import random
from itertools import pairwise

import pytest

from spiderfs.protocol.reads import ReadBytes, decoded, encoded
from spiderfs.shared.read_log import KEPT_S, Read, ReadLog, merged


def test_nothing_is_kept_before_someone_asks_nor_long_after_it() -> None:
    log = ReadLog(1)
    assert not log.is_kept(5.0)
    assert log.keep(5.0)
    assert not log.keep(6.0)
    assert log.is_kept(6.0 + KEPT_S / 2)
    assert not log.is_kept(6.0 + KEPT_S)


def test_a_process_finds_its_reads_of_all_workers_since_a_time() -> None:
    log = ReadLog(2)
    first, second = log.of_worker(0), log.of_worker(1)
    first.note(1.0, 5, 0, 10, 7, 70)
    first.note(2.0, 5, 10, 20, 7, 71)
    first.note(2.5, 5, 20, 30, 8, 80)
    if (child := os.fork()) == 0:
        second.note(3.0, 6, 0, 10, 7, 70)
        os._exit(0)
    os.waitpid(child, 0)
    assert log.since(2.0, 7, 70) == [Read(5, False, 10, 20), Read(6, True, 0, 10)]
    assert log.since(1.0, 7, 71) == [Read(5, False, 0, 10), Read(5, True, 10, 20), Read(6, False, 0, 10)]
    assert log.since(2.5, 8, 80) == [Read(5, True, 20, 30)]
    assert log.since(3.5, 7, 70) == []


def test_reads_that_were_overwritten_are_not_taken_for_all() -> None:
    log = ReadLog(1)
    for number in range(10_000):
        log.note(float(number), 1, 2 * number, 2 * number + 1, 7, 7)
    assert log.since(0.0, 7, 7) is None
    assert len(log.since(9_000.0, 7, 7) or ()) == 1_000


def test_pieces_are_joined_and_no_byte_is_lost_or_added() -> None:
    rng = random.Random(1)
    places = [(rng.randrange(200), rng.randrange(1, 20)) for _ in range(40)]
    reads = [Read(rng.randrange(3), rng.random() < 0.5, begin, begin + size) for begin, size in places]
    found = merged(reads)
    for file in {read[:2] for read in reads}:
        pieces = [read for read in found if read[:2] == file]
        wanted = {byte for read in reads if read[:2] == file for byte in range(read.begin, read.end)}
        assert {byte for piece in pieces for byte in range(piece.begin, piece.end)} == wanted
        assert sum(piece.end - piece.begin for piece in pieces) == len(wanted)
        assert all(before.end < after.begin for before, after in pairwise(pieces))


def test_the_attribute_says_what_was_read() -> None:
    reads = [ReadBytes(True, 0, 1 << 60, b"a b/\n\xff"), ReadBytes(False, 5, 6, b"c")]
    assert decoded(encoded(12345.678901, reads)) == ("12345.678901", reads)
    assert decoded(encoded(1.0, [])) == ("1.0", [])
    for bad in (b"", b"1.0", b"x\0", b"1.0\0001 2\0"):
        with pytest.raises(ValueError):  # noqa: PT011
            decoded(bad)
