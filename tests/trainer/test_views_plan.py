"""A planned training, and a client around FUSE, on a mount that shows views: they get views, each made once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from mounting import mounted
from torch.utils.data import DataLoader, Dataset

import trainer_hook
from spiderfs.client import Client
from spiderfs.views.making import make
from spiderfs.views.recipe import READY

sys.path.append(str(Path(__file__).parents[1] / "unit/views"))
from images import image_file, picture

pytestmark = [pytest.mark.both_modes]

PHOTOS = {f"{number % 3}/{number:02d}.jpg": image_file(image=picture(seed=number)) for number in range(36)}
VIEWS = {name: make(content, READY["jpeg256"], 50_000_000) for name, content in PHOTOS.items()}


class Files(Dataset[Any]):
    def __init__(self, root: Path) -> None:
        self.samples = [(os.fspath(root / name), int(name[0])) for name in PHOTOS]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[str, bytes]:
        path, _ = self.samples[index]
        return path, Path(path).read_bytes()


def test_a_planned_training_reads_views_that_were_made_once(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name, content in PHOTOS.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    with mounted(source, tmp_path / "m", view="jpeg256", source__latency_ms=5) as mount:
        loader = DataLoader(Files(mount.point), 6, shuffle=True, num_workers=2, collate_fn=list)
        with trainer_hook.plan(mount.point, loader):
            for _ in range(2):
                read = dict(sample for batch in loader for sample in batch)
                assert {os.path.relpath(path, mount.point): content for path, content in read.items()} == VIEWS
        client = Client(mount.point)
        assert {name: client.read_bytes(name) for name in PHOTOS} == VIEWS
        metrics = mount.stats()["metrics"]
        assert metrics["views_made"] == len(PHOTOS)
        assert metrics["origin_bytes"] == sum(map(len, PHOTOS.values()))
        assert metrics["client_opens"] > 0
