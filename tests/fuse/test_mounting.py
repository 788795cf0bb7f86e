"""Mounting, unmounting, and everything that can stand in the way."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mounting import (
    SPIDERFS,
    as_root,
    ending,
    eventually,
    is_running,
    mounted,
    mounts_at,
    options_of,
    options_text,
    run_spiderfs,
    unmount,
)
from ordinary_user import let_everybody_in
from programs import program
from reading import read_afresh, read_through, write_files

ROOT = Path(__file__).resolve().parents[2]
# Where tests in a mount namespace of root's put their cache, on a tmpfs: root's may not lie below what others own.
ROOTS_OWN = Path("/mnt")
SIZES = {f"dir/{number}": 50_000 for number in range(20)}


@pytest.fixture
def source(source: Path) -> Path:
    (source / "file").write_bytes(b"content")
    return source


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str, status: int = 1) -> None:
    """The command failed with one line for a person, and no traceback."""
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith("spiderfs: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stdout + done.stderr
    for word in words:
        assert word in done.stderr


def test_what_a_mount_has_is_refused_to_a_second_one(source: Path, tmp_path: Path) -> None:
    """Its mount point and its cache; and what belongs to it is no source."""
    (other := tmp_path / "other").mkdir()
    with mounted(source, tmp_path / "m") as mount:
        done = run_spiderfs("mount", source, mount.point, "-o", f"cache_dir={tmp_path}/cache")
        assert_one_line(done, str(mount.point), "already shows", "spiderfs umount")
        assert mounts_at(mount.point) == 1
        done = run_spiderfs("mount", source, other, "-o", f"cache_dir={mount.cache}")
        assert_one_line(done, str(mount.cache), "in use by another mount")
        inside = mount.point / ".spiderfs"
        done = run_spiderfs("mount", inside, other, "-o", f"cache_dir={tmp_path}/cache")
        assert_one_line(done, f"belongs to the mount at {mount.point}: name {mount.point}")
        assert_one_line(run_spiderfs("bench", inside, "-o", f"cache_dir={tmp_path}/cache"), "belongs to the mount")
        assert not mounts_at(other)
        assert (mount.point / "file").read_bytes() == b"content"


def test_a_signal_unmounts(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "m", workers=2) as mount:
        pids = [*mount.workers(), mount.manager()]
        mount.stop(signal.SIGINT)
        assert not mount.is_mounted()
        assert os.listdir(mount.point) == []
        assert not any(is_running(pid) for pid in pids)


def test_the_foreground_ends_by_ctrl_c_and_logs_to_the_terminal(source: Path, tmp_path: Path) -> None:
    point, cache = tmp_path / "mnt", tmp_path / "cache"
    point.mkdir()
    with (
        ending(tmp_path, point, cache),
        # In a process group of its own, as a terminal gives it: Ctrl-C reaches all processes of the mount.
        program(
            *(SPIDERFS, "mount", "--foreground", source, point, "-o", f"cache_dir={cache}"),
            stderr=subprocess.PIPE,
            text=True,
        ) as daemon,
    ):
        eventually(lambda: mounts_at(point))
        assert (point / "file").read_bytes() == b"content"
        os.killpg(daemon.pid, signal.SIGINT)
        _, said = daemon.communicate(timeout=30)
        assert daemon.returncode == 0, said
        assert "stopping on signal 2" in said
        assert "Traceback" not in said
        assert not mounts_at(point)


def test_umount_and_status(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "m") as mount:
        assert f"{source} on {mount.point}:" in run_spiderfs("status").stdout
        assert "\nopens " in run_spiderfs("status", mount.point).stdout
        with open(mount.point / "file"):
            assert_one_line(run_spiderfs("umount", mount.point), "in use")
        assert (mount.point / "file").read_bytes() == b"content"
        done = run_spiderfs("umount", mount.point)
        assert (done.returncode, done.stderr) == (0, "")
        # umount returns when the daemon has let go of its cache.
        assert mount.supervisor.ended(15)
        assert_one_line(run_spiderfs("umount", mount.point), "no spiderfs mount is at")


@pytest.mark.both_bindings
def test_an_ordinary_umount_ends_the_daemon(source: Path, tmp_path: Path) -> None:
    with mounted(source, tmp_path / "m", workers=4) as mount:
        unmount(mount.point)
        assert mount.supervisor.ended(30)
        assert mount.logged("unmounted")


def test_open_files_are_served_for_a_while_after_a_lazy_unmount(source: Path, tmp_path: Path) -> None:
    content = os.urandom(100_000)
    (source / "later").write_bytes(content)
    with mounted(source, tmp_path / "m") as mount:
        with open(mount.point / "later", "rb", buffering=0) as file:
            unmount(mount.point, "-l")
            assert file.read() == content
        assert mount.supervisor.ended(30)


def test_a_mount_over_its_source_is_refused_in_one_line(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    (source / "file").write_bytes(b"x")
    for point in (source, tmp_path / "link"):
        done = run_spiderfs("mount", source, point, "-o", f"cache_dir={tmp_path}/cache")
        assert_one_line(done, f"the mount point {source} would hide the source {source}")
    assert os.listdir(source) == ["file"]


def test_a_cache_in_use_by_a_detached_mount_names_its_daemon(source: Path, tmp_path: Path) -> None:
    (source / "file").write_bytes(b"x")
    with mounted(source, tmp_path / "m") as mount:
        with open(mount.point / "file", "rb"):
            unmount(mount.point, "-l")
            done = run_spiderfs("mount", source, mount.point, "-o", f"cache_dir={mount.cache}")
            assert_one_line(done, f"process {mount.supervisor.pid} still serves files", f"kill {mount.supervisor.pid}")
            assert "unmount it" not in done.stderr
        assert mount.supervisor.ended(30)


def test_a_trace_is_that_of_one_source_and_one_way_to_cache_it(source: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for _ in range(2):
        with mounted(source, tmp_path / "m", trace=trace, capacity="1MiB"):
            pass
    before = trace.read_bytes()
    for other in ("capacity=2MiB", "capacity=1MiB,policy=lru"):
        options = f"cache_dir={tmp_path}/cache,trace={trace},{other}"
        done = run_spiderfs("mount", source, tmp_path / "m/mnt", "-o", options)
        assert_one_line(done, f"{trace} is the trace of a mount with another source, capacity or policy")
    assert trace.read_bytes() == before


def test_a_warm_restart_keeps_the_cache_and_its_order(source: Path, tmp_path: Path) -> None:
    wanted = write_files(source, SIZES)
    names = sorted(SIZES)
    cache = tmp_path / "cache"
    options = {"policy": "lru", "capacity": "2MiB"}
    with mounted(source, tmp_path / "m", cache=cache, **options) as mount:
        # Some are read again, so that these are the last to be evicted.
        for name in names + names[:5]:
            read_afresh(mount.point / name)
        eventually(lambda: mount.stats()["sections"].get("samples", {}).get("entries") == len(names))
        eventually(lambda: mount.metric("events_folded") == len(names) + 5)
    with mounted(source, tmp_path / "m", cache=cache, **options) as mount:
        stats = mount.stats()
        assert stats["sections"]["samples"]["entries"] == len(names)
        read_through(mount.point, wanted)
        figures = mount.stats()["metrics"]
        assert (figures["opens_hit"], figures["opens"]) == (len(names), len(names))
        assert figures["origin_bytes"] == 0
    with mounted(source, tmp_path / "m", cache=cache, **options) as mount:
        # Nothing was read since: what a smaller cache keeps is what the readers read last.
        kept = mount.cached()
        assert kept == set(names)
        for name in names[:5]:
            read_afresh(mount.point / name)
        eventually(lambda: mount.metric("events_folded") == 5)
    with mounted(source, tmp_path / "m", cache=cache, **options) as mount:
        mount.change("capacity", "450kB")
        kept = mount.cached()
        assert kept <= set(names)
        assert 0 < len(kept) <= 5
        assert kept <= set(names[:5])


def test_mount_8_and_the_helper(source: Path, tmp_path: Path) -> None:
    """`mount -t spiderfs`, in a mount namespace of its own in which the helper is installed."""
    installed, point, log = (tmp_path / name for name in ("root", "mnt", "daemon.log"))
    cache = ROOTS_OWN / "cache"
    point.mkdir()
    subprocess.run(
        [ROOT / "scripts/install-mount-helper", SPIDERFS],
        env={**os.environ, "DESTDIR": str(installed)},
        check=True,
        capture_output=True,
    )
    options = f"ro,noatime,_netdev,x-systemd.automount,cache_dir={cache},log_file={log}"
    options += ",capacity=1MiB,allow_other,user,immutable"
    script = f"""
        set -e
        mount -t tmpfs -o mode=0755 tmpfs {ROOTS_OWN}
        mount -t overlay overlay -o lowerdir={installed}/sbin:/usr/sbin /usr/sbin
        mount -t overlay overlay -o lowerdir={installed}/usr/local/bin:/usr/local/bin /usr/local/bin
        mount -t spiderfs {source} {point} -o {options}
        cat {point}/file
        grep -c ' {point} fuse.spiderfs ' /proc/self/mounts
        grep capacity= {point}/.spiderfs/config
        grep -q immutable=on {point}/.spiderfs/config
        grep -q ' {point} fuse.spiderfs .*noexec' /proc/self/mounts
        if mount -t spiderfs {source} {point} -o cache_dir={cache}2; then exit 9; else echo status $?; fi
        {SPIDERFS} umount {point}
    """
    with ending(tmp_path, point, cache):
        done = as_root("unshare", "--mount", "--propagation", "private", "sh", "-c", script)
        out = done.stdout.decode().splitlines()
        assert out[0] == "content1"
        assert out[1].startswith("capacity=1MiB")
        assert out[2] == "status 32"
        assert b"already shows" in done.stderr
        assert not mounts_at(point)


ODD = os.fsdecode(b"caf\xe9 \xff")


def test_paths_need_not_be_utf8(tmp_path: Path) -> None:
    place = tmp_path / ODD
    (place / "source").mkdir(parents=True)
    (place / "source/file").write_bytes(b"content")
    for again in (False, True):
        with mounted(place / "source", place / "m", trace=place / "trace") as mount:
            assert (mount.point / "file").read_bytes() == b"content"
            assert mount.stats()["source"] == str(place / "source")
            for arguments in (["status"], ["status", mount.point], ["config", mount.point]):
                done = run_spiderfs(*arguments)
                assert (done.returncode, done.stderr) == (0, "")
            assert run_spiderfs("config", mount.point, "policy=lru").returncode == 0
            assert mount.metric("opens_hit") == again
    other = tmp_path / "other"
    other.mkdir()
    done = run_spiderfs("mount", other, place / "m/mnt", "-o", f"cache_dir={place}/m/cache")
    assert_one_line(done, "holds the files of", "choose another one")
    done = run_spiderfs("simulate", place / "trace", "--capacity", "100%")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("log_file={place}/no/such/log", "log_file="),
        ("log_file={place}", "Is a directory"),
        ("trace={place}/no/such/trace", "cannot record a trace"),
        ("cache_dir=/proc/nothing", "choose another one"),
        ("cache_dir=/dev/null", "is not a directory"),
        ("cache_dir={place}/" + "x" * 300, "File name too long"),
        ("cache_dir={place}/mnt/cache", "lies inside the mount point"),
        ("capacity=" + ODD, "is not a size"),
        ("workers=0", "workers=0"),
        ("immutable,binding=pyfuse3", "leave out immutable, or mount with -o binding=kernel"),
        (ODD, "unknown option"),
        ("ro,suid", "leave out suid"),
        ("cache_dir=/etc/passwd/cache", "Not a directory"),
        ("archives=rar", "this names no archives: write tar, zip or tar+zip"),
        ("archives=nested", "this names no archives"),
        ("archives=tar,packages=source,policy=impact", "leave out one of both"),
    ],
)
def test_an_unusable_option_is_refused_in_one_line(source: Path, tmp_path: Path, options: str, said: str) -> None:
    point = tmp_path / "mnt"
    point.mkdir()
    chosen = [f"cache_dir={tmp_path}/cache", options.format(place=tmp_path)]
    done = run_spiderfs("mount", source, point, *(word for option in chosen for word in ("-o", option)))
    assert_one_line(done, said)
    assert "unexpected" not in done.stderr
    assert not mounts_at(point)


@pytest.mark.parametrize("word", ["exec", "noexec"])
def test_programs_run_unless_noexec_says_no(source: Path, tmp_path: Path, word: str) -> None:
    (source / "program").write_text("#!/bin/sh\necho ran\n")
    (source / "program").chmod(0o755)
    with mounted(source, tmp_path / "m", exec="on" if word == "exec" else "off") as mount:
        if word == "exec":
            assert subprocess.run([mount.point / "program"], capture_output=True, check=True).stdout == b"ran\n"
        else:
            with pytest.raises(PermissionError):
                subprocess.run([mount.point / "program"], check=True)
        assert (mount.point / "program").read_bytes()
        assert f"\nexec={'on' if word == 'exec' else 'off'}  #" in mount.control("config").read_text()


_AS_NOBODY = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for name in sys.argv[1:]:
    try:
        with open(name, "rb") as file:
            print(len(file.read()))
    except OSError as exc:
        print(exc.strerror)
"""


