"""The scripts for Slurm, run as slurmd and sbatch would, with the variables that they set."""

from __future__ import annotations

import getpass
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import SPIDERFS, detach, ending, eventually, mounts_at

SCRIPTS = Path(__file__).resolve().parents[2] / "docs/examples/slurm"
# srun runs the command of its step on each node; here there is one.
SRUN = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
SCONTROL = '#!/bin/bash\n[ "$*" = "show hostnames n[1-3]" ] && printf "n1\\nn2\\nn3\\n"\n'


class Node:
    """A compute node whose programs of Slurm are substitutes."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.user = getpass.getuser()
        self.point = place / "mounts" / self.user
        self.cache = place / "cache" / self.user
        (place / "source").mkdir()
        (place / "source/sample").write_text("content")
        programs = place / "bin"
        programs.mkdir()
        logger = f'#!/bin/bash\necho "$*" >>{place}/log\n'
        train = '#!/bin/bash\ncat "$1/sample" && echo " $SLURM_ARRAY_TASK_ID"\n'
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "logger": logger, "train": train}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.path = f"{programs}:{SPIDERFS.parent}:{os.environ['PATH']}"
        settings = {"SOURCE": place / "source", "OPTIONS": "capacity=1MiB", "MOUNTS": place / "mounts"}
        settings |= {"CACHE": place / "cache", "STATE": place / "state", "PATH": self.path}
        (place / "conf").write_text("".join(f"{name}={shlex.quote(str(value))}\n" for name, value in settings.items()))

    def run(self, script: str, *arguments: str, job: int = 1, **variables: str) -> str:
        """What a script prints; slurmd gives a prolog no other variables than these."""
        slurm = {"SLURM_JOB_ID": str(job), "SLURM_JOB_USER": self.user, "SLURM_JOB_UID": str(os.getuid())}
        kept = {name: os.environ[name] for name in ("HOME", "PYTHONPATH") if name in os.environ}
        environment = kept | slurm | {"SPIDERFS_SLURM_CONF": str(self.place / "conf")} | variables
        done = subprocess.run(
            [SCRIPTS / script, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def log(self) -> str:
        log = self.place / "log"
        return log.read_text() if log.exists() else ""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    with ending(tmp_path, node.point, node.cache):
        yield node


def test_jobs_of_a_user_share_a_mount_that_ends_with_the_last(node: Node) -> None:
    node.run("prolog.sh", job=1)
    assert (node.point / "sample").read_text() == "content"
    node.run("prolog.sh", job=2)
    assert mounts_at(node.point) == 1
    assert (
        node.run("array.sbatch", SLURM_ARRAY_TASK_ID="7", USER=node.user, PATH=python_that_reads(node)) == "content 7\n"
    )
    node.run("epilog.sh", job=1)
    assert (node.point / "sample").read_text() == "content"
    node.run("epilog.sh", job=2)
    assert not mounts_at(node.point)
    assert (node.cache / "store").is_dir(), "the next job finds the cache"
    assert node.log() == ""


def python_that_reads(node: Node) -> str:
    """A path of programs whose python stands for a training run: it prints a sample of its mount and its seed."""
    place = node.place / "trainings"
    place.mkdir()
    script = f'#!/bin/bash\n[ "$2" = "/mnt/spiderfs/$USER" ] && cat {node.point}/sample && echo " $4"\n'
    (place / "python").write_text(script)
    (place / "python").chmod(0o755)
    return f"{place}:{node.path}"


@pytest.mark.thorough
def test_a_job_that_cannot_mount_does_not_drain_its_node(node: Node) -> None:
    (node.place / "source/sample").unlink()
    (node.place / "source").rmdir()
    node.run("prolog.sh")
    assert f"job 1 has no mount at {node.point}" in node.log()
    assert "does not exist" in node.log()
    node.run("epilog.sh")
    assert f"job 1 left a mount at {node.point}" in node.log()


@pytest.mark.thorough
def test_a_daemon_that_was_killed_is_replaced(node: Node) -> None:
    node.run("prolog.sh", job=1)
    lock = node.cache / "lock"
    supervisor = int(lock.read_text().split()[0])
    os.kill(supervisor, 9)
    eventually(lambda: not readable(node.point / "sample"))
    node.run("prolog.sh", job=2)
    assert (node.point / "sample").read_text() == "content"
    node.run("epilog.sh", job=1)
    node.run("epilog.sh", job=2)
    assert not mounts_at(node.point)


def readable(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


@pytest.mark.thorough
def test_a_job_without_a_prolog_mounts_for_itself(node: Node) -> None:
    point = Path(f"/tmp/spiderfs-{os.getpid()}")
    variables = {"SPIDERFS_SOURCE": str(node.place / "source"), "SPIDERFS_OPTIONS": "capacity=1MiB"}
    variables |= {"SLURM_TMPDIR": str(node.place), "PATH": node.path, "SLURM_ARRAY_TASK_ID": "0"}
    try:
        assert node.run("job.sbatch", "train", job=os.getpid(), **variables) == "content 0\n"
        assert not mounts_at(point)
        assert (node.place / f"cache-{os.getpid()}/store").is_dir()
    finally:
        if mounts_at(point):
            detach(point)
        point.rmdir()


def test_the_peers_are_the_nodes_of_the_job(node: Node) -> None:
    peers = node.run("peers.sh", SLURM_JOB_NODELIST="n[1-3]", PATH=node.path)
    assert peers == "peers=http://n1:8443+http://n2:8443+http://n3:8443\n"
