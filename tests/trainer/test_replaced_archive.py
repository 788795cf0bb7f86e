"""A training goes on to be fetched ahead for when the archive that it reads is replaced."""

from __future__ import annotations

import os
from pathlib import Path

from archive_files import tar_of
from listed import Listed
from mounting import mounted
from torch.utils.data import DataLoader

from trainer_hook import plan

MEMBERS = 40

# The manager looks for earlier versions every few seconds.
SOON = (
    "from spiderfs.daemon.caching import cache_control; cache_control.INTERVAL_S = cache_control.IDLE_INTERVAL_S = 0.05"
)


class Members(Listed[bytes]):
    def __init__(self, root: Path) -> None:
        self.samples = [(str(root / f"{number:04d}"), 0) for number in range(MEMBERS)]

    def __getitem__(self, index: int) -> bytes:
        return Path(self.samples[index][0]).read_bytes()[-1:]


def test_a_replaced_archive_is_fetched_ahead_of_again(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()

    def put(version: bytes) -> None:
        new = tmp_path / "new"
        new.write_bytes(tar_of({b"%04d" % number: b"%04d" % number + version * 3000 for number in range(MEMBERS)}))
        os.utime(new, (1e9 + version[0], 1e9 + version[0]))
        new.rename(source / "a.tar")

    put(b"1")
    options = {"archives": "tar", "capacity": "40kB", "ttl": 0, "dir_ttl": 0, "source__latency_ms": 2}
    with mounted(source, tmp_path / "m", first=SOON, **options) as mount:
        loader = DataLoader(Members(mount.point / "a.tar"), 4, shuffle=True)

        def fetched_ahead() -> int:
            before = mount.metric("prefetched")
            versions = {one for batch in loader for one in batch}
            assert versions == {current}
            return int(mount.metric("prefetched") - before)

        with plan(mount.point, loader):
            current = b"1"
            assert [fetched_ahead() > MEMBERS / 4 for _ in range(2)] == [True, True]
            put(current := b"2")
            fetched_ahead()
            assert any(fetched_ahead() > MEMBERS / 4 for _ in range(3))
            assert mount.metric("hook_malformed") == 0
