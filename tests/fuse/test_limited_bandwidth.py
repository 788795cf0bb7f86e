"""Limits on the bytes from the source: of all, and of what is fetched before a reader waits for it."""

from __future__ import annotations

import time
from pathlib import Path

from mounting import Mounted, eventually, mounted, run_spiderfs
from planning import planned
from reading import write_files

from spiderfs.protocol import Progress

SIZE, FILES = 100_000, 40


def fetched(mount: Mounted) -> int:
    return round(mount.metric("origin_bytes") / SIZE)


def test_warming_keeps_to_its_limit_and_readers_do_not_wait_for_it(source: Path, tmp_path: Path) -> None:
    write_files(source, {f"{number:02d}": SIZE for number in range(FILES)})
    with mounted(source, tmp_path / "m", capacity="50MiB", background_bandwidth="100kB") as mount:
        assert run_spiderfs("warm", "--detach", mount.point).returncode == 0
        eventually(lambda: fetched(mount) >= 1)
        begun = time.monotonic()
        for number in range(FILES - 10, FILES):
            (mount.point / f"{number:02d}").read_bytes()
        # One a second, and those that were read.
        assert fetched(mount) <= 10 + (time.monotonic() - begun) + 3
        assert fetched(mount) < FILES
        assert run_spiderfs("config", mount.point, "background_bandwidth=unlimited").returncode == 0
        eventually(lambda: fetched(mount) == FILES)


def test_a_plan_is_fetched_ahead_at_the_limit(source: Path, tmp_path: Path) -> None:
    names = [f"{number:02d}" for number in range(FILES)]
    write_files(source, dict.fromkeys(names, SIZE))
    with (
        mounted(source, tmp_path / "m", capacity="50MiB", background_bandwidth="100kB") as mount,
        planned(mount, names) as tell,
    ):
        for taken, name in enumerate(names[:12]):
            tell(Progress("train", 0, taken + 1, taken))
            (mount.point / name).read_bytes()
        begun, before = time.monotonic(), fetched(mount)
        eventually(lambda: fetched(mount) >= before + 1)
        assert fetched(mount) <= before + (time.monotonic() - begun) + 3
        mount.change("background_bandwidth", "unlimited")
        eventually(lambda: fetched(mount) == FILES)
