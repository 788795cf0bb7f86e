"""Which decoder makes the most of a mount: the recipes of docs/howto/decoding.md, beside Pillow on the local disk.

    .venv-dev/bin/python -m benchmarks.serving.decoding                 some three minutes
    .venv-dev/bin/python -m benchmarks.serving.decoding --quick         under a minute, without what only .peers has

Each row is a recipe that reads every image once in an epoch, in a new order, with two loader workers (or two threads).
Each image is decoded, and a random part of it resized to 224 x 224 as RandomResizedCrop does; nothing is trained. All
but the first read an immutable mount with the view that is named. The images are those of
`benchmarks.serving.image_loader`. Rows take turns epoch by epoch, and each has read every image once before, so caches
and the page cache are warm. A ratio is the median of the ratios within a round.

Decoders have an environment of their own, .peers, which benchmarks/install-peers makes; DALI runs on the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import tables
from benchmarks.common.command import add_data, add_names, command_line, main
from benchmarks.common.images import HELP, make_images
from benchmarks.common.interruption import scratch_directory
from benchmarks.serving.decoders import DALI, ROOT, THREADS, Task
from benchmarks.serving.peers import mounted, python_of_peers

LOCAL, ORIGINAL = "local disk", "original"


@dataclass(frozen=True)
class Extent:
    images: int
    rounds: int


FULL, QUICK = Extent(1_000, rounds=7), Extent(200, rounds=2)


@dataclass(frozen=True)
class Row:
    recipe: str
    """A heading of the page."""
    shown: str
    """What is read: LOCAL, ORIGINAL, or a view."""
    is_quick: bool = True
    """Whether .venv-dev has what the recipe imports."""


PILLOW, TORCHVISION = "Pillow", "torchvision.io"
OPENCV, SIMPLEJPEG, NUMPY = "OpenCV", "simplejpeg and OpenCV", "NumPy and OpenCV"
ROWS = {
    f"{row.shown}, {row.recipe}": row
    for row in (
        Row(PILLOW, LOCAL),
        Row(PILLOW, ORIGINAL),
        Row(TORCHVISION, ORIGINAL, is_quick=False),
        Row(OPENCV, ORIGINAL),
        Row(SIMPLEJPEG, ORIGINAL),
        Row(DALI, ORIGINAL, is_quick=False),
        Row(PILLOW, "jpeg256"),
        Row(TORCHVISION, "jpeg256", is_quick=False),
        Row(OPENCV, "jpeg256"),
        Row(SIMPLEJPEG, "jpeg256"),
        Row(DALI, "jpeg256", is_quick=False),
        Row(PILLOW, "bmp256"),
        Row(OPENCV, "bmp256"),
        Row(THREADS, "bmp256"),
        Row(NUMPY, "npy256"),
    )
}
BASE = f"{LOCAL}, {PILLOW}"


def measured(python: Path, task: Task) -> dict[str, list[float]]:
    """What `benchmarks.serving.decoders` answers; raises RuntimeError if it fails."""
    command = [str(python), "-m", "benchmarks.serving.decoders", json.dumps(asdict(task))]
    # Ctrl-C reaches it too, and its workers; the mounts are free as soon as it has ended.
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError("the loader failed; its message stands above")
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    count, rounds = arguments.extent.images, arguments.extent.rounds
    named = arguments.rows or [name for name, row in ROWS.items() if row.is_quick or not arguments.quick]
    names = [BASE, *(name for name in named if name != BASE)]
    # A figure of one environment says nothing of another: PyTorch and Pillow may be others.
    python = Path(sys.executable) if all(ROWS[name].is_quick for name in names) else python_of_peers()
    with scratch_directory("decoding") as scratch, ExitStack() as stack:
        source = scratch / "source"
        images = make_images(source, arguments.data, count)
        total_bytes = sum((source / name).stat().st_size for name in images)
        os.sync()
        roots = {LOCAL: source}
        for shown in dict.fromkeys(ROWS[name].shown for name in names if ROWS[name].shown != LOCAL):
            view = f"view={shown}" if shown != ORIGINAL else ""
            roots[shown] = stack.enter_context(mounted("immutable", source, scratch / shown, view)).root
        bytes_of = {shown: sum((root / name).stat().st_size for name in images) for shown, root in roots.items()}
        rows = {name: (ROWS[name].recipe, str(roots[ROWS[name].shown])) for name in names}
        rates = measured(python, Task(rows, rounds))
    of_original = {name: bytes_of[ROWS[name].shown] / total_bytes for name in names}
    of_local = {name: tables.rounds(found, rates[BASE]) for name, found in rates.items()}
    found = {"images": count, "bytes": total_bytes, "images_per_s": rates}
    found |= {"of_local_disk": of_local, "bytes_of_original": of_original}
    print(tables.decoding(found))
    return found


if __name__ == "__main__":
    program = command_line(__doc__, FULL, QUICK)
    add_data(program, HELP)
    add_names(program, "--rows", ROWS, "rows beside the first (default all)")
    main(run, program)
