"""The augmentation of the benchmarks of `refurbish`, and the differences that they show."""

import random

import numpy as np
import pytest
from PIL import Image

from benchmarks import tables
from benchmarks.common.augmentation import DISTORTIONS, MAGNITUDE, STRONGEST, Compose, Crop, Resize, as_bytes, mirrored
from benchmarks.serving.refurbish_speed import SCHEDULES


@pytest.fixture
def image() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8))


def test_randaugment_has_fourteen_distortions_that_keep_an_images_size(image):
    changed = 0
    for distortion in DISTORTIONS:
        other = distortion(image, MAGNITUDE / STRONGEST)
        assert (other.size, other.mode) == (image.size, image.mode)
        changed += other.tobytes() != image.tobytes()
    # One of them is none. The image has all values from 0 to 255 already, so its contrast cannot be stretched.
    assert (len(DISTORTIONS), changed) == (14, 12)


def test_a_pipeline_resizes_crops_and_mirrors(image):
    random.seed(0)
    made = Compose([Resize(15), Crop(12, padding=2), mirrored, as_bytes])(image)
    assert made.shape == (3, 12, 12)


def test_differences_are_those_of_runs_with_the_same_seed():
    names = ("configuration", "seed", "top1")
    figures = (("standard", 1, 0.5), ("r=2", 2, 0.9), ("r=2", 1, 0.52), ("standard", 2, 0.88))
    runs = tables.by_seed({"runs": [dict(zip(names, figure, strict=True)) for figure in figures]})
    assert tables.differences(runs["r=2"], runs["standard"]) == pytest.approx([2, 2])


def test_schedules_without_revampers_features_make_the_same_samples_at_other_times():
    naive, balanced, whole = (schedule(60, 3, 60, 0) for schedule in SCHEDULES.values())
    assert [int(naive.renewed(epoch).sum()) for epoch in range(7)] == [60, 0, 0, 60, 0, 0, 60]
    assert [int(balanced.renewed(epoch).sum()) for epoch in range(1, 7)] == [20] * 6
    assert all((balanced.renewed(epoch) == whole.renewed(epoch)).all() for epoch in range(7))
    for schedule in (naive, balanced, whole):
        assert sorted(schedule.order(5)) == list(range(60))
    spread = [np.ptp(of.renewed(5)[of.order(5)].reshape(6, 10).sum(1)) for of in (balanced, whole)]
    assert spread[0] > 1 >= spread[1]
