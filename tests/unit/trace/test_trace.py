from __future__ import annotations

import io
import tracemalloc
from pathlib import Path

import msgpack
import numpy as np
import pytest

from spiderfs.core.events import (
    AtHand,
    Budget,
    Disconnected,
    Dispatched,
    Epoch,
    Labels,
    Lost,
    Pinning,
    Planned,
    Progressed,
    Published,
    Ratio,
    Scored,
    WarmUp,
)
from spiderfs.core.policy import Hub
from spiderfs.errors import SpiderfsError, UsageError
from spiderfs.trace import ACCESS, EVENTS, FORMAT, ROWS, VERSION, TracedBatch, TraceWriter, read_trace

INODE = 2**63 - 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def write(path: Path, *keys: int) -> None:
    writer = TraceWriter(path)
    for number, key in enumerate(keys):
        writer.append(number / 2, key, 10 * key, served=key % 2 == 1)
    writer.close()


def test_reads_what_was_written(path: Path) -> None:
    writer = TraceWriter(path)
    writer.append(0.5, INODE, 2**40, served=True)
    writer.append(1.5, 7, 2**20, block=3)
    writer.close()
    writer.close()
    trace = read_trace(path)
    assert trace.columns["time_s"].tolist() == [0.5, 1.5]
    accesses = trace.accesses()
    assert (accesses.keys, accesses.sizes) == ([INODE, (7, 3)], [2**40, 2**20])
    assert trace.served_ratio() == 0.5


def test_nothing_is_written_before_it_is_due_and_a_full_buffer_is(path: Path) -> None:
    writer = TraceWriter(path)
    writer.append(0, 1, 1)
    assert len(read_trace(path).accesses()) == 0
    writer.flush()
    assert len(read_trace(path).accesses()) == 1
    for _ in range(ROWS):
        writer.append(0, 1, 1)
    assert len(read_trace(path).accesses()) == 1 + ROWS
    writer.close()


def test_what_a_crash_cut_short_is_ignored_and_overwritten(path: Path) -> None:
    write(path, 1)
    whole = path.read_bytes()
    write(path, 2)
    more = path.read_bytes()
    for length in range(len(whole), len(more)):
        path.write_bytes(more[:length])
        assert read_trace(path).accesses().keys == [1]
        write(path, 3)
        assert read_trace(path).accesses().keys == [1, 3]


def test_a_file_of_other_options_is_refused(path: Path) -> None:
    TraceWriter(path, options=77).close()
    TraceWriter(path, options=77).close()
    TraceWriter(path).close()
    before = path.read_bytes()
    with pytest.raises(UsageError, match="the trace of a mount with another source"):
        TraceWriter(path, options=78)
    assert path.read_bytes() == before


def append_to(path: Path, *records: object) -> None:
    with path.open("ab") as file:
        file.writelines(msgpack.packb(record) for record in records)


def test_unknown_kinds_and_names_are_skipped(path: Path) -> None:
    write(path, 1)
    append_to(path, {"t": 0, "kind": "Weather"}, {"t": 0, "kind": "Ratio", "ratio": 0.5, "reason": "none"})
    write(path, 3)
    trace = read_trace(path)
    assert trace.accesses().keys == [1, 3]
    assert trace.hints() == [(1, Ratio(0.5))]
    assert trace.served_ratio() == 1.0


def test_it_is_a_stream_of_maps_with_names(path: Path) -> None:
    writer = TraceWriter(path, options=77)
    writer.append(1.5, 5, 50)
    writer.append(2.0, 600, 50, served=True)
    writer.event(2.0, Epoch("2", 0.25))
    writer.event(2.5, Lost((7, 3)))
    writer.close()
    header, accesses, epoch, lost = msgpack.Unpacker(io.BytesIO(path.read_bytes()))
    assert header == {"format": "spiderfs trace", "version": VERSION, "options": 77}
    assert (accesses.pop("t"), accesses.pop("kind"), accesses.pop("rows")) == (1.5, "accesses", 2)
    # What is as usual is left out, and a column is as narrow as its largest number allows.
    dtypes = {"time_s": "<f4", "key": "<u2", "size": "u1", "served": "u1"}
    columns = {name: np.frombuffer(accesses.pop(name), dtype).tolist() for name, dtype in dtypes.items()}
    assert columns == {"time_s": [0, 0.5], "key": [5, 600], "size": [50, 50], "served": [0, 1]}
    assert accesses == {}
    assert epoch == {"t": 2.0, "kind": "Epoch", "job_dataset_id": 2, "accuracy": 0.25}
    assert lost == {"t": 2.5, "kind": "Lost", "key": [7, 3]}


