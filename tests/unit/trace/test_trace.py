from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spiderfs.core.hints import Epoch, Hub, Labels, Ratio, Scored
from spiderfs.errors import SpiderfsError, UsageError
from spiderfs.trace.batch import KIND_AT, RECORD_BYTES, TracedBatch
from spiderfs.trace.format import (
    BUFFERED_RECORDS,
    HEADER,
    MAGIC,
    RECORD,
    RECORD_FIELDS,
    Kind,
    TraceWriter,
    read_trace,
)

INODE = 2**63 - 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def write(path: Path, *keys: int) -> None:
    writer = TraceWriter(path)
    for number, key in enumerate(keys):
        writer.append(number / 2, key, 10 * key, served=key % 2 == 1)
    writer.close()


def test_layout_of_writer_and_reader_agree() -> None:
    assert (RECORD.itemsize, HEADER.size) == (RECORD_FIELDS.size, 16) == (32, 16)
    assert RECORD.fields is not None
    assert (RECORD.itemsize, RECORD.fields["kind"][1]) == (RECORD_BYTES, KIND_AT)


def test_reads_what_was_written(path: Path) -> None:
    writer = TraceWriter(path)
    writer.append(0.5, INODE, 2**40, served=True)
    writer.append(1.5, 7, 2**20, Kind.BLOCK, block=3)
    writer.close()
    writer.close()
    trace = read_trace(path)
    assert trace.records["time_s"].tolist() == [0.5, 1.5]
    accesses = trace.accesses()
    assert (accesses.keys, accesses.sizes) == ([INODE, (7, 3)], [2**40, 2**20])
    assert trace.served_ratio() == 0.5


def test_nothing_is_written_before_it_is_due_and_a_full_buffer_is(path: Path) -> None:
    writer = TraceWriter(path)
    writer.append(0, 1, 1)
    assert len(read_trace(path).records) == 0
    writer.flush()
    assert len(read_trace(path).records) == 1
    for _ in range(BUFFERED_RECORDS):
        writer.append(0, 1, 1)
    assert len(read_trace(path).records) == 1 + BUFFERED_RECORDS
    writer.close()


def test_goes_on_with_a_trace(path: Path) -> None:
    write(path, 1, 2)
    write(path, 3)
    assert read_trace(path).accesses().keys == [1, 2, 3]


@pytest.mark.parametrize("cut", [1, 31])
def test_a_record_cut_short_is_ignored_and_overwritten(path: Path, cut: int) -> None:
    write(path, 1, 2)
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_trace(path).accesses().keys == [1]
    write(path, 3)
    assert read_trace(path).accesses().keys == [1, 3]


def test_what_a_scorer_found_stands_between_the_accesses(path: Path) -> None:
    hub = Hub(INODE, "3", [5, 6, 7], [0.1, 0.25, 1 / 3])
    writer = TraceWriter(path)
    writer.hint(0, Ratio(0.9), int)
    writer.append(1, 5, 50, list_number=3)
    writer.hint(2, Scored("3", [5, 6], [1 / 3, 1 / 7]), int)
    writer.hint(2, Scored("3", [6], [1 / 9]), int)
    writer.hint(2, hub, int)
    writer.redirect(3, 6, 60, INODE, 70, list_number=3)
    writer.hint(4, Epoch("3"), int)
    writer.append(5, 7, 70)
    writer.close()
    trace = read_trace(path)
    accesses = trace.accesses()
    assert (accesses.keys, accesses.sizes, accesses.course_ids) == ([5, 6, 7], [50, 60, 70], ["3", "3", ""])
    scores = [(1, Scored("3", [5, 6], [1 / 3, 1 / 7])), (1, Scored("3", [6], [1 / 9]))]
    assert trace.hints() == [(0, Ratio(0.9)), *scores, (1, hub), (2, Epoch("3"))]
    assert trace.served_ratio() == pytest.approx(1 / 3)


def test_a_list_cut_short_ends_where_it_was_cut(path: Path) -> None:
    writer = TraceWriter(path)
    writer.hint(2, Hub(1, "3", [5, 6, 7], [0.1, 0.2, 0.3]), int)
    writer.close()
    path.write_bytes(path.read_bytes()[:-40])
    assert read_trace(path).hints() == [(0, Hub(1, "3", [5], [0.1]))]
    write(path, 9, 9)
    assert read_trace(path).hints() == [(0, Hub(1, "3", [5], [0.1]))]


def test_unknown_kinds_are_skipped(path: Path) -> None:
    write(path, 1)
    with path.open("ab") as file:
        file.write(RECORD_FIELDS.pack(0, 5, 5, 0, 99, 0, 0))
    trace = read_trace(path)
    assert len(trace.records) == 2
    assert trace.accesses().keys == [1]
    assert trace.served_ratio() == 1.0


def test_another_file_is_neither_read_nor_overwritten(path: Path) -> None:
    path.write_bytes(b"\x89PNG\r\n\x1a\n precious")
    for attempt in (read_trace, TraceWriter):
        with pytest.raises(UsageError, match="not a trace"):
            attempt(path)
    assert path.read_bytes().endswith(b"precious")


def test_another_version_is_named(path: Path) -> None:
    path.write_bytes(HEADER.pack(MAGIC, 9, 64, 0))
    for attempt in (read_trace, TraceWriter):
        with pytest.raises(UsageError, match="version 9"):
            attempt(path)


def test_a_header_cut_short_is_no_trace(path: Path) -> None:
    path.write_bytes(MAGIC)
    with pytest.raises(UsageError, match="not a trace"):
        read_trace(path)


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(UsageError, match="cannot record"):
        TraceWriter(tmp_path / "none" / "trace")