def _as_nobody(*paths: Path) -> list[str]:
    done = as_root(sys.executable, "-I", "-S", "-c", _AS_NOBODY, *paths)
    return done.stdout.decode().splitlines()


def test_other_users_see_what_the_permissions_allow(source: Path, tmp_path: Path, binding: str) -> None:
    (source / "secret").write_bytes(b"for the owner")
    (source / "secret").chmod(0o600)
    (source / "file").chmod(0o644)
    source.chmod(0o755)
    let_everybody_in(tmp_path)
    point, cache, log = tmp_path / "mnt", ROOTS_OWN / "cache", tmp_path / "daemon.log"
    point.mkdir(mode=0o755)
    let_everybody_in(tmp_path)
    # By root, for whom allow_other needs no line in /etc/fuse.conf; in a namespace, so that it ends in any case.
    options = options_text({"cache_dir": cache, "log_file": log, "allow_other": "on", **options_of(binding)})
    paths = [point / "file", point / "secret", *(point / ".spiderfs" / name for name in ("hook", "config", "warm"))]
    as_nobody = shlex.join(map(str, [sys.executable, "-I", "-S", "-c", _AS_NOBODY, *paths]))
    script = f"""
        set -e
        mount -t tmpfs -o mode=0755 tmpfs {ROOTS_OWN}
        {SPIDERFS} mount {source} {point} -o {options}
        cat {point}/secret; echo
        {as_nobody}
        {SPIDERFS} umount {point}
    """
    with ending(tmp_path, point, cache):
        done = as_root("unshare", "--mount", "--propagation", "private", "sh", "-c", script)
    seen, denied = done.stdout.decode().splitlines(), os.strerror(errno.EACCES)
    assert seen[:3] == ["for the owner", "7", denied]
    assert int(seen[3]) > 0
    assert seen[4:] == [denied, denied]


