"""The rules for readers, as properties that hold for all names, clocks, owners and paths."""

from __future__ import annotations

import math
import stat

from hypothesis import given
from hypothesis import strategies as st

from spiderfs.sources.source import SourceStat
from spiderfs.store.store import ContentKey
from spiderfs.vfs.rules import (
    ANYBODY,
    FOREVER_S,
    Credentials,
    Ownership,
    Settings,
    Validity,
    directories_to_pass,
    is_at_hand,
    is_provisional,
    left_s,
    trusted,
)

# In steps of which all sums are exact.
TIMES = st.integers(0, 1 << 42).map(lambda step: step / 1024)
TTLS = TIMES | st.just(math.inf)
NOW = 1.7e9
SHOWN = Ownership()


class Files:
    """Cached files, and those that are being fetched; remembers whether it was asked for the latter."""

    def __init__(self, stored: set[int], under_way: set[int]) -> None:
        self._stored, self._under_way = stored, under_way
        self.asked = False

    def stored(self, key: ContentKey) -> bool:
        return key.inode in self._stored

    def under_way(self, key: ContentKey) -> bool:
        self.asked = True
        return key.inode in self._under_way


def file(mode: int, uid: int = 5, gid: int = 6) -> SourceStat:
    return SourceStat(stat.S_IFREG | mode, uid, gid, 10, 0)


# -- how long a name is trusted


def test_a_name_whose_version_had_not_settled_is_trusted_until_it_settles() -> None:
    assert left_s(100, 101, 3600, settles_at=102.5) == 1.5
    assert left_s(100, 103, 3600, settles_at=102.5) < 0
    assert left_s(103, 104, 3600, settles_at=102.5) == 3599, "checked since then"
    assert left_s(100, 101, 1.25, settles_at=102.5) == 0.25


@given(checked_at=TIMES, now=TIMES, ttl_s=TTLS)
def test_nothing_is_trusted_for_longer_than_its_ttl_nor_for_ever(checked_at: float, now: float, ttl_s: float) -> None:
    left = left_s(checked_at, now, ttl_s)
    assert left <= min(ttl_s, FOREVER_S)
    if now < checked_at:
        assert left == 0.0, "the clock has been set back"
    else:
        assert left == min(ttl_s, FOREVER_S) - (now - checked_at)


@given(checked_at=TIMES, now=TIMES, ttl_s=TTLS, since_s=TIMES)
def test_what_was_checked_too_early_is_not_trusted(checked_at: float, now: float, ttl_s: float, since_s: float) -> None:
    left = left_s(checked_at, now, ttl_s, since_s)
    assert left == (left_s(checked_at, now, ttl_s) if checked_at >= since_s else 0.0)


@given(checked_at=TIMES, now=TIMES, ttl_s=TTLS, since_s=TIMES)
def test_both_ways_to_say_it_agree(checked_at: float, now: float, ttl_s: float, since_s: float) -> None:
    assert trusted(checked_at, ttl_s, since_s).at(now) == (left_s(checked_at, now, ttl_s, since_s) > 0)


@given(one=st.tuples(TIMES, TIMES), other=st.tuples(TIMES, TIMES), now=TIMES)
def test_two_are_trusted_while_each_is(one: tuple[float, float], other: tuple[float, float], now: float) -> None:
    both = Validity(*one).and_also(Validity(*other))
    assert both.at(now) == (Validity(*one).at(now) and Validity(*other).at(now))


def test_a_version_is_provisional_until_it_has_settled() -> None:
    assert is_provisional(NOW + 0.1, NOW)
    assert is_provisional(math.inf, NOW)
    assert not is_provisional(NOW, NOW)
    assert not is_provisional(0.0, NOW)


# -- who is given a substitute


@given(stored=st.booleans(), under_way=st.booleans(), waits=st.booleans())
def test_what_is_cached_or_comes_needs_no_substitute(stored: bool, under_way: bool, waits: bool) -> None:
    files = Files({7} if stored else set(), {7} if under_way else set())
    assert is_at_hand(7, files, Settings(wait_for_fetches=waits)) == (stored or (waits and under_way))
    # To ask whether another process fetches a file is a system call.
    assert files.asked == (waits and not stored)


NAMES = st.sampled_from([b"a", b"b", b"cc"])
PATHS = st.lists(NAMES, min_size=1, max_size=5).map(b"/".join)
READERS = st.builds(Credentials, st.integers(4, 6), st.frozensets(st.integers(5, 7)), st.booleans())


@given(who=READERS, mode=st.integers(0, 0o777), path=PATHS, passed=PATHS | st.just(b""))
def test_a_reader_passes_every_directory_above_a_substitute_unless_it_has_done_so(
    who: Credentials, mode: int, path: bytes, passed: bytes
) -> None:
    found = file(mode)
    needed = directories_to_pass(who, SHOWN, found, path, passed)
    assert (needed is None) == (not SHOWN.may_read(who, found))
    if needed is None:
        return
    directory = path.rpartition(b"/")[0]
    if who.may_read_all or directory == passed:
        assert needed == []
        return
    parts = directory.split(b"/") if directory else []
    assert needed == [b"/".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


@given(mode=st.integers(0, 0o777), path=PATHS)
def test_where_the_kernel_compares_no_one_every_substitute_may_be_given(mode: int, path: bytes) -> None:
    assert directories_to_pass(ANYBODY, SHOWN, file(mode), path, b"remote") == []


def test_what_the_mount_shows_counts_and_not_what_the_source_has() -> None:
    who = Credentials(1000, frozenset({1000}))
    assert directories_to_pass(who, SHOWN, file(0o600), b"a/x", b"a") is None
    assert directories_to_pass(who, Ownership(file_mode=0o644), file(0o600), b"a/x", b"a") == []
