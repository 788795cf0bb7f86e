"""The options that the processes of a mount share, on a disk that has room and on one that has none."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from spiderfs.daemon.published_options import publish_options, published_options
from spiderfs.errors import SpiderfsError
from spiderfs.options.model import Options
from spiderfs.shared.layout import RunLayout


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    return RunLayout(tmp_path)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(source=tmp_path, mountpoint=tmp_path, cache_dir=tmp_path)


def _full(path: Path, text: str) -> int:
    path.touch()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_change_can_be_published_on_a_full_disk(
    run: RunLayout, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = options.changed("capacity", "123456789012345").changed("ttl", "123456s")
    publish_options(run, options)
    monkeypatch.setattr(Path, "write_text", _full)
    publish_options(run, longer)
    assert published_options(run, options) == longer
    publish_options(run, options)
    assert published_options(run, longer) == options
    assert [path.name for path in run.directory.iterdir()] == [run.options.name]


def test_what_cannot_be_published_says_so(run: RunLayout, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_text", _full)
    with pytest.raises(SpiderfsError, match=r"the options cannot be written to .* \(No space left on device\)"):
        publish_options(run, options)


@pytest.mark.parametrize("text", [None, "", '{"capacity": "1M'])
def test_without_the_file_the_options_stay_as_they_are(
    run: RunLayout, options: Options, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if text is not None:
        run.options.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert published_options(run, options) == options
    assert "set them again with spiderfs config" in caplog.text
