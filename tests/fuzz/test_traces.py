"""Traces of any content after a good header, and text: simulated, or refused by a line that says what is wrong."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import fields
from pathlib import Path

import msgpack
import numpy as np
from fuzzing import damaged, examples, integers
from hypothesis import given
from hypothesis import strategies as st

from spiderfs.core.events import Epoch, Labels, Pinning, Ratio, Scored, WarmUp
from spiderfs.core.policy import Hub
from spiderfs.errors import UsageError
from spiderfs.options.units import Capacity
from spiderfs.simulation import chosen_policies, chosen_settings, compare
from spiderfs.trace import ACCESS, EVENTS, FORMAT, VERSION, TracedBatch, TraceWriter, read_trace

NUMBERS = st.floats(0, 1) | st.floats() | st.integers(0, 9) | integers(64) | st.none()
ARRAYS = st.lists(st.integers(1, 8), max_size=4).map(lambda keys: np.array(keys, "<u8").tobytes())
FLOATS = st.lists(st.floats(0, 1), max_size=4).map(lambda numbers: np.array(numbers, "<f8").tobytes())
PAIRS = st.lists(ARRAYS | st.integers(0, 9), max_size=2)
ANY = NUMBERS | st.booleans() | ARRAYS | FLOATS | PAIRS | st.binary(max_size=20)
# Each kind has its fields, most of which are as here.
LIKELY = {
    "job_dataset_id": st.integers(0, 2),
    "key": st.integers(1, 8),
    "active": st.booleans(),
    "goes_on": st.booleans(),
    "ratio": st.floats(0, 1),
    "accuracy": st.floats(0, 1),
    "size": st.integers(0, 100),
    "keys": ARRAYS,
    "neighbours": ARRAYS,
    "inodes": ARRAYS,
    "scores": FLOATS,
    "distances": FLOATS,
    "labels": st.lists(ARRAYS, min_size=2, max_size=2),
}


@st.composite
def events(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(sorted(EVENTS)) | st.text(max_size=9))
    record: dict[str, object] = {"t": draw(NUMBERS), "kind": kind}
    for field in fields(EVENTS[kind]) if kind in EVENTS else ():
        record[field.name] = draw(LIKELY.get(field.name, ANY) if draw(st.integers(0, 5)) else ANY)
    packed: bytes = msgpack.packb(record)
    return packed


@st.composite
def accesses(draw: st.DrawFn) -> bytes:
    rows = draw(st.integers(0, 5))
    record: dict[str, object] = {"t": 0.0, "kind": "accesses", "rows": rows, "time_s": bytes(4 * rows)}
    for name in draw(st.sets(st.sampled_from(sorted(set(ACCESS.names or ()) - {"time_s"})))):
        record[name] = draw(st.binary(min_size=rows, max_size=rows) if draw(st.integers(0, 9)) else ANY)
    packed: bytes = msgpack.packb(record)
    return packed


# As spiderfs writes them, so that more than the first of them is looked at.
GOOD = st.builds(
    lambda keys, size: msgpack.packb(
        {"t": 1.0, "kind": "accesses", "rows": len(keys), "time_s": bytes(4 * len(keys)), "key": bytes(keys)}
        | {"size": bytes([size]) * len(keys)}
    ),
    st.lists(st.integers(1, 8), min_size=1, max_size=5),
    st.integers(1, 100),
)
HEADER = msgpack.packb({"format": FORMAT, "version": VERSION, "options": 0})


@functools.cache
def written() -> bytes:
    """A trace of a short training, with one record of each kind at least."""
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory(prefix="trace") as directory:
        writer = TraceWriter(Path(directory) / "trace")
        inodes = np.arange(1, 9, dtype=np.uint64)
        writer.event(0.0, Labels("1", {int(inode): int(inode) % 2 for inode in inodes}))
        writer.event(0.0, Ratio(0.9))
        for epoch in range(2):
            for inode in inodes.tolist():
                writer.append(1.0, inode, 100 * inode, list_number=1)
                writer.event(1.0, Scored("1", [inode], [0.5]))
            writer.event(1.5, TracedBatch("1", inodes, rng.normal(size=(8, 3)), rng.random(8)))
            writer.event(2.0, Hub(1, "1", [3, 5], [0.1, 0.2]))
            writer.redirect(2.0, 3, 300, 1, 100, 1)
            writer.append(2.5, 77, 1 << 20, block=1)
            writer.event(2.5, Pinning("1", [1, 3]))
            writer.event(2.5, WarmUp("1", epoch == 0))
            writer.event(3.0, Epoch("1", 0.25 * epoch))
        writer.close()
        return (Path(directory) / "trace").read_bytes()


TEXT = st.text(st.sampled_from("ab1 90#\n\t-.\x00é"), max_size=60).map(str.encode) | st.binary(max_size=60)


@examples(60)
@given(
    records=st.lists(GOOD | accesses() | events(), max_size=30),
    epoch=st.none() | st.integers(1, 40) | integers(63).filter(bool),
    rescored=st.booleans(),
    data=st.data(),
)
def test_records_are_simulated(records: list[bytes], epoch: int | None, rescored: bool, data: st.DataObject) -> None:
    trace = HEADER + b"".join(records)
    if data.draw(st.integers(0, 4)) == 0:
        trace = data.draw(damaged(trace))
    _simulate(trace, epoch, rescored)


@examples(60)
@given(rescored=st.booleans(), data=st.data())
def test_a_damaged_trace_is_simulated_or_refused(rescored: bool, data: st.DataObject) -> None:
    _simulate(data.draw(damaged(written())), None, rescored)


def test_a_trace_that_is_not_damaged_is_simulated() -> None:
    _simulate(written(), None, True)


@examples(60)
@given(TEXT)
def test_any_text_is_simulated_or_refused(text: bytes) -> None:
    _simulate(text, None, False)


def _simulate(content: bytes, epoch: int | None, rescored: bool) -> None:
    with tempfile.NamedTemporaryFile(prefix="trace") as file:
        Path(file.name).write_bytes(content)
        settings = chosen_settings("nearest,0.5", 5) if rescored else chosen_settings(None, None)
        try:
            report = compare(
                read_trace(file.name), "trace", chosen_policies("all"), [Capacity.parse("50%")], epoch, None, settings
            )
        except UsageError:
            return
        assert all(0 <= row["hit_ratio"] <= 1 for row in report["results"])
