"""`spiderfs doctor`: each thing that can be wrong has its line, and the exit status says whether one is."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
from commands import mount_table, spiderfs

from spiderfs import __version__
from spiderfs.cli import doctor
from spiderfs.errors import MountError
from spiderfs.fuse import session
from spiderfs.fuse.wire import InitFlag, Offer

ALL = int(InitFlag.NO_OPEN_SUPPORT | InitFlag.HAS_RESEND | InitFlag.PASSTHROUGH)
ROOT = "30 1 8:1 / / rw - ext4 /dev/sda rw"


@pytest.fixture(autouse=True)
def healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which all is well, whatever this one is like."""
    mount_table(monkeypatch, tmp_path, ROOT)
    monkeypatch.setattr(doctor, "check_fuse_available", lambda allow_other: None)
    monkeypatch.setattr(session, "kernel_offer", lambda at: Offer(45, 0, ALL))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(doctor, "_MACHINES_PIDS", os.readlink("/proc/self/ns/pid"))
    monkeypatch.setattr(resource, "getrlimit", lambda number: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def found(*arguments: str | Path, wrong: bool = False) -> dict[str, tuple[str, str]]:
    """State and text of each finding; the last of a name."""
    result = spiderfs("doctor", *arguments, "--json")
    assert result.exit_code == int(wrong), result.output
    return {row["what"]: (row["state"], row["said"]) for row in json.loads(result.stdout)}


def test_a_healthy_machine_has_nothing_wrong() -> None:
    assert {state for state, _ in found().values()} <= {"ok", "note"}
    lines = spiderfs("doctor").stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("ok    fuse          this user can mount; Linux ")


@pytest.mark.parametrize(
    ("lacks", "what", "says"),
    [
        (InitFlag.NO_OPEN_SUPPORT, "immutable", "mount without immutable"),
        (InitFlag.HAS_RESEND, "resend", "use Linux 6.9 or later"),
        (InitFlag.PASSTHROUGH, "passthrough", "but needs Linux 6.9 and later"),
    ],
)
def test_what_the_kernel_lacks_is_said(monkeypatch: pytest.MonkeyPatch, lacks: InitFlag, what: str, says: str) -> None:
    monkeypatch.setattr(session, "kernel_offer", lambda at: Offer(31, 0, ALL & ~int(lacks)))
    state, said = found(wrong=what == "immutable")[what]
    assert state == ("wrong" if what == "immutable" else "note")
    assert says in said


def test_a_kernel_that_refuses_a_mount_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(at: Path) -> Offer:
        raise MountError(f"cannot mount on {at}: Operation not permitted")

    monkeypatch.setattr(session, "kernel_offer", refuse)
    assert "--cap-add SYS_ADMIN" in found(wrong=True)["fuse"][1]


def test_limits_and_clock_that_are_too_low_have_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = {resource.RLIMIT_NOFILE: 256, resource.RLIMIT_FSIZE: 1 << 20}
    monkeypatch.setattr(resource, "getrlimit", lambda number: (allowed.get(number, resource.RLIM_INFINITY), 0))
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    text = " ".join(spiderfs("doctor").stdout.split())
    assert "a process may have 256 open files: run 'ulimit -n 1024' before you mount" in text
    assert "run 'ulimit -f unlimited'" in text
    assert "set it, or new files are cached late" in text


def test_a_pid_namespace_of_its_own_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_MACHINES_PIDS", "pid:[1]")
    assert "hostPID" in found()["container"][1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("rw,vers=4.2,rsize=1048576,hard", "server:/a by nfs4, hard, rsize=1048576"),
        ("rw,soft,rsize=1048576", "mount it hard"),
        ("rw,hard,noac,acregmax=0", "leave it out, and set ttl"),
        ("rw,hard,rsize=8192", "rsize=8192 makes many requests"),
    ],
)
def test_options_of_nfs_are_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: str, says: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").touch()
    nfs = f"31 30 0:40 / {source} rw - nfs4 server:/a {options}"
    mount_table(monkeypatch, tmp_path, ROOT, nfs)
    state, said = found(source, "-o", f"cache_dir={tmp_path}/cache")["NFS"]
    assert says in said
    assert state == ("ok" if says.startswith("server") else "note")


