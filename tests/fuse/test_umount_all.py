"""`spiderfs umount --all` and `spiderfs cache`, on real mounts in a mount namespace of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from mounting import SPIDERFS, ending

# The copies of other tests' mounts leave this namespace first; the mounts themselves stay where they are.
SCRIPT = """
set -e
umount --all --lazy --types fuse.spiderfs
for name in one two; do
  mkdir -p "source/$name" "point/$name"
  echo "$name" >"source/$name/sample"
  spiderfs mount "source/$name" "point/$name" -o "cache_dir=$PWD/cache/$name,capacity=1MiB"
  cat "point/$name/sample"
done
mount --bind point/one point/two
spiderfs cache list cache/one cache/two
spiderfs cache remove cache/one 2>&1 && exit 1
spiderfs umount --all
grep fuse.spiderfs /proc/self/mountinfo && exit 1
spiderfs cache remove cache/one cache/two
ls cache
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes mount namespaces everywhere")
def test_all_mounts_end_and_their_caches_can_be_removed(tmp_path: Path) -> None:
    command = ["unshare", "--mount", "--propagation", "private", "bash", "-c", SCRIPT]
    path = f"{SPIDERFS.parent}:{os.environ['PATH']}"
    with (
        ending(tmp_path, tmp_path / "point/one", tmp_path / "cache/one"),
        ending(tmp_path, tmp_path / "point/two", tmp_path / "cache/two"),
    ):
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["one", "two"]
    assert all(f"of {tmp_path}/source/" in line and line.endswith(", mounted") for line in lines[2:4])
    assert "cache/one is in use: unmount it first" in lines[4]
    unmounted = [line for line in lines if line.startswith("unmounted ")]
    assert unmounted == [f"unmounted {tmp_path}/point/{name}" for name in ("two", "two", "one")]
    assert [line.partition(":")[0] for line in lines[-2:]] == ["removed cache/one", "removed cache/two"]
