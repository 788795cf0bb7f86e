"""The training runs of docs/examples/train and of README.md, each whole and on a real mount."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from mounting import Mounted, eventually, mounted
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs/examples/train"
CLASSES, EACH, EPOCHS = 2, 12, 2
SAMPLES = CLASSES * EACH
# The others differ in the loader or the trainer; each imports for seconds what the rest of the tests imports too.
LOOPS = [
    pytest.param(path.name, marks=() if path.stem == "loop_pytorch" else pytest.mark.thorough, id=path.stem)
    for path in sorted(EXAMPLES.glob("loop_*.py"))
]


def picture(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_folders(root: Path) -> None:
    for number in range(SAMPLES):
        path = root / f"class{number % CLASSES}" / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))


def write_shards(root: Path) -> None:
    root.mkdir(parents=True)
    for shard in range(2):
        with tarfile.open(root / f"{shard}.tar", "w") as archive:
            for number in range(shard * EACH, (shard + 1) * EACH):
                members = {f"{number:02d}.png": picture(number), f"{number:02d}.cls": b"%d" % (number % CLASSES)}
                for name, content in members.items():
                    member = tarfile.TarInfo(name)
                    member.size, member.mtime = len(content), 1_600_000_000
                    archive.addfile(member, io.BytesIO(content))


def train(mount: Mounted, place: Path, program: Path) -> subprocess.CompletedProcess[str]:
    """A training run in a process of its own, with nothing of this user's, and no network."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{place}", "OMP_NUM_THREADS": "1", "HF_HOME": str(place / "hf")}
    environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", program, mount.point / "train"],
        cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def check_planned(mount: Mounted) -> None:
    """Each epoch had all samples once, and from the second on they were opened by the plan."""

    def epochs() -> list[int]:
        rows = map(json.loads, mount.control("epochs").read_text().splitlines())
        return [row["samples"] for row in rows]

    eventually(lambda: not mount.stats()["trainers"], what="the end of the training run")
    assert epochs() == [SAMPLES] * EPOCHS
    assert mount.metric("planned_opens") >= SAMPLES


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_planned_and_says_so(name: str, tmp_path: Path) -> None:
    shards = name == "loop_webdataset.py"
    (write_shards if shards else write_folders)(tmp_path / "source/train")
    options: dict[str, object] = {"archives": "tar"} if shards else {}
    with mounted(tmp_path / "source", tmp_path / "m", **options) as mount:
        done = train(mount, tmp_path, EXAMPLES / name)
        check_planned(mount)
    assert f"epoch {EPOCHS}" in done.stdout
    assert f"INFO:trainer_hook:spiderfs: the mount has the plan of the list 'train': {SAMPLES} samples" in done.stderr
    if name != "loop_transformers.py":
        assert re.search(rf"^Planning\({mount.point}, {SAMPLES} samples, job \w+\)$", done.stdout, re.MULTILINE)


# What README.md uses of torchvision, which the environment has not.
TORCHVISION = """
from types import SimpleNamespace as _Of
from images import Images, network, tensor_of
transforms = _Of(Compose=lambda parts: parts, RandomResizedCrop=lambda side: None, ToTensor=lambda: None)
datasets = _Of(ImageFolder=lambda root, transform: Images(root))
def _resnet18():
    model = network(10)
    import torch
    model(torch.zeros(1, 3, 64, 64))
    return model
models = _Of(resnet18=_resnet18)
"""


def test_the_training_run_of_the_readme(tmp_path: Path) -> None:
    write_folders(tmp_path / "source/train")
    (block,) = re.findall(r"^```python\n(import torch\n.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    with mounted(tmp_path / "source", tmp_path / "m") as mount:
        # On another mount, with a smaller loader, without a GPU, and for two epochs.
        changes = {"/mnt/imagenet": str(mount.point), ", 128,": ", 8,", "num_workers=8": "num_workers=2"}
        changes |= {".cuda()": "", "range(90)": f"range({EPOCHS})"}
        for before, after in changes.items():
            assert before in block
            block = block.replace(before, after)
        (tmp_path / "torchvision.py").write_text(TORCHVISION)
        (tmp_path / "images.py").symlink_to(EXAMPLES / "images.py")
        (tmp_path / "train.py").write_text(block)
        train(mount, tmp_path, tmp_path / "train.py")
        check_planned(mount)
