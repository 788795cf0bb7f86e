"""The partition that a mount takes from its options and a profile."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from test_profile import MADE_UP

from spiderfs.daemon.context import Partition, chosen_partition
from spiderfs.errors import ConfigError, UsageError
from spiderfs.forms.partition import Split
from spiderfs.forms.profile import Reads, Record, SourceSpeed, load_record, save_record
from spiderfs.options.model import Options

# Views take as many bytes as the capacity in all.
SIZES = {"none": 100e3, "bmp256": 200e3}
SAMPLES = 5_000


def options(**given: object) -> Options:
    paths = {"source": Path("/source"), "mountpoint": Path("/mnt"), "cache_dir": Path("/cache")}
    return Options(**paths, **{"capacity": "1GB", "view": "bmp256", **given})  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_record(Record(SAMPLES, SIZES, replace(MADE_UP, samples=SAMPLES)), tmp_path / "profile.json")
    return tmp_path / "profile.json"


def test_without_a_split_the_root_shows_one_form(path: Path) -> None:
    assert chosen_partition(options(), path) == Partition(None, 1.0, 0.5)


def test_so_many_files_are_views_that_their_bytes_hold_them(path: Path) -> None:
    split, share, partials = chosen_partition(options(forms="50-50-0"), path)
    assert (split, partials) == (Split(0.5, 0.5, 0), 0)
    assert share == pytest.approx(0.97 * 0.95 / 2, rel=0.05)
    # A share of the source is one of what was profiled, half a gigabyte.
    whole = chosen_partition(options(forms="50-50-0", capacity="100%"), path)
    assert whole.view_share == pytest.approx(share / 2, rel=0.05)
    assert chosen_partition(options(forms="0-100-0", capacity="2GB"), path).view_share == 1


def test_a_split_without_views_needs_no_profile(tmp_path: Path) -> None:
    chosen = chosen_partition(options(forms="70-0-30"), tmp_path / "none")
    assert chosen == Partition(Split(0.7, 0, 0.3), 0.0, 0.3)
    assert chosen_partition(options(forms="0-0-100", view="none"), tmp_path / "none").partials_share == 0.9


def test_auto_takes_the_best_split_for_the_capacity(path: Path) -> None:
    record = load_record(path)
    assert record is not None
    assert record.profile is not None
    found = set()
    for wait_s, capacity_bytes in ((0.02, 3e8), (0.0005, 3e8), (0.0005, 9e8)):
        uncached = record.profile.uncached._replace(wait_s=wait_s)
        profile = replace(record.profile, uncached=uncached, source=SourceSpeed(wait_s, 8, 1e9))
        save_record(replace(record, profile=profile), path)
        chosen = chosen_partition(options(forms="auto", capacity=int(capacity_bytes)), path)
        assert chosen.split == replace(profile, cache_bytes=capacity_bytes).best("bmp256")
        found.add(chosen.split)
        # Without a view there are only originals to keep.
        alone = chosen_partition(options(forms="auto", capacity=int(capacity_bytes), view="none"), path)
        assert alone.split == Split(1, 0, 0)
    assert len(found) > 1


@pytest.mark.parametrize("forms", ["auto", "50-50-0"])
@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"\xff",
        b"[]",
        b"[" * 20_000,
        b'{"samples": 1, "sample_bytes": {}, "profile": null}',
        b'{"samples": 1, "sample_bytes": {"bmp256": 1}, "profile": null}',
        b'{"samples": 0, "sample_bytes": {"none": 1, "bmp256": 1}, "profile": null}',
        b'{"samples": 1e400, "sample_bytes": {"none": 1, "bmp256": 1}, "profile": null}',
        b'{"samples": 1, "sample_bytes": {"none": 0, "bmp256": NaN}, "profile": null}',
    ],
)
def test_without_a_readable_profile_the_command_is_named(tmp_path: Path, forms: str, content: bytes | None) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run 'spiderfs profile /mnt .*--view bmp256'$"):
        chosen_partition(options(forms=forms), path)


def test_a_record_is_read_as_it_was_written(path: Path) -> None:
    full = replace(MADE_UP, step_s=0.5, planned=True, encoded=replace(MADE_UP.encoded, reads=Reads(3, 4, 0.5)))
    save_record(Record(7, SIZES, full), path)
    assert load_record(path) == Record(7, SIZES, full)
    # Without a loader, what was known of one stays.
    save_record(Record(9, {"none": 5.0}, None), path)
    assert load_record(path) == Record(9, {"none": 5.0}, full)
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["profile.json"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"No such file or directory.*mount's user"):
        save_record(Record(7, SIZES, None), tmp_path / "missing/profile.json")
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UsageError, match=r"belongs to another user.*mount's user"):
        save_record(Record(7, SIZES, None), tmp_path / "profile.json")
    assert os.listdir(tmp_path) == []


def test_no_link_in_the_directory_is_followed(tmp_path: Path) -> None:
    target, cache = tmp_path / "target", tmp_path / "cache"
    cache.mkdir()
    target.write_text("mine")
    for name in ("profile.json", "profile.new"):
        (cache / name).symlink_to(target)
    save_record(Record(7, SIZES, None), cache / "profile.json")
    assert target.read_text() == "mine"
    assert load_record(cache / "profile.json") == Record(7, SIZES, None)
