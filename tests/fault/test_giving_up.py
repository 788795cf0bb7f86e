"""A mount whose processes cannot live ends, and its log says why."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

SPIDERFS = Path(sys.executable).with_name("spiderfs")
# Less than LMDB's map, so that no process can open the store.
ADDRESS_SPACE_BYTES = 1 << 41
PATIENCE_S = 30.0


def limit_address_space() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))


def test_the_log_says_why_a_mount_gave_up(tmp_path: Path) -> None:
    source, point, log = tmp_path / "source", tmp_path / "mnt", tmp_path / "log"
    source.mkdir()
    point.mkdir()
    subprocess.run(
        [SPIDERFS, "mount", source, point, "-o", f"cache_dir={tmp_path}/cache,log_file={log}"],
        preexec_fn=limit_address_space,
        check=False,
        timeout=60,
    )
    deadline = time.monotonic() + PATIENCE_S
    while "giving up, the log says why" not in (text := log.read_text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.02)
    assert "Cannot allocate memory" in text
    while str(point) in Path("/proc/self/mounts").read_text():
        assert time.monotonic() < deadline, "still mounted"
        time.sleep(0.02)
