"""`spiderfs evict` of a real mount: what is named leaves the cache, and can be read all the same."""

from __future__ import annotations

from pathlib import Path

from mounting import eventually, mounted, run_spiderfs
from reading import write_files


def test_what_is_named_leaves_the_cache(source: Path, tmp_path: Path) -> None:
    write_files(source, {f"{kind}/{number}": 1000 for kind in ("a", "b", "c") for number in range(5)})
    with mounted(source, tmp_path / "m", capacity="10MiB") as mount:

        def evicted(*paths: str) -> str:
            done = run_spiderfs("evict", mount.point, *paths)
            assert (done.returncode, done.stderr) == (0, "")
            return done.stdout

        def cached() -> int:
            return len(mount.control("cache").read_text().splitlines())

        assert run_spiderfs("warm", mount.point).returncode == 0
        eventually(lambda: cached() == 15)
        (source / "a/0").unlink()  # gone from the source, and still cached
        assert evicted("a") == "5 records evicted\n"
        partly = run_spiderfs("evict", mount.point, f"{mount.point}/b/*", "absent")
        assert (partly.returncode, partly.stdout) == (1, "5 records evicted\n")
        assert partly.stderr.endswith("has no file or directory absent: check the path\n")
        assert cached() == 5
        nothing = run_spiderfs("evict", mount.point, "**/x")
        assert (nothing.returncode, nothing.stdout) == (1, "")
        assert nothing.stderr == f"spiderfs: {mount.point} has no file or directory **/x: check the path\n"
        assert evicted("a/*") == "0 records evicted\n"
        assert (mount.point / "b/1").read_bytes() == (source / "b/1").read_bytes()
        assert evicted(str(mount.point)) in ("5 records evicted\n", "6 records evicted\n")
        outside = run_spiderfs("evict", mount.point, "../x")
        assert outside.stderr.startswith("spiderfs: ../x lies outside of the mount")
        assert run_spiderfs("evict", mount.point).returncode == 2