def test_each_event_comes_back(path: Path) -> None:
    events = [
        Scored("3", [5, INODE], [1 / 3, 1 / 7]),
        Hub(INODE, "3", [5, 6], [0.0, 0.25]),
        Ratio(1.0),
        Epoch("3"),
        Epoch("3", 1.0),
        Labels("3", {5: -1, INODE: 2**62}),
        Pinning("3", []),
        WarmUp("3", True),
        AtHand(5, 100),
        Budget(1 << 40, 0),
        Lost(5),
        Lost((5, 2)),
        Published(),
        Planned(7, "3", 1, 2, True, [5, INODE]),
        Progressed(7, "3", 1, 5, 4),
        Dispatched(7, "3", 1, 3, [6]),
        Disconnected(7),
    ]
    writer = TraceWriter(path)
    for event in events:
        writer.event(0, event)
    writer.close()
    assert [event for _, event in read_trace(path).events] == events
    assert {type(event) for event in events} | {TracedBatch} == set(EVENTS.values())


def test_the_columns_of_accesses_come_back(path: Path) -> None:
    writer = TraceWriter(path)
    writer.append(0, 5, 50, block=3, list_number=300, offered=False)
    writer.redirect(1, 6, 60, 0, 70, list_number=1)
    writer.append(2, INODE, 2**40, served=True, unseen=True)
    writer.close()
    rows = [
        (0, 5, 50, 3, 5, 50, 300, 0, 1, 0),
        (1, 6, 60, 0, 0, 70, 1, 1, 0, 0),
        (2, INODE, 2**40, 0, INODE, 2**40, 0, 1, 0, 1),
    ]
    columns = read_trace(path).columns
    assert list(zip(*(columns[name].tolist() for name in ACCESS.names or ()), strict=True)) == rows


def test_an_open_takes_a_few_bytes(path: Path) -> None:
    writer = TraceWriter(path)
    for number in range(2 * ROWS):
        writer.append(number / 1000, 1 + number, 100_000 + number, served=number % 2 == 0, list_number=1)
    writer.close()
    assert path.stat().st_size / (2 * ROWS) < 16


def test_another_file_is_neither_read_nor_overwritten(path: Path) -> None:
    path.write_bytes(b"\x89PNG\r\n\x1a\n precious")
    for attempt in (read_trace, TraceWriter):
        with pytest.raises(UsageError, match="not a trace"):
            attempt(path)
    assert path.read_bytes().endswith(b"precious")


@pytest.mark.parametrize(
    ("header", "version"),
    [
        (msgpack.packb({"format": FORMAT, "version": 9, "options": 0}), "version 9,"),
        (b"SPIDERTR\x02\x00\x20\x00" + bytes(36), "version 2 or older,"),
    ],
)
def test_another_version_is_named(path: Path, header: bytes, version: str) -> None:
    path.write_bytes(header)
    for attempt in (read_trace, TraceWriter):
        with pytest.raises(UsageError, match=f"{version}.*record another"):
            attempt(path)
    assert path.read_bytes() == header


def columns(rows: int, **changed: object) -> dict[str, object]:
    return {"t": 0, "kind": "accesses", "rows": rows, "time_s": bytes(4), "key": b"\1", "size": b"\1"} | changed


@pytest.mark.parametrize(
    "record",
    [
        5,
        {"t": 0},
        {"t": 0, "kind": ["accesses"]},
        {"t": 0, "kind": "accesses"},
        columns(0),
        columns(1 << 60),
        columns(1, key=b"\1\2\3"),
        columns(2, time_s=bytes(8), key=b"\1\2", size=b"\1\2\3"),
        columns(1, key="a"),
        columns(1, size=b"\xff" * 8),
        columns(1, given_size=b"\xff" * 8),
        {"t": 0, "kind": "Ratio"},
        {"t": 0, "kind": "Ratio", "ratio": -0.5},
        {"t": 0, "kind": "Epoch", "job_dataset_id": 1, "accuracy": 3.5},
        {"t": 0, "kind": "Scored", "job_dataset_id": 1, "keys": bytes(8), "scores": bytes(8)},
        {"t": 0, "kind": "Scored", "job_dataset_id": 1, "keys": bytes(16), "scores": b"\0\0\0\0\0\0\xf0\x3f"},
        {"t": 0, "kind": "Labels", "job_dataset_id": 1, "labels": [bytes(8), bytes(16)]},
        {"t": 0, "kind": "Labels", "job_dataset_id": 1, "labels": {}},
        {"t": 0, "kind": "AtHand", "key": 5, "size": 1 << 60},
        {"t": 0, "kind": "Lost", "key": [5, -1]},
        {"t": 0, "kind": "WarmUp", "job_dataset_id": 1, "active": 1},
        {
            "t": 0,
            "kind": "TracedBatch",
            "job_dataset_id": 1,
            "inodes": bytes(8),
            "embeddings": [0, b""],
            "losses": None,
        },
    ],
)
def test_a_record_that_no_writer_writes_is_one_line(path: Path, record: object) -> None:
    write(path, 1)
    append_to(path, record, {"t": 0, "kind": "Published"})
    with pytest.raises(UsageError, match=r"^the trace \S+ is damaged at record 2: record another$"):
        read_trace(path)


