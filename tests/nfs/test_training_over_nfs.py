"""Epochs of a planned DataLoader over NFS, and what readers cost the server."""

from __future__ import annotations

from pathlib import Path

import planned_loader
import pytest
from mounting import eventually, mounted
from nfs_files import content_of, drop_page_cache, read, write
from nfs_server import NFS, Way
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
                assert len(process.hear()) == FILES
                eventually(lambda: mount.stats()["plans"][0]["taken"] == FILES, 60, "the end of the epoch")
                assert mount.stats()["plans"][0]["trusted"]
                if epoch == 0:
                    first = mount.metric("origin_reads")
                process.tell("go on")
            assert process.ended_well(60)
        again = mount.metric("origin_reads") - first
        assert again == 0
        note.append(f"immutable={immutable}: {first} fetches in the first epoch, {again} in the next two")


def requests(point: Path) -> int:
    """How many requests the client of this mount has sent (the file mountstats of nfsstat(8))."""
    text = Path("/proc/self/mountstats").read_text().partition(f" mounted on {point} ")[2].partition("\ndevice ")[0]
    lines = text.partition("per-op statistics")[2].splitlines()
    return sum(int(line.split()[1]) for line in lines if ":" in line)


def test_requests_to_the_server(way: Way, at_server: Path, source: Path, tmp_path: Path, note: list[str]) -> None:
    """What a reader costs the server: many for what is not cached, none for what is."""
    names = [f"{number:03d}" for number in range(FILES)]
    write(at_server, names)
    with mounted(source, tmp_path / "m") as mount:
        counts = [requests(NFS)]
        for _ in range(2):
            for name in names:
                assert read(mount.point / name) == content_of(name, 0)
            counts.append(requests(NFS))
            drop_page_cache()
        cold, warm = counts[1] - counts[0], counts[2] - counts[1]
        note.append(f"{cold / FILES:.1f} for a file that is not cached, {warm / FILES:.2f} for one that is")
        # The probe for whether the directory has changed, once a second at most.
        assert warm < FILES / 4
        assert 1 <= cold / FILES < 10
