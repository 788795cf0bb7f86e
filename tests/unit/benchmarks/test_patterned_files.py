"""The large files of tests and benchmarks: blocks and pages that were swapped are noticed."""

from __future__ import annotations

from pathlib import Path

import xxhash

from benchmarks.common.sources import patterned, write_patterned
from benchmarks.serving.paced_store import Objects, _Answers
from spiderfs.store.store import BLOCK_BYTES


def test_no_two_pages_of_a_patterned_file_are_the_same(tmp_path: Path) -> None:
    size = 20 * BLOCK_BYTES + 5
    write_patterned(tmp_path / "file", size)
    content = (tmp_path / "file").read_bytes()
    assert content == patterned(0, size)
    assert content[5_000_000:7_500_000] == patterned(5_000_000, 7_500_000)
    pages = {xxhash.xxh3_64_intdigest(content[begin : begin + 4096]) for begin in range(0, size, 4096)}
    assert len(pages) == -(-size // 4096)


def test_no_two_blocks_of_an_object_are_the_same() -> None:
    answers = _Answers(Objects([], 0, {"large": 4 * BLOCK_BYTES}), 0.0)
    places = [(begin, begin + BLOCK_BYTES) for begin in range(0, 4 * BLOCK_BYTES, BLOCK_BYTES)]
    given = [answers.answer("GET", "/bucket/large", f"Range: bytes={begin}-{end - 1}") for begin, end in places]
    blocks = [answer.partition(b"\r\n\r\n")[2] for answer in given]
    assert blocks == [patterned(begin, end) for begin, end in places]
    assert len(set(blocks)) == 4