def test_a_source_is_checked_as_a_mount_would(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert found(tmp_path / "absent", wrong=True)["source"][1].startswith(
        f"the source {tmp_path}/absent does not exist"
    )
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").touch()
    os.utime(source / "a", (time.time() + 500, time.time() + 500))
    findings = found(source, "-o", f"cache_dir={tmp_path}/cache,capacity=8388607TiB")
    assert findings["source"] == (
        "note",
        "the source is on the disk of the cache, so caching does not speed it up: set cache_dir to another disk",
    )
    assert "set the clocks of both machines" in findings["source's clock"][1]
    assert "the cache will hold less" in findings["capacity"][1]
    mount_table(monkeypatch, tmp_path, ROOT, f"31 30 0:9 / {tmp_path} rw - nfs srv:/ rw")
    assert (
        "choose a directory on a local disk" in found(source, "-o", f"cache_dir={tmp_path}/c", wrong=True)["cache"][1]
    )


@pytest.mark.parametrize(("file_s", "state", "says"), [(4e-4, "note", "run 'spiderfs bench'"), (1.5e-3, "ok", "each")])
def test_a_source_from_which_files_come_at_once_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file_s: float, state: str, says: str
) -> None:
    (tmp_path / "source" / "a").mkdir(parents=True)
    for number in range(3):
        (tmp_path / "source" / "a" / f"{number}.jpg").write_bytes(b"x")
    read = doctor._timed_files
    monkeypatch.setattr(doctor, "_timed_files", lambda source: (file_s for _ in read(source)))
    speed = found(tmp_path / "source", "-o", f"cache_dir={tmp_path}/cache")["speed"]
    assert speed[0] == state
    assert speed[1].startswith(f"3 files took {file_s * 1000:.2f} ms each")
    assert says in speed[1]


def test_a_mount_point_whose_mount_has_gone_is_not_ok(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    state, said = found(tmp_path / "gone", "-o", f"cache_dir={tmp_path}/cache", wrong=True)["source"]
    assert (state, said.partition(":")[0]) == ("wrong", f"{tmp_path}/gone is empty, and nothing is mounted there")


def test_options_need_a_source() -> None:
    result = spiderfs("doctor", "-o", "capacity=1GiB")
    assert (result.exit_code, result.stderr) == (
        1,
        "spiderfs: -o is for a SOURCE that is not mounted yet: name one, or leave -o out\n",
    )


def test_a_mount_is_asked_for_its_troubles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here, old = tmp_path / "mnt", tmp_path / "old"
    figures = dict.fromkeys(doctor_counters(), 0) | {"source_reachable": 0.0, "worker_restarts": 3}
    for point, version in ((here, __version__), (old, "0.0.1")):
        (point / ".spiderfs").mkdir(parents=True)
        stats: dict[str, Any] = {
            "version": version,
            "cache_dir": str(tmp_path),
            "cache_dirs": [
                {"directory": str(tmp_path), "capacity_bytes": 1, "left_out": False},
                {"directory": "/nvme1/cache", "capacity_bytes": 0, "left_out": True},
            ],
            "metrics": figures,
            "peers": {"http://n1": {"remark": ""}, "http://n2": {"remark": "has had no file"}},
        }
        (point / ".spiderfs/stats.json").write_text(json.dumps(stats))
        (point / ".spiderfs/config").write_text("source=s3://bucket/a  # the source\n")
    lines = [f"4{n} 30 0:5{n} / {at} ro - fuse.spiderfs /nfs/a ro" for n, at in enumerate((old, here))]
    mount_table(monkeypatch, tmp_path, ROOT, *lines)
    assert f"note mount {old} is served by version 0.0.1" in " ".join(spiderfs("doctor").stdout.split())
    text = " ".join(spiderfs("doctor", here).stdout.split())
    assert str(old) not in text
    assert f"ok mount {here} shows /nfs/a, and answers" in text
    assert "wrong source it does not answer" in text
    assert "note since mounted 3 worker_restarts. See the log." in text
    assert f"cache {tmp_path} lies on" in text
    assert "wrong cache /nvme1/cache was missing at the mount, or has failed since: see to its disk" in text
    assert text.count(" peers ") == 1
    assert "wrong peers http://n2 has had no file" in text
    (here / ".spiderfs/stats.json").unlink()
    text = " ".join(spiderfs("doctor", here).stdout.split())
    assert (text.count("wrong mount"), text.count("wrong control files")) == (1, 0), "a thing is said once"


def doctor_counters() -> list[str]:
    from spiderfs.metrics import COUNTERS, TROUBLES

    names = [counter.name for counter in COUNTERS]
    assert set(names) >= TROUBLES
    return names
