"""`spiderfs bench` on real images behind a slow source: all ways are measured, and nothing is left behind.

And the figures that documents quote are still true, as far as small and short runs show it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mounting import run_spiderfs, settle
from PIL import Image

# Passes of some seconds each would make the test as long as the command.
_SHORT = (
    "from spiderfs.profiling import bench; bench.VIEWS = ('jpeg256',);"
    "bench.BATCH = 16; bench._MOST_ROUNDS = 3;"
    "bench._SPEED_S, bench._EPOCH_S, bench._MOST_S = 0.2, 0.3, 2.0"
)
_SLOW = "source.latency_ms=20"


def images(source: Path, side: int) -> None:
    source.mkdir()
    chance = np.random.default_rng(0)
    for number in range(70):
        pixels = chance.integers(0, 255, (side, side, 3), np.uint8)
        Image.fromarray(pixels).save(source / f"{number:03d}.jpg")
    settle(source)


def test_all_ways_are_compared_and_nothing_is_left(tmp_path: Path) -> None:
    source, cache = tmp_path / "source", tmp_path / "caches/one"
    cache.parent.mkdir()
    images(source, 40)
    words = ["bench", source, "-o", f"cache_dir={cache},{_SLOW}", "--workers", "2", "--json", tmp_path / "found.json"]
    done = run_spiderfs(*words, first=_SHORT)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["files"], found["whole"], found["images"], found["cached_share"]) == (70, True, True, 0.2)
    assert {"loader", "source", "direct", "lru", "plan"} <= found["passes"].keys()
    assert found["passes"]["plan"]["per_s"] > 1.2 * found["passes"]["direct"]["per_s"]
    # No view makes images of 40 pixels smaller.
    assert not any("256" in way for way in found["passes"])
    assert {len(way["passes"]) for way in found["passes"].values()} == {3}
    assert " ".join(found["verdict"].split()) in " ".join(done.stdout.split())
    assert max(len(line) for line in done.stdout.splitlines() if str(tmp_path) not in line) <= 80
    assert os.listdir(cache.parent) == []
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.thorough
def test_views_of_larger_images_are_measured_and_a_source_on_the_disk_of_the_cache_is_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    images(source, 300)
    words = ["bench", source, "-o", f"cache_dir={tmp_path}/cache", "--workers", "1", "--json", tmp_path / "found.json"]
    done = run_spiderfs(*words, first=_SHORT + "; bench._DECODES = 0.0")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["on_the_disk_of_the_cache"]
    assert "The source is on the disk of the cache" in done.stdout
    assert {"jpeg256", "loader, jpeg256"} <= found["passes"].keys()


# -- the project's own benchmarks

ROOT = Path(__file__).resolve().parents[2]
# They count bytes, so they hold beside other tests too.
QUICK = ("lookahead", "planned_ranges", "far", "stall")


@pytest.mark.slow
@pytest.mark.thorough
def test_kept_figures_are_still_true(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.all", "--quick", "--out", tmp_path, "--only", *QUICK]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
