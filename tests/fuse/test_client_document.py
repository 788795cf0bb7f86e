"""Every Python example of docs/reference/client.md, run in order in one program against a mount made for it."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from mounting import mounted
from PIL import Image
from serving import served

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reference" / "client.md"
FILES = {"train/1.txt": "one\n", "train/2.txt": "two\n"}


def test_the_examples_of_the_document(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    examples = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) >= 5
    with mounted(tmp_path / "source", tmp_path / "m") as mount:
        program = "\n".join(["import sys; mount = sys.argv[1]", *examples])
        # Twice: through the mount, which fetches, and from the cache.
        for _ in range(2):
            done = subprocess.run([sys.executable, "-c", program, mount.point], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        assert mount.metric("client_opens") > 5


# -- docs/howto/without-fuse.md


SERVED_DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "howto" / "without-fuse.md"

# torchvision is not installed here: a class with the attributes that the recipe uses, and its way to list and load.
_BEFORE = """
import datasets, fsspec, pandas, pyarrow.dataset, sys, torch, trainer_hook, webdataset
from pathlib import Path
from PIL import Image

class ImageFolder(torch.utils.data.Dataset):
    def __init__(self, root, loader):
        self.loader, classes = loader, sorted(path.name for path in Path(root).iterdir())
        self.samples = [(str(path), label) for label, name in enumerate(classes) for path in Path(root, name).iterdir()]
        self.imgs = self.samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        return self.loader(path), label
"""
_AFTER = """
import json, time
assert sorted(names) == ["cat", "dog"] and content[1:4] == b"PNG" and header == "name,label\\n"
assert sorted(image.getpixel((0, 0))[0] for batch in loader for image, _ in batch) == [0, 0, 1, 1, 2, 2, 3, 3]
assert first["number"] == 0 and keys == ["00", "01", "10", "11"]
assert list(table["label"]) == [0, 1] and sorted(parts["number"].to_pylist()) == [0, 1, 2, 3]
deadline = time.monotonic() + 30
while not json.loads(client.read_bytes("spiderfs://imagenet/.spiderfs/stats.json"))["metrics"]["planned_opens"]:
    assert time.monotonic() < deadline, "no read was one of the plan"
planning.close()
"""


@pytest.mark.thorough
def test_the_examples_without_a_mount(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("cat", "dog"):
        (source / "train" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), (number, 5, 7)).save(source / f"train/{name}/{number}.png")
    (source / "labels.csv").write_text("name,label\ncat,0\ndog,1\n")
    (source / "parts").mkdir()
    for part in range(2):
        pyarrow.parquet.write_table(
            pyarrow.table({"number": [2 * part, 2 * part + 1]}), source / f"parts/{part}.parquet"
        )
        with tarfile.open(source / f"shard-{part}.tar", "w") as tar:
            for number in range(2):
                member = tarfile.TarInfo(f"{part}{number}.cls")
                member.size = 1
                tar.addfile(member, io.BytesIO(b"1"))
    examples = re.findall(r"^```python\n(.*?)^```$", SERVED_DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) >= 6
    program = "\n".join([_BEFORE, *examples, _AFTER]).replace("/nfs/imagenet", str(source))
    with served(source, tmp_path / "d", name="imagenet"):
        # Twice: through the socket, which fetches, and from the cache.
        for _ in range(2):
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
