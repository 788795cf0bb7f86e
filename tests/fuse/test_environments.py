"""The environments of docs/howto/environments.md, so far as namespaces can emulate them here."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from mounting import SPIDERFS, eventually
from serving import URL, served

from spiderfs.cli.main import main
from spiderfs.protocol.requests import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/howto/environments.md").read_text()
FILES = 20

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user may be refused user namespaces")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for number in range(FILES):
        path = tmp_path / "source/train" / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d\n" % number * 1000)
        os.utime(path, (1_700_000_000, 1_700_000_000))
    return tmp_path / "source"


# -- a mount inside

# As rootless podman and `apptainer --userns` do: root of a user namespace, with /dev/fuse and without fusermount3.
_MOUNT = """set -eu
mount -t tmpfs none "$1"
mkdir "$1/mnt" "$1/bin"
"$3" mount "$2" "$1/mnt" -o "immutable,cache_dir=$1/cache,log_file=$1/log"
head -n 1 "$1/mnt/train/07.jpg"
grep -c " $1/mnt fuse" /proc/self/mounts
"$3" umount "$1/mnt"
test -z "$(ls "$1/mnt")"
"""


@as_root
def test_root_of_a_user_namespace_mounts_for_itself(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _MOUNT, "sh"]
    done = subprocess.run([*unshare, place, source, SPIDERFS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n1\n", "")
    # Outside of that namespace nothing was mounted.
    assert str(place) not in Path("/proc/self/mountinfo").read_text()


# -- no mount, and no /dev/fuse

# Serves the source, and trains planned epochs. By the third epoch all is read from the cache in the training's process.
_TRAIN = """
import json, os, sys, time
from pathlib import Path

import torch
import trainer_hook
from spiderfs import client
from spiderfs.cli.main import main

source, options, workers = sys.argv[1:]
assert not os.path.exists("/dev/fuse"), "it is there"

class Files(torch.utils.data.Dataset):
    samples = [(f"spiderfs://apart/train/{name}", 0) for name in sorted(os.listdir(f"{source}/train"))]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path = self.samples[index][0]
        assert client.read_bytes(path) == Path(path.replace("spiderfs://apart", source)).read_bytes()
        return index

def run(*arguments):
    try:
        main(list(arguments))
    except SystemExit as exc:
        assert not exc.code, exc.code

def figures():
    return json.loads(client.read_bytes("spiderfs://apart/.spiderfs/stats.json"))["metrics"]

run("serve", source, "--name", "apart", "-o", options)
try:
    # Without tensors, which workers would send through /dev/shm.
    loader = torch.utils.data.DataLoader(Files(), 4, shuffle=True, num_workers=int(workers), collate_fn=list)
    with trainer_hook.plan("spiderfs://apart", loader):
        for _ in range(3):
            assert sorted(index for batch in loader for index in batch) == list(range(len(Files())))
        until_s = time.monotonic() + 30
        while not (figures()["client_opens"] and figures()["planned_opens"]):
            assert time.monotonic() < until_s, figures()
            time.sleep(0.05)
finally:
    run("umount", "spiderfs://apart")