def test_bytes_that_are_no_maps_are_neither_read_nor_overwritten(path: Path) -> None:
    write(path, 1)
    before = path.read_bytes() + b"\xc1" + bytes(100)
    path.write_bytes(before)
    for attempt in (read_trace, TraceWriter):
        with pytest.raises(UsageError, match="is damaged at record 2"):
            attempt(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("length", [b"\xc6\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"])
def test_a_damaged_length_reserves_no_memory(path: Path, length: bytes) -> None:
    write(path, 1)
    with path.open("ab") as file:
        file.write(length)
    tracemalloc.start()
    try:
        accesses = read_trace(path).accesses()
    except UsageError:
        accesses = None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert accesses is None or accesses.keys == [1]
    assert peak < 1 << 24


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


def batches_of(path: Path) -> list[TracedBatch]:
    return [event for _, event in read_trace(path).events if isinstance(event, TracedBatch)]


@pytest.mark.parametrize(("rows", "dimension", "with_losses"), [(1, 1, False), (3, 64, True), (200, 17, False)])
def test_batches_come_back_in_half_precision(path: Path, rows: int, dimension: int, with_losses: bool) -> None:
    rng = np.random.default_rng(rows)
    inodes = rng.integers(1, 2**63, rows).astype(np.uint64)
    embeddings = rng.standard_normal((rows, dimension)).astype(np.float16)
    losses = rng.random(rows).astype(np.float16) if with_losses else None
    writer = TraceWriter(path)
    for goes_on in (False, True):
        writer.event(0, TracedBatch("3", inodes, embeddings.astype(np.float32), losses, goes_on))
    writer.close()
    found = batches_of(path)
    assert [batch.goes_on for batch in found] == [False, True]
    for batch in found:
        assert (batch.job_dataset_id, batch.embeddings.shape[1], batch.inodes.tolist()) == (
            "3",
            dimension,
            inodes.tolist(),
        )
        assert (batch.embeddings == embeddings).all()
        assert (batch.losses is None) == (losses is None)
        assert losses is None or (batch.losses == losses).all()


def test_a_sample_of_64_dimensions_takes_138_bytes(path: Path) -> None:
    writer = TraceWriter(path)
    for _ in range(10):
        writer.event(0, TracedBatch("1", np.arange(128, dtype=np.uint64), np.zeros((128, 64)), np.zeros(128)))
    writer.close()
    assert path.stat().st_size / 1280 == pytest.approx(138, abs=1.5)


def test_events_stand_between_the_accesses_and_hints_go_without_batches(path: Path) -> None:
    writer = TraceWriter(path)
    writer.event(0, Labels("2", {5: 1, 6: 1}))
    writer.append(1, 5, 10, list_number=2)
    writer.event(2, TracedBatch("2", np.array([5], np.uint64), np.ones((1, 4)), None))
    writer.event(2, Ratio(0.75))
    writer.event(2, Scored("3", [5], [0.5]))
    writer.append(3, 6, 10, list_number=2)
    writer.event(4, Epoch("2", accuracy=0.25))
    writer.event(5, Epoch("2"))
    writer.close()
    trace = read_trace(path)
    assert trace.has_batches
    (labels, (at, batch), *rest) = trace.events
    assert labels == (0, Labels("2", {5: 1, 6: 1}))
    assert isinstance(batch, TracedBatch)
    assert (at, batch.inodes.tolist()) == (1, [5])
    assert rest == [(1, Ratio(0.75)), (1, Scored("3", [5], [0.5])), (2, Epoch("2", 0.25)), (2, Epoch("2"))]
    assert trace.hints() == [labels, *rest]
    assert trace.accesses().keys == [5, 6]
    assert trace.accuracies() == {"2": [0.25]}


def test_a_batch_that_a_crash_cut_short_is_left_out(path: Path) -> None:
    def write_batch(key: int) -> None:
        writer = TraceWriter(path)
        writer.event(0, TracedBatch("1", np.full(4, key, np.uint64), np.ones((4, 16)), None))
        writer.close()

    write_batch(7)
    path.write_bytes(path.read_bytes()[:-40])
    assert batches_of(path) == []
    write_batch(8)
    assert [batch.inodes.tolist() for batch in batches_of(path)] == [[8] * 4]
