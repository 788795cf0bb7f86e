"""A mount beside another one, with the same source and settings and a cache of its own that is empty at first.

Its supervisor is a child of the process that measures, and goes with it: when that ends, however it ends, the kernel
sends SIGTERM to the supervisor (PR_SET_PDEATHSIG), which unmounts and deletes the cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spiderfs.errors import MountError
from spiderfs.linux.mounts import unmount_or_detach
from spiderfs.linux.process_table import end_with_parent
from spiderfs.options.mount_strings import option_string

# clock_getcpuclockid(3): the number of the clock of all threads of a process; glibc makes it so, and Python lacks it.
_ALL_THREADS = 2
# What decides how fast samples come, and nothing that names a file or a port of the mount beside.
SETTINGS = (
    "immutable", "binding", "archives", "workers", "fetches", "sample_max_bytes", "views", "view_workers",
    "view_megapixels",
    "source.latency_ms", "source.bandwidth", "source.timeout_s", "source.attempts",
    "source.endpoint", "source.region", "source.profile", "source.anonymous", "source.requester_pays",
    "source.addressing",
)  # fmt: skip
# More than is ever read here, so that nothing is evicted. It is a limit, no room that is taken.
_CAPACITY = "64GiB"
_PROGRAM = "from spiderfs.cli.main import main; from spiderfs.profiling.private_mount import serve; serve(main)"
_PATIENCE_S = 60.0
_LOOK_S = 0.01


def tree_cpu_seconds(root: int) -> float:
    """User and system time of a process and all its present descendants; 0 for those that have ended."""
    total, pids = 0.0, [root]
    for pid in pids:
        # A process that has ended meanwhile has neither clock nor children.
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~pid << 3) | _ALL_THREADS)
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    return total


@dataclass(frozen=True)
class PrivateMount:
    root: Path
    pid: int

    def cpu_s(self) -> float:
        """CPU time of all processes of this mount until now."""
        return tree_cpu_seconds(self.pid)

    def bytes_of_a_sample(self) -> float:
        """The mean of what is cached."""
        stats = json.loads((self.root / ".spiderfs/stats.json").read_bytes())
        return float(stats["used_bytes"] / max(1, stats["entries"]))


def settings_in(config: str) -> dict[str, str]:
    """The options of a mount, from the text of its control file `config`."""
    lines = [line.partition("  # ")[0].partition("=") for line in config.splitlines() if not line.startswith("#")]
    return {name: value for name, _, value in lines}


@contextmanager
def private_mount(options: Mapping[str, str], above: Path, view: str, **others: str) -> Iterator[PrivateMount]:
    """Mount what a mount with these options shows, by this view or `none`, and unmount and delete it at the end.

    It evicts nothing, unless `others` has its capacity and policy.

    The cache lies in a new directory in `above`, on the same disk as the other mount's, or where temporary files are.
    Raises MountError with what the mount said if it cannot be made.
    """
    try:
        scratch = Path(tempfile.mkdtemp(prefix="profile-", dir=above))
    except OSError:
        scratch = Path(tempfile.mkdtemp(prefix="spiderfs-profile-"))
    root = scratch / "mnt"
    chosen = {name: options[name] for name in SETTINGS if name in options}
    chosen |= {"view": view, "cache_dir": str(scratch / "cache"), "log_file": str(scratch / "log"), "policy": "minio"}
    chosen |= {"capacity": _CAPACITY, **others}
    words = ["mount", "--foreground", options["source"], str(root), "-o", option_string(chosen)]
    try:
        root.mkdir()
        # Ctrl-C reaches all processes of a terminal's group; this one ends when whoever measures has seen to the rest.
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(os.getpid()), str(scratch), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _wait_until_readable(process, root)
            yield PrivateMount(root, process.pid)
        finally:
            process.terminate()
            await_end(process, _PATIENCE_S)
            assert process.stderr is not None
            process.stderr.close()
    finally:
        # If the process was killed, no one has done it yet.
        unmount_or_detach(root)
        shutil.rmtree(scratch, ignore_errors=True)


def _wait_until_readable(process: subprocess.Popen[str], root: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while process.poll() is None:
        # Until the mount is there, the directory is empty; until its manager is at work, it does not answer for this.
        try:
            json.loads((root / ".spiderfs/stats.json").read_bytes())
        except (OSError, ValueError) as exc:
            if time.monotonic() > deadline:
                raise MountError(f"a mount to measure by was not ready in {_PATIENCE_S:.0f} s") from exc
            time.sleep(_LOOK_S)
        else:
            return
    assert process.stderr is not None
    raise MountError(f"a mount to measure by failed: {process.stderr.read().strip().removeprefix('spiderfs: ')}")


def await_end(process: subprocess.Popen[str], patience_s: float) -> None:
    """Wait until a process has ended; it is killed if it does not end by itself."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def serve(main: Callable[[], object]) -> None:
    """Run a command, then delete a directory; the arguments: parent process, directory, command."""
    parent, scratch = int(sys.argv[1]), Path(sys.argv[2])
    del sys.argv[1:3]
    # Until the supervisor waits for this signal, it ends the program as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if end_with_parent(parent, signal.SIGTERM):
            main()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
