"""`spiderfs profile` of a real mount and a real loader."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from image_files import image_file, picture
from mounting import SPIDERFS, eventually, is_running, mounted

from spiderfs.forms.profile import load_record
from spiderfs.linux.mounts import spiderfs_mounts
from spiderfs.shared.layout import CacheLayout

TRAINING = """
import os
import numpy, torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    def __init__(self, paths):
        self.paths = paths
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, index):
        return torch.from_numpy(numpy.array(Image.open(self.paths[index]).resize((32, 32))))

def make(directory):
    paths = [os.path.join(above, name) for above, _, names in os.walk(directory) for name in names]
    return DataLoader(Images(sorted(paths)), 4, shuffle=True, num_workers=1), lambda batch: batch.float().mean()
"""


def beside(directory: Path) -> list[Path]:
    """The mounts to measure by, of which the caches lie in this directory."""
    return [point for point in spiderfs_mounts() if point.parent.parent == directory]


def left_in(directory: Path) -> list[str]:
    """The caches of mounts to measure by."""
    return [name for name in os.listdir(directory) if name.startswith("profile-")]


def test_a_loader_is_profiled_beside_the_mount(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(24):
        (source / f"{number:02d}.jpg").write_bytes(image_file(image=picture(600, 500, seed=number)))
    (tmp_path / "my_training.py").write_text(TRAINING)
    with mounted(source, tmp_path / "m", capacity="60kB", source__latency_ms=20) as mount:
        opens = mount.metric("opens")
        words = [SPIDERFS, "profile", mount.point, "--loader", "my_training:make", "--view", "bmp256"]
        words += ["--samples", "12", "--uses", "2", "--nodes", "2", "--json", tmp_path / "p.json"]
        words += ["--network", "1GB", "--model", "4MB"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        told = json.loads((tmp_path / "p.json").read_text())
        assert mount.metric("opens") == opens  # only the mounts beside it are read
        assert beside(mount.cache.parent) == []
    assert told["source"]["latency_s"] >= 0.02
    assert (told["samples"], told["workers"], told["batch"], told["uses"], told["nodes"]) == (24, 1, 4, 2, 2)
    assert (told["network_bandwidth"], told["model_bytes"]) == (1e9, 4e6)
    forms = told["forms"]
    assert forms["uncached"]["wait_s"] >= 0.02 > forms["encoded"]["wait_s"]
    # 256 x 307 pixels of three bytes, and the file's head.
    assert forms["bmp256"]["sample_bytes"] == pytest.approx(256 * 307 * 3, rel=0.01)
    assert 32 * 32 * 3 <= forms["augmented"]["sample_bytes"] <= 32 * 32 * 3 + 1000
    # The mount has put each into its cache.
    assert told["keeping"]["other_cpu_s"] > 0
    rows = {row["split"]: row for row in told["predicted"]["bmp256"]}
    assert {"100-0-0", "0-100-0", "0-0-100", "50-50-0", "50-0-50", "0-50-50"} <= set(rows)
    best = next(row for row in rows.values() if row["best"])
    assert best["samples_per_s"] == max(row["samples_per_s"] for row in rows.values())
    assert best["split"] in done.stdout
    assert left_in(mount.cache.parent) == []
    with mounted(source, tmp_path / "m", capacity="60kB", view="bmp256", forms="auto") as mount:
        record = load_record(CacheLayout(mount.cache).profile)
        assert record is not None
        assert record.samples == 24
        assert mount.stats()["split"] == best["split"]


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(number, marks=pytest.mark.thorough) for number in (signal.SIGTERM, signal.SIGKILL))],
)
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "0.jpg").write_bytes(image_file())
    (tmp_path / "my_training.py").write_text(
        "import os, pathlib, time\n"
        "def make(directory):\n"
        "    pathlib.Path('asleep').write_text(str(os.getpid()))\n"
        "    time.sleep(1000)\n"
    )
    with mounted(source, tmp_path / "m") as mount:
        words = [SPIDERFS, "profile", mount.point, "--loader", "my_training:make"]
        profile = subprocess.Popen(
            words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            asleep = tmp_path / "asleep"
            loader = int(eventually(lambda: asleep.exists() and asleep.read_text(), within_s=150))
            assert len(beside(mount.cache.parent)) == 1
        finally:
            # On a terminal every process of the group hears of Ctrl-C.
            (os.killpg if number == signal.SIGINT else os.kill)(profile.pid, number)
            said, _ = profile.communicate(timeout=120)
        if number == signal.SIGKILL:
            # Its processes hear of that from the kernel, and take some time.
            assert profile.returncode == -number
            eventually(lambda: not is_running(loader) and not left_in(mount.cache.parent))
        else:
            assert profile.returncode == 1
            assert said.split() == ["Aborted!"]
        assert beside(mount.cache.parent) == []
        assert left_in(mount.cache.parent) == []
        assert not is_running(loader)
