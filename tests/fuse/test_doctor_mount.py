"""`spiderfs doctor` beside real mounts: one that is well, and one whose daemon was killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from mounting import eventually, mounted, mounts_at, run_spiderfs
from reading import write_files


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
def test_ended_early_it_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
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
