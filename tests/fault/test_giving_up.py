"""A mount whose processes cannot live ends, and says where the reason is to be found."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mounting import PATIENCE_S, detach, eventually, mounted, mounts_at

SPIDERFS = Path(sys.executable).with_name("spiderfs")
# Less than LMDB's map, so that no process can open the store.
ADDRESS_SPACE_BYTES = 1 << 41


def limit_address_space() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))


def test_a_mount_that_cannot_begin_fails_and_names_its_log(tmp_path: Path) -> None:
    source, point, log = tmp_path / "source", tmp_path / "mnt", tmp_path / "log"
    source.mkdir()
    point.mkdir()
    done = subprocess.run(
        [SPIDERFS, "mount", source, point, "-o", f"cache_dir={tmp_path}/cache,log_file={log}"],
        preexec_fn=limit_address_space,
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert f"the log {log} says why" in done.stderr
    assert "Cannot allocate memory" in log.read_text()
    eventually(lambda: mounts_at(point) == 0, what="the mount to be gone")


@pytest.fixture
def spiderfs_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have `mounted` use a `spiderfs` that does something first."""

    def begin(what: str) -> None:
        program = tmp_path / "spiderfs"
        program.write_text(f"#!{sys.executable}\nfrom spiderfs.cli.main import main\n{what}\nmain()\n")
        program.chmod(0o755)
        monkeypatch.setattr("mounting.SPIDERFS", program)

    return begin


def test_a_mount_whose_processes_keep_dying_ends_and_logs_it(
    tmp_path: Path, spiderfs_after: Callable[[str], None]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    # The pauses between deaths are a minute in all.
    spiderfs_after("from spiderfs.daemon import restarts; restarts.LONGEST_PAUSE_S = restarts.FIRST_PAUSE_S")
    with mounted(source, tmp_path / "m", allowed=(r".* ended \(signal 9\)", "giving up, the log .* says why")) as mount:
        for deaths in range(1, 21):
            worker = mount.workers()[0]
            os.kill(worker, signal.SIGKILL)
            if deaths < 20:
                eventually(lambda worker=worker: mount.workers() != [worker], what="another worker")
        assert mount.supervisor.ended(PATIENCE_S)
        assert mount.logged("giving up")
        # Whoever reads it must not take the empty directory underneath for an empty data set.
        for look in (os.listdir, os.statvfs):
            with pytest.raises(OSError) as caught:  # noqa: PT011
                look(mount.point)
            assert caught.value.errno == errno.ENOTCONN
        detach(mount.point)
