"""refurbish over a real mount: partial samples lie in its cache, within its budget, and outlive it and the training."""

from __future__ import annotations

import itertools
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from accelerate.data_loader import prepare_data_loader
from mounting import Mounted, eventually, mounted
from noisy_files import BATCH, NUMBERS, SAMPLES, LastNoise, Noise, Numbers, write_numbers
from torch.utils.data import DataLoader, DistributedSampler
from two_ranks import in_two_ranks

import trainer_hook
from trainer_hook.ranks import from_all_ranks
from trainer_hook.refurbishing.loader import fingerprint
from trainer_hook.refurbishing.stores import Missing, MountStore, PartialStore, StoreUnusable, mount_of

PARTIAL_BYTES = 8 * NUMBERS


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_numbers(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture(autouse=True)
def counts() -> None:
    Noise.runs = LastNoise.runs = 0


def refurbished(root: Path, last: float = 0.0, workers: int = 0, **options: Any) -> DataLoader[Any]:
    loader = DataLoader(Numbers(root, last), BATCH, shuffle=True, num_workers=workers, persistent_workers=bool(workers))
    return trainer_hook.refurbish(loader, split=1, **{"reuse": 2, **options})


def epoch_of(loader: DataLoader[Any]) -> dict[int, float]:
    drawn = [(int(label), float(image[0])) for images, labels in loader for image, label in zip(images, labels)]  # noqa: B905
    assert sorted(label for label, _ in drawn) == list(range(SAMPLES))
    return dict(drawn)


def store_of(loader: DataLoader[Any]) -> Any:
    return loader.dataset._store  # type: ignore[attr-defined]


def made_in_an_epoch(loader: DataLoader[Any]) -> int:
    before = Noise.runs
    epoch_of(loader)
    return Noise.runs - before


def section(mount: Mounted) -> dict[str, int]:
    found: dict[str, int] = mount.stats()["sections"]["partials"]
    return found


def test_workers_share_what_each_of_them_has_made(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path, capacity="4MB") as mount:
        loader = refurbished(mount.point, workers=2)
        assert isinstance(store_of(loader), MountStore)
        epochs = [epoch_of(loader) for _ in range(4)]
        for before, after in itertools.pairwise(epochs):
            assert sum(before[label] != after[label] for label in range(SAMPLES)) == SAMPLES // 2
        eventually(lambda: section(mount)["entries"] == SAMPLES)
        assert section(mount)["bytes"] < 1.2 * SAMPLES * PARTIAL_BYTES
        assert mount.metric("partials_refused") == mount.metric("hook_malformed") == 0
        # A worker that is spawned has a copy of the store.
        copy = pickle.loads(pickle.dumps(store_of(loader)))
        number = int(loader.sampler._generations.of_epoch(3)[3])  # type: ignore[attr-defined]
        seams, (made, label) = copy.get(3, number)
        assert (float(made[0]), label) == (epochs[3][3], 3)
        copy.put(3, number + 1, (seams, (made + 1, label)), number)
        copy.settle()
        assert float(copy.get(3, number + 1)[1][0][0]) == epochs[3][3] + 1
        with pytest.raises(Missing):
            copy.get(3, number)
        copy.close()
        del loader


def test_a_training_goes_on_with_what_an_earlier_one_has_kept(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path, capacity="4MB") as mount:
        first = epoch_of(refurbished(mount.point))
        eventually(lambda: section(mount)["entries"] == SAMPLES)
    Noise.runs = 0
    with mounted(source, tmp_path, capacity="4MB") as mount:
        assert section(mount)["entries"] == SAMPLES
        assert epoch_of(refurbished(mount.point)) == first
        # Some are made to learn how large they are.
        assert Noise.runs <= SAMPLES // 4
        # Another seed makes others.
        assert epoch_of(refurbished(mount.point, seed=5)) != first


def test_files_outside_of_mounts_and_mounts_of_others_leave_memory(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(store_of(refurbished(source)), PartialStore)
    with mounted(source, tmp_path, capacity="4MB") as mount:
        path = [str(mount.point / "000.npy")]
        assert mount_of(path) == mount.point
        monkeypatch.setattr("os.geteuid", lambda: 4321)
        with pytest.raises(StoreUnusable, match="that of user"):
            mount_of(path)
        monkeypatch.undo()
    with mounted(source, tmp_path, capacity="4MB", partials_share=0) as mount:
        loader = refurbished(mount.point)
        assert isinstance(store_of(loader), PartialStore)
        assert epoch_of(loader)


def test_a_name_stands_for_what_makes_a_sample(tmp_path: Path) -> None:
    one, same, other = Numbers(tmp_path), Numbers(tmp_path), Numbers(tmp_path)
    other.size = 3  # type: ignore[attr-defined]
    assert fingerprint(one, Noise(1), 0) == fingerprint(same, Noise(1), 0)
    names = {fingerprint(one, Noise(1), 0), fingerprint(one, Noise(2), 0), fingerprint(one, Noise(1), 1)}
    names |= {fingerprint(one, LastNoise(1), 0), fingerprint(other, Noise(1), 0)}
    assert len(names) == 5
    # What a sample is besides its transforms: labels, sizes, and whatever else the data set has.
    shifted, resized = Numbers(tmp_path), Numbers(tmp_path)
    shifted.samples = [(path, label + 1) for path, label in shifted.samples]
    resized.shape = (3, 4)  # type: ignore[attr-defined]
    names |= {fingerprint(dataset, Noise(1), 0) for dataset in (shifted, resized)}
    assert len(names) == 7
    # No one can tell what a lambda does.
    assert fingerprint(one, lambda sample: sample) != fingerprint(one, lambda sample: sample)


def test_samples_that_are_too_large_for_the_mount_are_kept_in_memory(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        mounted(source, tmp_path, capacity="4MB", sample_max_bytes=PARTIAL_BYTES + 200) as mount,
        caplog.at_level(logging.INFO),
    ):
        loader = refurbished(mount.point)
        assert isinstance(store_of(loader), PartialStore)
        assert f"sample_max_bytes={PARTIAL_BYTES + 200}: split where samples are smaller" in caplog.text
        epoch_of(loader)
        assert made_in_an_epoch(loader) == SAMPLES // 2


# -- in a training of two processes: one order is dealt out, and what one rank has made the other uses

REUSE, EPOCHS = 2, 5


def train(rank: int, directory: str) -> None:
    data = Numbers(Path(directory) / "source", last=0)
    for sampler in (DistributedSampler(data), None):
        Noise.runs = 0
        loader = DataLoader(data, BATCH, sampler=sampler, shuffle=None if sampler else True)
        loader = trainer_hook.refurbish(loader, split=1, reuse=REUSE)
        assert len(loader) == SAMPLES // 2 // BATCH
        stores = from_all_ranks(str(loader.dataset._store.directory))  # type: ignore[attr-defined]
        assert stores[0] == stores[1]
        before: dict[int, float] = {}
        for epoch in range(EPOCHS):
            drawn = [(int(label), float(image[0])) for images, labels in loader for image, label in zip(images, labels)]  # noqa: B905
            shares = from_all_ranks(drawn)
            now = dict(shares[0] + shares[1])
            assert sorted(now) == list(range(SAMPLES))
            assert len(shares[0]) == len(shares[1])
            if epoch:
                assert sum(now[label] == before[label] for label in now) == SAMPLES // REUSE
            before = now
        # As many as one process would make, though a sample is often the other rank's in the next epoch.
        assert sum(from_all_ranks(Noise.runs)) == SAMPLES + (EPOCHS - 1) * SAMPLES // REUSE
        prepared = prepare_data_loader(loader, num_processes=2, process_index=rank, put_on_device=False)
        with pytest.raises(RuntimeError, match="leave the refurbished loader out of prepare"):
            next(iter(prepared))
        del loader, prepared


def test_two_ranks_share_one_epoch_and_what_they_have_made(tmp_path: Path) -> None:
    write_numbers(tmp_path / "source")
    in_two_ranks(train, tmp_path)
