"""Trainings on mounts with `packages=source`: fewer reads, the right bytes, and a source that may do what it likes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from known_losses import Training
from mounting import Mounted, eventually, mounted
from reading import source_with

CLASSES, EACH, BYTES = 2, 120, 40_000
SAMPLES = CLASSES * EACH
NAMES = [f"train/{label}/{number:03d}" for number in range(EACH) for label in range(CLASSES)]
LABELS = np.arange(SAMPLES, dtype=np.int32) % CLASSES
LOSSES = np.where(np.arange(SAMPLES) < SAMPLES // 2, 0.1, 2.0) + np.arange(SAMPLES) / 1000
# The part of the samples with low losses, a quarter of the cache, has room for most of a package, and holds so few of
# them that a package still has many that are not cached, also where a tenth of its files has changed.
OPTIONS: dict[str, object] = {"capacity": "3MB", "policy": "impact", "plan": "off", "ttl": "1s"}
DIRECTORY = ".spiderfs-packages"


def content(number: int, version: int = 0) -> bytes:
    return b"%08d" % number + bytes([version]) * (BYTES + number)


source = source_with({name: content(number) for number, name in enumerate(NAMES)})


def training_on(mount: Mounted) -> Training:
    return Training(mount.point, NAMES, LABELS, LOSSES, 20)


def train_until_loaded(mount: Mounted, training: Training, packages: int) -> None:
    def enough() -> bool:
        # As ImpactSampler draws: few of the easy samples, so that others are left to substitute for them.
        training.epoch(0.4 if mount.metric("packages_written") else 1.0)
        return mount.metric("packages_loaded") >= packages

    eventually(enough, within_s=120.0, what="packages")


def test_packages_are_made_and_loaded_and_readers_do_not_see_them(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path, packages="source", **OPTIONS) as mount:
        training = training_on(mount)
        train_until_loaded(mount, training, 2)
        assert (source / DIRECTORY).is_dir()
        assert (source / DIRECTORY).stat().st_mode & 0o777 == 0o700
        assert os.listdir(mount.point) == ["train"]
        assert not (mount.point / DIRECTORY).exists()
        assert mount.metric("packages_written") >= 1
        assert mount.metric("packaged_samples") >= 10 * mount.metric("packages_loaded") / 2
        for wanted, given in training.given:
            assert LABELS[wanted] == LABELS[given]
            assert wanted == given or max(wanted, given) < SAMPLES // 2
        used = mount.stats()["metrics"]
        assert used["used_bytes"] <= used["capacity_bytes"]
        training.close()
        # Bytes that came with packages are those of the files.
        for number, name in enumerate(NAMES):
            eventually(lambda n=number, p=name: (mount.point / p).read_bytes() == content(n), what=name)  # type: ignore[misc]


def test_a_changed_file_is_read_again_over_a_remount(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path, packages="source", **OPTIONS) as mount:
        training = training_on(mount)
        train_until_loaded(mount, training, 1)
        training.close()
    written = len(os.listdir(source / DIRECTORY))
    assert written >= 1
    # All easy ones but some, so that packages are of use still.
    changed = range(0, SAMPLES // 2, 10)
    for number in changed:
        (source / NAMES[number]).write_bytes(content(number, version=7))
    with mounted(source, tmp_path, packages="source", **OPTIONS) as mount:
        training = training_on(mount)
        train_until_loaded(mount, training, 1)
        training.close()
        for number in changed:
            truth = content(number, version=7)
            path = mount.point / NAMES[number]
            eventually(lambda path=path, truth=truth: path.read_bytes() == truth, what=path.name)  # type: ignore[misc]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_forged_directory_is_not_used(source: Path, tmp_path: Path) -> None:
    """As with a sticky source root in which everybody may write: another user was there first."""
    source.chmod(0o1777)
    (source / DIRECTORY).mkdir()
    os.chown(source / DIRECTORY, 65534, 65534)
    (source / DIRECTORY).chmod(0o755)
    warnings = ["packages cannot be written to the source", "not made by this mount"]
    with mounted(source, tmp_path, packages="source", allowed=warnings, **OPTIONS) as mount:
        training = training_on(mount)

        def warned() -> bool:
            training.epoch()
            return all(mount.logged(warning) for warning in warnings)

        eventually(warned, what="the warnings")
        training.epoch()
        assert [len(mount.logged(warning)) for warning in warnings] == [1, 1]
        assert mount.metric("packages_ignored") == 1
        assert list((source / DIRECTORY).iterdir()) == []
        training.close()
