"""Ranges that are learned while loaders read: which bytes of which files each sample has."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mounting import Mounted, mounted
from torch.utils.data import DataLoader, Sampler
from windows import SIZE, Mapped, Windows, piece, read_epochs, windows

import trainer_hook
from benchmarks.common.sources import make_older, patterned
from spiderfs.protocol.reads import READS_XATTR, decoded
from trainer_hook.loader.learning import LearnedRanges, merged_rows, observe, release

SAMPLES, PAGE = 200, 4096
PLACES = windows(SAMPLES)
SLOW = {"source__latency_ms": 5, "capacity": "5MB", "policy": "minio"}


# -- what is known


def test_rows_are_merged_and_no_byte_is_lost_or_added() -> None:
    rng = random.Random(3)
    begins = [(rng.randrange(4), rng.randrange(3), rng.randrange(300), rng.randrange(1, 40)) for _ in range(120)]
    rows = np.array([(sample, file, begin, begin + size) for sample, file, begin, size in begins], np.int64)
    merged = merged_rows(rows).tolist()

    def bytes_in(given: list[list[int]]) -> list[tuple[int, int, int]]:
        return [(sample, file, byte) for sample, file, begin, end in given for byte in range(begin, end)]

    assert sorted(bytes_in(merged)) == sorted(set(bytes_in(rows.tolist())))
    assert merged == sorted(merged)
    for before, after in pairwise(merged):
        assert before[:2] != after[:2] or before[3] < after[2]
    assert len(merged_rows(np.empty((0, 4), np.int64))) == 0


# -- data sets


class Forgetting(Windows):
    """Has the kernel drop the pages of its file, as it does where data do not fit into memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, PLACES)

    def __getitem__(self, index: int) -> bool:
        found = super().__getitem__(index)
        descriptor = os.open(self.path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        return found


class ForgettingMapped(Forgetting, Mapped):
    pass


class InThreads(Forgetting):
    """Reads each half of a sample in a thread of its own, which ends before the sample is there."""

    def read(self, offset: int, length: int) -> bytes:
        halves = [(offset, length // 2), (offset + length // 2, length - length // 2)]
        with ThreadPoolExecutor(2) as pool:
            return b"".join(pool.map(lambda half: piece(self.path, *half), halves))


class Several(Forgetting):
    """Reads a batch at once."""

    def __getitem__(self, index: int) -> bool:
        raise NotImplementedError

    def __getitems__(self, indices: list[int]) -> list[bool]:
        return [super(Several, self).__getitem__(index) for index in indices]


class Mosaic(Forgetting):
    """Every second sample also shows another one, which is another one in each epoch."""

    def __getitem__(self, index: int) -> bool:
        shown = index % 2 or self[random.randrange(1, SAMPLES, 2)]
        return bool(shown) and super().__getitem__(index)


class Failing(Forgetting):
    def __getitem__(self, index: int) -> bool:
        found = super().__getitem__(index)
        if index == 7:
            raise OSError("a bad sample")
        return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    (source / "one.bin").write_bytes(patterned(0, SIZE))
    make_older(source / "one.bin")
    return source


@pytest.fixture(scope="module", params=["off", "on"], ids=["opened", "immutable"])
def mount(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    place = tmp_path_factory.mktemp("mount")
    with mounted(source, place, immutable=request.param, workers=2, **SLOW) as mount:
        yield mount


def learned(plan: Any) -> LearnedRanges:
    """What a plan has learned, also in the epoch that has just ended."""
    found = plan._learned
    assert isinstance(found, LearnedRanges)
    found.take()
    return found


def check_known(plan: Any, samples: Any = range(SAMPLES)) -> None:
    """Each of these samples has its own pages, and hardly more; the others have none."""
    ranges, places = learned(plan).ranges(), PLACES
    spread = 0 if os.geteuid() == 0 else 32 * PAGE
    for index in range(SAMPLES):
        rows = range(ranges.first[index], ranges.first[index + 1])
        offset, length = places[index]
        if index not in samples:
            assert not rows
            continue
        (row,) = rows
        begin, end = int(ranges.offsets[row]), int(ranges.offsets[row] + ranges.lengths[row])
        assert begin <= offset
        assert end >= offset + length
        assert end - begin <= length + 2 * PAGE + spread


@pytest.mark.parametrize("kind", [Forgetting, ForgettingMapped, InThreads, Several])
def test_later_epochs_are_planned_by_what_the_first_has_read(mount: Mounted, kind: type[Forgetting]) -> None:
    loader = DataLoader(kind(mount.point / "one.bin"), batch_size=8, shuffle=True, num_workers=2)
    wanted, before = sum(length for _, length in PLACES), mount.metric("prefetched")
    with trainer_hook.plan(mount.point, loader, ranges="learn") as plan:
        read_epochs(loader, 1)
        assert mount.metric("prefetched") == before
        fetched = mount.metric("origin_bytes")
        read_epochs(loader, 2)
        assert f"learned {SAMPLES} of {SAMPLES} samples" in repr(plan)
        check_known(plan)
        assert mount.metric("prefetched") > before + SAMPLES / 2
        assert mount.metric("origin_bytes") < fetched + 1.3 * 2 * wanted


@pytest.mark.parametrize("context", ["spawn", pytest.param("forkserver", marks=pytest.mark.thorough)])
def test_workers_that_are_not_forked_learn_too(mount: Mounted, context: str) -> None:
    data = Forgetting(mount.point / "one.bin")
    loader = DataLoader(
        data, batch_size=8, shuffle=True, num_workers=2, multiprocessing_context=context, persistent_workers=True
    )
    with trainer_hook.plan(mount.point, loader, ranges="learn") as plan:
        read_epochs(loader, 2)
        check_known(plan)
    del loader


class Some(Sampler[int]):
    def __len__(self) -> int:
        return SAMPLES // 2

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES // 2).tolist())


def test_samples_that_are_not_drawn_or_cannot_be_read_are_not_known(mount: Mounted) -> None:
    loader = DataLoader(Failing(mount.point / "one.bin"), batch_size=None, sampler=Some(), num_workers=2)
    with trainer_hook.plan(mount.point, loader, ranges="learn") as plan:
        assert f"learned 0 of {SAMPLES} samples" in repr(plan)
        for _ in range(2):
            batches, taken = iter(loader), []
            while len(taken) < SAMPLES // 2 - 1:
                with contextlib.suppress(OSError):
                    taken.append(next(batches))
            assert all(taken)
            with pytest.raises((OSError, StopIteration)):
                next(batches)
        check_known(plan, set(range(SAMPLES // 2)) - {7})
        assert f"learned {SAMPLES // 2 - 1} of {SAMPLES} samples" in repr(plan)


def test_a_sample_that_another_one_shows_keeps_its_bytes_to_itself(mount: Mounted) -> None:
    loader = DataLoader(Mosaic(mount.point / "one.bin"), batch_size=8, shuffle=True, num_workers=2)
    with trainer_hook.plan(mount.point, loader, ranges="learn") as plan:
        read_epochs(loader, 2)
        check_known(plan)


def test_threads_that_read_samples_side_by_side_learn_their_own(mount: Mounted) -> None:
    data = Forgetting(mount.point / "one.bin")
    with trainer_hook.plan(mount.point, DataLoader(data, batch_size=8), ranges="learn") as plan:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(data.__getitem__, range(SAMPLES)))
        assert all(data[index] for index in range(SAMPLES))
        check_known(plan)


def test_an_epoch_that_is_interrupted_leaves_what_it_has_learned(mount: Mounted) -> None:
    data = Forgetting(mount.point / "one.bin")
    loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2)

    def interrupted() -> None:
        for number, batch in enumerate(loader):
            assert batch.all()
            if number == 10:
                raise KeyboardInterrupt

    with trainer_hook.plan(mount.point, loader, ranges="learn") as plan:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        known = sum(np.diff(learned(plan).ranges().first) > 0)
        assert 80 <= known < SAMPLES
        read_epochs(loader, 2)
        check_known(plan)
    assert type(data) is Forgetting
    assert data[3]


def test_settled_samples_are_not_marked(mount: Mounted) -> None:
    data = Several(mount.point / "one.bin")
    loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2)
    with trainer_hook.plan(mount.point, loader, ranges="learn") as plan:
        read_epochs(loader, 1)
        learned(plan)
        assert not any(map(learned(plan).marks.is_settled, range(SAMPLES)))
        read_epochs(loader, 2)
        learned(plan)
        settled = sum(map(learned(plan).marks.is_settled, range(SAMPLES)))
        # Where the kernel has pages that were pushed, there is no READ that says anything new.
        assert settled > 0.9 * SAMPLES


def test_a_hook_learns_ranges_too(mount: Mounted) -> None:
    loader = DataLoader(Forgetting(mount.point / "one.bin"), batch_size=8, shuffle=True, num_workers=2)
    before = mount.metric("prefetched")
    hook = trainer_hook.attach(
        mount.point, torch.nn.Linear(2, 2), loader, options=trainer_hook.HookOptions(ranges="learn")
    )
    for _ in range(2):
        read_epochs(loader, 1)
        hook.epoch_end()
    assert mount.metric("prefetched") > before
    hook.close()


@pytest.mark.parametrize("learns", [True, False])
def test_a_file_that_is_replaced_meanwhile_has_its_new_bytes(tmp_path: Path, learns: bool) -> None:
    (source := tmp_path / "source").mkdir()
    file = source / "one.bin"
    file.write_bytes(patterned(0, SIZE))
    make_older(file)
    with mounted(source, tmp_path, ttl="0s", **SLOW) as mount:
        path = mount.point / "one.bin"
        loader = DataLoader(Forgetting(path), batch_size=8, shuffle=True, num_workers=2)
        ranges: Any = "learn" if learns else [(path, *place) for place in PLACES]
        with trainer_hook.plan(mount.point, loader, ranges=ranges):
            read_epochs(loader, 2)
            # A shorter one, in which each sample has other bytes, and some samples none.
            (new := source / "new").write_bytes(patterned(1, SIZE // 2))
            make_older(new, 1800)
            new.rename(file)
            for offset, length in PLACES:
                assert piece(path, offset, length) == patterned(offset + 1, min(offset + length + 1, SIZE // 2))
            with contextlib.suppress(OSError):
                for batch in loader:
                    assert not batch.any()


# -- data sets and their classes


def test_copies_of_an_observed_data_set_are_of_its_class(tmp_path: Path) -> None:
    (file := tmp_path / "one.bin").write_bytes(patterned(0, SIZE))
    data, known = Forgetting(file), LearnedRanges(tmp_path, SAMPLES)
    observe(data, known.marks)
    for made in (copy.copy(data), copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert isinstance(made, Forgetting)
        assert (made.path, made.places) == (data.path, data.places)
        assert made[3]
    release(data)
    assert type(data) is Forgetting


def test_a_copy_that_outlives_its_plan_is_a_plain_data_set(tmp_path: Path) -> None:
    data, known = Forgetting(tmp_path), LearnedRanges(tmp_path, SAMPLES)
    observe(data, known.marks)
    saved = pickle.dumps(data)
    release(data)
    del known
    gc.collect()
    assert type(pickle.loads(saved)) is Forgetting


@pytest.mark.parametrize(
    ("dataset", "ranges", "message"),
    [
        (
            Forgetting,
            "guess",
            r"ranges='guess': give a list of \(path, offset, length\), or 'learn'",
        ),
        (lambda path: [1, 2, 3], "learn", "reads of a list cannot be observed: give a data set of a class of your own"),
        (lambda path: [], "learn", "the data set has no samples"),
    ],
)
def test_what_cannot_be_learned_is_refused(
    mount: Mounted, dataset: Callable[[Path], Any], ranges: Any, message: str
) -> None:
    loader = DataLoader(dataset(mount.point / "one.bin"), batch_size=8, sampler=range(2))
    for _ in range(2):
        with pytest.raises(ValueError, match=message) as refused:
            trainer_hook.plan(mount.point, loader, ranges=ranges)
        assert "\n" not in str(refused.value)


def test_two_loaders_learn_in_lists_of_their_own(mount: Mounted) -> None:
    loaders = [DataLoader(Forgetting(mount.point / "one.bin"), batch_size=8) for _ in range(2)]
    with trainer_hook.plan(mount.point, loaders[0], ranges="learn"):
        with pytest.raises(ValueError, match="give this one another split"):
            trainer_hook.plan(mount.point, loaders[1], ranges="learn")
        with trainer_hook.plan(mount.point, loaders[1], ranges="learn", split="val") as other:
            read_epochs(loaders[0], 1)
            read_epochs(loaders[1], 2)
            check_known(other)


def test_without_a_mount_a_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (file := tmp_path / "one.bin").write_bytes(patterned(0, SIZE))
    loader = DataLoader(Forgetting(file), batch_size=8, shuffle=True)
    with trainer_hook.plan(tmp_path, loader, ranges="learn"):
        read_epochs(loader, 2)
    assert all("no spiderfs" in record.getMessage() for record in caplog.records), caplog.text


def test_a_mount_that_goes_ends_the_learning_and_not_the_training(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = LearnedRanges(tmp_path, SAMPLES)
    data = Forgetting(source / "one.bin")
    observe(data, known.marks)
    assert all(data[index] for index in range(20))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no ranges are learned" in line


def test_no_one_sees_what_other_processes_read(mount: Mounted) -> None:
    ask = partial(os.getxattr, mount.point)
    since = ask(READS_XATTR).partition(b"\0")[0].decode()
    if (child := os.fork()) == 0:
        piece(mount.point / "one.bin", 40_000, 10_000)
        os._exit(0)
    os.waitpid(child, 0)
    assert decoded(ask(f"{READS_XATTR}.{since}"))[1] == []
    piece(mount.point / "one.bin", 80_000, 10_000)
    (read,) = decoded(ask(f"{READS_XATTR}.{since}"))[1]
    assert (read.path, read.own) == (b"one.bin", True)
    assert read.begin <= 80_000 < 90_000 <= read.end
    for bad in ("x", "", "-", "1e999"):
        with pytest.raises(OSError, match="No data available"):
            ask(f"{READS_XATTR}.{bad}x")
