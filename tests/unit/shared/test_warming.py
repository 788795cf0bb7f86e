"""The line of `.spiderfs/warm`: who reads it knows what who wrote it knew."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from spiderfs.shared.escapes import escaped
from spiderfs.shared.warming import Warming

COUNT = st.integers(0, 2**63)


@given(
    st.builds(
        Warming,
        *(st.booleans() for _ in range(2)),
        *(COUNT for _ in range(9)),
        unknown=st.text(st.characters(exclude_categories=["Cs"])),
    )
)
def test_a_line_is_read_as_it_was_written(warming: Warming) -> None:
    line = warming.line()
    assert line.count("\n") == 1
    assert Warming.of_line(line) == replace(warming, unknown=escaped(warming.unknown))


def test_it_works_until_all_was_found_and_nothing_is_left() -> None:
    assert not Warming().working
    assert Warming(searching=True).working
    assert Warming(found=2, fetched=1, left=1).working
    assert not Warming(found=2, fetched=1, failed=1).working
    assert not Warming(ended=True, searching=True, left=3).working
    assert Warming(searching=True).line().startswith("working: 0 files found so far, 0 fetched (0 bytes), ")


@pytest.mark.parametrize("text", ["", "idle", "idle: 0 files found, 0 fetched (0 bytes)\n", "a\nb"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="this is no line of"):
        Warming.of_line(text)
