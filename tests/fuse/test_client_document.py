"""Every Python example of docs/reference/client.md, run in order in one program against a mount made for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from mounting import mounted

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
