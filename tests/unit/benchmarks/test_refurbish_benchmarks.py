"""The augmentation of the benchmarks of `refurbish`, and the differences that they show."""

import random

import numpy as np
import pytest
from PIL import Image

from benchmarks.common.augmentation import DISTORTIONS, MAGNITUDE, STRONGEST, Compose, Crop, Resize, as_bytes, mirrored
from benchmarks.common.schedules import NaiveGenerations, UnspreadGenerations
from benchmarks.serving.refurbish_speed import images_per_s
from benchmarks.training.refurbish_accuracy import Run, gained
from trainer_hook.refurbishing.generations import Generations


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
    runs = [Run("standard", 1, 0.5, 1), Run("r=2", 2, 0.9, 1), Run("r=2", 1, 0.52, 1), Run("standard", 2, 0.88, 1)]
    assert gained(runs, "r=2") == pytest.approx([2, 2])


SAMPLES, REUSE, BATCH = 300, 3, 30


@pytest.mark.parametrize(
    ("schedule", "is_balanced", "is_spread"),
    [(NaiveGenerations, False, False), (UnspreadGenerations, True, False), (Generations, True, True)],
)
def test_schedules_lack_what_their_row_of_table_1_says(schedule, is_balanced, is_spread):
    generations = schedule(SAMPLES, REUSE, SAMPLES, seed=5)
    by_epoch = [int(generations.renewed(epoch).sum()) for epoch in range(1, 1 + REUSE)]
    assert sum(by_epoch) == SAMPLES, "each is made once in a cycle"
    assert by_epoch == ([SAMPLES // REUSE] * REUSE if is_balanced else [0, 0, SAMPLES])
    order = generations.order(1)
    assert sorted(order.tolist()) == list(range(SAMPLES))
    by_batch = generations.renewed(1)[order].reshape(-1, BATCH).sum(axis=1)
    assert (set(by_batch.tolist()) == {BATCH // REUSE}) == is_spread
    ranks = [generations.order(1, rank, 2) for rank in range(2)]
    assert sorted(np.concatenate(ranks).tolist()) == list(range(SAMPLES))


def test_steps_of_an_accelerator_bound_the_rate():
    batches = [range(10)] * 4
    assert images_per_s(batches, epochs=3, step_s=0.005) == pytest.approx(10 / 0.005, rel=0.6)
    assert images_per_s(batches, epochs=3) > 10 / 0.005