def test_a_full_disk_is_one_line() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(SpiderfsError, match="No space left"):
        TraceWriter(full)


def test_text(path: Path) -> None:
    path.write_bytes("# a comment\ntrain/0001.jpg 100\n\ntrain/ü.jpg 20 # again\ntrain/0001.jpg 100\n".encode())
    trace = read_trace(path)
    assert not trace.recorded
    assert (trace.accesses().keys, trace.accesses().sizes) == ([0, 1, 0], [100, 20, 100])


@pytest.mark.parametrize("line", ["a", "a b", "a 1 2", "a -1", "a 1.5", "a 9999999999999999999"])
def test_a_line_that_is_not_text_trace_is_named(path: Path, line: str) -> None:
    path.write_text(f"a 1\n{line}\n")
    with pytest.raises(UsageError, match="line 2"):
        read_trace(path)


def test_lists_come_back_each_by_itself(path: Path) -> None:
    writer = TraceWriter(path)
    lists = [("1", {5: 0, 6: -(2**32) - 1}), ("2", {5: 2**31})]
    writer.hint(0, Labels("1", lists[0][1]), int)
    writer.hint(0, Labels("2", lists[1][1]), int)
    writer.append(1, 5, 10)
    writer.hint(2, Labels("2", lists[1][1]), int)
    writer.close()
    given = [Labels(dataset, labels) for dataset, labels in lists]
    assert read_trace(path).hints() == [(0, given[0]), (0, given[1]), (1, given[1])]


def batches_of(path: Path) -> list[TracedBatch]:
    return [lesson for _, lesson in read_trace(path).lessons() if isinstance(lesson, TracedBatch)]


@pytest.mark.parametrize(("rows", "dimension", "with_losses"), [(1, 1, False), (3, 64, True), (200, 17, False)])
def test_batches_come_back_in_half_precision(path: Path, rows: int, dimension: int, with_losses: bool) -> None:
    rng = np.random.default_rng(rows)
    inodes = rng.integers(1, 2**63, rows).astype(np.uint64)
    embeddings = rng.standard_normal((rows, dimension)).astype(np.float16)
    losses = rng.random(rows).astype(np.float16) if with_losses else None
    writer = TraceWriter(path)
    for goes_on in (False, True):
        writer.batch(0, 3, inodes, embeddings.astype(np.float32), losses, goes_on)
    writer.close()
    found = batches_of(path)
    assert [batch.goes_on for batch in found] == [False, True]
    for batch in found:
        assert (batch.course_id, batch.embeddings.shape[1], batch.keys.tolist()) == ("3", dimension, inodes.tolist())
        assert (batch.embeddings == embeddings).all()
        assert (batch.losses is None) == (losses is None)
        assert losses is None or (batch.losses == losses).all()


def test_a_sample_of_64_dimensions_takes_158_bytes(path: Path) -> None:
    writer = TraceWriter(path)
    writer.batch(0, 1, np.arange(128, dtype=np.uint64), np.zeros((128, 64)), np.zeros(128))
    writer.close()
    assert (path.stat().st_size - HEADER.size) / 128 == pytest.approx(158, abs=0.5)


def test_lessons_stand_between_the_accesses_and_hints_go_without_them(path: Path) -> None:
    writer = TraceWriter(path)
    writer.hint(0, Labels("2", {5: 1, 6: 1}), int)
    writer.append(1, 5, 10, list_number=2)
    writer.batch(2, 2, np.array([5], np.uint64), np.ones((1, 4)), None)
    writer.hint(2, Ratio(0.75), int)
    writer.hint(2, Scored("3", [5], [0.5]), int)
    writer.append(3, 6, 10, list_number=2)
    writer.hint(4, Epoch("2", accuracy=0.25), int)
    writer.hint(5, Epoch("2"), int)
    writer.close()
    trace = read_trace(path)
    assert trace.has_batches
    (labels, (at, batch), *rest) = trace.lessons()
    assert labels == (0, Labels("2", {5: 1, 6: 1}))
    assert isinstance(batch, TracedBatch)
    assert (at, batch.keys.tolist()) == (1, [5])
    ends = [(2, Epoch("2", 0.25)), (2, Epoch("2"))]
    assert rest == [(1, Ratio(0.75)), *ends]
    assert trace.hints() == [labels, (1, Ratio(0.75)), (1, Scored("3", [5], [0.5])), *ends]
    assert trace.accesses().keys == [5, 6]
    assert trace.accuracies() == {"2": [0.25]}


def test_a_batch_that_a_crash_cut_short_is_left_out(path: Path) -> None:
    def write_batch(key: int) -> None:
        writer = TraceWriter(path)
        writer.batch(0, 1, np.full(4, key, np.uint64), np.ones((4, 16)), None)
        writer.close()

    write_batch(7)
    path.write_bytes(path.read_bytes()[:-40])
    assert batches_of(path) == []
    write_batch(8)
    assert [batch.keys.tolist() for batch in batches_of(path)] == [[8] * 4]


@pytest.mark.parametrize(("rows", "dimension"), [(0, 4), (4, 0)])
def test_a_batch_of_nothing_is_damage(path: Path, rows: int, dimension: int) -> None:
    write(path, 1)
    with path.open("ab") as file:
        file.write(RECORD_FIELDS.pack(0, 0, rows, dimension, Kind.BATCH, 0, 1))
    with pytest.raises(UsageError, match=r"^the trace is damaged at record 1, [^\n]*$"):
        list(read_trace(path).lessons())
