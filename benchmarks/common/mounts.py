"""Mounts of a slow source with an empty cache, which are unmounted when their context ends."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.fakes.faulty_source import Faults
from spiderfs.linux.mounts import mounts

SPIDERFS = Path(sys.executable).parent / "spiderfs"
COMMAND_PATIENCE_S = 60.0
WORKER_PATIENCE_S = 5.0
LATE_MOUNT_S = 2.0


@contextmanager
def mounted(source: Path | str, scratch: Path, capacity: int, latency_ms: float, options: str) -> Iterator[Path]:
    """A mount with an empty cache; when the context ends, it is unmounted and everything in `scratch` is deleted."""
    mountpoint, older = scratch / "mnt", multiprocessing.active_children()
    mountpoint.mkdir(parents=True)
    given = f"capacity={capacity},cache_dir={scratch / 'cache'},log_file={scratch / 'log'}"
    given += f",source.latency_ms={latency_ms:g},{options}"
    try:
        spiderfs("mount", source, mountpoint, "-o", given)
        yield mountpoint
    finally:
        end_loader_workers(older)  # as long as they live, the mount is busy
        try:
            if is_mounted(mountpoint):
                spiderfs("umount", mountpoint)
        finally:
            if is_mounted(mountpoint):
                subprocess.run(["fusermount3", "-u", "-z", mountpoint], check=False)
            shutil.rmtree(scratch, ignore_errors=True)


def spiderfs(*words: str | Path, faults: Faults | None = None) -> None:
    """Run a command of spiderfs; raises RuntimeError, with the command's message, if it fails or hangs.

    The sources of a mount that is made so have the `faults`.
    """
    program: tuple[str | Path, ...] = (SPIDERFS,)
    if faults is not None:
        program = (sys.executable, "-m", "benchmarks.fakes.faulty_source", faults.path)
    try:
        done = subprocess.run(
            [*program, *words], stderr=subprocess.PIPE, text=True, check=False, timeout=COMMAND_PATIENCE_S
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"spiderfs {words[0]} did not end in {COMMAND_PATIENCE_S:.0f} s") from error
    except KeyboardInterrupt:
        # The daemon of a command that was interrupted may mount after all, and is then unmounted by the caller.
        deadline = time.monotonic() + LATE_MOUNT_S
        while words[0] == "mount" and not is_mounted(Path(words[2])) and time.monotonic() < deadline:
            time.sleep(0.05)
        raise
    if done.returncode:
        raise RuntimeError(f"spiderfs {words[0]} failed: {done.stderr.strip()}")


def is_mounted(mountpoint: Path) -> bool:
    """Whether something is mounted there, as the kernel's table says; a stat of the mount point could hang."""
    return any(mount.mountpoint == mountpoint for mount in mounts())


def stats(mountpoint: Path) -> dict[str, Any]:
    """The figures of a mount now."""
    figures: dict[str, Any] = json.loads((mountpoint / ".spiderfs" / "stats.json").read_text())
    return figures


def counts(mountpoint: Path) -> dict[str, int]:
    metrics: dict[str, int] = stats(mountpoint)["metrics"]
    return metrics


def leave_signals_to_the_parent(_worker: int) -> None:
    # Ctrl-C reaches every process of the terminal. The parent ends its loader workers, which should print no traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch  # imported here, because some benchmarks mount without training

    torch.set_num_threads(1)


def end_loader_workers(others: Collection[BaseProcess] = ()) -> None:
    """End loader workers after an interrupt; its traceback keeps the loader alive, so they would go on reading."""
    for process in set(multiprocessing.active_children()).difference(others):
        process.terminate()
        process.join(WORKER_PATIENCE_S)
