"""When a version has settled: by example, and for servers whose clocks are ahead or behind."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from spiderfs.vfs.rules import MOST_BEHIND_S, WINDOW_S, behind_s, may_look_old, settles_at, window_s

NOW = 1_800_000_000.0
YEAR_2400 = 13_569_465_600


def at(mtime_s: float, asked_at: float = NOW, behind: float = 0.0, known: float | None = None, size: int = 0) -> float:
    return settles_at(int(mtime_s * 1e9), size, asked_at, asked_at, behind, known)


def test_an_old_version_has_settled_and_a_young_one_settles_after_the_window() -> None:
    assert at(NOW - WINDOW_S - 0.1) == 0
    assert at(NOW - WINDOW_S + 0.1) == NOW + WINDOW_S
    assert at(NOW) == NOW + WINDOW_S
    assert at(0) == at(-1e12) == 0


@pytest.mark.parametrize("mtime_s", [NOW + 5, NOW + 3600, YEAR_2400, 1e18])
def test_an_mtime_in_the_future_costs_one_window_and_no_more(mtime_s: float) -> None:
    first = at(mtime_s)
    assert first == NOW + WINDOW_S
    assert at(mtime_s, asked_at=NOW + 1, known=first) == first, "seen again, it does not begin again"
    assert at(mtime_s, asked_at=NOW + 500, known=first) == first < NOW + 500


def test_a_version_does_not_wait_for_the_old_time_when_our_clock_was_set_back() -> None:
    assert at(NOW - 3600, asked_at=NOW - 3600, known=NOW + WINDOW_S) == NOW - 3600 + WINDOW_S


def test_a_server_that_is_behind_makes_young_versions_look_old_until_that_is_known() -> None:
    assert at(NOW - 600) == 0
    assert at(NOW - 600, behind=600) == NOW + WINDOW_S
    assert may_look_old(int((NOW - 600) * 1e9), 0, NOW)
    assert not may_look_old(int((NOW - 2 * MOST_BEHIND_S) * 1e9), 0, NOW), "no one has to look up how far it is behind"


def test_a_change_between_two_looks_tells_how_far_a_clock_is_behind() -> None:
    later = NOW + 100
    assert behind_s(NOW, int((NOW - 500) * 1e9), later) == pytest.approx(600), "it may have changed just now"
    assert behind_s(NOW, int((NOW + 1) * 1e9), later) == behind_s(NOW, int(NOW * 1e9), later) == 0
    assert behind_s(NOW, 0, later) == 0, "no clock is behind by years: that mtime was set by hand"


def test_a_large_file_may_be_written_for_longer() -> None:
    assert window_s(0) == WINDOW_S < window_s(1 << 30) < window_s(1 << 62) < 60


@given(
    offset=st.floats(-MOST_BEHIND_S + 10, MOST_BEHIND_S),
    looks=st.lists(st.floats(0, 100), min_size=1, max_size=8),
    size=st.integers(0, 1 << 63),
)
def test_whatever_the_servers_clock_says_nothing_settles_sooner_than_a_window_after_its_change(
    offset: float, looks: list[float], size: int
) -> None:
    """The file changes at NOW by our clock. The server's clock is `offset` ahead; if it is behind, we know that."""
    known: float | None = None
    for look in sorted(looks):
        known = at(NOW + offset, asked_at=NOW + look, behind=max(-offset, 0.0) + 1e-3, known=known, size=size)
        assert known >= NOW + window_s(size) or NOW + look >= NOW + window_s(size)
    assert at(NOW + offset, asked_at=NOW + 200, known=known, size=size) < NOW + 200, "and each of them does settle"
