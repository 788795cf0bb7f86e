"""Reads made-up images from a slow source as a training's loader does: directly, by an LRU cache, and by a plan.

Two epochs or more of all images in random order, the same for each way. The images are small enough for every machine,
so what was read leaves the kernel's memory, as if the data were larger than that. All files, mounts and caches lie in
one temporary directory, which is deleted at the end.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from spiderfs.options.units import format_size
from spiderfs.profiling.bench import File, PlanPublisher, Readers, Way, learn_names, list_files
from spiderfs.profiling.private_mount import private_mount
from spiderfs.sources.local import LocalSource
from spiderfs.sources.slow import SlowSettings
from spiderfs.views.recipe import NO_VIEW

IMAGES, CLASSES, PIXELS = 480, 10, 224
LATENCY_MS = 20.0
CACHED_SHARE = 0.2
WAYS = {"direct": "directly from the source", "lru": "mount, LRU cache", "plan": "mount, plan"}
# A mount's last prefetches and counts may come after its last read.
_SETTLE_S = 0.2


class DemoEpoch(NamedTuple):
    """One pass over all images; `hits` of them did not wait for the source, which sent `fetched_bytes`."""

    seconds: float
    hits: int
    fetched_bytes: int


def demo(epochs: int, workers: int, say: Callable[[str], None]) -> Iterator[list[DemoEpoch]]:
    """Measure each of WAYS, whose name `say` is given before; raises MountError if nothing can be mounted."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spiderfs-demo-")))
        images = scratch / "images"
        _make_images(images)
        files = list_files(LocalSource(str(images)), 1 << 20).files
        SlowSettings.create(scratch / "line", latency_ms=LATENCY_MS).close()
        orders = [random.Random(number).sample(files, len(files)) for number in range(epochs)]
        readers = stack.enter_context(Readers(workers))
        readers.fit(workers * 1000 / LATENCY_MS)
        source = Way(str(images), str(images), faults=str(scratch / "line"))
        for way, named in WAYS.items():
            say(named)
            yield _direct(readers, source, orders) if way == "direct" else _mounted(readers, source, way, orders)


def _make_images(root: Path) -> None:
    for number in range(IMAGES):
        directory = root / f"class{number % CLASSES}"
        directory.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((PIXELS, PIXELS), 40).convert("RGB").save(directory / f"{number:03}.jpg")


def _direct(readers: Readers, source: Way, orders: list[list[File]]) -> list[DemoEpoch]:
    passes = [readers.read(source, order, decode=True) for order in orders]
    return [DemoEpoch(done.seconds, 0, done.bytes) for done in passes]


def _mounted(readers: Readers, source: Way, way: str, orders: list[list[File]]) -> list[DemoEpoch]:
    total = sum(file.version.size for file in orders[0])
    options = {"source": source.named, "immutable": "on", "source.latency_ms": str(LATENCY_MS)}
    others = {"capacity": format_size(int(total * CACHED_SHARE) & ~1023), "policy": "lru" if way == "lru" else "spider"}
    with ExitStack() as stack:
        mount = stack.enter_context(private_mount(options, Path(source.root).parent, NO_VIEW, **others)).root
        learn_names(mount, orders[0])
        plan = stack.enter_context(closing(PlanPublisher(mount, orders[0]))) if way == "plan" else None
        epochs, before = [], _counts(mount)
        for number, order in enumerate(orders):
            if plan is not None:
                plan.publish(*orders[number : number + 2])
            done = readers.read(Way(str(mount)), order, decode=True, plan=plan)
            time.sleep(_SETTLE_S)
            after = _counts(mount)
            epochs.append(DemoEpoch(done.seconds, done.files - (after[0] - before[0]), after[1] - before[1]))
            before = after
        return epochs


def _counts(mount: Path) -> tuple[int, int]:
    """Opens that have waited for the source so far, and bytes that it has sent."""
    metrics = json.loads((mount / ".spiderfs/stats.json").read_bytes())["metrics"]
    return metrics["opens"] - metrics["opens_hit"], metrics["origin_bytes"]
