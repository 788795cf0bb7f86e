"""Epochs of a planned DataLoader over NFS."""

from __future__ import annotations

from pathlib import Path

import planned_loader
import pytest
from mounting import eventually, mounted
from nfs_server import Way
from training_process import training_process

FILES, SIZE, EPOCHS = 120, 4000, 3


@pytest.mark.parametrize("immutable", ["off", "on"])
def test_a_planned_training(
    way: Way, at_server: Path, source: Path, tmp_path: Path, note: list[str], immutable: str
) -> None:
    for number in range(FILES):
        path = at_server / str(number % 4) / f"{number:05d}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(path.name.encode().ljust(SIZE, b"."))
    with mounted(source, tmp_path / "m", immutable=immutable) as mount:
        task = planned_loader.Task(str(mount.point), epochs=[None] * EPOCHS)
        with training_process(planned_loader.main, task) as process:
            for epoch in range(EPOCHS):
                # Each sample is compared with its name by the data set.
                assert process.hear() == FILES
                eventually(lambda: mount.stats()["plans"][0]["taken"] == FILES, 60, "the end of the epoch")
                assert mount.stats()["plans"][0]["believed"]
                if epoch == 0:
                    first = mount.metric("origin_reads")
                process.tell("go on")
            assert process.ended_well(60)
        again = mount.metric("origin_reads") - first
        assert again == 0
        note.append(f"immutable={immutable}: {first} fetches in the first epoch, {again} in the next two")
