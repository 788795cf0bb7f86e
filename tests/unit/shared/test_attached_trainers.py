"""What workers read is what the manager has published."""

from __future__ import annotations

from pathlib import Path

from spiderfs.shared.published import Attached, publish_trainers, published_trainers


def test_workers_read_what_the_manager_published(tmp_path: Path) -> None:
    path = tmp_path / "trainers"
    assert published_trainers(path) == []
    trainers = [Attached(1, 2, 3, (4, 5), True), Attached(6, 7, 8, (), False)]
    publish_trainers(path, trainers)
    assert published_trainers(path) == trainers
    publish_trainers(path, [])
    assert published_trainers(path) == []
    assert list(tmp_path.iterdir()) == [path]


def test_a_list_that_cannot_be_read_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "trainers"
    for damaged in (b"", bytes(40), b"[[1, 2]]", b"\xff"):
        path.write_bytes(damaged)
        assert published_trainers(path) == []
    path.unlink()
    path.mkdir()
    assert published_trainers(path) == []
