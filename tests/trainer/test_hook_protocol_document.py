"""The page of the hook protocol: its tables name all fields, and its frames are what the code makes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hook_daemon import HookDaemon

from spiderfs.protocol import MESSAGES, Batch, Decoder, Hello, Message, encode

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "reference" / "hook-protocol.md").read_text()
FRAMES = (ROOT / "docs" / "examples" / "hook_frames.txt").read_text()

EXAMPLES: tuple[Message, ...] = (
    Hello("numpy", "20261122-1"),
    Batch("train", 0, 7, np.array([1, 0]), np.array([[1, 0], [0.6, -0.8]]), np.array([0.25, 2])),
)


def hexdump(data: bytes) -> str:
    """As `hexdump -C` shows it."""
    lines = []
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:08x}  {row[:8].hex(' '):23}  {row[8:].hex(' '):23}  |{text}|")
    return "\n".join(lines)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.TYPE)
def test_the_bytes_of_an_example(message: Message) -> None:
    assert f"\n{message.TYPE}\n{hexdump(encode(message))}\n" in FRAMES


def test_the_dumps_can_be_decoded() -> None:
    lines = re.findall(r"^[0-9a-f]{8}  (.{48})", FRAMES, re.MULTILINE)
    received = Decoder().feed(bytes.fromhex("".join(lines)))
    assert [type(message) for message in received] == [type(message) for message in EXAMPLES]


def test_the_tables_name_every_message_and_field() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+)` \|(.*)$", DOCUMENT, re.MULTILINE))
    for name, kind in MESSAGES.items():
        for field in (*kind.SCALARS, *kind.ARRAYS):
            assert f"`{field}`" in rows[name], (name, field)
        for array in kind.ARRAYS.values():
            assert array.dtype.replace("|", r"\|") in rows[name], name


def test_the_example_without_torch(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for kind in range(2):
        for number in range(20):
            file = tmp_path / "mount" / f"class{kind}" / f"{number}.npy"
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, rng.normal(2 * kind, 1, size=(10, 10)))
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch here')\n")
    example = ROOT / "docs" / "examples" / "hook_numpy.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    with HookDaemon(tmp_path / "mount") as daemon:
        command = [sys.executable, str(example), str(tmp_path / "mount")]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "epoch 3: accuracy" in result.stdout
    assert len(daemon.sink.batches) == 3 * 3
    assert [end.epoch for _, end in daemon.sink.ends] == [0, 1, 2]
    assert not daemon.counted["hook_malformed"]
