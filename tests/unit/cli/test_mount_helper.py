"""mount(8)'s way to call spiderfs, its installation, and the examples of configuration."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from spiderfs.cli.main import main
from spiderfs.cli.mount import translate
from spiderfs.errors import ConfigError
from spiderfs.linux import mounts
from spiderfs.options.model import Options

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("given", "sloppy", "translated"),
    [
        (["rw,capacity=20GiB"], False, ["capacity=20GiB"]),
        (["ro,noatime", "policy=lru"], False, ["ro", "noatime", "policy=lru"]),
        ([r"rw,log_file=/a\,b"], False, [r"log_file=/a\,b"]),
        (["rw,capacity=1GiB,unheard_of=3,immutable"], True, ["capacity=1GiB", "immutable"]),
        (["rw,noexec,unheard_of"], True, ["noexec"]),
        (["rw,capacity = 1GiB"], True, ["capacity = 1GiB"]),
        (["rw,suid"], True, ["suid"]),
        ([], False, []),
    ],
)
def test_options_are_translated(given: list[str], sloppy: bool, translated: list[str]) -> None:
    assert translate(given, sloppy) == tuple(translated)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Calls the helper as mount(8) would, for places that exist; returns exit status and output."""
    for name in ("source", "mnt"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(mounts, "check_fuse_available", lambda allow_other: None)

    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["mount-helper", f"{tmp_path}/source", f"{tmp_path}/mnt", *arguments])
        return done.exit_code, done.output

    return run


def test_a_fake_mount_checks_everything(call: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    cache = f"cache_dir={tmp_path}/cache"
    assert call("-fv", "-o", f"rw,noatime,{cache}", "-t", "spiderfs")[0] == 0
    status, output = call("-f", "-o", f"rw,capcity=1,{cache}")
    assert (status, output) == (32, "spiderfs: unknown option capcity: did you mean capacity?\n")
    assert call("-sf", "-n", "-o", f"rw,capcity=1,{cache}") == (0, "")


def test_the_installed_helper_calls_the_installed_command(tmp_path: Path) -> None:
    command = tmp_path / "venv" / "spiderfs"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    command.chmod(0o755)
    root = tmp_path / "root"
    installer = [ROOT / "scripts" / "install-mount-helper", command]
    for _ in range(2):  # installing again changes nothing
        subprocess.run(installer, env={**os.environ, "DESTDIR": str(root)}, check=True, capture_output=True, timeout=30)
    assert (root / "usr/local/bin/spiderfs").readlink() == command
    assert (root / "etc/systemd/system/spiderfs@.service").is_file()
    helper = tmp_path / "helper"
    text = (root / "sbin/mount.spiderfs").read_text()
    helper.write_text(text.replace("/usr/local/bin/spiderfs", str(root / "usr/local/bin/spiderfs")))
    helper.chmod(0o755)
    said = subprocess.run([helper, "/a b", "/m", "-o", "rw"], capture_output=True, text=True, check=True, timeout=30)
    assert said.stdout == "mount-helper|/a b|/m|-o|rw|"
    command.unlink()
    said = subprocess.run([helper, "/a", "/m"], capture_output=True, text=True, check=False, timeout=30)
    assert (said.returncode, said.stderr.count("\n")) == (32, 1)
    assert "scripts/install-mount-helper" in said.stderr


def test_installing_keeps_what_others_have_put_there(tmp_path: Path) -> None:
    command, root = tmp_path / "spiderfs", tmp_path / "root"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)

    def install(*given: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / "scripts" / "install-mount-helper", *given],
            env={**os.environ, "DESTDIR": str(root)},
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

    assert install(command).returncode == 0
    unit = root / "etc/systemd/system/spiderfs@.service"
    unit.write_text("changed by the administrator")
    assert install(command).returncode == 0
    assert install(command).returncode == 0
    assert unit.with_name("spiderfs@.service~").read_text() == "changed by the administrator"
    assert unit.read_bytes() == (ROOT / "systemd/spiderfs@.service").read_bytes()
    installed = root / "usr/local/bin/spiderfs"
    installed.unlink()
    installed.write_text("pip's own")
    installed.chmod(0o755)
    refused = install(command)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert f"{installed} is a program of its own: name it as SPIDERFS to use it, or delete it" in refused.stderr
    assert install(installed).returncode == 0
    assert installed.read_text() == "pip's own"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, to give it up")
def test_only_root_installs() -> None:
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", "bash", ROOT / "scripts" / "install-mount-helper"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def example(tmp_path: Path) -> str:
    """The example configuration with its own places replaced by ones that exist."""
    text = (ROOT / "mount" / "imagenet.toml").read_text()
    for name in ("/nfs/imagenet", "/mnt/imagenet", "/scratch/spiderfs/imagenet"):
        (tmp_path / name[1:]).mkdir(parents=True)
        text = text.replace(f'"{name}"', f'"{tmp_path}{name}"')
    return text


def test_the_example_shows_every_option_and_its_default(example: str, tmp_path: Path) -> None:
    full = re.sub(r"^# ([a-z_]+ = )", r"\1", example, flags=re.MULTILINE)
    toml = tmp_path / "example.toml"
    toml.write_text(example)
    plain = Options.load(toml=toml)
    toml.write_text(full)
    try:
        everything = Options.load(toml=toml)
    except ConfigError as exc:
        pytest.fail(str(exc))
    by_cores = {"workers": plain.workers, "view_workers": plain.view_workers}
    assert everything.model_copy(update=by_cores) == plain
    assert everything.model_fields_set - {"cache_dir"} == set(Options.model_fields) - {"cache_dir"}


def test_the_fstab_example_is_understood(tmp_path: Path) -> None:
    lines = (ROOT / "mount" / "fstab.example").read_text().splitlines()
    (line,) = (line for line in lines if line and not line.startswith("#"))
    source, directory, fstype, options, *_ = line.split()
    assert (source, directory, fstype) == ("/nfs/imagenet", "/mnt/imagenet", "spiderfs")
    (tmp_path / "source").mkdir()
    (tmp_path / "mnt").mkdir()
    loaded = Options.load(translate([options], False), None, tmp_path / "source", tmp_path / "mnt")
    assert str(loaded.capacity) == "200GiB"