print("trained")
"""


class Restrictions(NamedTuple):
    read_only_root: bool
    shm: str
    """The size of /dev/shm; empty: there is none."""
    tmp: bool
    """Whether /tmp can be written."""
    cache_dir: bool
    """Whether the user names one, on a volume."""
    workers: int
    namespaces: tuple[str, ...]
    """Besides those of users and mounts."""
    user: tuple[str, ...]
    """What gives up the rights that the namespaces were made with."""


_LOCKED = {os.ST_NOSUID: "nosuid", os.ST_NODEV: "nodev", os.ST_NOEXEC: "noexec"}
_NO_RIGHTS = ("setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")
ENVIRONMENTS = {
    # A user without a name and a home, as OpenShift gives them; one volume, for the cache and the socket; no network.
    "pod": Restrictions(
        True, "", False, True, 0, (),
        ("unshare", "--user", "--map-user=1000660000", "--map-group=0", "--net", "setpriv", "--no-new-privs"),
    ),
    # Root of the container, with a small /dev/shm, on a notebook service too; the program has the PID 1.
    "docker": Restrictions(False, "256k", True, False, 2, ("--pid", "--fork", "--kill-child"), _NO_RIGHTS),
    # The user of the host, with home and /tmp; enroot is much like it.
    "apptainer": Restrictions(
        True, "1g", True, False, 2, (), ("unshare", "--user", "--map-user=1000", "--map-group=1000")
    ),
}  # fmt: skip


def set_up(found: Restrictions, root: Path, place: Path, source: Path) -> str:
    """A script that makes a root of the least that Python needs, and becomes that user there."""
    quoted = shlex.quote

    def bound(path: str | Path, read_only: bool = True) -> list[str]:
        there, has = quoted(f"{root}{path}"), os.statvfs(path).f_flag
        # Whoever has made a user namespace cannot take these from a mount.
        kept = [name for bit, name in _LOCKED.items() if has & bit]
        lines = [f"mkdir -p {there}", f"mount --bind {quoted(str(path))} {there}"]
        return [*lines, f"mount -o remount,bind,{','.join(['ro', *kept])} {there}"] if read_only else lines

    lines = ["set -eu", f"mount -t tmpfs none {root}", f"mkdir -p {root}/dev {root}/proc {root}/old"]
    if found.tmp:
        lines += [f"mkdir -m 1777 {root}/tmp", f"mount -t tmpfs none {root}/tmp"]
    for path in map(Path, ("/usr", "/bin", "/lib", "/lib64", "/sbin")):
        if path.is_symlink():
            lines.append(f"ln -s {quoted(os.readlink(path))} {root}{path}")
        elif path.exists():
            lines += bound(path)
    for readable in (sys.base_prefix, sys.prefix, ROOT, source):
        lines += bound(readable)
    lines += bound(place, read_only=False)
    for device in ("null", "zero", "random", "urandom"):
        lines += [f"touch {root}/dev/{device}", f"mount --bind /dev/{device} {root}/dev/{device}"]
    if found.shm:
        lines += [f"mkdir {root}/dev/shm", f"mount -t tmpfs -o size={found.shm} none {root}/dev/shm"]
    # One of the machine's shows no processes of another PID namespace.
    proc = "mount -t proc proc" if "--pid" in found.namespaces else "mount --rbind /proc"
    lines += [f"{proc} {root}/proc", f"cd {root}"]
    if found.read_only_root:
        lines.append(f"mount -o remount,ro {root}")
    return "\n".join([*lines, "pivot_root . old", "umount -l /old", 'exec "$@"'])


@as_root
@pytest.mark.parametrize(
    "name", ["pod", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("docker", "apptainer"))]
)
def test_a_training_run_without_fuse(source: Path, tmp_path: Path, name: str) -> None:
    found = ENVIRONMENTS[name]
    root, place = tmp_path / "root", tmp_path / "place"
    root.mkdir()
    (place / "home").mkdir(parents=True)
    variables = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = f"log_file={place}/log"
    if found.cache_dir:
        # torch does without a directory for temporary files, but not each package that it imports.
        variables |= {ENVIRONMENT: f"{place}/sockets", "TMPDIR": str(place)}
        options += f",cache_dir={place}/cache"
    elif name == "apptainer":
        variables |= {"HOME": f"{place}/home"}
    unshare = ["unshare", "--user", "--map-root-user", "--mount", *found.namespaces]
    command = [*found.user, sys.executable, "-c", _TRAIN, str(source), options, str(found.workers)]
    done = subprocess.run(
        [*unshare, "sh", "-c", set_up(found, root, place, source), "sh", *command],
        env=variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    log = (place / "log").read_text() if (place / "log").exists() else ""
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr + log
    assert "WARNING" not in log


@as_root
def test_a_reader_in_a_pid_namespace_of_its_own(source: Path, tmp_path: Path) -> None:
    """As in another container with the same volumes: the daemon cannot know the reader, and sends it everything."""
    read = f"from spiderfs import client; [client.read_bytes('{URL}/train/07.jpg') for _ in range(3)]"
    with served(source, tmp_path / "d") as daemon:
        command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", read]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        eventually(lambda: daemon.metric("opens_hit") >= 2, what="hits in the daemon")
        assert daemon.metric("client_opens") == 0


# -- the page


def test_each_environment_of_the_page_says_whether_it_was_tried() -> None:
    table = PAGE[PAGE.index("| environment") : PAGE.index("\n\n", PAGE.index("| environment"))]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    assert len(rows) == 12
    assert {row[-1].strip() for row in rows} == {"tested", "emulated", "not tried", "cannot work"}
    assert set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE)) >= {"tests/fuse/test_environments.py"}


def test_the_commands_of_the_page_are_those_of_spiderfs() -> None:
    blocks = "".join(re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    commands = re.findall(r"spiderfs ((?:serve|umount) [^|'\n]*)", blocks)
    assert len(commands) >= 3
    for subcommand, *arguments in map(shlex.split, commands):
        command = main.get_command(click.Context(main), subcommand)
        assert command is not None
        command.make_context(subcommand, arguments)  # raises UsageError
