"""A planned training, and a client around FUSE, where views are shown: they get views, each made once.

The root of the mount shows the view, or a directory in `.spiderfs/views` does.
"""

from __future__ import annotations

import os
from pathlib import Path

import known_losses
import numpy as np
import pytest
from image_files import image_file, picture
from known_losses import Training
from listed import Read
from mounting import mounted
from profiled import note_sizes
from reading import read_afresh, source_with
from torch.utils.data import DataLoader

import trainer_hook
from spiderfs.client import Client
from spiderfs.views.making import make
from spiderfs.views.recipe import NO_VIEW, READY, Recipe

PHOTOS = {f"{number % 3}/{number:02d}.jpg": image_file(image=picture(seed=number)) for number in range(36)}
VIEWS = {name: make(content, READY["jpeg256"], 50_000_000) for name, content in PHOTOS.items()}


source = source_with(PHOTOS)


# The kernel of an immutable mount is given the views before anybody reads them.
@pytest.mark.parametrize(
    ("below", "options"), [("", {"view": "jpeg256", "immutable": "on"}), (".spiderfs/views/jpeg256", {})]
)
def test_a_planned_training_reads_views_that_were_made_once(
    source: Path, tmp_path: Path, below: str, options: dict[str, str]
) -> None:
    with mounted(source, tmp_path / "m", source__latency_ms=5, **options) as mount:
        root = mount.point / below
        samples = [(os.fspath(root / name), int(name[0])) for name in PHOTOS]
        data = Read(samples, lambda path, _: (path, Path(path).read_bytes()))
        loader = DataLoader(data, 6, shuffle=True, num_workers=2, collate_fn=list)
        with trainer_hook.plan(root, loader):
            for _ in range(2):
                read = dict(sample for batch in loader for sample in batch)
                assert {os.path.relpath(path, root): content for path, content in read.items()} == VIEWS
            assert [plan["length"] for plan in mount.stats()["plans"]] == [len(PHOTOS)]
        client = Client(mount.point)
        assert {name: client.read_bytes(os.path.join(below, name)) for name in PHOTOS} == VIEWS
        metrics = mount.stats()["metrics"]
        assert metrics["views_made"] == len(PHOTOS)
        assert metrics["origin_bytes"] == sum(map(len, PHOTOS.values()))
        assert metrics["client_opens"] > 0 or below
        (job,) = mount.stats()["jobs"] or [{"origin_bytes": metrics["origin_bytes"]}]
        assert job["origin_bytes"] == metrics["origin_bytes"]


SMALL = Recipe("bmp", 24)
MIXED = {"view": "small", "views": "small:bmp:24", "forms": "50-50-0"}


def images(source: Path, place: Path, count: int) -> list[tuple[str, bytes, bytes]]:
    """Names, originals and views of small images at the source, of which a profile knows the sizes."""
    source.mkdir()
    made = []
    for number in range(count):
        content = image_file(image=picture(160, 120, seed=number))
        (source / f"{number:03d}.jpg").write_bytes(content)
        view = make(content, SMALL, 50_000_000)
        assert isinstance(view, bytes)
        made.append((f"{number:03d}.jpg", content, view))
    originals, views = (sum(len(row[form]) for row in made) for form in (1, 2))
    note_sizes(place, count, {NO_VIEW: originals, "small": views})
    return made


def test_a_substitute_has_the_bytes_of_its_own_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = images(tmp_path / "source", tmp_path / "m", 90)
    numbers = {content: b"%08d" % number for number, (_, *forms) in enumerate(made) for content in forms}
    monkeypatch.setattr(known_losses, "read_afresh", lambda path: numbers[read_afresh(path)])
    names, labels = [name for name, _, _ in made], np.arange(90, dtype=np.int32) % 3
    losses = np.where(np.arange(90) < 45, 0.1, 2.0) + np.arange(90) / 1000
    with mounted(tmp_path / "source", tmp_path / "m", capacity="130kB", policy="impact", **MIXED) as mount:
        training = Training(mount.point, names, labels, losses, 15)
        try:
            training.until_redirected(mount, 5)
        finally:
            training.close()
        assert any(wanted != given for wanted, given in training.given)
        assert all(wanted % 3 == given % 3 for wanted, given in training.given)
        assert mount.stats()["forms"]["small"] > 0
