"""The command line: help, and every way to fail in exactly one line."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from commands import looks_mounted, refusal, spiderfs

from spiderfs import __version__
from spiderfs.cli import control_files
from spiderfs.cli import mount as umount
from spiderfs.cli.main import COMMANDS, main
from spiderfs.errors import MountError
from spiderfs.linux import mounts
from spiderfs.options.model import GROUPS, default_rows
from spiderfs.shared.layout import CacheLayout

STATS: dict[str, Any] = {
    "version": "0.1.0",
    "source": "/nfs/a",
    "mountpoint": "/mnt/a",
    "pid": 4711,
    "policy": "minio",
    "capacity_bytes": 10 * 2**30,
    "used_bytes": 2 * 2**30,
    "entries": 12,
    "sections": {"landing": {"bytes": 2**30, "entries": 12}, "odd": 3},
    "workers": 2,
    "uptime_s": 3700.5,
    "metrics": {"spiderfs_opens_total": 1200, "note": "text"},
}


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stats = json.dumps({**STATS, "cache_dir": str(tmp_path / "cache")})
    return looks_mounted(monkeypatch, tmp_path, stats__json=stats, config="capacity=10GiB\n")


@pytest.fixture
def unmounted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each unmount was lazy."""
    calls: list[bool] = []
    monkeypatch.setattr(umount, "unmount", lambda path, lazy: calls.append(lazy))
    return calls


def test_help_names_every_command_and_every_option() -> None:
    shown = spiderfs("--help").output
    assert all(name in shown for name in COMMANDS if name != "mount-helper")
    assert "mount-helper" not in shown
    shown = spiderfs("mount", "--help").output
    assert all(row.name in shown for row in default_rows())
    # The groups follow each other, the basic options first.
    groups = [line.rstrip(":") for line in shown.splitlines() if line.rstrip(":") in GROUPS]
    assert groups == list(GROUPS)
    assert shown.index("\n  cache_dir") < shown.index("Names, archives") < shown.index("\n  ttl*")
    for name in COMMANDS:
        assert spiderfs(name, "--help").exit_code == 0
    assert __version__ in spiderfs("--version").output


def test_without_arguments_it_shows_commands_that_exist() -> None:
    result = spiderfs()
    assert result.exit_code == 0
    shown = re.findall(r"^  spiderfs (\w+)", result.output, re.MULTILINE)
    assert shown[:4] == ["demo", "doctor", "bench", "mount"]
    assert set(shown) <= COMMANDS.keys()


def test_help_imports_nothing_heavy() -> None:
    heavy = {"pydantic", "numpy", "rich", "lmdb", "trio"}
    script = (
        "import sys; from spiderfs.cli.main import main; main(['--help'], standalone_mode=False);"
        f"print(sorted({heavy!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("missing", ["click", "trio", "pydantic", "lmdb"])
def test_a_missing_package_is_named_with_what_installs_it(tmp_path: Path, missing: str) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "mnt").mkdir()
    script = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv[0] = 'spiderfs'; import spiderfs.__main__;"
        "from spiderfs.linux import mounts; mounts.check_fuse_available = lambda allow_other: None;"
        "spiderfs.__main__.main()"
    )
    arguments = ["mount", tmp_path / "source", tmp_path / "mnt", "-o", f"cache_dir={tmp_path}/cache"]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    expected = f"spiderfs: {missing} is not installed: run `pip install .` in a checkout of spiderfs\n"
    assert (done.stdout, done.stderr) == ("", expected)


def program(*arguments: str | Path, prefix: str = "", **streams: Any) -> subprocess.CompletedProcess[str]:
    """Run the program itself; `prefix` is Python that runs before it."""
    code = f"import sys; sys.argv[0] = 'spiderfs'\n{prefix}\nfrom spiderfs.__main__ import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, text=True, timeout=60, check=False, stderr=subprocess.PIPE, **streams)


