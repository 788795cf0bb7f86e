"""`spiderfs profile`: every way to fail in one line, before anything is measured."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from commands import looks_mounted, refusal, spiderfs


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    point = looks_mounted(
        monkeypatch, tmp_path, stats__json=json.dumps({"capacity_bytes": 1000, "cache_dir": str(tmp_path / "c/cache")})
    )
    options = {"source": tmp_path / "missing", "cache_dir": tmp_path / "c/cache", "views": "tiny:bmp:64", "fetches": 4}
    write_config(point, **options, binding="kernel")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return point


def write_config(point: Path, **options: object) -> None:
    (point / ".spiderfs/config").write_text("".join(f"{name}={value}  # help\n" for name, value in options.items()))


@pytest.mark.parametrize("option", ["--rate", "--uses"])
def test_what_is_no_number_is_refused(here: Path, option: str) -> None:
    result = spiderfs("profile", here, option, "nan")
    assert result.exit_code == 2
    assert "'nan' is no number" in result.stderr


def test_what_cannot_be_profiled_is_refused_in_one_line(here: Path, tmp_path: Path) -> None:
    assert "no spiderfs mount is at" in refusal("profile", tmp_path)
    assert "it has jpeg256, " in refusal("profile", here, "--view", "jpeg257")
    assert "tiny" in refusal("profile", here, "--view", "none,small")
    for option in ("--capacity", "--network", "--model"):
        assert f"{option} much" in refusal("profile", here, option, "much")
    assert "a mount to measure by failed" in refusal("profile", here, "--view", "none")


def test_a_binding_without_views_is_asked_for_none(here: Path) -> None:
    write_config(here, cache_dir="/cache", views="none", binding="pyfuse3")
    assert "write --view none" in refusal("profile", here)


@pytest.mark.slow
def test_a_loader_that_is_not_there_is_named(here: Path, tmp_path: Path) -> None:
    (tmp_path / "my_training.py").write_text("loader = 3\n")
    assert "my_training has no function loader" in refusal("profile", here, "--loader", "my_training:loader")


def test_a_source_that_cannot_be_read_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/profile/mnt/a.jpg")

    monkeypatch.setattr("spiderfs.profiling.measure.measure", measure)
    assert "failed at /profile/mnt/a.jpg (Permission denied)" in refusal("profile", here, "--view", "none")
