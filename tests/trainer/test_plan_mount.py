"""Plans of real DataLoaders on real mounts, where the daemon sees opens and where it does not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planned_loader
import pytest
from mounting import Mounted, eventually, mounted
from object_server import object_server
from reading import write_numbered
from training_process import TrainingProcess, training_process

from spiderfs.core.plans.schedule import UNPROVEN_SAMPLES, UNSEEN_AFTER_S

pytestmark = [pytest.mark.opened_and_immutable]

FILES, SIZE = 400, 4000
# Of what the loader had in hand when the daemon first heard of it, only opens that were seen count: two workers with
# two batches each.
IN_HAND = 2 * 2 * 8


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    write_numbered(source, FILES, SIZE)
    return source


class Loader:
    """`planned_loader` in a process of its own."""

    def __init__(self, process: TrainingProcess) -> None:
        self._process = process

    def epoch(self) -> int:
        """Wait for the end of an epoch; how many samples the loop has taken."""
        return len(self._process.hear())

    def go_on(self) -> None:
        self._process.tell("go on")


@contextlib.contextmanager
def loading(mount: Mounted, **task: Any) -> Iterator[Loader]:
    with training_process(planned_loader.main, planned_loader.Task(str(mount.point), **task)) as process:
        loader = Loader(process)
        yield loader
        loader.go_on()
        assert process.ended_well(60)


def plan(mount: Mounted) -> dict[str, Any]:
    (found,) = mount.stats()["plans"]
    row: dict[str, Any] = found
    return row


def reads(mount: Mounted) -> tuple[int, int]:
    """Opens of files that the daemon saw, and reads that it did not see."""
    metrics = mount.stats()["metrics"]
    return metrics["opens"], metrics["page_cache_reads"]


@pytest.mark.parametrize(
    "task",
    [
        pytest.param({}, id="plain"),
        pytest.param({"persistent": True, "replacement": True}, id="replacement"),
        pytest.param({"workers": 0}, id="no workers", marks=pytest.mark.thorough),
    ],
)
def test_each_draw_is_counted_once(source: Path, tmp_path: Path, task: dict[str, Any], binding: str) -> None:
    with mounted(source, tmp_path / "m") as mount, loading(mount, epochs=[None, None, None], **task) as loader:
        for epoch in range(3):
            assert loader.epoch() == FILES
            eventually(lambda epoch=epoch: (plan(mount)["epoch"], plan(mount)["taken"]) == (epoch, FILES))
            assert plan(mount)["trusted"], (epoch, plan(mount), reads(mount))
            if epoch == 0:
                # What is opened before workers know of the trainer is no one's.
                eventually(lambda: sum(reads(mount)) >= FILES - IN_HAND, what="the draws of the first epoch")
                settled(mount)
                first = sum(reads(mount))
            else:
                expected = first + epoch * FILES
                eventually(lambda expected=expected: sum(reads(mount)) >= expected, what="all draws")
                settled(mount)
                assert sum(reads(mount)) == expected
            if epoch < 2:
                loader.go_on()
        opened, unseen = reads(mount)
        (job,) = mount.stats()["jobs"]
        assert job["page_cache_reads"] == unseen
        # The plan may begin after the first batches, if the loop is faster than the connection, as on a busy machine.
        assert 2 * FILES < job["samples"] <= 3 * FILES
        rows = [json.loads(line) for line in mount.control("epochs").read_text().splitlines()]
        assert [row["epoch"] for row in rows] == [0, 1, 2]
        assert [row["samples"] for row in rows] == [job["samples"] - 2 * FILES, FILES, FILES]
        assert sum(row["page_cache_reads"] for row in rows) == unseen
        assert all(row["planned"] >= row["samples"] - IN_HAND for row in rows), rows
        if binding == "immutable":
            # The kernel has all files after the first epoch, unless memory is short.
            assert unseen > FILES
            assert f"{unseen:,} answered by the page cache" in mount.status()
        else:
            assert (opened, unseen) == (3 * FILES, 0)


def settled(mount: Mounted) -> None:
    """Wait until the daemon knows what was opened, and of what no one has heard."""
    known = [(0, 0), reads(mount)]

    def quiet() -> bool:
        time.sleep(1.5 * UNSEEN_AFTER_S)
        known.append(reads(mount))
        return known[-1] == known[-2]

    eventually(quiet, what="the counts to stand still")


def test_a_training_that_leaves_epochs_early(source: Path, tmp_path: Path) -> None:
    """What its workers had in hand is read or not, and not taken; the next epoch is followed as any other."""
    with (
        mounted(source, tmp_path / "m", source__latency_ms=3) as mount,
        loading(mount, epochs=[10, 0, 20, None]) as loader,
    ):
        for batches in (10, 0, 20):
            assert loader.epoch() == batches * 8
            loader.go_on()
        assert loader.epoch() == FILES
        eventually(lambda: plan(mount)["taken"] == FILES)
        assert plan(mount)["trusted"]
        assert plan(mount)["length"] == FILES
        (job,) = mount.stats()["jobs"]
        assert job["samples"] <= FILES + 30 * 8 + 3 * IN_HAND


@pytest.mark.not_immutable("is fetched ahead alike")
def test_a_slow_training_does_not_wait(source: Path, tmp_path: Path) -> None:
    with (
        mounted(source, tmp_path / "m", source__latency_ms=5, capacity="25%") as mount,
        loading(mount, epochs=[None], step_s=0.08) as loader,
    ):
        assert loader.epoch() == FILES
        metrics = mount.stats()["metrics"]
        # All but the first ones came before their reader; some are those of the next epoch.
        assert metrics["prefetched"] > 0.8 * FILES
        assert metrics["origin_reads"] < 1.4 * FILES
        eventually(lambda: plan(mount)["taken"] == FILES)
        assert plan(mount)["trusted"]
        assert plan(mount)["samples_per_s"] < 110


@pytest.mark.not_immutable("is fetched ahead alike")
@pytest.mark.parametrize(
    "files",
    [
        pytest.param("links_of_directories/*/*", marks=pytest.mark.thorough),
        pytest.param("links_of_files/*", marks=pytest.mark.thorough),
        "hub/snapshots/main/*",
    ],
)
def test_samples_are_fetched_ahead_that_the_list_names_by_links(tmp_path: Path, files: str) -> None:
    source = tmp_path / "source"
    write_numbered(source / "all", FILES, SIZE)
    for directory in ("links_of_directories", "links_of_files", "hub/blobs", "hub/snapshots/main"):
        (source / directory).mkdir(parents=True)
    for number in range(4):
        (source / "links_of_directories" / str(number)).symlink_to(f"../all/{number}")
    for number in range(FILES):
        (source / "links_of_files" / f"{number:08d}").symlink_to(f"../all/{number % 4}/{number:08d}")
        (source / "hub" / "blobs" / f"{number:040x}").write_bytes(b"%08d" % number + bytes(SIZE))
        (source / "hub" / "snapshots" / "main" / f"{number:08d}").symlink_to(f"../../blobs/{number:040x}")
    with (
        mounted(source, tmp_path / "m", source__latency_ms=5, capacity="25%") as mount,
        loading(mount, epochs=[None], step_s=0.08, files=files) as loader,
    ):
        assert loader.epoch() == FILES
        assert mount.metric("prefetched") > 0.7 * FILES
        eventually(lambda: plan(mount)["taken"] == FILES)
        assert plan(mount)["opens"] > 0.8 * FILES


def test_a_list_whose_samples_are_other_files_is_found_out(tmp_path: Path) -> None:
    # A plan is trusted until many of its samples were not read in their turn.
    write_numbered(source := tmp_path / "source", 2 * FILES, SIZE)
    with (
        mounted(source, tmp_path / "m", source__latency_ms=3, capacity="20%") as mount,
        loading(mount, epochs=[None, None, None], reads="wrong") as loader,
    ):
        loader.epoch()
        eventually(lambda: not plan(mount)["trusted"])
        assert "not followed" in mount.status()
        brought = mount.metric("prefetched")
        assert brought <= 2 * UNPROVEN_SAMPLES
        for _ in range(2):
            loader.go_on()
            loader.epoch()
        assert mount.metric("prefetched") == brought


@pytest.mark.parametrize("share", [False, True])
def test_a_data_set_that_keeps_its_files_in_memory_is_not_fetched_for_again(
    source: Path, tmp_path: Path, share: bool
) -> None:
    with (
        mounted(source, tmp_path / "m", source__latency_ms=1, capacity="20%") as mount,
        loading(mount, epochs=[None] * 3, workers=0, keeps=True, step_s=0.01, share=share) as loader,
    ):
        assert loader.epoch() == FILES
        first, lost = mount.metric("origin_reads"), mount.metric("landing_lost")
        for _ in range(2):
            loader.go_on()
            assert loader.epoch() == FILES
        # Some samples of the first epoch are fetched again for the second one, which has begun to be fetched ahead;
        # those that were pushed out before they could be kept, once more.
        again = mount.metric("landing_lost") - lost
        assert mount.metric("origin_reads") - first <= UNPROVEN_SAMPLES + again


def test_a_manager_that_is_killed_gets_the_progress_of_the_training(source: Path, tmp_path: Path, binding: str) -> None:
    with mounted(source, tmp_path / "m", source__latency_ms=5, capacity="25%") as mount:
        mount.expect(r"manager .* ended \(signal 9\)", r" ended \(signal 9\)", "the process that pushes")
        with loading(mount, epochs=[None, None], step_s=0.05) as loader:
            eventually(lambda: any(row["taken"] > FILES // 4 for row in mount.stats()["plans"]))
            killed = mount.manager()
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: mount.manager() != killed, what="another manager")
            eventually(lambda: any(row["taken"] > FILES // 4 for row in mount.stats()["plans"]), what="the plan again")
            ahead = mount.metric("prefetched")
            drawn = loader.epoch()
            eventually(lambda: plan(mount)["taken"] == FILES)
            assert plan(mount)["trusted"]
            loader.go_on()
            drawn += loader.epoch()
            eventually(lambda: plan(mount)["taken"] == FILES)
            assert sum(reads(mount)) <= drawn
            # The kernel of an immutable mount has all of it by then.
            assert binding == "immutable" or mount.metric("prefetched") > ahead + FILES // 4


@pytest.mark.not_immutable("is fetched ahead alike")
def test_the_objects_of_a_bucket_are_fetched_ahead_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with object_server() as server:
        for number in range(FILES):
            server.objects[f"{number % 4}/{number:08d}"] = b"%08d" % number + bytes(SIZE)
        server.latency_s = 0.01
        with mounted("s3://bucket", tmp_path / "place", source__endpoint=server.url) as mount:
            server.asked()
            with loading(mount, epochs=[None, None], step_s=0.02) as loader:
                assert loader.epoch() == FILES
                loader.go_on()
                assert loader.epoch() == FILES
                assert mount.metric("prefetched") > FILES / 4
                asked = server.asked("GET")
                assert len(asked) == len(set(asked)) == FILES
