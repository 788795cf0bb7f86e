"""A training on a real mount, recorded and replayed: with the mount's radius as it was, with others otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mounting import PATIENCE_S, eventually, mounted, run_spiderfs
from vector_files import write_vectors

from spiderfs.trace import read_trace

ROOT = Path(__file__).parents[2]
CLASSES, EACH = 2, 60
EPOCHS = 3
# Hubs have room: with plans they would have next to none.
SHARED: dict[str, object] = {"plan": "off", "ratio_start": 0.5, "ratio_end": 0.5}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_vectors(tmp_path / "source", CLASSES, EACH, apart=2.0)


def recorded(source: Path, place: Path, **options: object) -> Path:
    """The trace of docs/examples/hook_numpy.py, which knows neither torch nor substitutes."""
    trace = place / "trace"
    with mounted(source, place, capacity="20KiB", trace=trace, **options) as mount:
        example = [sys.executable, str(ROOT / "docs" / "examples" / "hook_numpy.py"), str(mount.point)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(example, env=environment, capture_output=True, check=True, timeout=PATIENCE_S)
        batches = EPOCHS * -(-CLASSES * EACH // 16)
        eventually(lambda: mount.metric("hook_batches") == batches, what="all batches")
    return trace


def simulated(trace: Path, *options: str) -> dict[str, Any]:
    report = trace.with_suffix(".json")
    done = run_spiderfs("simulate", trace, "--policy", "spider", "--capacity", "30%", "--json", report, *options)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    return found


@pytest.mark.parametrize("policy", ["spider", "lru"])
def test_a_recorded_training_is_scored_again_with_other_radii(source: Path, tmp_path: Path, policy: str) -> None:
    # Without substitutes every sample is read, and its embedding recorded, whatever the policy was.
    trace = recorded(source, tmp_path / policy, policy=policy, substitute="off", **SHARED)
    assert len(read_trace(trace).accuracies()["1"]) == EPOCHS
    report = simulated(trace, "--radius", "0.02,nearest,1.2")
    redirects = {row["radius"]: row["redirects"] for row in report["results"] if row["policy"] == "spider"}
    assert redirects["0.02"] == 0, "no one is so near"
    assert min(redirects["nearest"], redirects["1.2"]) > 20
    (nearest,) = (scoring for scoring in report["scorings"] if scoring["radius"] == "nearest")
    assert nearest["scores"] > EPOCHS * EACH
    assert nearest["scores_as_recorded"] == (nearest["scores"] if policy == "spider" else 0)
    if policy == "spider":
        # The mount's hubs, against those that a cache of another size finds in the same batches.
        assert simulated(trace)["results"][0]["redirects"] > 20


def test_a_report_has_the_epochs_of_an_earlier_mount_and_a_replay_of_its_trace(source: Path, tmp_path: Path) -> None:
    trace = recorded(source, tmp_path / "m", **SHARED)
    with mounted(source, tmp_path / "m", capacity="20KiB", trace=trace, **SHARED) as mount:
        epochs = [json.loads(line) for line in mount.control("epochs").read_text().splitlines()]
        assert [epoch["epoch"] for epoch in epochs] == [*range(EPOCHS)]
        # What is opened before workers know of the trainer is no one's.
        assert 0.9 < sum(epoch["samples"] for epoch in epochs) / (EPOCHS * CLASSES * EACH) <= 1
        assert all(epoch["seconds"] > 0 for epoch in epochs)
        # Each wait is one of the counter of all waits.
        assert 0 < sum(epoch["waited_s"] for epoch in epochs) < 60
        done = run_spiderfs("report", mount.point, "--html", tmp_path / "report.html")
        assert (done.returncode, done.stderr) == (0, "")
        page = (tmp_path / "report.html").read_text()
        assert f"{EPOCHS} epochs, " in page
        assert "spider, as mounted" in page


def test_with_substitutes_the_scores_are_those_of_the_samples_that_were_served(source: Path, tmp_path: Path) -> None:
    trace = recorded(source, tmp_path / "mount", substitute_when="miss", radius=0.8, **SHARED)
    columns = read_trace(trace).columns
    assert (columns["given"] != columns["key"]).any()
    (scoring,) = simulated(trace, "--radius", "0.8")["scorings"]
    assert scoring["scores_as_recorded"] == scoring["scores"] > 0


def test_a_trace_without_embeddings_says_so(source: Path, tmp_path: Path) -> None:
    trace = recorded(source, tmp_path / "mount", trace_embeddings="off")
    assert simulated(trace)["results"]
    done = run_spiderfs("simulate", trace, "--radius", "0.5")
    assert done.returncode == 1
    assert done.stderr.startswith("spiderfs: the trace holds no embeddings")
    assert len(done.stderr.splitlines()) == 1
