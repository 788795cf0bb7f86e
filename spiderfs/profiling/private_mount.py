"""A mount beside another one, with the same source and settings and a cache of its own that is empty at first."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spiderfs.errors import MountError
from spiderfs.linux.cpu_clocks import tree_cpu_seconds
from spiderfs.linux.mounts import unmount_or_detach

# What decides how fast samples come, and nothing that names a file or a port of the mount beside.
_SETTINGS = (
    "immutable", "binding", "workers", "fetches", "sample_max_bytes", "views", "view_workers", "view_megapixels",
    "source.latency_ms", "source.latency_jitter", "source.bandwidth", "source.timeout_s", "source.attempts",
)  # fmt: skip
# More than is ever read here, so that nothing is evicted. It is a limit, no room that is taken.
_CAPACITY = "64GiB"
_COMMAND = (sys.executable, "-c", "from spiderfs.cli.main import main; main()")
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class PrivateMount:
    root: Path
    pid: int

    def stats(self) -> dict[str, int]:
        """The figures of `stats.json`."""
        figures: dict[str, int] = json.loads((self.root / ".spiderfs/stats.json").read_bytes())
        return figures

    def cpu_s(self) -> float:
        """CPU time of all processes of this mount until now."""
        return tree_cpu_seconds(self.pid)

    def bytes_of_a_sample(self) -> float:
        """The mean of what is cached."""
        stats = self.stats()
        return stats["used_bytes"] / max(1, stats["entries"])


def settings_in(config: str) -> dict[str, str]:
    """The options of a mount, from the text of its control file `config`."""
    lines = [line.partition("  # ")[0].partition("=") for line in config.splitlines() if not line.startswith("#")]
    return {name: value for name, _, value in lines}


@contextmanager
def private_mount(options: Mapping[str, str], above: Path, view: str) -> Iterator[PrivateMount]:
    """Mount what a mount with these options shows, by this view or `none`, and unmount and delete it at the end.

    The cache lies in a new directory in `above`, on the same disk as the other mount's, or where temporary files are.
    Raises MountError with what the mount said if it cannot be made.
    """
    try:
        scratch = Path(tempfile.mkdtemp(prefix="profile-", dir=above))
    except OSError:
        scratch = Path(tempfile.mkdtemp(prefix="spiderfs-profile-"))
    root = scratch / "mnt"
    chosen = {name: options[name] for name in _SETTINGS if name in options}
    chosen |= {"view": view, "cache_dir": str(scratch / "cache"), "log_file": str(scratch / "log"), "policy": "minio"}
    chosen["capacity"] = _CAPACITY
    given = ",".join(f"{name}={value}".replace(",", "\\,") for name, value in chosen.items())
    try:
        root.mkdir()
        _spiderfs("mount", options["source"], str(root), "-o", given)
        yield PrivateMount(root, json.loads((root / ".spiderfs/stats.json").read_bytes())["pid"])
    finally:
        try:
            _spiderfs("umount", str(root))
        except MountError:
            unmount_or_detach(root)
        shutil.rmtree(scratch, ignore_errors=True)


def _spiderfs(*words: str) -> None:
    try:
        done = subprocess.run([*_COMMAND, *words], capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired as exc:
        raise MountError(f"spiderfs {words[0]} of a mount to measure by did not end in {_PATIENCE_S:.0f} s") from exc
    if done.returncode:
        raise MountError(f"a mount to measure by failed: {done.stderr.strip().removeprefix('spiderfs: ')}")