def test_without_allow_other_no_one_else_gets_in(source: Path, tmp_path: Path) -> None:
    (source / "file").chmod(0o644)
    source.chmod(0o755)
    let_everybody_in(tmp_path)
    with mounted(source, tmp_path / "m") as mount:
        let_everybody_in(mount.point.parent)
        assert _as_nobody(mount.point / "file") == [os.strerror(errno.EACCES)]


# -- what is missing


def test_at_a_terminal_a_mount_says_in_one_line_where_it_is(source: Path, tmp_path: Path) -> None:
    point, cache = tmp_path / "mnt", tmp_path / "cache"
    point.mkdir()
    ours, theirs = os.openpty()
    with ending(tmp_path, point, cache):
        command = [SPIDERFS, "mount", source, point, "-o", f"cache_dir={cache},log_file={tmp_path}/daemon.log"]
        subprocess.run(command, stdout=theirs, timeout=60, check=True)
        told = os.read(ours, 4096).decode()
        assert told == f"mounted at {point}, cache in {cache}: watch it with 'spiderfs top {point}'\r\n"
    os.close(ours)
    os.close(theirs)


# -- all mounts of a machine


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


# -- spiderfs doctor


def findings(*arguments: str | Path) -> tuple[int, list[tuple[str, str, str]]]:
    done = run_spiderfs("doctor", *arguments, "--json")
    return done.returncode, [(row["what"], row["state"], row["said"]) for row in json.loads(done.stdout)]


