"""The recipes of docs/howto/decoding.md and its batch loader, run against mounts with views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from image_files import image_file, picture
from mounting import Mounted, eventually, mounted
from PIL import Image
from reading import write_contents

import trainer_hook
from benchmarks.serving.decoders import COMMON, DALI, THREADS, Task, batch_loader, defined_by, rates, snippets
from benchmarks.serving.decoding import LOCAL, NUMPY, OPENCV, ORIGINAL, PILLOW, ROWS, SIMPLEJPEG, TORCHVISION

# Their packages take GB, so the benchmark's environment alone has them; it runs the same snippets.
IN_THE_BENCHMARK = {TORCHVISION, DALI}
HERE = (PILLOW, OPENCV, SIMPLEJPEG, NUMPY)
PICTURES = {f"{number % 2}/{number}.jpg": picture(700, 500, seed=number) for number in range(8)}
SIDE = 224
# Of 256, on average: decoders round differently, and a view is a JPEG of a JPEG.
ALIKE = 3.0


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mounted]:
    write_contents(tmp_path / "source", {name: image_file(image=image) for name, image in PICTURES.items()})
    with mounted(tmp_path / "source", tmp_path / "m", view="bmp256", immutable="on") as mount:
        yield mount


def shown_in(mount: Mounted, view: str) -> Path:
    return mount.point / ".spiderfs/views" / view


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.recipe in HERE])
def test_a_recipe_gives_a_part_of_the_image(mount: Mounted, row: object) -> None:
    names = defined_by(row.recipe)  # type: ignore[attr-defined]
    view = ORIGINAL if row.shown == LOCAL else row.shown  # type: ignore[attr-defined]
    for name, image in PICTURES.items():
        path = str(shown_in(mount, view) / name)
        part = names["load"](path)
        assert (tuple(part.shape), str(part.dtype)) == ((SIDE, SIDE, 3), "torch.uint8")
        whole = names | {"part_of": lambda width, height: (0, 0, width, height)}
        names["load"].__globals__.update(whole)
        wanted = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR), dtype=np.int16)
        assert np.abs(names["load"](path).numpy() - wanted).mean() < ALIKE


def test_parts_lie_within_the_image_and_differ() -> None:
    part_of = defined_by(PILLOW)["part_of"]
    parts = [part_of(341, 256) for _ in range(500)]
    assert all(0 <= left < right <= 341 and 0 <= top < bottom <= 256 for left, top, right, bottom in parts)
    assert len(set(parts)) > 400
    assert 0.4 < np.mean([(right - left) * (bottom - top) for left, top, right, bottom in parts]) / 341 / 256 < 0.6


def test_every_recipe_is_a_row_of_the_benchmark() -> None:
    recipes = set(snippets()) - {COMMON}
    assert recipes == set(HERE) | IN_THE_BENCHMARK
    assert {row.recipe for row in ROWS.values()} == recipes | {THREADS}
    assert {row.recipe for row in ROWS.values() if not row.is_quick} == IN_THE_BENCHMARK


def test_the_batch_loader_gives_every_image_once(mount: Mounted) -> None:
    example = batch_loader()
    found: list[np.ndarray] = []
    labels: Counter[int] = Counter()
    for images, of_images in example.ahead(example.batches(mount.point, batch_size=3, threads=2)):
        assert tuple(images.shape) == (len(of_images), SIDE, SIDE, 3)
        found += list(images.numpy())
        labels.update(of_images.tolist())
    assert labels == {0: 4, 1: 4}
    means = sorted(image.mean(axis=(0, 1)).round().tolist() for image in found)
    assert len({tuple(mean) for mean in means}) == len(PICTURES)


def test_a_plan_follows_the_batch_loader(mount: Mounted) -> None:
    example = batch_loader()
    loader = example.batches(mount.point, batch_size=3, threads=2)
    with trainer_hook.plan(mount.point, loader):
        assert sum(len(labels) for _, labels in example.ahead(loader)) == len(PICTURES)
        eventually(lambda: mount.metric("planned_opens"), what="opens that follow the plan")


def test_rows_take_turns_after_an_epoch_of_their_own(mount: Mounted) -> None:
    rows = {"one": (OPENCV, str(mount.point)), "other": (THREADS, str(mount.point))}
    found = rates(Task(rows, rounds=2))
    assert [len(found[name]) for name in rows] == [2, 2]
    assert all(rate > 0 for rates_of_row in found.values() for rate in rates_of_row)
