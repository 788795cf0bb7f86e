"""A mount in surroundings as docs/howto/environments.md names them, so far as they can be made here."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from mounting import SPIDERFS

ROOT = Path(__file__).resolve().parents[2]
# As rootless podman and `apptainer --userns` do: root of a user namespace, with /dev/fuse and without fusermount3.
_SCRIPT = """set -eu
mount -t tmpfs none "$1"
mkdir "$1/mnt" "$1/bin"
"$3" mount "$2" "$1/mnt" -o "immutable,cache_dir=$1/cache,log_file=$1/log"
cat "$1/mnt/0/a.jpg"
grep -c " $1/mnt fuse" /proc/self/mounts
"$3" umount "$1/mnt"
test -z "$(ls "$1/mnt")"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user may be refused user namespaces")
def test_root_of_a_user_namespace_mounts_for_itself(tmp_path: Path) -> None:
    source, place = tmp_path / "source", tmp_path / "place"
    (source / "0").mkdir(parents=True)
    place.mkdir()
    (source / "0/a.jpg").write_text("bytes\n")
    os.utime(source / "0/a.jpg", (1_700_000_000, 1_700_000_000))
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _SCRIPT, "sh"]
    done = subprocess.run([*unshare, place, source, SPIDERFS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "bytes\n1\n", "")
    # Outside of that namespace nothing was mounted.
    assert str(place) not in Path("/proc/self/mountinfo").read_text()


def test_each_environment_of_the_page_says_whether_it_was_tried() -> None:
    page = (ROOT / "docs/howto/environments.md").read_text()
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 12
    assert {row[-1].strip() for row in rows} == {"tested", "not tried", "cannot work"}
    named = re.findall(r"`(tests/[\w/]+\.py)`", page)
    assert len(named) == 3
    assert all((ROOT / name).exists() for name in named)
