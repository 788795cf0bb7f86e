"""The systemd unit: systemd itself finds nothing to complain about, and its mount is seen outside of it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[3] / "systemd" / "spiderfs@.service"
COMMAND = "/usr/local/bin/spiderfs"

# What makes systemd give the service a mount namespace of its own: exec_needs_mount_namespace() in systemd's source.
NAMESPACING = {
    "BindPaths", "BindReadOnlyPaths", "ExecPaths", "InaccessiblePaths", "MountFlags", "MountImages", "NoExecPaths",
    "PrivateDevices", "PrivateIPC", "PrivateMounts", "PrivateTmp", "PrivateUsers", "ProcSubset", "ProtectControlGroups",
    "ProtectHome", "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables", "ProtectProc", "ProtectSystem",
    "ReadOnlyPaths", "ReadWritePaths", "RootDirectory", "RootImage", "TemporaryFileSystem",
}  # fmt: skip


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text()
    assert f"ExecStart={COMMAND} mount --foreground --config /etc/spiderfs/%i.toml\n" in text
    # The command is not installed where the tests run, and a path that is missing would be complained about.
    installed = tmp_path / "spiderfs@.service"
    installed.write_text(text.replace(COMMAND, "/bin/true"))
    instance = tmp_path / "spiderfs@imagenet.service"
    instance.symlink_to(installed)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(instance)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_mount_is_made_where_everybody_sees_it() -> None:
    lines = UNIT.read_text().splitlines()
    directives = {line.partition("=")[0] for line in lines if "=" in line and not line.startswith("#")}
    assert not directives & NAMESPACING
    assert {"Type", "NotifyAccess", "KillMode", "TimeoutStopSec", "CapabilityBoundingSet"} <= directives