def test_a_mount_is_well_until_its_daemon_is_killed(source: Path, tmp_path: Path) -> None:
    write_files(source, {"a": 1000})
    with mounted(source, tmp_path / "m", capacity="10MiB") as mount:
        status, found = findings(mount.point)
        assert status == 0, found
        # The kernel was asked by a mount that has ended.
        assert ("resend", "ok") in {(what, state) for what, state, _ in found}
        assert ("mount", "ok", f"{mount.point} shows {source}, and answers") in found
        assert ("since mounted", "ok", "no errors, restarts, or damage") in found
        mount.supervisor.signal(signal.SIGKILL)
        assert mount.supervisor.ended(30)

        def dead() -> bool:
            status, found = findings()
            said = [said for what, state, said in found if (what, state) == ("mount", "wrong")]
            return status == 1 and f"the daemon of {mount.point} is dead: unmount" in " ".join(said)

        eventually(dead)
        assert run_spiderfs("umount", mount.point).returncode == 0
        assert not mounts_at(mount.point)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_doctor_that_is_ended_early_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ends = (
        "import os\nfrom spiderfs.linux import mounts\nreal = mounts.mount\n"
        "def mount(*args, **options):\n    descriptor = real(*args, **options)\n"
        f"    os.kill(os.getpid(), {number})\n    return descriptor\nmounts.mount = mount"
    )
    done = run_spiderfs("doctor", first=ends)
    assert (done.returncode, done.stderr.strip()) == (1, "Aborted!")
    assert "spiderfs-doctor" not in Path("/proc/self/mountinfo").read_text()
    assert not [*tmp_path.iterdir()]