def test_ctrl_c_while_the_program_begins_says_no_more_than_later() -> None:
    pressed = "class Finder:\n    def find_spec(self, name, *_):\n        if name == 'click': raise KeyboardInterrupt\n"
    done = program("status", prefix=f"{pressed}sys.meta_path.insert(0, Finder())")
    assert (done.returncode, done.stderr) == (1, "Aborted!\n")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["mount", "--help"], ["status"], ["status", "--json"]]
)
def test_output_that_no_one_takes_is_no_traceback(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = program(*arguments, stdout=full)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith("spiderfs: its output cannot be written")
    reader, writer = os.pipe()
    os.close(reader)
    done = program(*arguments, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_mount_that_is_refused_names_the_reason(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    assert "did you mean capacity?" in refusal("mount", tmp_path, tmp_path / "mnt", "-o", "ro,capcity=1GiB")
    assert "does not exist" in refusal("mount", tmp_path / "missing", tmp_path / "mnt")
    assert "no source is named" in refusal("mount")
    assert "no mountpoint" in refusal("mount", tmp_path)
    assert "serve it with 'spiderfs serve --name data'" in refusal("mount", tmp_path, "spiderfs://data")
    assert "cannot be read" in refusal("mount", "--config", tmp_path / "missing.toml")
    assert spiderfs("mount", "--unheard-of").exit_code == 2


def test_commands_for_a_path_that_is_not_mounted(tmp_path: Path) -> None:
    for arguments in (["umount"], ["status"], ["config"]):
        assert "no spiderfs mount is at" in refusal(*arguments, tmp_path)
    assert spiderfs("stat").exit_code == 2


@pytest.mark.parametrize("arguments", [["status"], ["config"]])
def test_a_broken_pipe_is_not_the_mounts(mounted: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    echo = click.echo

    def gone(message: str, nl: bool = True, err: bool = False) -> None:
        if not err:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        echo(message, err=True)

    monkeypatch.setattr("click.echo", gone)
    result = spiderfs(*arguments, mounted)
    assert (result.exit_code, result.output) == (1, "")


def test_status_lists_mounts(mounted: Path) -> None:
    line = f"/nfs/a on {mounted}: 2.0 GiB of 10.0 GiB cached (20%), policy minio, pid 4711\n"
    assert spiderfs("status").output == line
    (listed,) = json.loads(spiderfs("status", "--json").output)
    assert listed["stats"]["workers"] == 2
    (mounted / ".spiderfs" / "stats.json").write_text("[]")
    assert "not readable" in spiderfs("status").output
    mounts.MOUNT_TABLE.write_text("")
    assert spiderfs("status").output == "there is no spiderfs mount\n"
    assert json.loads(spiderfs("status", "--json").output) == []


def test_status_of_a_hung_mount(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = hang(mounted, monkeypatch)
    assert "does not answer" in refusal("status", mounted)
    assert "does not answer" in spiderfs("status").output
    released()


def test_config_shows_and_changes(mounted: Path) -> None:
    assert spiderfs("config", mounted).output == "capacity=10GiB\n"
    result = spiderfs("config", mounted, "policy=lru")
    assert (result.exit_code, result.output) == (0, "")
    assert (mounted / ".spiderfs" / "config").read_text().startswith("policy=lru\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("workers=3", "cannot be changed while mounted"),
        ("capcity=1", "did you mean capacity?"),
        ("capacity=lots", "write it like"),
        ("capacity", "capacity=VALUE"),
    ],
)
def test_config_says_why_it_refuses(mounted: Path, change: str, said: str) -> None:
    assert said in refusal("config", mounted, "policy=lru", change)
    # All or nothing: the good change before the bad one is not made either.
    assert (mounted / ".spiderfs" / "config").read_text() == "capacity=10GiB\n"


def test_mount_remarks_on_a_capacity_that_can_hardly_be_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mnt").mkdir()
    (tmp_path / "source").mkdir()
    monkeypatch.setattr("spiderfs.daemon.supervisor.run", lambda options, foreground: 0)
    monkeypatch.setattr(mounts, "check_fuse_available", lambda allow_other: None)
    for capacity, said in (("200", "spiderfs: warning: capacity=200 is 200 bytes"), ("2MiB", "")):
        options = f"capacity={capacity},cache_dir={tmp_path}/cache"
        result = spiderfs("mount", tmp_path / "source", tmp_path / "mnt", "-o", options)
        assert result.exit_code == 0
        assert result.stderr.startswith(said)
        assert result.stderr.count("\n") == bool(said)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EBUSY])
def test_an_unreadable_control_file_has_two_reasons(
    mounted: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(control_files, "mount_at", mounts.mounted_at)
    monkeypatch.setattr(control_files, "within", refuse)
    for command in ("status", "config"):
        said = refusal(command, mounted)
        assert "try again in a moment" in said
        assert "the daemon's log" in said, "it says that too many are open"


@pytest.mark.parametrize("command", [["umount"], ["status"], ["warm"], ["config"], ["umount", "--lazy"]])
def test_a_secret_in_an_address_is_not_repeated(command: list[str]) -> None:
    said = refusal(*command, "s3://KEY:SEC/RET@bucket/train")
    assert "no spiderfs mount is at s3://...@bucket/train" in said
    assert "RET" not in said
    assert "SIGNATURE" not in refusal(*command, "https://host/path?sig=SIGNATURE")


def test_umount_waits_for_the_daemon(mounted: Path, unmounted: list[bool], tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    lock = os.open(CacheLayout(tmp_path / "cache").lock, os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert not umount.wait_released(tmp_path / "cache", 0)
    release = threading.Timer(0.1, os.close, [lock])
    release.start()
    assert spiderfs("umount", mounted).exit_code == 0
    release.join()
    assert umount.wait_released(tmp_path / "cache", 0)
    assert unmounted == [False]


@pytest.mark.parametrize(("known_before", "status"), [(True, 1), (False, 0)])
def test_umount_names_other_places_of_the_mount_and_no_later_mount_of_its_number(
    mounted: Path, unmounted: list[bool], monkeypatch: pytest.MonkeyPatch, known_before: bool, status: int
) -> None:
    of_it = mounts.mounted_at(mounted)
    assert of_it is not None
    other = of_it._replace(mountpoint=Path("/mnt/other"))
    monkeypatch.setattr(umount, "mounts", lambda: [other] if unmounted or known_before else [])
    result = spiderfs("umount", mounted)
    assert result.exit_code == status
    assert ("/mnt/other" in result.output) is bool(status)


def test_a_daemon_stays(mounted: Path, unmounted: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(umount, "wait_released", lambda cache_dir, timeout_s: False)
    assert "kill 4711" in refusal("umount", mounted)
    assert spiderfs("umount", "--lazy", mounted).exit_code == 0
    assert unmounted == [False, True]


def test_umount_all_goes_on_after_a_failure_and_leaves_the_mounts_of_others(
    mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spiderfs("umount").exit_code == spiderfs("umount", "--all", mounted).exit_code == 1
    user = os.geteuid()
    lines = [
        f"10{number} 27 0:5{number} / {tmp_path}/{number} ro - fuse.spiderfs /nfs/{number} ro,user_id={owner}\n"
        for number, owner in enumerate((user, user, user + 1))
    ]
    mounts.MOUNT_TABLE.write_text("".join(lines))
    tried: list[str] = []

    def unmount(path: Path, lazy: bool) -> None:
        tried.append(path.name)
        if path.name == "1":
            raise MountError(f"cannot unmount {path}: busy")

    monkeypatch.setattr(umount, "unmount", unmount)
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr(umount, "read_stats", lambda mount: {})
    monkeypatch.setattr(umount, "all_served", list)
    result = spiderfs("umount", "--all")
    others = ["2"] if user == 0 else []
    assert tried == [*others, "1", "0"], "root unmounts all, the last one first"
    assert result.exit_code == 1
    assert result.stderr == f"spiderfs: cannot unmount {tmp_path}/1: busy\n"
    assert result.stdout.splitlines() == [f"unmounted {tmp_path}/{name}" for name in [*others, "0"]]
    monkeypatch.setattr("os.geteuid", lambda: user + 1)
    tried.clear()
    assert spiderfs("umount", "--all").exit_code == 0
    assert tried == ["2"]


def test_umount_all_waits_once_every_place_of_a_mount_is_gone(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_it = mounts.mounted_at(mounted)
    assert of_it is not None
    left = {place: of_it._replace(mountpoint=place) for place in (mounted, mounted.parent / "bound")}
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(umount, "mounts", lambda: list(left.values()))
    monkeypatch.setattr(umount, "unmount", lambda path, lazy: left.pop(path))
    monkeypatch.setattr(umount, "read_stats", lambda mount: {})
    monkeypatch.setattr(umount, "all_served", list)
    result = spiderfs("umount", "--all")
    assert (result.exit_code, result.stderr) == (0, "")


def test_umount_detaches_a_hung_mount(mounted: Path, unmounted: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    released = hang(mounted, monkeypatch)
    result = spiderfs("umount", mounted)
    released()
    assert result.exit_code == 0
    assert "does not answer" in result.stderr
    assert unmounted == [True]


def hang(mount: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Make stats of a pretended mount hang, as a FIFO without a writer does, until the result is called."""
    stats = mount / ".spiderfs/stats.json"
    stats.unlink()
    os.mkfifo(stats)
    monkeypatch.setattr("spiderfs.cli.control_files.ANSWER_TIMEOUT_S", 0.02)

    def release() -> None:
        os.close(os.open(stats, os.O_RDWR | os.O_NONBLOCK))

    return release


def test_shells_complete_commands_and_mount_points(mounted: Path) -> None:
    def completed(*words: str) -> list[str]:
        environment = {"_SPIDERFS_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(["spiderfs", *words])}
        environment |= {"COMP_CWORD": str(len(words))}
        shown = CliRunner().invoke(main, prog_name="spiderfs", env=environment).stdout
        return [line.partition(",")[2] for line in shown.splitlines() if line]

    assert completed("st") == ["status"]
    assert completed("mount-") == []
    assert completed("--ver") == ["--version"]
    assert completed("mount", "-o", "immutable,cap") == ["immutable,capacity="]
    assert completed("umount", str(mounted)[:3]) == [str(mounted)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["unmount", "/mnt"], "did you mean umount?"),
        (["mount", "--cache_dir=/x", "/a", "/b"], "There is no option --cache_dir: write -o cache_dir=VALUE."),
        (["mount", "--source.latency_ms", "5", "/a", "/b"], "write -o source.latency_ms=VALUE."),
        (["mount", "--nothing", "/a", "/b"], "No such option"),
        (["nothing-like-it"], "No such command"),
        (["mount", "/"], "write 'spiderfs mount SOURCE MOUNTPOINT'"),
    ],
)
def test_a_slip_in_a_command_line_is_reported_with_what_to_write(words: list[str], said: str) -> None:
    result = spiderfs(*words)
    assert result.exit_code != 0
    assert said in result.stderr
