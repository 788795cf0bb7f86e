"""Which disk of a cache takes a payload, and what becomes of the others' when the list of directories changes."""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from spiderfs.errors import StoreError
from spiderfs.shared.layout import DATA_FILE, DISK_FILE, EXTENTS_FILE, EXTENTS_MAP_FILE
from spiderfs.store.disks import Disks, home, shares_of, spread


def test_a_share_is_that_of_the_file_system_and_directories_in_one_share_it() -> None:
    assert shares_of({0: (1, 100), 1: (2, 300)}) == {0: 0.25, 1: 0.75}
    assert shares_of({0: (1, 100), 1: (2, 200), 2: (2, 200)}) == {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}
    assert shares_of({0: (1, 0)}) == {0: 1.0}, "ramfs has no size"


SHARES = st.lists(st.integers(1, 1000), min_size=1, max_size=5).map(
    lambda sizes: {number: size / sum(sizes) for number, size in enumerate(sizes)}
)


@given(SHARES, st.lists(st.integers(0, 200), min_size=1, max_size=100))
def test_disks_are_filled_in_proportion_to_their_shares(shares: dict[int, float], sizes: list[int]) -> None:
    filled = Counter[int]()
    for disk, size in zip(spread(sizes, {}, shares), sizes, strict=True):
        filled[disk] += size
    total, largest = sum(sizes), max(sizes)
    for disk, share in shares.items():
        # Each payload goes where the fill is then the least; that is at most what it is if all disks got one.
        assert filled[disk] <= share * (total + len(shares) * largest) + 1e-6


def test_a_disk_that_has_more_gets_less() -> None:
    assert spread([10, 10, 10], {0: 15}, {0: 0.5, 1: 0.5}) == [1, 1, 0]
    assert spread([10], {0: 0, 1: 0}, {1: 1.0}) == [1], "one that is full has no share"


def test_large_files_are_spread_by_shares_and_stay_when_a_disk_comes_or_goes() -> None:
    shares = {0: 0.5, 1: 0.3, 2: 0.2}
    homes = {inode: home(inode, shares) for inode in range(5000)}
    assert {disk: round(count / 5000, 1) for disk, count in Counter(homes.values()).items()} == shares
    without = {inode: home(inode, {0: 0.5, 1: 0.3}) for inode in homes}
    assert all(without[inode] == disk for inode, disk in homes.items() if disk != 2)


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """The content directories of three cache directories."""
    places = [tmp_path / name / "store" / "content" for name in ("first", "second", "third")]
    for place in places:
        place.mkdir(parents=True)
    (places[0] / DATA_FILE).touch()
    return places


def bound(places: list[Path], missing: tuple[Path, ...] = ()) -> Disks:
    disks = Disks(places[0], places[1:], missing)
    disks.bind()
    return disks


def numbers(disks: Disks) -> dict[str, int]:
    return {disks.directory(number).name: number for number in disks.numbers}


def test_a_directory_keeps_its_number_and_its_files_wherever_the_list_names_it(places: list[Path]) -> None:
    first = numbers(bound(places))
    assert sorted(first.values()) == [0, 1, 2]
    for name in (EXTENTS_FILE, EXTENTS_MAP_FILE):
        (places[2] / name).write_text("kept")
    assert numbers(bound([places[0], places[2], places[1]])) == first
    assert (places[2] / EXTENTS_FILE).read_text() == "kept"
    assert numbers(Disks.of_store(places[0])) == first
    (places[2] / EXTENTS_MAP_FILE).unlink()
    assert numbers(bound(places))["third"] not in first.values(), "without the map of its chunks it begins again"
    assert not (places[2] / EXTENTS_FILE).exists()


def test_a_directory_that_was_left_out_comes_back_empty_and_with_another_number(places: list[Path]) -> None:
    before = numbers(bound(places))
    (places[1] / "extents").write_text("old")
    without = bound(places, (places[1],))
    assert numbers(without) == {"first": 0, "third": before["third"]}
    assert without.several
    assert sum(without.parts(1000).values()) in (999, 1000), "the others have its part"
    back = numbers(bound(places))
    assert back["third"] == before["third"]
    assert back["second"] not in (0, before["third"])
    assert not (places[1] / "extents").exists()


def test_files_of_another_store_are_deleted(places: list[Path]) -> None:
    bound(places)
    (places[1] / "extents").write_text("of the store that was")
    (places[0] / DATA_FILE).unlink()
    assert sorted(numbers(bound(places)).values()) == [0, 1, 2]
    assert [path.name for path in places[1].iterdir()] == [DISK_FILE]


def test_a_disk_that_fails_is_left_out_and_another_error_leaves_all(
    places: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    disks = bound(places)
    disks.failed(1, OSError(errno.ENOSPC, "full"))
    disks.failed(1, OSError(errno.EMFILE, "too many files"))
    disks.failed(0, OSError(errno.EIO, "the first one has the rows"))
    assert disks.numbers == [0, 1, 2]
    assert caplog.text == ""
    error = StoreError("the cache cannot be used")
    error.__cause__ = OSError(errno.EIO, "broken")
    for _ in range(2):
        disks.failed(1, error)
    assert disks.numbers == [0, 2]
    assert caplog.text.count("goes on without") == 1
    gone = FileNotFoundError(errno.ENOENT, "no such file")
    disks.failed(2, gone)
    assert disks.numbers == [0, 2], "a file alone may be missing"
    shutil.rmtree(places[2])
    disks.failed(2, gone)
    assert disks.numbers == [0]
    assert disks.parts(1000) == {0: 1000}
