"""Traces of any content after a good header, and text: simulated, or refused by a line that says what is wrong."""

from __future__ import annotations

import functools
import struct
import tempfile
from pathlib import Path

import numpy as np
from fuzzing import damaged, examples, integers
from hypothesis import given
from hypothesis import strategies as st

from spiderfs.core.hints import Epoch, Hub, Labels, Pinning, Ratio, Scored, WarmUp
from spiderfs.errors import UsageError
from spiderfs.options.units import Capacity
from spiderfs.simulation.compare import chosen_policies, compare
from spiderfs.simulation.hint_source import chosen_settings
from spiderfs.trace.format import HEADER, MAGIC, RECORD, RECORD_FIELDS, VERSION, Kind, TraceWriter, read_trace

NUMBERS = st.floats(allow_nan=True, allow_infinity=True).map(lambda x: int.from_bytes(struct.pack("<d", x), "little"))
LIKELY = st.floats(0, 1, width=32).map(lambda x: int.from_bytes(struct.pack("<d", x), "little"))
RECORDS = st.builds(
    RECORD_FIELDS.pack,
    st.floats(0, 1e9),
    st.integers(1, 8) | integers(64),
    st.integers(0, 9) | LIKELY | NUMBERS | integers(64),
    st.integers(0, 4) | integers(32),
    st.sampled_from(Kind).map(int) | st.integers(0, 255),
    st.integers(0, 1) | st.integers(0, 255),
    st.integers(0, 2) | st.integers(0, 65535),
)
# As spiderfs writes them, so that more than the first of them is looked at.
GOOD = st.builds(
    RECORD_FIELDS.pack,
    st.just(1.0),
    st.integers(1, 8),
    st.integers(1, 100),
    st.just(0),
    st.sampled_from([int(Kind.OPEN), int(Kind.BLOCK)]),
    st.integers(0, 1),
    st.integers(0, 2),
)


@functools.cache
def written() -> bytes:
    """A trace of a short training, with one record of each kind at least."""
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory(prefix="trace") as directory:
        writer = TraceWriter(Path(directory) / "trace")
        inodes = np.arange(1, 9, dtype=np.uint64)
        writer.hint(0.0, Labels("1", {int(inode): int(inode) % 2 for inode in inodes}), int)
        writer.hint(0.0, Ratio(0.9), int)
        for epoch in range(2):
            for inode in inodes.tolist():
                writer.append(1.0, inode, 100 * inode, list_number=1)
                writer.hint(1.0, Scored("1", [inode], [0.5]), int)
            writer.batch(1.5, 1, inodes, rng.normal(size=(8, 3)), rng.random(8))
            writer.hint(2.0, Hub(1, "1", [3, 5], [0.1, 0.2]), int)
            writer.redirect(2.0, 3, 300, 1, 100, 1)
            writer.append(2.5, 77, 1 << 20, Kind.BLOCK, block=1)
            writer.hint(2.5, Pinning("1", [1, 3]), int)
            writer.hint(2.5, WarmUp("1", epoch == 0), int)
            writer.hint(3.0, Epoch("1", 0.25 * epoch), int)
        writer.close()
        return (Path(directory) / "trace").read_bytes()


TEXT = st.text(st.sampled_from("ab1 90#\n\t-.\x00é"), max_size=60).map(str.encode) | st.binary(max_size=60)


@examples(60)
@given(
    records=st.lists(GOOD | RECORDS, max_size=30),
    epoch=st.none() | st.integers(1, 40) | integers(63).filter(bool),
    anew=st.booleans(),
    data=st.data(),
)
def test_any_records_are_simulated_or_refused(
    records: list[bytes], epoch: int | None, anew: bool, data: st.DataObject
) -> None:
    trace = HEADER.pack(MAGIC, VERSION, RECORD.itemsize, 0) + b"".join(records)
    if data.draw(st.integers(0, 4)) == 0:
        trace = data.draw(damaged(trace))
    _simulate(trace, epoch, anew)


@examples(60)
@given(anew=st.booleans(), data=st.data())
def test_a_damaged_trace_is_simulated_or_refused(anew: bool, data: st.DataObject) -> None:
    _simulate(data.draw(damaged(written())), None, anew)


def test_a_trace_that_is_not_damaged_is_simulated() -> None:
    _simulate(written(), None, True)


@examples(60)
@given(TEXT)
def test_any_text_is_simulated_or_refused(text: bytes) -> None:
    _simulate(text, None, False)


def _simulate(content: bytes, epoch: int | None, anew: bool) -> None:
    with tempfile.NamedTemporaryFile(prefix="trace") as file:
        Path(file.name).write_bytes(content)
        settings = chosen_settings("auto,0.5", 5) if anew else chosen_settings(None, None)
        try:
            report = compare(
                read_trace(file.name), "trace", chosen_policies("all"), [Capacity.parse("50%")], epoch, None, settings
            )
        except UsageError:
            return
        assert all(0 <= row["hit_ratio"] <= 1 for row in report["results"])
